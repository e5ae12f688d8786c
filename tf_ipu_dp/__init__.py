"""Data-parallel TensorFlow 2 / Keras training on Graphcore IPUs, real or emulated."""

__version__ = "0.2.0"
