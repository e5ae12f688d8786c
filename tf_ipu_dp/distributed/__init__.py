"""The instances of a job: ranks, collectives, launchers, first failures, restarts and verification.

Imports no TensorFlow. Uses models and data sets only through the plan.
"""
