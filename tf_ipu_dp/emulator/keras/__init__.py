"""Keras models on an emulated IPU: `fit`, `evaluate`, `predict`, pipeline stages, optimizers, names in Keras.

Owns the options and state of a model, and the patches of Keras. Executions, replicas and the reduction of gradients
are in `runtime`, which must not be repeated here.
"""
