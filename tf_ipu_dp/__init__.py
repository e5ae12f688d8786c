"""Data-parallel TensorFlow 2 / Keras training on Graphcore IPUs, real or emulated."""

import sys
from typing import Any, List

__version__ = "0.2.0"

# What can be used from Python, with the module that has it. It is imported when it is used: the package stays light.
_API = {
    "open_run": "opened_run",
    "UsageError": "cli",
}


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_API[name]}"), name)


def __dir__() -> List[str]:
    return sorted([*globals(), *_API])


if getattr(sys, "argv", [])[:1] == ["-m"]:  # python -m tf_ipu_dp.COMMAND, which Python is about to import
    from tf_ipu_dp import missing_packages

    missing_packages.explain_at_exit()
