"""What a command on a run that is there takes from the run, and what it does not."""

from __future__ import annotations

import pytest

from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import run_folder, saved_flags
from tf_ipu_dp.runs.plan_record import PlanRecord

SAVED = (
    "--ipus=8",
    "--model=mlp",
    "--gradient_accumulation=2",
    "--export",
    "--noprefetch",
    "--time_limit=2h",
    "--json",
)


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that has written its flags."""
    cfg = train_flags.parse([*SAVED, f"--run_dir={tmp_path}"])
    record = PlanRecord.of(plan.plan_run(cfg, info.DATASETS["fashion_mini"]))
    run_folder.RunFolder(tmp_path).write_start(cfg, record)
    return tmp_path


def complete(run_dir, *words, **launched):
    return saved_flags.complete([f"--run_dir={run_dir}", *words], **launched).config


def test_the_folder_alone_gives_the_runs_own_flags(run_dir):
    found = complete(run_dir)
    assert (found.ipus, found.model, found.gradient_accumulation) == (8, "mlp", 2)
    assert found.export and not found.prefetch
    assert not found.json and found.time_limit is None  # of the command that had them, not of the run


def test_what_is_typed_wins(run_dir):
    found = complete(run_dir, "--ipus=4", "--noexport", "--learning_rate=0.3")
    assert (found.ipus, found.export, found.learning_rate, found.model) == (4, False, 0.3, "mlp")


def test_a_typed_global_batch_replaces_the_saved_accumulation(run_dir):
    found = complete(run_dir, "--global_batch_size=512")
    assert (found.global_batch_size, found.gradient_accumulation) == (512, None)


def test_what_a_launcher_decides_is_not_taken_from_the_run(run_dir):
    assert complete(run_dir, given_by_launcher=("ipus", "instances")).ipus is None


@pytest.mark.parametrize("word", ["--noresume", "--input_only"])
def test_a_command_that_does_not_resume_takes_nothing(run_dir, word):
    assert complete(run_dir, word).ipus is None


def test_an_evaluation_takes_what_it_needs(run_dir):
    found = complete(run_dir, "--evaluate")
    assert (found.ipus, found.model, found.gradient_accumulation) == (8, "mlp", None)


def test_flags_of_a_later_release_are_left_out(run_dir):
    path = run_folder.RunFolder(run_dir).run_flags
    path.write_text(path.read_text() + "--of_a_later_release=3\n")
    assert complete(run_dir).ipus == 8


def test_the_words_are_those_of_the_whole_command(run_dir):
    found = saved_flags.complete([f"--run_dir={run_dir}", "--ipus=4"])
    assert train_flags.parse(found.words) == found.config
    assert saved_flags.complete(["--ipus=4"]).words == ("--ipus=4",)
