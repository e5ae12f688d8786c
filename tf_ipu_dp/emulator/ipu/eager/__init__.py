"""`tensorflow.python.ipu.eager`."""
