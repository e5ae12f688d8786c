"""Data-parallel TensorFlow 2 / Keras training on Graphcore IPUs, real or emulated."""

import importlib.util
import os
import sys

__version__ = "0.2.0"

# From release 2.16 on, TensorFlow's Keras is Keras 3 unless this is set when it is imported. Keras 2 is tf_keras then.
if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

if getattr(sys, "argv", [])[:1] == ["-m"]:  # python -m tf_ipu_dp.COMMAND, which Python is about to import
    import _signal  # without the modules that `signal` imports

    _is_caught = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if _is_caught:  # until the next lines are done, Ctrl-C would show a traceback of their imports
        _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

    from tf_ipu_dp import missing_packages

    missing_packages.explain_at_exit()
    if _is_caught:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
