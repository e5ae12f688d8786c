"""Samples per second of whole training runs against plain Keras `fit` on the same model and data, alternating.

    .venv/bin/python benchmarks/training.py [--rounds=5] [--only=resnet20] [--norm=group]

Each round starts every contender as a new process: `python -m tf_ipu_dp.train`, with input, metrics, logging,
checkpoints and monitoring, and the same model in stock Keras with `tf.data`, batch and shuffle. Replicas are compared
with Keras at the same global batch, and one replica with Keras at the same batch. The first execution or batch, with
tracing, is excluded on both sides. Reported: medians, the median of the ratios within a round, and which share of the
peak of this machine's matrix products, measured in each round too, the model's multiply-adds reach.
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
GLOBAL_BATCH, MICRO = 256, 32
UPDATES = {"mlp": 300, "cnn": 80, "resnet20": 16, "resnet50": 16}  # of the global batch, for some seconds
RESNET = ["--model=resnet20", "--ipus=8", "--micro_batch_size=32", "--epochs=24steps"]
CNN = ["--ipus=8", "--micro_batch_size=32", "--epochs=160steps"]
OWN_CNN = Path(__file__).parents[1] / "tests" / "programs" / "own" / "cnn.py"  # the built-in one
# Variants of one run of ours, compared with the first of them.
VARIANTS = {
    "costs": {
        "no logging, no checkpoints": [*RESNET, "--log_every=1000000", "--checkpoint_every=1000000"],
        "every 3 steps logged, 2 checkpoints": [*RESNET, "--log_every=3", "--checkpoint_every=12"],
    },
    "own model": {
        "--model=cnn": [*CNN, "--model=cnn"],
        "--model=cnn.py:build": [*CNN, f"--model={OWN_CNN}:build"],
    },
}
SUITES = [*UPDATES, *VARIANTS]
# Contenders of a model: Keras with a batch, or our run with replicas and micro batch; and whom each is compared with.
CONTENDERS = {
    "Keras, batch 256": ("keras", 256, None),
    "8 replicas x 32": (8, 32, "Keras, batch 256"),
    "1 replica x 256": (1, 256, "Keras, batch 256"),
    "Keras, batch 32": ("keras", 32, None),
    "1 replica x 32": (1, 32, "Keras, batch 32"),
}


def describe(model, norm):
    """Returns what is known of the data set, and the description of a model for it."""
    from tf_ipu_dp.datasets import info
    from tf_ipu_dp.planning import architectures

    facts = info.DATASETS["synthetic"]
    size = {"height": facts.height, "width": facts.width, "channels": facts.channels, "classes": facts.classes}
    return facts, architectures.describe(model, norm=norm, **size)


def keras_rate(model, batch, updates, norm):
    """Returns the samples per second of stock Keras, from the end of the first batch to the end of the last."""
    import tensorflow as tf

    from tf_ipu_dp.datasets import sources
    from tf_ipu_dp.training import models

    facts, described = describe(model, norm)
    network = models.make_model(described, eight_bit_input=False, mean=facts.mean, deviation=facts.deviation)
    network.compile(
        tf.keras.optimizers.SGD(0.05, 0.9),
        tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    split = sources.open_source(facts, data_dir=None, seed=1).train

    def prepare(image, label):
        return (tf.cast(image, tf.float32) / 255 - facts.mean) / facts.deviation, label

    dataset = tf.data.Dataset.from_tensor_slices((split.images, split.labels)).shuffle(8192).repeat().batch(batch)
    dataset = dataset.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
    ends = []
    after = tf.keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    network.fit(dataset, steps_per_epoch=updates * GLOBAL_BATCH // batch, epochs=1, verbose=0, callbacks=[after])
    return batch * (len(ends) - 1) / (ends[-1] - ends[0])


def peak_rate():
    """Returns the multiply-adds per second of the best of some large matrix products."""
    import tensorflow as tf

    size = 2048
    matrix = tf.random.normal([size, size])
    product = tf.function(lambda: tf.reduce_sum(tf.matmul(matrix, matrix)))
    product().numpy()
    times = []
    for _ in range(8):
        began = time.perf_counter()
        product().numpy()
        times.append(time.perf_counter() - began)
    return size**3 / min(times)


def in_new_process(call):
    """Returns the number that a call of a function in this file returns in a process of its own."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import training as b; print(b.{call})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def our_rate(words):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*TRAIN, *words, f"--run_dir={folder}/run"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)["samples_per_s"]


def rate_of(model, norm, replicas, batch):
    updates = UPDATES[model]
    if replicas == "keras":
        return in_new_process(f"keras_rate({model!r}, {batch}, {updates}, {norm!r})")
    steps = updates * GLOBAL_BATCH // (replicas * batch)
    return our_rate(
        [f"--model={model}", f"--ipus={replicas}", f"--micro_batch_size={batch}", f"--epochs={steps}steps"]
        + ([f"--norm={norm}"] if norm != "batch" else [])
    )


def compare(model, norm, rounds):
    rates = {name: [] for name in ("peak", *CONTENDERS)}
    for number in range(rounds):
        for name, found in rates.items():
            print(f"\r{model}: round {number + 1}/{rounds}, {name:<40}", end="", file=sys.stderr, flush=True)
            if name == "peak":
                found.append(in_new_process("peak_rate()"))
            else:
                replicas, batch, _ = CONTENDERS[name]
                found.append(rate_of(model, norm, replicas, batch))
    print(f"\r{'':<80}\r", end="", file=sys.stderr)
    peaks = rates.pop("peak")
    multiply_adds = 3 * describe(model, norm)[1].macs  # forward, and twice as many backward
    print(f"{model + ', ' + norm + ' norm':<26}samples/s   ratio   from to     of peak")
    for name, found in rates.items():
        base = CONTENDERS[name][2]
        ratios = [one / other for one, other in zip(found, rates[base])] if base else []
        ratio = f"{statistics.median(ratios):8.2f}{min(ratios):7.2f} {max(ratios):4.2f}" if ratios else " " * 20
        share = statistics.median(rate * multiply_adds / peak for rate, peak in zip(found, peaks))
        print(f"{name:<26}{statistics.median(found):9,.0f}{ratio}{100 * share:9.0f} %")
    print()


def compare_variants(suite, rounds):
    rates = {name: [] for name in VARIANTS[suite]}
    for number in range(rounds):
        for name, words in VARIANTS[suite].items():
            print(f"\r{suite}: round {number + 1}/{rounds}, {name:<40}", end="", file=sys.stderr, flush=True)
            rates[name].append(our_rate(words))
    print(f"\r{'':<80}\r", end="", file=sys.stderr)
    first = next(iter(rates.values()))
    print(f"{suite:<38}samples/s   ratio   from to")
    for name, found in rates.items():
        ratios = [one / base for one, base in zip(found, first)]
        print(
            f"{name:<38}{statistics.median(found):9,.0f}{statistics.median(ratios):8.2f}"
            f"{min(ratios):7.2f} {max(ratios):4.2f}"
        )
    print()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=SUITES)
    parser.add_argument("--norm", choices=["batch", "group"], default="batch")
    args = parser.parse_args()
    for suite in [args.only] if args.only else SUITES:
        if suite in VARIANTS:
            compare_variants(suite, args.rounds)
        else:
            compare(suite, args.norm, args.rounds)


if __name__ == "__main__":
    main()
