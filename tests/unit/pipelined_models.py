"""Small Keras models for tests of pipeline stages, and what they are assigned to."""

from __future__ import annotations

import tensorflow as tf

layers = tf.keras.layers


def dense(name, units=2):
    return layers.Dense(units, name=name)


def sequential(count=4):
    return tf.keras.Sequential([layers.Input((2,)), *(dense(f"d{number}") for number in range(count))])


def staged(stages):
    model = sequential(len(stages))
    model.set_pipeline_stage_assignment(list(stages))
    return model


def stages_of(model):
    return [assignment.pipeline_stage for assignment in model.get_pipeline_stage_assignment()]


def calls_of(model):
    return [(one.layer.name, one.node_index) for one in model.get_pipeline_stage_assignment()]


def diamond():
    """a -> (b, c) -> join -> a again."""
    start, shared = layers.Input((2,)), dense("a")
    first = shared(start)
    joined = layers.Add(name="join")([dense("b")(first), dense("c")(first)])
    return tf.keras.Model(start, shared(joined))


def assign(model, stages):
    assignments = model.get_pipeline_stage_assignment()
    for assignment, stage in zip(assignments, stages):
        assignment.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignments)
    return model


class Subclass(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.a, self.b = dense("a"), dense("b")
        self.inner = tf.keras.Sequential([dense("inner")], name="nested")

    def call(self, x):
        y = self.b(self.a(x))
        return self.inner(self.a(layers.add([2.0 * y, x])))
