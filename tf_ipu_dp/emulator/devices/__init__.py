"""The emulated partition: which IPUs there are, which process holds them, and how TensorFlow lists them.

Owns the registry on disk and its heartbeats. `registry` uses the standard library only; nothing here knows about
programs, replicas or Keras.
"""
