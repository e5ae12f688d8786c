"""`tensorflow.python.ipu.data`."""
