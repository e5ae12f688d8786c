"""The emulated partition: which IPUs there are, who holds them, and how TensorFlow lists them."""
