"""Runs programs of the device: executions, replicas, gradient reduction, collectives, instances, feeds.

Owns everything that computes. It knows Keras models only as arguments, and must not import the `keras` room. Modules
that `popdist` needs (`instances`, `wait_meter`) import TensorFlow and Horovod late.
"""
