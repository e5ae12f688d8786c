"""Weights of samples count in the loss, the update and weighted metrics, on arrays and streams and on any layout."""

import numpy as np
import tensorflow as tf

import tf_ipu_dp

RANDOM = np.random.RandomState(0)
COUNT, RATE = 64, 0.25
INPUTS = RANDOM.normal(size=(COUNT, 5)).astype(np.float32)
TARGETS = RANDOM.normal(size=(COUNT, 1)).astype(np.float32)
LABELS = RANDOM.randint(0, 3, COUNT)
WEIGHTS = RANDOM.choice([0.0, 0.5, 3.0], COUNT)
HELD = 37  # validation samples, which fill no micro batch
ONE_STEP = {
    "global_batch_size": COUNT, "micro_batch_size": 8, "epochs": "1steps", "learning_rate": RATE, "momentum": 0,
    "lr_schedule": "constant", "warmup_epochs": 0,
}  # fmt: skip


def layers_of(outputs):
    return [tf.keras.layers.Dense(4, activation="tanh", name="hidden"), tf.keras.layers.Dense(outputs, name="last")]


def regression(input_shape):
    model = tf.keras.Sequential([tf.keras.Input(input_shape), *layers_of(1)])
    return tf_ipu_dp.Task(model, loss="mse", metrics=["mae"], weighted_metrics=[tf.keras.metrics.MeanSquaredError("w")])


def two_outputs(input_shape):
    inputs = tf.keras.Input(input_shape)
    outputs = [tf.keras.layers.Dense(1, name=name)(inputs) for name in ("b", "a")]
    return tf_ipu_dp.Task(
        tf.keras.Model(inputs, outputs), loss={"a": "mse", "b": "mae"}, weighted_metrics={"a": ["mse"]}
    )


def classification(input_shape, classes):
    return tf.keras.Sequential([tf.keras.Input(input_shape), *layers_of(classes)])


def one_number(input_shape):
    model = tf.keras.Sequential([tf.keras.Input(input_shape), *layers_of(1)])
    return tf_ipu_dp.Task(model, loss=lambda targets, outputs: tf.reduce_mean(tf.square(targets - outputs)))


def data(targets, weights=WEIGHTS):
    def first(count):
        return INPUTS[:count], tf.nest.map_structure(lambda each: each[:count], targets), weights[:count]

    return first(COUNT), first(HELD)


def arrays():
    return data(TARGETS)


def stream():
    train, validation = (tf.data.Dataset.from_tensor_slices(each) for each in data(TARGETS))
    return tf_ipu_dp.Data(train, validation)


def weights_after(model, given, name, **flags):
    result = tf_ipu_dp.train(model=model, data=given, run_dir=f"runs/{name}", **{**ONE_STEP, **flags})
    return result.scores, tf_ipu_dp.open_run(f"runs/{name}").model(model=model, dataset=given)


def check(model, given, name, losses, expected, **flags):
    """Trains one step, and compares weights and scores with those of plain TensorFlow, whose sums have the weights."""
    scores, trained = weights_after(model, given, name, **flags)
    start = weights_after(model, given, f"{name}-start", **{**flags, "learning_rate": 1e-30})[1]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(WEIGHTS.astype(np.float32) * losses(start(INPUTS), COUNT)) / COUNT
    for before, gradient, after in zip(
        start.trainable_weights, tape.gradient(loss, start.trainable_weights), trained.trainable_weights
    ):
        np.testing.assert_allclose(after, before - RATE * gradient, atol=1e-5, err_msg=before.name)
    loss = np.sum(WEIGHTS[:HELD] * losses(trained(INPUTS[:HELD]), HELD)) / HELD
    np.testing.assert_allclose(scores.loss, loss, rtol=1e-5)
    assert scores.samples == HELD
    expected(scores, trained.predict(INPUTS[:HELD], verbose=0))


def check_regression(scores, outputs):
    errors = (outputs - TARGETS[:HELD])[:, 0]
    np.testing.assert_allclose(scores.metrics["mae"], np.abs(errors).mean(), rtol=1e-5)
    np.testing.assert_allclose(scores.metrics["w"], np.average(errors**2, weights=WEIGHTS[:HELD]), rtol=1e-5)


def check_classes(scores, probabilities):
    np.testing.assert_allclose(scores.top1, (probabilities.argmax(1) == LABELS[:HELD]).mean())


def check_two(scores, outputs):
    errors = outputs[1][:, 0] - TARGETS[:HELD, 0]
    np.testing.assert_allclose(scores.metrics["a_mse"], np.average(errors**2, weights=WEIGHTS[:HELD]), rtol=1e-5)


def main():
    def squares(outputs, count):
        return tf.reduce_mean(tf.square(outputs - TARGETS[:count]), axis=-1)

    def crossentropy(probabilities, count):
        return tf.keras.losses.sparse_categorical_crossentropy(LABELS[:count], probabilities)

    def of_two(outputs, count):
        return squares(outputs[1], count) + tf.reduce_mean(tf.abs(outputs[0] - TARGETS[:count]), axis=-1)

    classes = data(LABELS)
    check(regression, arrays, "one", squares, check_regression, ipus=1)
    check(regression, arrays, "four", squares, check_regression, ipus=4)
    check(regression, arrays, "stages", squares, check_regression, ipus=4, pipeline_stages=2)
    check(regression, stream, "stream", squares, check_regression, ipus=2)
    check(classification, classes, "classes", crossentropy, check_classes, ipus=2)
    check(two_outputs, data({"a": TARGETS, "b": TARGETS}), "two", of_two, check_two, ipus=2)
    try:
        tf_ipu_dp.train(model=one_number, data=arrays, run_dir="runs/refused", **ONE_STEP)
    except tf_ipu_dp.UsageError as error:
        assert "has a loss that returns one number for a batch, and the samples have weights." in str(error), error
    else:
        raise AssertionError("it was not refused")


if __name__ == "__main__":
    main()
