"""`tensorflow.python.ipu.ops.functional_ops_grad`: imported to register gradients. The emulator needs none.

Outlined functions are made of operations of TensorFlow that have gradients.
"""
