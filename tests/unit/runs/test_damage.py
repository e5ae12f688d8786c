"""Damaged side files do not keep a good checkpoint from being used; what is damaged is said."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.distributed import job
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import checkpoints, run_folder, saved_flags
from tf_ipu_dp.runs.manifest import Manifest
from tf_ipu_dp.runs.plan_record import PlanRecord

WORDS = ("--ipus=4", "--model=mlp", "--global_batch_size=256", "--seed=7", "--noexport")


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run with checkpoints of steps 8 and 16."""
    make_run(tmp_path / "run", WORDS)
    return tmp_path / "run"


def make_run(path, words, **planned):
    """Makes a run's folder with checkpoints of steps 8 and 16, which have what the plan gave to some flags."""
    cfg = train_flags.parse([*words, f"--run_dir={path}"])
    record = PlanRecord.of(plan.plan_run(cfg, info.DATASETS["fashion_mini"]))
    flags = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    texts = {**{name: cli.typed(value) for name, value in flags.items() if value is not None}, **planned}
    with run_folder.open_folder(str(path), name="x", now=datetime(2026, 1, 5), needed_bytes=0) as folder:
        folder.write_start(cfg, record)
        store = checkpoints.Store(folder.checkpoints, 3, pytest.fail)
        for step in (8, 16):
            manifest = Manifest(step, 0, 0, texts, record, (), {"seed": 7}, {}, "2026-01-05T00:00:00")
            store.save(manifest, lambda prefix: prefix.with_suffix(".index").write_bytes(b"state"))


def complete(run_dir, *words):
    found = saved_flags.complete([f"--run_dir={run_dir}", *words])
    config = found.config
    return (config.ipus, config.model, config.global_batch_size, config.seed, config.export), found.warnings


RIGHT = (4, "mlp", 256, 7, False)


def test_an_undamaged_folder_gives_no_warning(run_dir):
    assert complete(run_dir) == (RIGHT, ())


@pytest.mark.parametrize("damage", ["{", '{"a": ' * 50_000, "", json.dumps({"schema": 99})])
def test_the_batch_of_a_resumed_run_is_that_of_its_checkpoint_whatever_plan_json_says(run_dir, damage):
    config = train_flags.parse([f"--run_dir={run_dir}"])
    assert job.read_saved_batch(config).global_batch_size == 256
    (run_dir / "plan.json").write_text(damage)
    assert run_folder.RunFolder(run_dir).read_plan() is None
    assert job.read_saved_batch(config).global_batch_size == 256


@pytest.mark.parametrize("number", [0, -1, 512, 10**30, "many"])
def test_a_changed_number_in_plan_json_changes_nothing(run_dir, number):
    value = json.loads((run_dir / "plan.json").read_text())
    for part in ("batch", "training", "topology"):
        (run_dir / "plan.json").write_text(
            json.dumps(
                {**value, part: {key: number if type(each) is int else each for key, each in value[part].items()}}
            )
        )
        found = run_folder.RunFolder(run_dir).read_plan()
        assert found is None or number == 512
        assert job.read_saved_batch(train_flags.parse([f"--run_dir={run_dir}"])).global_batch_size == 256


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"--ipus=4\n--model=nosuch\n", "--model=nosuch is not possible"),
        (b"--ipus=\xff\n", "--ipus=\\udcff is not possible"),
        (None, "No such file or directory"),
    ],
)
def test_flags_that_cannot_be_used_are_taken_from_the_checkpoint(run_dir, content, reason):
    (run_dir / "run.flags").unlink()
    if content is not None:
        (run_dir / "run.flags").write_bytes(content)
    flags, (warning,) = complete(run_dir)
    assert flags == RIGHT and reason in cli.printable(warning)
    assert warning.endswith("the flags of the checkpoint of step 16 are taken.")
    assert complete(run_dir, "--evaluate")[0][:2] == RIGHT[:2]
    assert complete(run_dir, "--ipus=2")[0] == (2, *RIGHT[1:])


def test_a_flag_of_the_model_that_differs_from_the_checkpoint_is_corrected_and_said(run_dir):
    text = (run_dir / "run.flags").read_text()
    (run_dir / "run.flags").write_text(text.replace("--seed=7", "--seed=3"))
    assert complete(run_dir) == (
        RIGHT,
        (
            f"--seed=3 in {run_dir}/run.flags is not what the checkpoint of step 16 was trained with; --seed=7 is "
            "taken.",
        ),
    )
    assert complete(run_dir, "--seed=5")[0][3] == 5  # what is typed wins, and is refused later


def test_without_a_checkpoint_flags_that_cannot_be_used_are_refused(tmp_path):
    (tmp_path / "run.flags").write_text("--ipus=many\n")
    with pytest.raises(cli.UsageError, match="--ipus=many is not possible"):
        complete(tmp_path)


def test_a_manifest_with_fields_of_a_later_release_is_read(run_dir):
    path = run_dir / "checkpoints" / "step-00000016" / "manifest.json"
    sealed = json.loads(path.read_text())
    content = {**sealed["manifest"], "novelty": {"a": 1}}
    content["plan"] = {**content["plan"], "novelty": 2}
    content["plan"]["recipe"]["novelty"] = 3
    path.write_text(checkpoints._render({**json.loads(checkpoints._seal(content)), "writer": "9.9"}))
    warnings = []
    found = checkpoints.Store(run_dir / "checkpoints", 3, warnings.append).newest()
    assert found.manifest.step == 16 and warnings == []


