"""Data-parallel TensorFlow 2 / Keras training on Graphcore IPUs, real or emulated."""

import sys

__version__ = "0.2.0"

if getattr(sys, "argv", [])[:1] == ["-m"]:  # python -m tf_ipu_dp.COMMAND, which Python is about to import
    from tf_ipu_dp import missing_packages

    missing_packages.explain_at_exit()
