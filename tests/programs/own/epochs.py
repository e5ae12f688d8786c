"""Trains many short epochs: the graphs of past data sets must be freed, and not wait for Python's collector."""

import gc
import threading

import tensorflow as tf
from tensorflow.python.framework.func_graph import FuncGraph

import tf_ipu_dp


class CountGraphs(tf.keras.callbacks.Callback):
    """Counts the graphs that are alive at the end of each epoch."""

    def __init__(self):
        super().__init__()
        self.counts = []

    def on_epoch_end(self, epoch, logs=None):
        gc.set_threshold(0)  # as if Python found nothing worth collecting
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()  # it deletes the iterator of the epoch
        self.counts.append(sum(isinstance(each, FuncGraph) for each in gc.get_objects()))


graphs = CountGraphs()
tf_ipu_dp.train(
    model="mlp", dataset="synthetic", image_size=28, ipus=1, micro_batch_size=2, learning_rate=0.0005, epochs="24steps",
    updates_per_epoch=2, validate=False, export=False, sdk="emulator", run_dir="run", callbacks=[graphs],
)  # fmt: skip
of_an_epoch = graphs.counts[1] - graphs.counts[0]
assert len(graphs.counts) == 12 and graphs.counts[-1] <= graphs.counts[1] + 2 * max(of_an_epoch, 1), graphs.counts
