"""What the IPUs and the runs do: devices, snapshots, tables, recordings, exporter, and the bottleneck of a run.

Never imports TensorFlow.
"""
