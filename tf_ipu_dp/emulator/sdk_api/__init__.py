"""The SDK's modules by name: `tensorflow.python.ipu` (ipu), `keras.ipu` (keras_ipu), popdist, gcipuinfo, addons.

What they share lives in `runtime`, `keras` and `devices`.
"""
