"""Runs programs of the device: executions, replicas, gradient reduction, collectives, instances, feeds.

Owns everything that computes. Keras models reach it only as arguments: it must not import the `keras` room. Modules
that `popdist` needs (`instances`, `wait_meter`) import TensorFlow and Horovod late.
"""
