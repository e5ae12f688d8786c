"""Data sets: their sizes (`info`), where they are on disk (`lookup`), and their samples (`sources`).

A set that tensorflow-datasets has is added in `info` alone. `info` is pure and `lookup` reads two small files; the rest
needs TensorFlow. Independent of models, devices and runs.
"""
