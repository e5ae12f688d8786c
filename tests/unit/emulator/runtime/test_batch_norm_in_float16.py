"""Batch normalisation with float16 scale, offset and statistics."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

X = np.random.RandomState(0).randn(32, 4, 4, 3).astype("float16")


class HalfBatchNormalization(tf.keras.layers.BatchNormalization):
    """Keras raises the parameters of float16 layers to float32; this one does not."""

    @property
    def _param_dtype(self):
        return self.dtype


@pytest.mark.parametrize("training", [True, False])
def test_the_fused_operation_gives_the_results_and_gradients_of_float32_parameters(scope, training):
    scope(1)

    def normalised(dtype):
        scale, offset = tf.constant([1.0, 2.0, 0.5], dtype), tf.constant([0.0, 1.0, -1.0], dtype)
        statistics = {} if training else {"mean": tf.zeros(3, dtype), "variance": tf.ones(3, dtype)}
        with tf.GradientTape() as tape:
            tape.watch([scale, offset])
            y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
                tf.constant(X), scale, offset, is_training=training, **statistics
            )
            loss = tf.reduce_sum(tf.cast(y, tf.float32) ** 2)
        return [y, mean, variance, *tape.gradient(loss, [scale, offset])]

    half, single = normalised(tf.float16), normalised(tf.float32)
    assert {each.dtype for each in half} == {tf.float16}
    for ours, theirs in zip(half, single):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 2)])
def test_a_model_that_is_float16_throughout_trains_with_batch_norm(scope, replicas, accumulation):
    y = (X.mean(axis=(1, 2, 3)) > 0).astype("int32")
    tf.random.set_seed(1)
    with scope(replicas).scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Conv2D(4, 3, dtype="float16", input_shape=(4, 4, 3)),
                HalfBatchNormalization(momentum=0.5, dtype="float16"),
                tf.keras.layers.Flatten(dtype="float16"),
                tf.keras.layers.Dense(2, dtype="float16"),
            ]
        )
        assert {weight.dtype for weight in model.weights} == {tf.float16}
        model.set_gradient_accumulation_options(accumulation, "mean")
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.SGD(0.05), loss, steps_per_execution=2)
        data = tf.data.Dataset.from_tensor_slices((X, y)).batch(4, drop_remainder=True)
        losses = model.fit(data, epochs=6, verbose=0).history["loss"]
        moving_mean, moving_variance = model.layers[1].get_weights()[2:]
        assert np.isfinite(model.evaluate(data, steps=8, verbose=0))
    assert losses[-1] < losses[0]
    assert np.abs(moving_mean).max() > 0
    assert np.isfinite(moving_variance).all() and not np.array_equal(moving_variance, np.ones(4))
