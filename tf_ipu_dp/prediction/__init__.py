"""Predictions of a trained run: which inputs, on which weights, into which file.

Runs the model of a checkpoint, or an export, data-parallel over replicas. Trains nothing, needs no data set, and never
loads code that only a run's folder names.
"""
