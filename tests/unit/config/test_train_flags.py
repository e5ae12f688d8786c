from __future__ import annotations

import dataclasses

import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli, flag_mistakes
from tf_ipu_dp.config import train_flags, values

FLAGS = [
    "augment",
    "callbacks",
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
    "freeze",
    "global_batch_size",
    "gradient_accumulation",
    "hosts",
    "image_size",
    "init_from",
    "input_only",
    "instances",
    "ipus",
    "json",
    "keep_best",
    "keep_checkpoints",
    "l2",
    "label_column",
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
    "skip_bad_samples",
    "stall_timeout",
    "time_limit",
    "track",
    "updates_per_epoch",
    "validate",
    "validation_split",
    "warmup_epochs",
    "weight_decay",
    "weights",
]


def test_these_are_the_flags_and_a_new_one_is_a_decision():
    assert sorted(train_flags.make_flags()) == FLAGS


def test_the_config_has_a_field_and_the_help_has_a_line_for_every_flag():
    assert sorted(field.name for field in dataclasses.fields(train_flags.TrainConfig)) == FLAGS
    assert sorted(name for names in train_flags.GROUPS.values() for name in names) == FLAGS
    assert sorted(flag.name for flag in train_flags.FLAGS) == FLAGS


def test_a_flag_cannot_be_declared_without_saying_what_it_changes():
    with pytest.raises(TypeError, match="effect"):
        train_flags.Flag("x", None, train_flags.whole(1), help="X.")
    assert all(isinstance(flag.effect, train_flags.Effect) for flag in train_flags.FLAGS)


def test_a_flag_that_is_left_open_says_what_is_decided_for_it():
    assert all((flag.default is None) == bool(flag.open_default) for flag in train_flags.FLAGS)


def test_a_checkpoint_is_tied_to_the_flags_that_change_the_weights():
    assert sorted(train_flags.names_tied_to_weights()) == [
        "augment", "dataset", "freeze", "global_batch_size", "image_size", "label_column", "loss_scaling", "model",
        "momentum", "norm", "optimizer", "precision", "reduction", "seed", "skip_bad_samples", "updates_per_epoch",
        "validation_split", "weight_decay",
    ]  # fmt: skip
    assert train_flags.names_tied_for_evaluation() == ("model", "norm", "dataset", "label_column", "image_size")


def test_an_evaluation_does_not_need_how_the_training_was_divided():
    assert sorted(train_flags.names_dropped_for_evaluation()) == [
        "callbacks", "checkpoint_every", "device_iterations", "epochs", "global_batch_size", "gradient_accumulation",
        "hosts",
        "init_from", "instances", "updates_per_epoch",
    ]  # fmt: skip


def test_what_depends_on_the_host_may_differ_between_instances():
    assert sorted(train_flags.names_per_instance()) == ["data_dir", "executable_cache", "hosts", "init_from", "run_dir"]


@pytest.mark.parametrize(
    ("word", "accepted"),
    [
        ("--momentum=2", "a number from 0 to 1."),
        ("--image_size=3", "a whole number from 28 to 4096."),
        ("--l2=nan", "a number from 0 to 1000000."),
    ],
)
def test_a_number_out_of_bounds_is_refused_with_the_bounds(word, accepted):
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse([word])
    assert str(caught.value).endswith(f"It takes {accepted}")


def test_the_help_quotes_the_defaults_that_the_planner_uses():
    fv = train_flags.make_flags()
    assert fv["learning_rate"].help.endswith("Default: 0.05 for sgd, 0.001 for adam, 1 for lars.")
    assert fv["loss_scaling"].help.endswith("Default: 128, or none with --precision=32.32.")
    assert fv["lr_drop_epochs"].help.endswith("Default: after 50% and 75% of the run.")
    assert fv["warmup_epochs"].help.endswith("Default: 0.5, but at most 10% of the run.")
    assert fv["momentum"].help == "Momentum of sgd and lars."


def test_the_flags_can_be_defined_on_any_flag_values():
    fv = flags.FlagValues()
    train_flags.define_flags(fv)
    fv(["program", "--ipus=8"])
    assert train_flags.TrainConfig.from_flags(fv).ipus == 8


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
    assert train_flags.parse([f"--epochs={text}"]).epochs == values.Duration(*duration)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "steps", "5 days", "", "5stepsx", "٣", "9" * 5000])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(cli.UsageError, match="--epochs="):
        train_flags.parse([f"--epochs={text}"])


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("30m", 1800), ("2 h", 7200), ("0s", 0)])
def test_a_time_has_a_unit_or_is_in_seconds(text, seconds):
    assert train_flags.parse([f"--stall_timeout={text}"]).stall_timeout == values.TimeSpan(seconds)


@pytest.mark.parametrize("text", ["-1s", "1.5h", "1w", "", "s", "9" * 5000])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(cli.UsageError, match="--time_limit="):
        train_flags.parse([f"--time_limit={text}"])


@pytest.mark.parametrize(("text", "hosts"), [("2", (2, ())), ("a,b", (2, ("a", "b"))), ("n1.x", (1, ("n1.x",)))])
def test_hosts_are_a_number_or_names(text, hosts):
    assert train_flags.parse([f"--hosts={text}"]).hosts == values.Hosts(*hosts)


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


def test_early_stopping_without_validations_is_refused():
    with pytest.raises(cli.UsageError) as error:
        train_flags.parse(["--early_stop=3", "--novalidate"])
    assert str(error.value) == "--early_stop=3 needs validations. Leave --novalidate out."


