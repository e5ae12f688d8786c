"""The flags of a training run, declared once in `train_flags`, and the frozen config that they are parsed into.

Knows the names of models and data sets, and nothing of what is done with the values.
Pure: no TensorFlow, environment, clock or printing.
"""
