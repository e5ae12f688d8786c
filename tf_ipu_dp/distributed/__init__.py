"""Who am I, how many are we: the instances of a job, what starts them, and who failed first.

No TensorFlow of its own. Knows nothing of models and data.
"""
