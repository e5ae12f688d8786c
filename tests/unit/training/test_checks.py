"""Which checkpoints are refused; runs that resume are in tests/integration/test_training.py."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.emulator.sdk_api import gcipuinfo, ipu, popdist
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import checkpoints
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks, preflight

EMULATOR = Sdk("emulator", ipu, popdist, gcipuinfo)
PATH = Path("runs/old/checkpoints/step-00000008")


def weights_of_an_mlp(*units):
    sizes = list(zip(units, units[1:]))
    names = [f"hidden{number}_dense" for number in range(1, len(sizes))] + ["predictions"]
    return [(f"{name}/kernel:0", shape, "float32") for name, shape in zip(names, sizes)]


def refusal(variables_then, variables_now, *words):
    def planned(*more):
        cfg = train_flags.parse(["--model=mlp", "--dataset=synthetic", "--image_size=28", *more])
        return cfg, plan.plan_run(cfg, lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size))

    manifest = checks.manifest_at(8, *planned(), EMULATOR, variables_then, datetime(2026, 11, 17))
    manifest.versions["tf_ipu_dp"] = "0.1.0"
    with pytest.raises(cli.UsageError) as caught:
        checks.require_same_model(checkpoints.Checkpoint(PATH, manifest), *planned(*words), variables_now)
    return str(caught.value)


def test_a_checkpoint_of_an_mlp_with_other_layers_is_refused_with_the_version_that_had_them():
    former, present = weights_of_an_mlp(784, 256, 256, 256, 10), weights_of_an_mlp(784, 256, 128, 64, 10)
    assert refusal(former, present) == (
        f"{PATH} does not fit: the variable hidden2_dense/kernel:0 was 256x256 float32 and is 256x128 float32; "
        "the variable hidden3_dense/kernel:0 was 256x256 float32 and is 128x64 float32; "
        "the variable predictions/kernel:0 was 256x10 float32 and is 64x10 float32. "
        "The flags are the same, so --model=mlp was another model in the code that trained it (tf_ipu_dp 0.1.0). "
        "Use that code, or another --run_dir."
    )


def test_if_flags_differ_the_flags_of_the_run_are_what_to_use():
    weights = weights_of_an_mlp(784, 256, 128, 64, 10)
    assert refusal(weights, weights[:1], "--model=cnn").endswith(
        "--model was mlp and is cnn. Leave out what differs (the run's own flags are then taken), or use another "
        "--run_dir."
    )


def test_flags_that_do_not_fit_a_run_are_refused_before_its_model_is_built(tmp_path, emulator_dir):
    def planned(*words):
        cfg = train_flags.parse(["--dataset=synthetic", "--image_size=28", f"--run_dir={tmp_path / 'run'}", *words])
        return cfg, plan.plan_run(cfg, lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size))

    def write_state(prefix):
        prefix.with_name(f"{prefix.name}.index").write_bytes(b"weights")

    store = checkpoints.Store(tmp_path / "run" / "checkpoints", 1, lambda _: None)
    store.folder.mkdir(parents=True)
    (tmp_path / "run" / "run.flags").touch()
    store.save(checks.manifest_at(8, *planned("--model=mlp"), EMULATOR, (), datetime(2026, 11, 17)), write_state)
    preflight.check(*planned("--model=mlp", "--learning_rate=0.5"))
    for words in (["--model=cnn"], ["--model=cnn", "--evaluate"]):
        with pytest.raises(cli.UsageError) as caught:
            preflight.check(*planned(*words))
        assert str(caught.value).startswith(f"{store.folder}/step-00000008 does not fit: --model was mlp and is cnn"), (
            words
        )
    with pytest.raises(cli.UsageError) as caught:
        preflight.check(*planned("--model=mlp", "--noresume"))
    assert str(caught.value) == (
        f"--noresume would start over in {tmp_path / 'run'}, which has a checkpoint of step 8. Use another --run_dir, "
        "or leave --noresume out."
    )
