"""`tensorflow.python.ipu.ops.op_util`: internal functions of the SDK, which are not documented. It can be imported."""
