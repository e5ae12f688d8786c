"""Random sets of flags for train, planned in this process: a plan, or sentences whose suggestions help.

In two cases of three all values are such as the flags take, so that the planner has to judge them together; in the
others they are at bounds, beyond them, or no values at all. A third of the cases is one of the processes that poprun,
horovodrun or srun has started. What a refusal suggests is typed in place of the flag, under the same launcher, and must
solve that problem.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path
from unittest import mock

from tf_ipu_dp import cli, train
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning import plan

LIMIT_S = 10.0
NUMBERS = ("0", "1", "2", "3", "4", "6", "8", "16", "32", "64", "100", "128", "256", "1000", "1024", "4096", "65536")
EDGES = (
    "-1", "2147483647", "2147483648", "-2147483649", "9" * 400, "1e308", "1e-320", "nan", "inf", "0x10", "1_000", "٣",
    "", " ", "None", "true", "steps", "1.5", "4,2", "a,b", "a,a", "\x1b[2J", "\u202e", "\udcff", "'; rm -rf ~", "$(id)",
    "~", "~it_is_no_user/x", "~it_is_no_user/x.py:make", "/" + "x" * 300, "x/" * 2500, "./x.npz", "/dev/zero",
    "x" * 300, "x" * 5000, "../..", "/", "a\nb", "--ipus=3", "-", "--", "NaN%", "1h", "-5s",
)  # fmt: skip
LAYOUTS = ("1", "2", "2", "3", "4", "4", "6", "8", "8", "12", "16", "32", "64", "100", "256", "1048576")
COUNTS = ("1", "2", "3", "4", "5", "8", "12", "16", "32", "48", "64", "100", "128", "1000", "65536", "2147483647")
SWITCH = ("true", "false", "1", "0")
SHARES = ("0", "1e-4", "0.1", "0.5", "0.9", "1")
# What a flag without a list of choices takes; the planner has to judge the first eight together.
PLANNED = (
    "ipus", "pipeline_stages", "instances", "hosts", "micro_batch_size", "gradient_accumulation", "global_batch_size",
    "model",
)  # fmt: skip
TAKEN = {
    **dict.fromkeys(PLANNED, LAYOUTS),
    "hosts": ("1", "2", "4", "7", "a,b", "node1,node2,node3"),
    **dict.fromkeys(("micro_batch_size", "global_batch_size"), COUNTS),
    "pipeline_splits": ("conv3_block1", "conv2_block1,conv4_block1", "block2", "dense_1"),
    "dataset": ("fashion_mini", "synthetic", "cifar10", "mnist", "imagenet2012"),
    "image_size": ("28", "32", "64", "96", "224", "4096"),
    "epochs": ("1", "5", "90", "1steps", "200steps", "7steps"),
    "device_iterations": COUNTS, "updates_per_epoch": COUNTS, "checkpoint_every": COUNTS, "log_every": COUNTS,
    "keep_checkpoints": COUNTS, "check_weights_every": COUNTS, "lr_base_batch": COUNTS, "early_stop": COUNTS,
    "seed": COUNTS, "lr_drop_epochs": ("1", "30,60", "0.5"), "warmup_epochs": ("0", "0.5", "5", "100"),
    "loss_scaling": ("none", "dynamic", "1", "65536"), "time_limit": ("1h", "30m", "90s"),
    "stall_timeout": ("1", "60", "600"), "keep_best": ("accuracy", "loss"), "track": ("wandb", "mlflow,wandb"),
    "learning_rate": SHARES, "momentum": SHARES, "weight_decay": SHARES, "l2": SHARES, "label_smoothing": SHARES,
    "validation_split": ("0", "0.1", "0.9"), "label_column": ("label",), "freeze": ("conv1", "block1"),
    "init_from": ("runs/none",), "callbacks": ("none.py:make", "none"),
    "run_dir": ("runs/x",), "data_dir": (".",), "executable_cache": ("cache",),
    **dict.fromkeys(("skip_bad_samples", "eight_bit_io", "prefetch", "resume", "validate", "export"), SWITCH),
    **dict.fromkeys(("deterministic", "json", "recompute"), SWITCH),
}  # fmt: skip
WORDS = (
    "--", "-", "---", "--=", "--ipus", "-ipus=4", "--noipus", "--nojson=1", "--flagfile", "--flagfile=", "--undefok=x",
    "--flagfile=/dev/null", "--flagfile=/", "word", "", "--helpfull=1", "--ipus==4", "--batch=4", "--lr=1",
    "--" + "y" * 1000,
)  # fmt: skip


@contextlib.contextmanager
def prepare(options):
    """Works in an empty folder, so that no case finds a run of another one."""
    del options
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            choices = {flag.name: getattr(flag.parser, "enum_values", None) for flag in train_flags.FLAGS}
            skipped = ("evaluate", "input_only", "dry_run")
            yield {name: list(found or TAKEN[name]) for name, found in choices.items() if name not in skipped}
        finally:
            os.chdir(before)


def make_words(chance, choices):
    """Returns a command line for --dry_run."""
    wild = chance.random() < 0.33
    names = chance.sample(sorted(choices), chance.randrange(1, 9))
    if not wild:
        names = list(dict.fromkeys([*chance.sample(PLANNED, chance.randrange(1, 6)), *names[: chance.randrange(5)]]))
    words = []
    for name in names:
        odd = wild and chance.random() < 0.4
        value = chance.choice((*NUMBERS, *EDGES) if odd else choices[name])
        words.append(f"--{name}" if wild and chance.random() < 0.05 else f"--{name}={value}")
    if wild and chance.random() < 0.3:
        words.insert(chance.randrange(len(words) + 1), chance.choice(WORDS))
    return [word for word in words if "\0" not in word]


def make_launcher(chance):
    """Returns the variables of a launcher; in most cases there is none."""
    if chance.random() < 0.67:
        return {}
    instances = chance.choice((2, 3, 4, 8))
    instance = chance.randrange(instances)
    if chance.random() < 0.5:
        local = chance.choice((1, 2, 3, 4, 16))
        return {
            "POPDIST_NUM_TOTAL_REPLICAS": str(instances * local), "POPDIST_NUM_LOCAL_REPLICAS": str(local),
            "POPDIST_NUM_IPUS_PER_REPLICA": chance.choice("1248"),
            "POPDIST_REPLICA_INDEX_OFFSET": str(instance * local),
        }  # fmt: skip
    rank, size = chance.choice((("HOROVOD_RANK", "HOROVOD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")))
    return {rank: str(instance), size: str(instances)}


def try_case(number, chance, choices):
    """Plans a random set of flags."""
    del number
    words, launcher = make_words(chance, choices), make_launcher(chance)
    with mock.patch.dict(os.environ, launcher):
        outcome, problem = plan_and_check(words)
    return outcome, None if problem is None else f"{launcher} {problem}"


def plan_and_check(words):
    """Plans a command line as train does; returns what came out, and what is wrong with that."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run("train", lambda: train.main(["--dry_run", *words]), err)
    said = err.getvalue()
    made = list(Path().iterdir())
    if made:
        return "wrote", f"{words!r} made {made}"
    if not (said + out.getvalue()).replace("\n", "").isprintable():
        return "escapes", f"{words!r}: {said!r}"
    if code == 0:
        return ("planned", None) if out.getvalue() and "Traceback" not in said else ("silent", f"{words!r}")
    if code != 1 or out.getvalue() or not said.startswith("train: ") or len(said) > 20_000 or "Traceback" in said:
        return "unclear", f"{words!r}: code {code}, {said[:2000]!r}"
    return check_suggestions(words)


def check_suggestions(words):
    """Types what a refusal suggests, one after the other: each must solve its problem."""
    refusal = read_refusal(words)
    if not isinstance(refusal, plan.PlanError):
        return "refused", None
    helped = False
    for problem in refusal.problems:
        for fix in problem.fixes:
            helped = True
            removed = {name for name, value in fix.changes if value is None}
            kept = [word for word in words if word.lstrip("-").split("=")[0] not in removed]
            added = [cli.flag_text(name, value) for name, value in fix.changes if value is not None]
            end = kept.index("--") if "--" in kept else len(kept)  # words after it are no flags
            again = read_refusal([*kept[:end], *added, *kept[end:]])
            is_solved = again is None or (
                isinstance(again, plan.PlanError) and problem.rule not in {each.rule for each in again.problems}
            )
            if not is_solved:
                return "unhelpful", f"{words!r}: {problem} Tried {added} without {sorted(removed)}: {again}"
    return "refused, and all suggestions help" if helped else "refused by the planner, without suggestions", None


def read_refusal(words):
    """Returns the error of a command line; None if it is planned."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            train.main(["--dry_run", *words])
    except cli.UsageError as error:
        return error
    return None
