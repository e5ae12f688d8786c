"""The SDK's modules by name: `tensorflow.python.ipu` (ipu), `keras.ipu` (keras_ipu), popdist, gcipuinfo, addons.

Owns names, signatures, checks and exception types of the SDK. Code that its modules share is in `runtime`, `keras` and
`devices`; what the emulator does not do is refused by name with `refusal.refused`.
"""
