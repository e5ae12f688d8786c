"""Random sets of flags for train, planned in this process: a plan, or sentences whose suggestions help.

Half of the values are plausible, the others are at bounds, beyond them, or no values at all. What a refusal suggests is
typed in place of the flag, and must solve that problem.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from pathlib import Path

from tf_ipu_dp import cli, train
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.planning import plan

LIMIT_S = 10.0
NUMBERS = ("0", "1", "2", "3", "4", "6", "8", "16", "32", "64", "100", "128", "256", "1000", "1024", "4096", "65536")
EDGES = (
    "-1", "2147483647", "2147483648", "-2147483649", "9" * 400, "1e308", "1e-320", "nan", "inf", "0x10", "1_000", "٣",
    "", " ", "None", "true", "steps", "1.5", "4,2", "a,b", "a,a", "\x1b[2J", "\u202e", "\udcff", "'; rm -rf ~", "$(id)",
    "~", "~it_is_no_user/x", "x" * 300, "x" * 5000, "../..", "/", "a\nb", "--ipus=3", "-", "--", "NaN%", "1h", "-5s",
)  # fmt: skip
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
            yield {flag.name: list(getattr(flag.parser, "enum_values", None) or ()) for flag in train_flags.FLAGS}
        finally:
            os.chdir(before)


def make_words(chance, choices):
    """Returns a command line for --dry_run."""
    words = []
    for name in chance.sample(sorted(choices), chance.randrange(1, 9)):
        if name in ("evaluate", "input_only", "dry_run"):
            continue
        value = chance.choice(choices[name] or NUMBERS) if chance.random() < 0.92 else chance.choice(EDGES)
        words.append(f"--{name}={value}" if chance.random() < 0.95 else f"--{name}")
    if chance.random() < 0.1:
        words.insert(chance.randrange(len(words) + 1), chance.choice(WORDS))
    return [word for word in words if "\0" not in word]


def try_case(number, chance, choices):
    """Plans a random set of flags."""
    del number
    words = make_words(chance, choices)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run("train", lambda: train.main(["--dry_run", *words]), err)
    said = err.getvalue()
    made = list(Path().iterdir())
    if made:
        return "wrote", f"{words!r} made {made}"
    if not all(each == "\n" or each.isprintable() for each in said + out.getvalue()):
        return "escapes", f"{words!r}: {said!r}"
    if code == 0:
        return ("planned", None) if out.getvalue() and "Traceback" not in said else ("silent", f"{words!r}")
    if code != 1 or out.getvalue() or not said.startswith("train: ") or len(said) > 20_000 or "Traceback" in said:
        return "unclear", f"{words!r}: code {code}, {said[:2000]!r}"
    return check_suggestions(words)


def check_suggestions(words):
    """Types what a refusal suggests, one after the other: each must solve its problem."""
    try:
        config = train_flags.parse(words)
        dataset = lookup.find(config.dataset, config.data_dir, config.image_size)
        plan.plan_run(config, dataset)
    except plan.PlanError as error:
        for problem in error.problems:
            for fix in problem.fixes:
                removed = {name for name, value in fix.changes if value is None}
                kept = [word for word in words if word.lstrip("-").split("=")[0] not in removed]
                added = [cli.flag_text(name, value) for name, value in fix.changes if value is not None]
                try:
                    plan.plan_run(train_flags.parse([*kept, *added]), dataset)
                except plan.PlanError as again:
                    if problem.rule in {each.rule for each in again.problems}:
                        return "unhelpful", f"{words!r}: {problem} Tried {added} without {sorted(removed)}: {again}"
                except cli.UsageError as again:
                    return "unhelpful", f"{words!r}: {problem} Tried {added} without {sorted(removed)}: {again}"
        return "refused, and the suggestions help", None
    except cli.UsageError:
        return "refused", None
    return "refused elsewhere", None
