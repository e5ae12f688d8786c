"""Accumulated gradients of Keras models in 16 bits: how they are reduced, and the type of the accumulators."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu.ops import pipelining_ops

v2 = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
GRADIENT, RATE = 30000.0, 2.0**-10  # two gradients fit into float16, three do not
ONES = np.ones((8, 1), "float16")


def make_model(**optimizer):
    """Weights that begin with 0, and a gradient that is the same in each micro batch."""
    layers = [
        tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype="float16", input_shape=(1,)),
        tf.keras.layers.Activation("linear", dtype="float16"),
    ]
    model = tf.keras.Sequential(layers)
    model.compile(v2.SGD(RATE, **optimizer), lambda y, p: p * GRADIENT, steps_per_execution=4)
    return model


def weight_after_one_update(model, replicas):
    model.fit(ONES[: 4 * replicas], ONES[: 4 * replicas], batch_size=1, verbose=0)
    return model.get_weights()[0].item()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("method", "micro_batches"), [("mean", 1), ("running_mean", 1), ("sum", np.inf)])
def test_means_of_16_bit_gradients_do_not_overflow_though_their_sum_does(scope, method, micro_batches, replicas):
    with scope(replicas).scope():
        model = make_model()
        model.set_gradient_accumulation_options(4, method)
        weight = weight_after_one_update(model, replicas)
    assert weight == pytest.approx(-RATE * GRADIENT * micro_batches * replicas, rel=2e-3)


class Transformer:
    """Stores the type of the gradients that an optimizer gets, and casts them for the update."""

    def __init__(self):
        self.dtypes = []

    def __call__(self, pairs):
        self.dtypes = [gradient.dtype for gradient, _ in pairs]
        return [(tf.cast(gradient, variable.dtype), variable) for gradient, variable in pairs]


@pytest.mark.parametrize("method", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [tf.float32, lambda variable: tf.float32])
def test_accumulators_of_another_type_are_passed_on_in_that_type(scope, dtype, method):
    with scope(1).scope():
        transformer = Transformer()
        model = make_model(gradient_transformers=[lambda pairs: pairs, transformer])
        model.set_gradient_accumulation_options(4, method, dtype=dtype)
        weight = weight_after_one_update(model, 1)
    assert transformer.dtypes == [tf.float32]
    # The sum fits into the accumulator, but not into the 16 bits of the update.
    assert weight == (-RATE * GRADIENT if method == "mean" else -np.inf)


def test_without_accumulation_there_is_no_accumulator_whose_type_could_matter(scope):
    with scope(2).scope():
        transformer = Transformer()
        model = make_model(gradient_transformers=[transformer])
        model.set_gradient_accumulation_options(1, "mean", dtype=tf.float32)
        model.fit(ONES, ONES, batch_size=1, verbose=0)
    assert transformer.dtypes == [tf.float16]


def test_a_pipeline_has_accumulators_of_the_type_asked_for(two_ipus):
    transformer = Transformer()
    model = make_model(gradient_transformers=[transformer])
    model.set_pipeline_stage_assignment([0, 1])
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=4,
        gradient_accumulation_reduction_method="mean",
        gradient_accumulation_dtype=tf.float32,
        pipeline_schedule=pipelining_ops.PipelineSchedule.Sequential,
    )
    assert weight_after_one_update(model, 1) == -RATE * GRADIENT
    assert transformer.dtypes == [tf.float32]


def test_unknown_options_of_the_accumulation_are_refused(scope):
    with scope(1).scope():
        model = make_model()
        model.set_gradient_accumulation_options(2, offload_weight_update_variables=False, dtype=tf.float16)
        with pytest.raises(TypeError, match="unexpected keyword argument 'dtypes'"):
            model.set_gradient_accumulation_options(2, dtypes=tf.float32)
