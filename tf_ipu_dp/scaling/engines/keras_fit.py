"""Plain Keras, one process: `python -m tf_ipu_dp.scaling.engines.keras_fit ORDER`. Imports TensorFlow."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Sequence

from tf_ipu_dp.scaling.engines import keras_training, order_files


def main(words: Sequence[str]) -> int:
    """Trains with `model.fit` and writes the answer; returns the exit code."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    order = order_files.read_order(Path(words[0]))
    import tensorflow as tf

    keras_training.set_up(order)
    model = keras_training.make_model(order)
    keras_training.compile_model(model, keras_training.make_optimizer(order), order)
    clock = keras_training.make_clock(order, barrier=lambda: order_files.wait_for_others(order, Path(words[0])))
    model.fit(keras_training.make_input(order, rank=0), verbose=0, callbacks=[clock])
    order_files.write_answer(clock.answer(0, f"Keras of TensorFlow {tf.__version__}"), Path(words[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
