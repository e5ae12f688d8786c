"""`tensorflow.python.ipu.ops.within_replica_ops_grad`: imported to register gradients. The emulator needs none.

Collectives within a replica are made of operations of TensorFlow that have gradients.
"""
