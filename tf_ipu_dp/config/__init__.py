"""The flags of a training run, and the frozen config that they are parsed into.

Pure: no TensorFlow, environment, clock or printing.
"""
