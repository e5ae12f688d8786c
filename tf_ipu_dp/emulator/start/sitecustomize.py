"""Found on the PYTHONPATH by every Python that poprun starts: makes the emulator the Poplar SDK of the program."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from tf_ipu_dp import emulator

emulator.install()

# Another sitecustomize further down the path is as welcome as it would be without this one.
_here = Path(__file__).resolve().parent
_rest = [path for path in sys.path if Path(path).resolve() != _here]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _rest)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
