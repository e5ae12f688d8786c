"""The instances of a job: their places, what starts them, which failed first, when to restart, how to verify.

Imports no TensorFlow, and knows nothing of models and data sets beyond the plan.
"""
