"""Whole programs as users of the SDK write them, each run as a script; they check their own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
ONE_INSTANCE = {
    "POPDIST_NUM_TOTAL_REPLICAS": "2",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "1",
    "POPDIST_REPLICA_INDEX_OFFSET": "0",
    "POPDIST_LOCAL_INSTANCE_INDEX": "0",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
}
TRAINING_LOOP = ["runs go on with the data", "polled 200 steps", "refused: ValueError", "refused: TypeError"]
CASES = {
    "cnn_tutorial": ["accuracy above 0.95: True", "updates after resuming: 4", "done"],
    "functional_models": [
        "logs: kind_accuracy kind_loss largest loss rating_loss rating_mae rating_share",
        "updates: 16",
        "class and sample weights agree with stock Keras",
    ],
    "subclassed_models": [
        "dynamic False: scale 256, 64 updates",
        "dynamic True: scale 1024, 64 updates",
        "nested model done",
    ],
    "pipelined_models": [
        "logits (Dense) (0)                 second        1",
        "logits (Dense)                                   1",
        "stage_context_model: Grouped, 16 updates",
        "sequential_model: Interleaved, 16 updates",
        "assigned_model: Sequential, 16 updates",
        "a count that does not fill the pipeline is refused",
        "done",
    ],
    "outfeeds_in_fit": ["averages: 2", "updates told: [1, 3]", "samples counted: 32", "done"],
    "custom_training_loop 1": ["1 replicas: 6 updates", *TRAINING_LOOP],
    "custom_training_loop 4": ["4 replicas: 6 updates", *TRAINING_LOOP],
    "conditional_enqueue": ["kept enough: True", "the seed repeats the draws", "collectives done", "done"],
    "loops_and_infeeds": [
        "an infeed queue must be initialised",
        "epochs: 2, steps sent: 10",
        "detections: 24",
        "done",
    ],
    "tf1_style": [
        "compiled: [1.0, -2.0]",
        "looped: 4",
        "a computation must be placed on a device",
        "the data have an end",
    ],
    "tf1_session": ["trained: 14.30 to 3.55"],
    "graphs_in_tf2": [
        "placed: [0.0, 1.0, 6.0]",
        "trained in a loop, steps: 8",
        "sharded: [64.0, 128.0]",
        "pipelined: [9.0, 9.0, 9.0, 9.0]",
        "a session has one replica",
    ],
    "compiled_on_several_ipus": [
        "4 replicas: 6.31 to 0.37",
        "two shards: 24.0, replicas 2",
        "four shards: 4.5, replicas 1",
        "a fifth shard does not fit",
    ],
    "own_optimizers": ["SGDW: 8 updates", "hyperparameters done", "Clipped: done", "an own minimize is refused"],
    "image_classification": [
        "SGDW: 18 updates, accuracy above 0.5: True",
        "LAMB: 36 updates, accuracy above 0.8: True",
        "AdamW in 16.16 and 3 stages: 32 updates, accuracy above 0.8: True",
        "refused: OwnMinimize overrides minimize, which cannot be used with accumulated gradients.",
    ],
    "bert_pretraining": [
        "LAMB with accumulation: 8 updates, loss falls: True",
        "a pipeline trains the same weights",
        "captured in a loop: 3 tags, loss falls: True",
        "captured in a pipeline: the sum over the micro batches of an update",
        "loss scaling: factor above 1: True, loss falls: True",
    ],
    "addons": ["Adam: 40 updates", "LAMB: 32 updates", "SGD agrees with Keras"],
    "popdist_training": ["instance 0 of 1, 2 replicas", "means agree", "sums agree", "done"],
    "monitored_training": ["sampled while training, devices: 2", "devices are free", "done"],
    "seeds_and_exports": ["seeds repeat the training", "epochs measured: 2", "a plain process answers alike"],
}


def test_every_program_has_a_case():
    assert {path.stem for path in PROGRAMS.glob("*.py")} == {case.split()[0] for case in CASES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_program_for_the_sdk_does_what_it_expects_of_itself(case, tmp_path, emulator_dir, run_command):
    name, *words = case.split()
    environ = {"TMPDIR": str(tmp_path), **(ONE_INSTANCE if name.startswith("popdist") else {})}
    done = run_command("emulator", PROGRAMS / f"{name}.py", *words, cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr[-5000:]
    printed = [line.rstrip() for line in done.stdout.splitlines()]
    missing = [line for line in CASES[case] if not any(told.endswith(line) for told in printed)]
    assert not missing, done.stdout
