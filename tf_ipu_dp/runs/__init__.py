"""The folder of one run: typed records, checkpoints, heartbeats, and the result as text.

No TensorFlow. Only the leader writes, except heartbeats and errors.
"""
