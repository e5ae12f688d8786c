"""The training loop, and what it needs: the session (a model on its device), checks, models, optimizers, console.

Imports TensorFlow. Talks to the device through the SDK that it is given, never to the emulator.
"""
