"""Fused passes: the micro batches of several time-sliced replicas, and of several accumulation steps, in one pass.

Owns which models qualify, what is done per micro batch inside a pass, and how an update is divided into passes. The
result is that of one micro batch after the other, up to rounding; a model that does not qualify is not touched.
"""
