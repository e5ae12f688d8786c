"""`ipu_tensorflow_addons.v1.optimizers`: empty, as in the SDK."""
