"""Collectives: what a gradient all-reduce sends, what it takes on a real engine, and what it would take elsewhere.

One module for each subcommand of `python -m tf_ipu_dp.collectives` (size, measure, simulate, report, validate), and
`network.py` for emulated hosts. Sizes, formulas, simulator and statistics import neither TensorFlow nor Horovod.
"""
