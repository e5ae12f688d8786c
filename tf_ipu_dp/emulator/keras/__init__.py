"""Keras models on an emulated IPU: `fit`, `evaluate`, `predict`, pipeline stages, optimizers, names in Keras.

Owns what is set on and kept for a model, and the patches of Keras. It must not compute: executions, reductions and
replicas are in `runtime`.
"""
