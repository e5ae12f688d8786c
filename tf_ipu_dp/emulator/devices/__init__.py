"""The emulated partition: which IPUs it has, which process holds them, and how TensorFlow lists them.

Owns the registry on disk and its heartbeats. `registry` uses the standard library only; nothing here depends on
programs, replicas or Keras.
"""
