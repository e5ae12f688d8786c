"""What several instances cost and gain, alternating in one run.

    .venv/bin/python benchmarks/instances.py [--rounds=5] [--only=layout]

layout   ResNet-20, micro batches of 32, accumulation 4: 8 replicas in one instance and in two, one replica alone, and
         the stock Horovod recipe for Keras (hvd.DistributedOptimizer, two processes, horovodrun) with the same model
         and the global batch of 8 replicas; and what TensorFlow's kernels leave room for: forward and backward passes
         of the model and nothing else, in two processes that never communicate
mlp, cnn, resnet20, resnet50
         8 replicas x 32 in one instance and in two; and PyTorch DDP in two processes with the same global batch, where
         PyTorch is installed (python -m tf_ipu_dp.environment ddp), set up as `python -m tf_ipu_dp.scaling` does
input    a small model with an augmentation that costs more than the model: in numpy, which holds Python's lock, and
         in TensorFlow; one and two instances of the same program for the SDK
start    from the command to the end of the first step: one and four instances
timing   MLP, 2 instances x 1 replica, 1,500 updates: without and with the time of every exchange of gradients

Every round starts new processes for every contender. Reported: medians, and the median of the ratios within a
round to the first contender.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HAS_TORCH = importlib.util.find_spec("torch") is not None
HERE = str(Path(__file__).resolve().parent)
GLOBAL_BATCH = 32 * 8 * 4
UPDATES = 6
MODELS = {"mlp": 600, "cnn": 120, "resnet20": 16, "resnet50": 8}  # updates of 256 samples, for some seconds
RESNET20 = [
    "--dataset=synthetic", "--model=resnet20", "--micro_batch_size=32", "--gradient_accumulation=4",
    "--seed=1", "--json",
]  # fmt: skip
BARE_BATCH, BARE_PASSES = 128, 24
SAMPLES = 1024
INPUT_BATCH = 32
SUITES = {
    "layout": [
        "1 instance x 8 replicas",
        "2 instances x 4 replicas",
        "1 instance x 1 replica",
        "stock Horovod, 2 processes",
        "bare passes, 2 processes",
    ],
    **{
        model: ["1 instance x 8 replicas", "2 instances x 4 replicas", *(["DDP, 2 processes"] if HAS_TORCH else [])]
        for model in MODELS
    },
    "input": ["numpy, 1 instance", "numpy, 2 instances", "tf.data, 1 instance", "tf.data, 2 instances"],
    "start": ["1 instance x 8 replicas", "4 instances x 2 replicas"],
    "timing": ["exchanges not timed", "exchanges timed"],
}


def poprun(instances, replicas):
    options = ["--num-instances", str(instances), "--num-replicas", str(replicas)]
    return [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--only-output-from-instance", "0", *options, "python3"]


def python_arguments(function):
    return ["-c", f"import sys; sys.path.insert(0, {HERE!r}); import instances as b; b.{function}"]


def read_rate(command, processes=1):
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        for _ in range(processes)
    ]
    return sum(read_end(command, process) for process in started)


def read_end(command, process):
    stdout, stderr = process.communicate()
    lines = [line.split(">:", 1)[-1] for line in stdout.splitlines() if "{" in line]
    if process.returncode or not lines:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{stderr}")
    return json.loads(lines[-1])["samples_per_s"]


def measure_layout(name):
    if name.startswith("stock"):
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        return read_rate([horovodrun, "-np", "2", sys.executable, *python_arguments("stock_horovod()")])
    if name.startswith("bare"):
        return read_rate([sys.executable, *python_arguments("bare_passes()")], processes=2)
    instances, _, _, local, _ = name.split()
    replicas = int(instances) * int(local)
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tf_ipu_dp.train", *RESNET20, f"--epochs={UPDATES * 8 // replicas}steps"]
        return read_rate([*poprun(int(instances), replicas), *words, f"--run_dir={folder}/run"])


def measure_model(name, model):
    words = ["--dataset=synthetic", f"--model={model}", "--micro_batch_size=32", "--seed=1"]
    with tempfile.TemporaryDirectory() as folder:
        if name.startswith("DDP"):
            study = ["--mode=instances", "--sizes=2", "--engines=ddp", "--ipus=8", "--repeats=1"]
            study += [f"--updates={MODELS[model]}", f"--study_dir={folder}/study", *words]
            subprocess.run([sys.executable, "-m", "tf_ipu_dp.scaling", *study], capture_output=True, check=True)
            (cell,) = map(json.loads, Path(folder, "study", "cells.jsonl").read_text().splitlines())
            if not cell["samples"]:
                sys.exit(cell["reason"])
            return cell["samples"] / cell["seconds"]
        job = poprun(int(name[0]), 8)
        words += ["--json", f"--epochs={MODELS[model]}steps", f"--run_dir={folder}/run"]
        return read_rate([*job, "-m", "tf_ipu_dp.train", *words])


def measure_input(name):
    kind, count = name.split(", ")
    return read_rate([*poprun(int(count[0]), 2), *python_arguments(f"train_with_augmentation({kind!r})")])


def measure_start(name):
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "tf_ipu_dp.train", "--dataset=synthetic", "--model=resnet20", "--epochs=1steps"]
        began = time.perf_counter()
        process = subprocess.Popen(
            [*poprun(int(name[0]), 8), *words, "--micro_batch_size=4", f"--run_dir={folder}/run"],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        for line in process.stderr:
            if "compiling... " in line:  # printed after the first step
                seconds = time.perf_counter() - began
        process.wait()
        return seconds


def measure_timing(name):
    with tempfile.TemporaryDirectory() as folder:
        words = ["--dataset=synthetic", "--image_size=28", "--model=mlp", "--micro_batch_size=32", "--epochs=1500steps"]
        words += ["--seed=1", "--json", f"--run_dir={folder}/run"]
        return read_rate([*poprun(2, 2), *python_arguments(f"train_timed({words!r}, {name == 'exchanges timed'})")])


def train_timed(words, timed):
    """Trains; without timing, the program records nothing and the instances send nothing of it."""
    from tf_ipu_dp import sdk, train
    from tf_ipu_dp.emulator.runtime import instances

    if not timed:
        instances._exchanges.add = lambda seconds: None
        sdk.Sdk.exchange_times = lambda self: None
    train.start(words)


def make_network(model, optimizer):
    """Returns the application's model in stock Keras."""
    import tensorflow as tf

    from tf_ipu_dp.datasets import info
    from tf_ipu_dp.planning import architectures
    from tf_ipu_dp.training import models

    facts = info.DATASETS["synthetic"]
    size = {"height": facts.height, "width": facts.width, "channels": facts.channels, "classes": facts.classes}
    described = architectures.describe(model, norm="batch", **size)
    network = models.make_model(described, eight_bit_input=False, mean=facts.mean, deviation=facts.deviation)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(optimizer, loss, metrics=["accuracy"])
    return network


