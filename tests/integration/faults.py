"""Trains like `python -m tf_ipu_dp.train`, but something is wrong with instance 1: what, is the first argument."""

import sys
import threading

import popdist

from tf_ipu_dp import train
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.training import checks, loop

fault = sys.argv[1]
broken = popdist.getInstanceIndex() == 1
words = sys.argv[2:]

if fault == "stuck_input" and broken:
    make_training = sources.make_training

    def stuck(*arguments, **names):
        import tensorflow as tf

        first = make_training(*arguments, **names)
        spec = first.element_spec

        def never(*_):
            threading.Event().wait()

        def blocks(*element):
            wait = tf.numpy_function(never, [], [])
            with tf.control_dependencies([wait]):
                return tuple(tf.ensure_shape(tf.identity(part), each.shape) for part, each in zip(element, spec))

        return first.take(8).concatenate(first.skip(8).map(blocks))

    sources.make_training = stuck

if fault == "unlike" and broken:
    words.append("--seed=7")
    checks.__version__ = "9.9"
    sources.fingerprint = lambda source: "other"

if fault == "drift" and broken:
    exchange = loop.TrainingLoop._exchange

    def drift(self, *arguments):
        if self.step == 6:
            kernel = self.session.model.weights[0]
            kernel.assign(kernel * 1.0001)
        return exchange(self, *arguments)

    loop.TrainingLoop._exchange = drift

train.start(words)
