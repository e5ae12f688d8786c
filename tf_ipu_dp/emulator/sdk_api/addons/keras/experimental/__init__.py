"""`ipu_tensorflow_addons.keras.experimental`: its one module, `auto_pipeline`, is refused when it is imported."""
