"""Data sets: what is known of them (`info`), where they are found (`lookup`), and their samples (`sources`).

A set that tensorflow-datasets has is added in `info` alone. `info` is pure and `lookup` reads two small files; the rest
needs TensorFlow. Knows nothing of models, devices or runs.
"""
