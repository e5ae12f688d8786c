"""The training loop, and what it needs: the session (a model on its device), checks, models, optimizers, console.

Imports TensorFlow. Uses the device through the SDK that is passed in, never through the emulator.
"""