@given(
    ipus=st.one_of(st.none(), st.integers(1, 2**20)),
    hosts=st.one_of(st.none(), st.integers(1, 9).map(values.Hosts), st.just(values.Hosts(2, ("a", "b")))),
    epochs=st.builds(values.Duration, st.integers(1, 999), st.sampled_from(["epochs", "steps"])),
    limit=st.one_of(st.none(), st.builds(values.TimeSpan, st.integers(0, 10**6))),
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


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("--lr=0.1", "Use --learning_rate=0.1."),
        ("--batch_size=64", "Use --micro_batch_size=64 (one replica) or --global_batch_size=64 (the job)."),
        ("--batch-size=64", "Use --micro_batch_size=64 (one replica) or --global_batch_size=64 (the job)."),
        ("--steps=200", "Use --epochs=200steps."),
        ("--max_steps=200", "Use --epochs=200steps."),
        ("--replicas=8", "Use --ipus=8 (each replica takes 1 IPU per pipeline stage)."),
        ("--output=runs/a", "Use --run_dir=runs/a."),
        ("--name=a", "Use --run_dir=runs/a."),
        ("--checkpoint=a", "Use --run_dir=FOLDER (it resumes from the newest checkpoint of that run)."),
        ("--lr", "Use --learning_rate=VALUE."),
        ("--lr=fast", "Use --learning_rate=VALUE."),
        ("--max_steps=abc", "Use --epochs=VALUEsteps."),
        ("--ngpus=8", "Use --ipus=8."),
        ("--nodes=a,b", "Use --hosts=a,b."),
        ("--fp16", "Use --precision=16.16 (or 16.32, with 32-bit weights)."),
        ("--wandb", "Use --track=wandb."),
        ("--patience=3", "Use --early_stop=3."),
        ("--list_models", "Use python -m tf_ipu_dp.list models."),
        ("--tensorboard", "Use tensorboard --logdir=runs/NAME/tensorboard; every run writes it."),
        ("--learning-rate=1", "Did you mean --learning_rate?"),
        ("--modle=cnn", "Did you mean --model?"),
        ("--colour=red", "See --help for those that are."),
    ],
)
def test_a_name_from_another_trainer_points_to_the_flag_that_is_meant(typed, advice):
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse([typed])
    assert str(caught.value) == f"{typed.split('=')[0]} is not a flag. {advice}"


def test_the_flag_after_another_name_of_a_flag_is_not_taken_for_its_value():
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse(["--lr", "--ipus=8"])
    assert "--lr is not a flag. Use --learning_rate=VALUE." in caught.value.sentences


@pytest.mark.parametrize(
    ("typed", "guess"),
    [
        ("--resume=runs/a", "Did you mean --run_dir=runs/a?"),
        ("--export=out", "Did you mean --export (it writes to export/ in the run's folder)?"),
        ("--precision=fp16", "Did you mean --precision=16.16?"),
        ("--precision=float32", "Did you mean --precision=32.32?"),
    ],
)
def test_a_value_that_means_something_else_is_answered_with_that(typed, guess):
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse([typed])
    assert str(caught.value).startswith(f"{typed} is not possible. {guess} It takes ")


def test_every_alias_names_flags_that_exist():
    fv = train_flags.make_flags()
    for name, (flag, form) in flag_mistakes._ALIASES.items():
        assert name not in fv, name
        assert flag == "watch" or flag in fv, flag
        typed = [word.lstrip("-").split("=")[0] for word in form.split() if word.startswith("--")]
        assert all(word in fv for word in typed if word not in ("watch", "logdir")), form


@pytest.mark.parametrize("name", ["learning_rate", "momentum", "weight_decay"])
@pytest.mark.parametrize("value", ["abc", "-1", "1e99"])
def test_a_number_that_is_none_is_answered_with_the_numbers_that_are(name, value):
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse([f"--{name}={value}"])
    highest = 1 if name == "momentum" else 1000000
    assert str(caught.value) == f"--{name}={value} is not possible. It takes a number from 0 to {highest}."


def test_a_model_that_is_nearly_right_is_offered():
    with pytest.raises(cli.UsageError, match=r"^--model=resnet51 is not possible: it is none of the models. Did you"):
        train_flags.parse(["--model=resnet51"])
    with pytest.raises(
        cli.UsageError, match=r"^--model=mine.py is not possible: it does not name a function of a file"
    ):
        train_flags.parse(["--model=mine.py"])


@pytest.mark.parametrize("name", ["mine.py:load", "package.module:load", "./photos", "data/table.csv", "~/x.npz"])
def test_functions_and_paths_are_data_sets_too(name):
    assert train_flags.parse([f"--dataset={name}"]).dataset == name


def test_the_best_are_kept_by_the_loss_unless_a_metric_is_named():
    own = ["--model=mine.py:build", "--keep_best=auc"]
    words = ([], ["--keep_best"], own, ["--early_stop=2"], ["--keep_best=accuracy", "--early_stop=2"])
    found = [train_flags.parse(each).best_metric for each in words]
    assert found == [None, "loss", "auc", "loss", "accuracy"]


def test_a_metric_that_built_in_models_do_not_have_is_refused_at_once():
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse(["--keep_best=acuracy"])
    assert str(caught.value) == (
        "--keep_best=acuracy is not a metric of this task. Use --keep_best=loss, accuracy or top5."
    )


def test_modes_that_exclude_each_other_are_named_with_what_each_does():
    with pytest.raises(cli.UsageError) as caught:
        train_flags.parse(["--dry_run", "--evaluate", "--run_dir=x"])
    assert str(caught.value) == (
        "--dry_run and --evaluate exclude each other: --dry_run only shows the plan, --evaluate evaluates a "
        "checkpoint. Use --dry_run or --evaluate alone."
    )
