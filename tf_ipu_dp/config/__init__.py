"""The flags of a training run, declared once in `train_flags`, and the frozen config that they are parsed into.

Knows the names of models and data sets, but not how the values are used.
Pure: no TensorFlow, environment, clock or printing.
"""
