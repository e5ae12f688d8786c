"""The modules `tensorflow.python.ipu.ops.*_grad`: imported to register gradients. The emulator needs none.

Its operations are made of operations of TensorFlow that have gradients.
"""