def stock_horovod():
    """Trains as Horovod's documentation recommends for Keras."""
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf

    from tf_ipu_dp.datasets import info, sources

    hvd.init()
    facts = info.DATASETS["synthetic"]
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    network = make_network("resnet20", hvd.DistributedOptimizer(legacy.SGD(0.05, 0.9)))
    split = sources.open_source(facts, data_dir=None, seed=1).train

    def prepare(image, label):
        return (tf.cast(image, tf.float32) / 255 - facts.mean) / facts.deviation, label

    dataset = tf.data.Dataset.from_tensor_slices((split.images, split.labels)).shard(hvd.size(), hvd.rank())
    dataset = dataset.shuffle(4096).repeat().batch(GLOBAL_BATCH // hvd.size())
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    ends = []
    after = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    network.fit(dataset, steps_per_epoch=UPDATES, epochs=1, verbose=0, callbacks=[begin, after])
    if hvd.rank() == 0:
        print(json.dumps({"samples_per_s": GLOBAL_BATCH * (len(ends) - 1) / (ends[-1] - ends[0])}))


def bare_passes():
    """Computes gradients on one core, repeatedly on the same samples, and discards them."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    network = make_network("resnet20", "sgd")
    images, labels = tf.random.normal([BARE_BATCH, 32, 32, 3]), tf.zeros([BARE_BATCH], tf.int32)

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            loss = network.compiled_loss(labels, network(images, training=True))
        return [tf.reduce_sum(each) for each in tape.gradient(loss, network.trainable_variables)]

    run()
    began = time.perf_counter()
    for _ in range(BARE_PASSES):
        run()
    print(json.dumps({"samples_per_s": BARE_BATCH * BARE_PASSES / (time.perf_counter() - began)}))


def train_with_augmentation(kind):
    """Trains a small model on images that are augmented one by one. Written for the SDK, like a user's program."""
    import numpy as np
    import popdist
    import popdist.tensorflow
    import tensorflow as tf
    from tensorflow.python import ipu
    from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

    popdist.init()
    config = ipu.config.IPUConfig()
    popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
    config.configure_ipu_system()
    random = np.random.RandomState(popdist.getInstanceIndex())

    def in_numpy(image):
        # Elastic noise of one image, in many small calls: what preprocessing in Python looks like.
        for row in range(image.shape[0]):
            image[row] = np.roll(image[row], random.randint(-2, 3), axis=0) * random.uniform(0.9, 1.1)
        return image

    def in_tensorflow(image):
        shifts = tf.random.uniform([32], -2, 3, tf.int32)
        rows = [tf.roll(image[row], shifts[row], 0) * tf.random.uniform([], 0.9, 1.1) for row in range(32)]
        return tf.stack(rows)

    def augment(image, label):
        if kind == "numpy":
            image = tf.ensure_shape(tf.numpy_function(in_numpy, [image], tf.float32), [32, 32, 3])
        else:
            image = in_tensorflow(image)
        return image, label

    images = np.random.RandomState(1).uniform(size=[SAMPLES, 32, 32, 3]).astype(np.float32)
    labels = np.random.RandomState(2).randint(10, size=[SAMPLES]).astype(np.int32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.shard(popdist.getNumInstances(), popdist.getInstanceIndex()).repeat()
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE).batch(INPUT_BATCH, drop_remainder=True)
    strategy = PopDistStrategy()
    ends = []
    after = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    with strategy.scope():
        model = tf.keras.Sequential(
            [tf.keras.layers.Flatten(), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, steps_per_execution=4)
        local = popdist.getNumLocalReplicas()
        model.fit(dataset.prefetch(8), steps_per_epoch=25 * 4 * local, epochs=1, verbose=0, callbacks=[after])
    if popdist.getInstanceIndex() == 0:
        samples = 4 * popdist.getNumTotalReplicas() * INPUT_BATCH * (len(ends) - 1)
        print(json.dumps({"samples_per_s": samples / (ends[-1] - ends[0])}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SUITES)
    args = parser.parse_args()
    measures = {model: functools.partial(measure_model, model=model) for model in MODELS}
    measures.update(layout=measure_layout, input=measure_input, start=measure_start, timing=measure_timing)
    for suite in [args.only] if args.only else SUITES:
        found = {name: [] for name in SUITES[suite]}
        for number in range(args.rounds):
            for name, values in found.items():
                print(f"\r{suite}: round {number + 1}/{args.rounds}, {name:<40}", end="", file=sys.stderr, flush=True)
                values.append(measures[suite](name))
        print(f"\r{'':<80}\r", end="", file=sys.stderr)
        first = found[SUITES[suite][0]]
        print(f"{suite:<30}{'s' if suite == 'start' else 'samples/s':>9}   ratio")
        for name, values in found.items():
            ratio = statistics.median(one / base for one, base in zip(values, first))
            digits = {"start": (1, 2), "timing": (0, 3)}.get(suite, (0, 2))
            print(f"{name:<30}{statistics.median(values):9,.{digits[0]}f}{ratio:8.{digits[1]}f}")
        print()


if __name__ == "__main__":
    main()
