"""What the two Keras programs share: the model, its input, its optimizer, and a callback with a clock.

TensorFlow is imported in the functions: the study itself never does.
"""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, Optional

from tf_ipu_dp.scaling.engines import samples
from tf_ipu_dp.scaling.engines.protocol import Answer, Order
from tf_ipu_dp.scaling.engines.update_times import UpdateTimes


def set_up(order: Order) -> None:
    """Sets the threads and the seed. Must be called before TensorFlow computes anything."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(order.threads)
    tf.config.threading.set_inter_op_parallelism_threads(order.threads)
    seed = getattr(tf.keras.utils, "set_random_seed", tf.random.set_seed)
    seed(order.seed % 2**32)


def make_model(order: Order) -> Any:
    """Returns the Keras model of the order, with the order's weights if it has some."""
    import numpy as np

    from tf_ipu_dp.training import models

    facts = samples.find_dataset(order)
    model = models.make_model(
        samples.describe_model(order), eight_bit_input=False, mean=facts.mean, deviation=facts.deviation
    )
    if order.weights is not None:
        with np.load(order.weights) as arrays:
            model.set_weights([arrays[variable_name(variable)] for variable in model.weights])
    return model


def variable_name(variable: Any) -> str:
    """Returns the name of a variable in a file of weights: conv1_conv/kernel."""
    return str(variable.name).partition(":")[0]


def make_optimizer(order: Order) -> Any:
    """Returns SGD with momentum: the stock one, or one that also takes L2 and weight decay of kernels alone."""
    import tensorflow as tf

    from tf_ipu_dp.training import optimizers

    if order.l2 or order.weight_decay:
        return optimizers.Sgd(
            learning_rate=order.learning_rate, momentum=order.momentum, l2=order.l2, weight_decay=order.weight_decay
        )
    # Horovod's recipe for Keras 2.11 and later takes the legacy ones.
    keras = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    return keras.SGD(order.learning_rate, momentum=order.momentum)


def make_input(order: Order, rank: int) -> Any:
    """Returns the process's batches: gathered from memory by index, normalised in parallel, prefetched."""
    import tensorflow as tf

    split = samples.load(order)
    images, labels = tf.identity(split.images), tf.identity(split.labels)
    factor, offset = tf.constant(split.factor), tf.constant(split.offset)

    def prepare(rows: Any) -> Any:
        return tf.cast(tf.gather(images, rows), tf.float32) * factor + offset, tf.gather(labels, rows)

    rows = samples.rows_of_updates(order, rank, len(split.labels))
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    return dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def compile_model(model: Any, optimizer: Any, order: Order, **options: Any) -> None:
    """Compiles a model with the loss and the metric of `tf_ipu_dp.train`."""
    import tensorflow as tf

    from tf_ipu_dp.training.optimizers import Crossentropy

    loss = Crossentropy(label_smoothing=order.label_smoothing)
    metric = tf.keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile(optimizer, loss, metrics=[metric], **options)


def make_clock(order: Order, barrier: Callable[[], None]) -> Any:
    """Returns a callback that times the updates after the warm-up and keeps the first and the mean loss."""
    import tensorflow as tf

    class Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
        """Knows the times of the updates."""

        # Otherwise Keras would turn the metrics of every update into numbers, for this callback alone.
        _supports_tf_logs = True

        def __init__(self) -> None:
            super().__init__()
            self.began, self.ended = 0.0, 0.0
            self.first_loss, self.mean_loss = 0.0, 0.0
            self.updates = 0
            self.times = UpdateTimes(order)

        def on_train_batch_begin(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
            del logs
            if batch == order.warmup_updates:
                barrier()
                self.began = time.perf_counter()
                self.times.begin(self.began)

        def on_train_batch_end(self, batch: int, logs: Optional[Dict[str, Any]] = None) -> None:
            is_last = batch == order.warmup_updates + order.updates - 1
            is_timed = order.times_updates and batch >= order.warmup_updates
            if is_timed and self.times.end_update(time.perf_counter()):
                is_last = self.model.stop_training = True
            if is_last:
                self.ended = time.perf_counter()
                self.updates = batch + 1 - order.warmup_updates
            # Keras reports the mean of the epoch so far.
            if batch == 0:
                self.first_loss = float((logs or {})["loss"])
            if is_last:
                self.mean_loss = float((logs or {})["loss"])

        def answer(self, rank: int, engine: str) -> Answer:
            """Returns what was measured."""
            return Answer(
                rank=rank,
                engine=engine,
                seconds=self.ended - self.began,
                samples=self.updates * order.batch_size,
                first_loss=self.first_loss,
                mean_loss=self.mean_loss,
                update_s=tuple(self.times.seconds),
            )

    return Clock()
