"""Trains from Python several times in one process, as a script or notebook does, and asserts what is promised."""

import dataclasses
import json
import signal
from pathlib import Path

import houses
import numpy as np
import tensorflow as tf
import watchers

import tf_ipu_dp

RANDOM = np.random.RandomState(0)
INPUTS = RANDOM.normal(size=(256, 6)).astype(np.float32)
LABELS = (INPUTS[:, 0] > 0).astype(int)
SMALL = {"ipus": 2, "micro_batch_size": 8, "learning_rate": 0.2}


class Seen(tf.keras.callbacks.Callback):
    """Notes what it is called with, and stops the run after its first epoch if asked to."""

    def __init__(self, stops=False):
        super().__init__()
        self.calls, self.batches, self.stops = [], [], stops

    def on_train_begin(self, logs=None):
        self.calls.append("begin")

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append((epoch, "loss" in logs and "val_loss" in logs and "val_accuracy" in logs))
        self.model.stop_training = self.stops

    def on_train_end(self, logs=None):
        self.calls.append("end")


def build(input_shape, classes):
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [tf.keras.Input(input_shape), layers.Dense(8, activation="relu"), layers.Dense(classes, activation="softmax")]
    )


def adapted(input_shape, classes):
    layer = tf.keras.layers.Normalization()
    layer.adapt(INPUTS[:250])  # the last batch is smaller
    return tf.keras.Sequential([tf.keras.Input(input_shape), layer, tf.keras.layers.Dense(classes)])


def normalised(input_shape, classes, mean, variance):
    layer = tf.keras.layers.Normalization(mean=mean, variance=variance)
    return tf.keras.Sequential([tf.keras.Input(input_shape), layer, tf.keras.layers.Dense(classes)])


def with_statistics():
    layer = tf.keras.layers.Normalization()
    layer.adapt(INPUTS)
    facts = {name: getattr(layer, name).numpy()[0].tolist() for name in ("mean", "variance")}
    return tf_ipu_dp.Data((INPUTS, LABELS), (INPUTS[:50], LABELS[:50]), facts=facts)


def stream():
    whole = tf.data.Dataset.from_tensor_slices((INPUTS, LABELS))
    return tf_ipu_dp.Data(whole, whole.take(50), classes=2)


def bad_stream(label=0, number=0.0):
    inputs, labels = INPUTS.copy(), LABELS.copy()
    inputs[200, 3], labels[200] = number, label
    train = tf.data.Dataset.from_tensor_slices((inputs, labels))
    return tf_ipu_dp.Data(train, tf.data.Dataset.from_tensor_slices((INPUTS[:50], LABELS[:50])), classes=2)


def refusal(**arguments):
    try:
        tf_ipu_dp.train(**arguments)
    except tf_ipu_dp.UsageError as error:
        return str(error)
    raise AssertionError("it was not refused")


def check_adapted_layers(arrays):
    said = refusal(model=adapted, data=arrays, run_dir="runs/adapted", **SMALL)
    assert "adapts a layer to data, which on a device takes batches of one size. Do that in the function" in said, said
    normal = tf_ipu_dp.train(model=normalised, data=with_statistics, epochs=1, run_dir="runs/normal", **SMALL)
    assert normal.scores.top1 > 0.7, normal.scores


