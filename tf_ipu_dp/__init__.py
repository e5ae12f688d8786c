"""Data-parallel TensorFlow 2 / Keras training on Graphcore IPUs, real or emulated."""

import importlib
import importlib.util
import os
import sys
from typing import Any, List

__version__ = "0.2.0"

# From release 2.16 on, TensorFlow's Keras is Keras 3 unless this is set when it is imported. Keras 2 is tf_keras then.
if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

# What `import tf_ipu_dp` offers. Each is imported when it is first asked for: importing the package takes no time.
_PUBLIC = {
    "Data": ("tf_ipu_dp.task", "Data"),
    "Task": ("tf_ipu_dp.task", "Task"),
    "UsageError": ("tf_ipu_dp.cli", "UsageError"),
    "open_run": ("tf_ipu_dp.opened_run", "open_run"),
    "plan": ("tf_ipu_dp.python_calls", "plan"),
    "train": ("tf_ipu_dp.train", ""),
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> List[str]:
    return sorted({*globals(), *_PUBLIC})


if getattr(sys, "argv", [])[:1] == ["-m"]:  # python -m tf_ipu_dp.COMMAND, which Python is about to import
    import _signal  # without the modules that `signal` imports

    _is_caught = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if _is_caught:  # until the next lines are done, Ctrl-C would show a traceback of their imports
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    from tf_ipu_dp import missing_packages

    missing_packages.explain_at_exit()
    if _is_caught:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
