"""Found on the PYTHONPATH by every Python that poprun starts: installs the emulator in place of the Poplar SDK."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_hook_folder = Path(__file__).resolve().parent
_root = _hook_folder.parents[2]

# The program uses the emulator of the poprun that started it, wherever that is installed.
_found = importlib.util.find_spec("tf_ipu_dp")
if _found is None or _found.origin is None or Path(_found.origin).resolve().parents[1] != _root:
    sys.path.insert(0, str(_root))

from tf_ipu_dp import emulator  # noqa: E402

# Other modules in that directory must not hide the program's own or installed ones.
if sys.path[0] == str(_root):
    sys.path.append(sys.path.pop(0))

emulator.install()

# Run the sitecustomize that Python would have found without this one.
_other_paths = [path for path in sys.path if Path(path).resolve() != _hook_folder]
_spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _other_paths)
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))