def main():
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    arrays = ((INPUTS, LABELS), (INPUTS[:50], LABELS[:50]))
    seen = Seen()
    first = tf_ipu_dp.train(model=build, data=arrays, epochs=2, run_dir="runs/a", callbacks=[seen], **SMALL)
    assert first.updates == 32 and first.scores.samples == 50 and first.scores.top1 > 0.8, first.scores
    assert seen.calls == ["begin", (0, True), (1, True), "end"] and len(seen.batches) == 32, seen.calls
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    again = tf_ipu_dp.train(model=build, data=arrays, epochs=2, run_dir="runs/b", **SMALL)
    assert again.scores == first.scores, (again.scores, first.scores)
    stopped = tf_ipu_dp.train(
        model=build, data=arrays, epochs=9, run_dir="runs/c", callbacks=[Seen(stops=True)], **SMALL
    )
    assert stopped.updates == 16 and "callback" in stopped.stopped.message
    streamed = tf_ipu_dp.train(model=build, data=stream, epochs=2, run_dir="runs/d", **SMALL)
    assert streamed.scores.samples == 50 and streamed.scores.top1 > 0.8, streamed.scores
    bad = {"model": build, "epochs": 1, "run_dir": "runs/bad", **SMALL}
    said = refusal(data=lambda: bad_stream(label=7), **bad)
    assert said.startswith("--dataset=__main__:data streams a label that is none of 0 to 1."), said
    said = refusal(data=lambda: bad_stream(number=np.nan), **{**bad, "run_dir": "runs/nan"})
    assert said.startswith("--dataset=__main__:data streams NaN or infinite numbers."), said
    short = dataclasses.replace(stream(), validation_samples=90)
    assert refusal(data=lambda: short, **{**bad, "run_dir": "runs/short"}) == (
        "--dataset=__main__:data streams fewer samples than the 256 for training and 90 for validation that it gives "
        "as their numbers."
    )
    early = {**bad, "data": arrays, "run_dir": "runs/refused"}  # before anything is trained or written
    assert refusal(keep_best="acuracy", **early) == (
        "--keep_best=acuracy is not a metric of this task. Use --keep_best=loss, accuracy or top5."
    )
    assert refusal(callbacks=[5], **early) == (
        "callbacks has int where a Keras callback (tf.keras.callbacks) is expected. It takes one, or a list of them."
    )
    assert not Path("runs/refused").exists()
    check_adapted_layers(arrays)
    held_out = tf_ipu_dp.train(
        model=lambda classes: build((6,), classes), data=tf_ipu_dp.Data((INPUTS, LABELS)), epochs=1, export=True,
        run_dir="runs/e", **SMALL,
    )  # fmt: skip
    assert held_out.scores.samples == 51
    exported = tf.keras.models.load_model("runs/e/export", compile=False)
    assert exported.predict(INPUTS[:3], verbose=0).shape == (3, 2)
    assert "starts other processes" in refusal(model=build, data=arrays, ipus=2, instances=2)
    assert refusal(model=build, data=arrays, ipus=3).startswith("--ipus=3 is not possible")
    assert "give the function that returns it" in refusal(model=build((6,), 2), data=arrays)
    plan = tf_ipu_dp.plan(model=houses.build, data=houses.load, ipus=4)
    assert plan.dataset.inputs == "district: one int32, measures: 4 float32"
    refused = refusal(model=houses.build, data=houses.load, ipus=4, instances=2, callbacks=[Seen()])
    assert refused == (
        "instances=2 starts other processes, which do not have these callbacks. Give the function of a file that makes "
        "them, like callbacks=make_callbacks or callbacks='FILE.py:function'."
    )
    assert "returned str where a Keras callback" in refusal(model=build, data=arrays, ipus=2, callbacks=watchers.wrong)
    houses_as_two = {"model": houses.build, "data": houses.load, "optimizer": "adam", "ipus": 4, "instances": 2}
    two = tf_ipu_dp.train(
        **houses_as_two, epochs=3, run_dir="runs/f", callbacks=watchers.stop_after_an_epoch, log_every=8
    )
    assert two.scores.samples == 501 and set(two.scores.metrics) == {"mae", "rmse"}
    assert two.updates == 31 and "callback" in two.stopped.message, two
    noted = json.loads(Path("runs/f.json").read_text(encoding="utf-8"))["calls"]
    batches = [call for call in noted if call[0] == "batch"]
    assert [call[0] for call in noted] == ["begin", *["batch"] * 31, "epoch", "end"], noted
    assert [call[1] for call in batches] == list(
        range(batches[0][1], batches[-1][1] + 1, batches[1][1] - batches[0][1])
    )
    assert "loss" in batches[0][2] and {"val_loss", "val_mae"} <= set(noted[-2][2]), noted[-2]
    cut = tf_ipu_dp.train(
        **houses_as_two, epochs=3, run_dir="runs/g", callbacks="watchers.py:stop_in_an_epoch", log_every=1
    )
    assert cut.updates < 31 and "callback" in cut.stopped.message, cut
    planned = json.loads(Path("runs/f/plan.json").read_text(encoding="utf-8"))
    assert planned["topology"]["instances"] == 2


if __name__ == "__main__":
    main()
