"""What the IPUs and the runs on them do: devices, sampler, snapshots, tables, recordings, exporter and bottlenecks.

Reads run folders and never writes to them. Never imports TensorFlow; reaches SDK and emulator through sdk.py only.
"""
