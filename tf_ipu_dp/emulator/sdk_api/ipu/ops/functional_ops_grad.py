"""`tensorflow.python.ipu.ops.functional_ops_grad`: imported to register gradients, of which the emulator needs none.

Outlined functions are made of operations of TensorFlow that have gradients.
"""
