"""Samples per second of whole training runs against plain Keras `fit` on the same model and data, alternating.

    .venv/bin/python benchmarks/training.py [--rounds=5] [--only=resnet20]

Each round starts every contender as a new process: `python -m tf_ipu_dp.train`, with input, metrics, logging,
checkpoints and monitoring, and the same model in stock Keras with `tf.data`, batch and shuffle. The first execution or
epoch, with tracing, is excluded on both sides. Reported: medians, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = [sys.executable, "-m", "tf_ipu_dp.train", "--sdk=emulator", "--dataset=synthetic", "--seed=1", "--json"]
QUIET = ["--log_every=1000000", "--checkpoint_every=1000000"]
RESNET20 = ["--model=resnet20", "--ipus=8", "--micro_batch_size=32", "--epochs=24steps"]
RESNET50 = ["--model=resnet50", "--ipus=1", "--micro_batch_size=32", "--epochs=24steps"]
MLP = ["--model=mlp", "--ipus=1", "--micro_batch_size=32", "--epochs=2"]
SUITES = {
    "resnet20": [
        ("plain Keras, batch 32", ("keras", "resnet20", 24 * 8)),
        ("tf_ipu_dp, 8 replicas x 32", RESNET20),
    ],
    "resnet50": [
        ("plain Keras, batch 32", ("keras", "resnet50", 24)),
        ("tf_ipu_dp, 1 replica x 32", RESNET50),
    ],
    "mlp": [
        ("plain Keras, batch 32", ("keras", "mlp", 512)),
        ("tf_ipu_dp, device_iterations=1", [*MLP, "--device_iterations=1"]),
        ("tf_ipu_dp, device_iterations=16", [*MLP, "--device_iterations=16"]),
    ],
    "costs": [
        ("no logging, no checkpoints", [*RESNET20, *QUIET]),
        ("every 3 steps logged, 2 checkpoints", [*RESNET20, "--log_every=3", "--checkpoint_every=12"]),
    ],
}


def keras_rate(model, batches):
    """Returns the samples per second of stock Keras, from the end of the first batch to the end of the last."""
    import tensorflow as tf

    from tf_ipu_dp.datasets import info, sources
    from tf_ipu_dp.planning import architectures
    from tf_ipu_dp.training import models

    facts = info.DATASETS["synthetic"]
    size = {"height": facts.height, "width": facts.width, "channels": facts.channels, "classes": facts.classes}
    described = architectures.describe(model, norm="batch", **size)
    network = models.make_model(described, eight_bit_input=False, mean=facts.mean, deviation=facts.deviation)
    network.compile(
        tf.keras.optimizers.SGD(0.05, 0.9),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    split = sources.open_source(facts, data_dir=None, seed=1).train

    def prepare(image, label):
        return (tf.cast(image, tf.float32) / 255 - facts.mean) / facts.deviation, label

    dataset = tf.data.Dataset.from_tensor_slices((split.images, split.labels)).shuffle(8192).repeat().batch(32)
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    ends = []
    after = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    network.fit(dataset, steps_per_epoch=batches, epochs=1, verbose=0, callbacks=[after])
    return 32 * (len(ends) - 1) / (ends[-1] - ends[0])


def rate_of(contender):
    if contender[0] == "keras":
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import training as b; "
        command = [sys.executable, "-c", code + f"print(b.keras_rate({contender[1]!r}, {contender[2]}))"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(done.stdout)
    with tempfile.TemporaryDirectory() as folder:
        command = [*TRAIN, *contender, f"--run_dir={folder}/run"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["samples_per_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SUITES)
    args = parser.parse_args()
    for suite in [args.only] if args.only else SUITES:
        contenders = SUITES[suite]
        rates = {name: [] for name, _ in contenders}
        for number in range(args.rounds):
            for name, contender in contenders:
                print(f"\r{suite}: round {number + 1}/{args.rounds}, {name:<40}", end="", file=sys.stderr, flush=True)
                rates[name].append(rate_of(contender))
        print(f"\r{'':<80}\r", end="", file=sys.stderr)
        first = rates[contenders[0][0]]
        print(f"{suite:<38}samples/s   ratio")
        for name, found in rates.items():
            ratio = statistics.median(one / base for one, base in zip(found, first))
            print(f"{name:<38}{statistics.median(found):9,.0f}{ratio:8.2f}")
        print()


if __name__ == "__main__":
    main()