@pytest.mark.parametrize(
    "damage", ["[" * 100_000, '{"schema": ' + "9" * 10_000 + "}", '{"schema": "' + "x" * 9999 + '"}']
)
def test_a_manifest_that_is_nested_or_huge_is_skipped_for_an_older_checkpoint(run_dir, damage):
    (run_dir / "checkpoints" / "step-00000016" / "manifest.json").write_text(damage)
    warnings = []
    assert checkpoints.Store(run_dir / "checkpoints", 3, warnings.append).newest().manifest.step == 8
    (warning,) = warnings
    assert "step-00000016 is damaged and skipped: manifest.json" in warning and len(warning) < 400
    assert run_folder.RunFolder(run_dir).read_saved_plan().batch.global_batch_samples == 256


def test_folders_that_are_named_like_leftovers_are_kept_and_do_not_stop_a_run(run_dir):
    for name in (".notes.tmp", ".plan.json.123.tmp", ".trial-mine", "checkpoints/.tmp-mine", "checkpoints/step-x"):
        (run_dir / name).mkdir()
        (run_dir / name / "precious").write_text("x")
    hexes = "0123456789abcdef0123456789abcdef"
    for name in (".plan.json.123.tmp2", f".plan.json.123-{hexes}.tmp", f"checkpoints/.tmp-step-00000016-{hexes}"):
        (run_dir / name).write_text("unfinished")
    (run_dir / ".trial-abcd_123").mkdir()
    with run_folder.open_folder(str(run_dir), name="x", now=datetime(2026, 1, 5), needed_bytes=0) as folder:
        store = checkpoints.Store(folder.checkpoints, 3, pytest.fail)
        assert store.newest().manifest.step == 16 and store.steps() == [8, 16]
    assert len(list(run_dir.rglob("precious"))) == 5
    assert not (run_dir / ".trial-abcd_123").exists() and not list(run_dir.rglob(f"*{hexes}*"))


def test_bad_lines_of_metrics_are_left_out_and_the_others_are_kept(run_dir):
    good = (
        b'{"schema": 1, "kind": "train", "step": 4, "epoch": 0.1, "loss": 1.0, "accuracy": 0.5, "learning_rate": 0.1}'
    )
    bad = [b"\xff\xfe", b"[" * 50_000, b"{", b"null", b'{"kind": "train", "step": 1e999}', b"\0" * 100, b"9" * 5000]
    (run_dir / "metrics.jsonl").write_bytes(b"\n".join([good, *bad, good.replace(b"4", b"12", 1)]) + b"\ncut off {")
    with run_folder.open_folder(str(run_dir), name="x", now=datetime(2026, 1, 5), needed_bytes=0) as folder:
        assert [record.step for record in folder.read_metrics()] == [4, 12]
        folder.truncate_metrics(after_step=8)
        assert [record.step for record in folder.read_metrics()] == [4]


def test_flags_of_the_model_that_run_flags_lacks_are_taken_from_the_checkpoint(run_dir):
    (run_dir / "run.flags").write_bytes(b"\x1b[2J garbage\n")
    flags, (warning,) = complete(run_dir)
    assert flags == RIGHT
    assert warning == (
        "--global_batch_size=256 --ipus=4 --model=mlp --seed=7 are missing in "
        f"{run_dir}/run.flags, and taken from the checkpoint of step 16."
    )


def test_flags_that_were_cut_off_are_taken_from_the_checkpoint_and_edited_ones_are_kept(tmp_path):
    words = ("--ipus=2", "--image_size=32", "--lr_scaling=linear", "--learning_rate=0.4", "--epochs=9")
    planned = {"learning_rate": "0.1", "norm": "batch", "updates_per_epoch": "128", "global_batch_size": "64"}
    make_run(tmp_path, words, **planned)
    text = (tmp_path / "run.flags").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("--image_size", "--learning_rate", "--seed"))]
    (tmp_path / "run.flags").write_text("\n".join(lines).replace("--epochs=9", "--epochs=11"))
    found = saved_flags.complete([f"--run_dir={tmp_path}"])
    config = found.config
    assert (config.image_size, config.norm, config.global_batch_size, config.ipus) == (32, "batch", 64, 2)
    assert (config.learning_rate, config.lr_scaling) == (0.1, "none")  # a checkpoint has the rate after its scaling
    assert config.epochs == train_flags.parse(["--epochs=11"]).epochs
    assert "--image_size=32" in found.warnings[0] and "--seed" not in found.warnings[0]  # 42 is the default
    (tmp_path / "run.flags").write_text(text.replace("--image_size=", "--imagE_size="))
    found = saved_flags.complete([f"--run_dir={tmp_path}"])
    assert found.config.image_size == 32 and "--image_size=32" in found.warnings[0]
    (tmp_path / "run.flags").write_text(text)
    whole = saved_flags.complete([f"--run_dir={tmp_path}"])
    assert (whole.config.learning_rate, whole.config.lr_scaling, whole.config.norm) == (0.4, "linear", None)
    assert whole.warnings == ()


def test_metrics_that_are_no_file_are_no_metrics(run_dir):
    (run_dir / "metrics.jsonl").mkdir()
    assert run_folder.RunFolder(run_dir).read_metrics() == []
