"""Images per second of a model on the emulator, against plain Keras and MirroredStrategy, alternating.

    .venv/bin/python benchmarks/emulator.py [--model=resnet20] [--rounds=5] [--micro_batches=128]

Each contender runs in its own process for all rounds. In a round each of them in turn trains some micro batches of 32.
Two times are measured: of the whole call of `fit`, and up to the end of its last batch, because stock `fit` often waits
for seconds after that, until tf.data's tuning thread releases the iterator. The first execution, with tracing, is
reported separately. Reported: medians, ratios to plain Keras at batch 32 in the same round, each process's peak memory,
and the path that the emulator takes: how many micro batches go through the graph in one pass.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

MICRO = 32
PARTS = ("seconds", "trained")
CONTENDERS = {
    "Keras, batch 32": ("keras", 1),
    "Keras, batch 256": ("keras", 8),
    "emulator, 1 replica": ("emulator", 1),
    "emulator, 8 replicas": ("emulator", 8),
    "emulator, 64 replicas": ("emulator", 64),
    "MirroredStrategy, 8 CPUs": ("mirrored", 8),
}


def make_model(name):
    from tf_ipu_dp.datasets import info
    from tf_ipu_dp.planning import architectures
    from tf_ipu_dp.training import models

    facts = info.DATASETS["synthetic"]
    size = {"height": facts.height, "width": facts.width, "channels": facts.channels, "classes": facts.classes}
    described = architectures.describe(name, norm="batch", **size)
    return models.make_model(described, eight_bit_input=False, mean=facts.mean, deviation=facts.deviation)


def contender(model_name, kind, replicas):
    """Reads a number of micro batches from each line of standard input, trains them and prints the times."""
    import numpy as np
    import tensorflow as tf

    if kind == "emulator":
        from tf_ipu_dp import emulator

        emulator.install()
        from tensorflow.python import ipu

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = replicas
        config.configure_ipu_system()
        strategy = ipu.ipu_strategy.IPUStrategy()
    elif kind == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
        strategy = tf.distribute.MirroredStrategy([f"/cpu:{n}" for n in range(replicas)])
    else:
        strategy = tf.distribute.get_strategy()
    with strategy.scope():
        model = make_model(model_name)
        model.compile(
            tf.keras.optimizers.SGD(0.1, momentum=0.9),
            tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    rng = np.random.default_rng(0)
    images = rng.standard_normal((8 * MICRO, 32, 32, 3), dtype="float32")
    labels = rng.integers(0, 10, 8 * MICRO).astype("int32")
    element = MICRO if kind == "emulator" else MICRO * replicas
    data = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().batch(element, drop_remainder=True)
    data = data.prefetch(tf.data.AUTOTUNE)
    last_batch = tf.keras.callbacks.LambdaCallback(on_train_end=lambda logs: ends.append(time.perf_counter()))
    ends = []
    print("ready", flush=True)
    for line in sys.stdin:
        micro_batches = int(line)
        started = time.perf_counter()
        model.fit(data, steps_per_epoch=micro_batches * MICRO // element, verbose=0, callbacks=[last_batch])
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        answer = {"seconds": seconds, "trained": ends[-1] - started, "peak_mib": peak, "path": ""}
        if kind == "emulator":
            count = model.train_function.passes.micro_batches
            answer["path"] = f"fused, {count} x {MICRO}" if count > 1 else "one by one"
        print(json.dumps(answer), flush=True)


def train_round(process, micro_batches):
    process.stdin.write(f"{micro_batches}\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def main(model_name, rounds, micro_batches):
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            **os.environ,
            "IPU_EMULATOR_DIR": f"{folder}/ipus",
            "IPU_EMULATOR_IPUS": "128",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        processes = {}
        for name, (kind, replicas) in CONTENDERS.items():
            command = [sys.executable, __file__, "--contender", model_name, kind, str(replicas)]
            processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environ,
            )
        for process in processes.values():
            process.stdout.readline()
        first = {name: train_round(process, 64) for name, process in processes.items()}
        rates = {(name, part): [] for name in processes for part in PARTS}
        for _ in range(rounds):
            for name, process in processes.items():
                answer = train_round(process, micro_batches)
                for part in PARTS:
                    rates[name, part].append(micro_batches * MICRO / answer[part])
                first[name].update(peak_mib=answer["peak_mib"], path=answer["path"])
        for process in processes.values():
            process.stdin.close()
            process.wait()
    base = "Keras, batch 32"
    print(f"{model_name:<26}{'whole fit':>18}{'to the last batch':>20}{'first 64':>11}{'peak':>7}  passes")
    print(f"{'':<26}{'images/s':>10}{'ratio':>8}{'images/s':>12}{'ratio':>8}{'s':>11}{'MiB':>7}")
    for name in processes:
        cells = []
        for part in PARTS:
            ratio = statistics.median(rate / other for rate, other in zip(rates[name, part], rates[base, part]))
            cells += [statistics.median(rates[name, part]), ratio]
        seconds, peak = first[name]["seconds"], first[name]["peak_mib"]
        print(
            f"{name:<26}{cells[0]:>10.0f}{cells[1]:>8.2f}{cells[2]:>12.0f}{cells[3]:>8.2f}{seconds:>11.1f}{peak:>7.0f}"
            f"  {first[name]['path']}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model", choices=["mlp", "cnn", "resnet20", "resnet50"], default="resnet20")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--micro_batches", type=int, default=128)
    parser.add_argument("--contender", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        contender(*arguments.contender[:2], int(arguments.contender[2]))
    else:
        main(arguments.model, arguments.rounds, arguments.micro_batches)
