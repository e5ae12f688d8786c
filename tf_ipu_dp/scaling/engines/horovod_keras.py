"""Horovod's own recipe for Keras: `python -m tf_ipu_dp.scaling.engines.horovod_keras ORDER` in every process.

One all-reduce of each gradient by `DistributedOptimizer`, and the weights of process 0 for all. The learning rate is
the order's, already that of the global batch. Imports TensorFlow and Horovod.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Sequence

from tf_ipu_dp.scaling.engines import keras_training, order_files


def main(words: Sequence[str]) -> int:
    """Trains with `model.fit` and writes the answer of this process; returns the exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    order = order_files.read_order(Path(words[0]))
    import horovod
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    hvd.init()
    keras_training.set_up(order)
    model = keras_training.make_model(order)
    optimizer = hvd.DistributedOptimizer(keras_training.make_optimizer(order))
    keras_training.compile_model(model, optimizer, order, experimental_run_tf_function=False)

    def barrier() -> None:
        hvd.allreduce(tf.zeros([1]), name="barrier")
        order_files.wait_for_others(order, Path(words[0]))

    clock = keras_training.make_clock(order, barrier)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), clock]
    model.fit(keras_training.make_input(order, hvd.rank()), verbose=0, callbacks=callbacks)
    engine = f"Horovod {horovod.__version__}, Keras of TensorFlow {tf.__version__}"
    order_files.write_answer(clock.answer(hvd.rank(), engine), Path(words[0]))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
