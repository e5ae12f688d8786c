"""Trains a small CNN on four replicas as the Keras tutorials do: arrays and datasets, callbacks, saving and loading."""

import tempfile
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = 4
ACCUMULATION = 2
STEPS_PER_EXECUTION = 4
MICRO_BATCH = 16
SAMPLES = 1024
EPOCHS = 2


def load_digits():
    """Images of bars, one position per class, with noise: float64 images and uint8 labels, as MNIST's loader gives."""
    rng = np.random.RandomState(0)
    labels = rng.randint(0, 8, SAMPLES + 256).astype("uint8")
    images = rng.uniform(0, 0.3, (len(labels), 8, 8, 1))
    images[np.arange(len(labels)), labels] += 0.7
    return (images[:SAMPLES], labels[:SAMPLES]), (images[SAMPLES:], labels[SAMPLES:])


def make_model():
    return keras.Sequential(
        [
            keras.layers.Conv2D(16, 3, activation="relu", input_shape=(8, 8, 1)),
            keras.layers.MaxPooling2D(2),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(8, activation="softmax"),
        ]
    )


class ExecutionCounter(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begins, self.ends, self.tests, self.predicts = [], [], 0, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.begins.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        assert {"loss", "accuracy"} <= set(logs), logs
        self.ends.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.tests += 1

    def on_predict_batch_end(self, batch, logs=None):
        self.predicts += 1


(x_train, y_train), (x_test, y_test) = load_digits()
train_data = tf.data.Dataset.from_tensor_slices((x_train.astype("float32"), y_train.astype("int32")))
train_data = train_data.shuffle(SAMPLES).batch(MICRO_BATCH, drop_remainder=True).repeat().prefetch(4)

config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
folder = Path(tempfile.mkdtemp())

with strategy.scope():
    model = make_model()
    model.summary()
    model.set_gradient_accumulation_options(
        gradient_accumulation_steps_per_replica=ACCUMULATION, gradient_accumulation_reduction_method="running_mean"
    )
    model.set_replication_options(replicated_metric_reduction_method="MEAN")
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(learning_rate=0.05),
        metrics=["accuracy"],
        steps_per_execution=STEPS_PER_EXECUTION,
    )
    counter = ExecutionCounter()
    history = model.fit(
        train_data,
        epochs=EPOCHS,
        steps_per_epoch=SAMPLES // MICRO_BATCH,
        validation_data=(x_test, y_test),
        validation_batch_size=MICRO_BATCH,
        callbacks=[
            counter,
            keras.callbacks.ModelCheckpoint(str(folder / "epoch-{epoch}.h5"), save_weights_only=True),
            keras.callbacks.ModelCheckpoint(str(folder / "best"), monitor="val_loss", save_best_only=True),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch == 0 else rate / 2),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.TensorBoard(str(folder / "board"), update_freq="epoch"),
            keras.callbacks.EarlyStopping(patience=5),
        ],
        verbose=2,
    )

    # 64 micro batches make 16 steps on each of 4 replicas, and 4 executions of 4 steps.
    assert counter.begins == [0, 4, 8, 12] * EPOCHS and counter.ends == [3, 7, 11, 15] * EPOCHS, counter.ends
    assert counter.tests == EPOCHS  # 16 micro batches are one execution
    assert model.optimizer.iterations.numpy() == EPOCHS * 16 // ACCUMULATION
    assert set(history.history) >= {"loss", "accuracy", "val_loss", "val_accuracy", "lr"}
    np.testing.assert_allclose(history.history["lr"], [0.05, 0.025], rtol=1e-6)
    assert history.params["steps"] == 16 and history.params["epochs"] == EPOCHS
    assert sorted(path.name for path in folder.glob("epoch-*")) == ["epoch-1.h5", "epoch-2.h5"]
    assert len((folder / "log.csv").read_text().splitlines()) == 1 + EPOCHS

    # The last epoch goes on with arrays.
    history = model.fit(x_train, y_train, batch_size=MICRO_BATCH, epochs=1, verbose=0)
    assert model.optimizer.iterations.numpy() == (EPOCHS + 1) * 16 // ACCUMULATION

    results = model.evaluate(x_test, y_test, batch_size=MICRO_BATCH, return_dict=True, verbose=0)
    model.set_replication_options()  # which would reduce the predictions too
    predictions = model.predict(x_test, batch_size=MICRO_BATCH, callbacks=[counter])
    assert predictions.shape == (256, 8) and counter.predicts == 1
    print(f"accuracy above 0.95: {results['accuracy'] > 0.95}")
    np.testing.assert_allclose(np.mean(predictions.argmax(axis=1) == y_test), results["accuracy"], rtol=1e-6)
    true_loss = keras.losses.sparse_categorical_crossentropy(y_test, predictions).numpy().mean()
    np.testing.assert_allclose(results["loss"], true_loss, rtol=1e-4, atol=1e-5)

    # Weights, an HDF5 file and a SavedModel, each loaded into something that predicts the same.
    model.save_weights(str(folder / "weights"))
    model.save(str(folder / "model.h5"))
    model.save(str(folder / "saved_model"))
    same = make_model()
    same.load_weights(str(folder / "weights"))
    loaded = [
        same,
        keras.models.load_model(str(folder / "model.h5")),
        keras.models.load_model(str(folder / "saved_model")),
    ]
    for other in loaded:
        other.compile(loss="sparse_categorical_crossentropy", steps_per_execution=STEPS_PER_EXECUTION)
        np.testing.assert_allclose(other.predict(x_test, batch_size=MICRO_BATCH), predictions, rtol=1e-5, atol=1e-7)

    # A model that comes with its optimizer trains on where it was saved.
    resumed = keras.models.load_model(str(folder / "model.h5"))
    assert resumed.optimizer.iterations.numpy() == model.optimizer.iterations.numpy()
    resumed.set_gradient_accumulation_options(gradient_accumulation_steps_per_replica=ACCUMULATION)
    resumed.compile(resumed.optimizer, resumed.loss, metrics=["accuracy"], steps_per_execution=STEPS_PER_EXECUTION)
    resumed.fit(x_train[:512], y_train[:512], batch_size=MICRO_BATCH, verbose=0)
    print(f"updates after resuming: {resumed.optimizer.iterations.numpy() - model.optimizer.iterations.numpy()}")

# Outside the scope, a loaded model is a plain one.
plain = keras.models.load_model(str(folder / "model.h5"))
np.testing.assert_allclose(plain.predict(x_test, verbose=0), predictions, rtol=1e-5, atol=1e-6)
print("done")
