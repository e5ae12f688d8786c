from __future__ import annotations

import dataclasses

import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.config import schema, train_flags

FLAGS = [
    "augment",
    "check_weights_every",
    "checkpoint_every",
    "data_dir",
    "dataset",
    "deterministic",
    "device_iterations",
    "dry_run",
    "early_stop",
    "eight_bit_io",
    "epochs",
    "evaluate",
    "executable_cache",
    "export",
    "format",
    "global_batch_size",
    "gradient_accumulation",
    "hosts",
    "image_size",
    "input_only",
    "instances",
    "ipus",
    "json",
    "keep_checkpoints",
    "l2",
    "label_smoothing",
    "learning_rate",
    "log_every",
    "loss_scaling",
    "lr_base_batch",
    "lr_drop_epochs",
    "lr_scaling",
    "lr_schedule",
    "micro_batch_size",
    "model",
    "momentum",
    "norm",
    "optimizer",
    "pipeline_schedule",
    "pipeline_splits",
    "pipeline_stages",
    "precision",
    "prefetch",
    "recompute",
    "reduction",
    "resume",
    "run_dir",
    "sdk",
    "seed",
    "stall_timeout",
    "time_limit",
    "updates_per_epoch",
    "warmup_epochs",
    "weight_decay",
]


def test_these_are_the_flags_and_a_new_one_is_a_decision():
    assert sorted(train_flags.make_flags()) == FLAGS


def test_the_config_has_a_field_and_the_help_has_a_line_for_every_flag():
    assert sorted(field.name for field in dataclasses.fields(schema.TrainConfig)) == FLAGS
    assert sorted(name for names in train_flags.GROUPS.values() for name in names) == FLAGS


def test_the_flags_can_be_defined_on_any_flag_values():
    fv = flags.FlagValues()
    train_flags.define_flags(fv)
    fv(["program", "--ipus=8"])
    assert schema.TrainConfig.from_flags(fv).ipus == 8


def test_what_was_not_given_is_none():
    cfg = train_flags.parse([])
    assert (cfg.ipus, cfg.instances, cfg.hosts, cfg.pipeline_stages, cfg.global_batch_size) == (None,) * 5


def test_the_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        train_flags.parse([]).ipus = 3


@pytest.mark.parametrize(
    ("text", "duration"),
    [("5", (5, "epochs")), ("5epochs", (5, "epochs")), ("200steps", (200, "steps")), ("1 step", (1, "steps"))],
)
def test_a_duration_is_epochs_or_steps(text, duration):
    assert train_flags.parse([f"--epochs={text}"]).epochs == schema.Duration(*duration)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "steps", "5 days", "", "5stepsx", "٣", "9" * 5000])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(cli.UsageError, match="--epochs="):
        train_flags.parse([f"--epochs={text}"])


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2 h", 7200), ("0s", 0)])
def test_a_time_has_a_unit_or_is_in_seconds(text, seconds):
    assert train_flags.parse([f"--stall_timeout={text}"]).stall_timeout == schema.TimeSpan(seconds)


@pytest.mark.parametrize("text", ["-1s", "1.5h", "1d", "", "s", "9" * 5000])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(cli.UsageError, match="--time_limit="):
        train_flags.parse([f"--time_limit={text}"])


@pytest.mark.parametrize(("text", "hosts"), [("2", (2, ())), ("a,b", (2, ("a", "b"))), ("n1.x", (1, ("n1.x",)))])
def test_hosts_are_a_number_or_names(text, hosts):
    assert train_flags.parse([f"--hosts={text}"]).hosts == schema.Hosts(*hosts)


@pytest.mark.parametrize("text", ["0", "a,,b", "a,a", "a b", "", "-2", "2.5", "0x4", "nöde", "9" * 5000])
def test_what_are_no_hosts_is_refused(text):
    with pytest.raises(cli.UsageError, match="--hosts="):
        train_flags.parse([f"--hosts={text}"])


def test_json_and_mermaid_exclude_each_other_and_a_drawing_is_for_a_dry_run():
    with pytest.raises(cli.UsageError, match="exclude each other"):
        train_flags.parse(["--dry_run", "--json", "--format=mermaid"])
    with pytest.raises(cli.UsageError, match="Add --dry_run"):
        train_flags.parse(["--format=mermaid"])
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse(["--format=mermaid", "--json"])
    assert len(caught.value.sentences) == 2


@given(
    ipus=st.one_of(st.none(), st.integers(1, 2**20)),
    hosts=st.one_of(st.none(), st.integers(1, 9).map(schema.Hosts), st.just(schema.Hosts(2, ("a", "b")))),
    epochs=st.builds(schema.Duration, st.integers(1, 999), st.sampled_from(["epochs", "steps"])),
    limit=st.one_of(st.none(), st.builds(schema.TimeSpan, st.integers(0, 10**6))),
    dry_run=st.booleans(),
    run_dir=st.one_of(st.none(), st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1)),
)
def test_a_config_survives_its_flag_file(ipus, hosts, epochs, limit, dry_run, run_dir):
    changes = {
        "time_limit": limit,
        "ipus": ipus,
        "hosts": hosts,
        "epochs": epochs,
        "dry_run": dry_run,
        "run_dir": run_dir,
    }
    cfg = dataclasses.replace(train_flags.parse([]), **changes)
    assert train_flags.parse(cfg.flag_lines()) == cfg
