"""What a job is before it runs: topology, batch and step arithmetic, refusals with fixes, the plan as text.

Pure: no TensorFlow, environment, clock or printing.
"""
