"""Data sets: what is known of them (`info`, pure), where they are found (`lookup`), and their samples (`sources`).

Knows nothing of models, devices or runs.
"""
