"""Callbacks that a function of a file makes: they note what they are called with, and stop the run if asked to."""

import json
import os
from pathlib import Path

import tensorflow as tf


class Watcher(tf.keras.callbacks.Callback):
    def __init__(self, path, stops_after_batch=None, stops_after_epoch=None):
        super().__init__()
        self.path, self.calls = Path(path), []
        self.stops_after_batch, self.stops_after_epoch = stops_after_batch, stops_after_epoch

    def note(self, *words):
        self.calls.append(list(words))
        self.path.write_text(json.dumps({"pid": os.getpid(), "calls": self.calls}), encoding="utf-8")

    def on_train_begin(self, logs=None):
        self.note("begin")

    def on_train_batch_end(self, batch, logs=None):
        self.note("batch", batch, sorted(logs))
        if self.stops_after_batch is not None and batch >= self.stops_after_batch:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.note("epoch", epoch, sorted(logs))
        if epoch == self.stops_after_epoch:
            self.model.stop_training = True

    def on_train_end(self, logs=None):
        self.note("end")


def watch(run_dir):
    return [Watcher(f"{run_dir}.json")]


def stop_after_an_epoch(run_dir):
    return Watcher(f"{run_dir}.json", stops_after_epoch=0)


def stop_in_an_epoch(run_dir):
    return Watcher(f"{run_dir}.json", stops_after_batch=3)


def wrong():
    return ["EarlyStopping"]
