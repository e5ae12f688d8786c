"""Data-parallel TensorFlow 2 / Keras training on Graphcore IPUs, real or emulated."""

import importlib.util
import os
import sys

__version__ = "0.2.0"

# From release 2.16 on, TensorFlow's Keras is Keras 3 unless this is set when it is imported. Keras 2 is tf_keras then.
if importlib.util.find_spec("tf_keras"):
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

if getattr(sys, "argv", [])[:1] == ["-m"]:  # python -m tf_ipu_dp.COMMAND, which Python is about to import
    from tf_ipu_dp import missing_packages

    missing_packages.explain_at_exit()
