"""`python -m tf_ipu_dp.runs`: the runs below a folder as a table; shows, compares and deletes them. No TensorFlow."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli, flag_help, terminal_text
from tf_ipu_dp.config import parsers
from tf_ipu_dp.monitoring import drawings, terminal
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.run_catalogue import cleaning, comparison, comparison_text, details, summaries, table
from tf_ipu_dp.run_catalogue.summaries import RunSummary

SUBCOMMANDS = {
    "list": "Shows a table of the runs below a folder. It is what runs does without a subcommand.",
    "show": "Shows one run: its result, its flags, its checkpoints, and the commands that go on with it.",
    "compare": "Compares runs: results, flags that differ, learning curves; also as PNG, SVG or HTML.",
    "clean": "Deletes runs. Without --yes it only says which, and how much that frees.",
}
_MEANT = {"delete": "clean", "remove": "clean", "rm": "clean", "ls": "list", "diff": "compare"}
_FOLDER = "runs"
_EXAMPLES = {
    "list": (
        "python -m tf_ipu_dp.runs",
        "python -m tf_ipu_dp.runs list studies --model=resnet20 --sort=accuracy",
    ),
    "show": ("python -m tf_ipu_dp.runs show runs/first",),
    "compare": (
        "python -m tf_ipu_dp.runs compare runs/first runs/second",
        "python -m tf_ipu_dp.runs compare runs/* --x=seconds --out=compare.html --out=compare.png",
    ),
    "clean": (
        "python -m tf_ipu_dp.runs clean --older_than=30d --keep_best",
        "python -m tf_ipu_dp.runs clean --state=failed --yes",
    ),
}
_SERIALIZER: Any = flags.ArgumentSerializer()
_SELECTION = ("match", "model", "dataset", "state")


class _TextParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    def __init__(self, placeholder: str) -> None:
        super().__init__()
        self.placeholder = placeholder


def main(words: Sequence[str]) -> int:
    """Runs the subcommand that the first word names; without one, shows the table."""
    if cli.wants_help(words[:1]):
        return cli.show(_render_subcommands())
    name = words[0] if words and words[0] in SUBCOMMANDS else "list"
    rest = words[1:] if words and words[0] in SUBCOMMANDS else words
    if rest and rest is words and not rest[0].startswith("-") and not Path(rest[0]).is_dir():
        raise cli.UsageError(_explain_unknown(rest[0]))
    if cli.wants_help(rest):
        return cli.show(_help(name))
    bodies: Dict[str, Callable[[flags.FlagValues, List[str]], int]] = {
        "list": _list,
        "show": _show,
        "compare": _compare,
        "clean": _clean,
    }
    fv = _make_flags(name)
    return bodies[name](fv, cli.parse(rest, fv, arguments=True))


def _list(fv: flags.FlagValues, folders: List[str]) -> int:
    runs, shown = _read(fv, folders)
    shown = table.sort(shown, _value(fv, "sort"), reverse=_value(fv, "reverse"))[: _value(fv, "limit") or None]
    if _value(fv, "json"):
        return cli.show(table.render_json(shown))
    if not runs:
        where = " or ".join(folders or [_FOLDER])
        cli.announce("runs", f"no run below {where}. Train one: python -m tf_ipu_dp.train")
        return 0
    if shown:
        sys.stdout.write(table.render(shown, _options()))
    hidden = len(runs) - len(shown)
    cli.announce("runs", table.summary_line(shown) + (f"; {hidden:,} not shown" if hidden else ""))
    return 0


def _show(fv: flags.FlagValues, paths: List[str]) -> int:
    if len(paths) != 1:
        raise cli.UsageError(f"show needs the folder of one run, like runs/first, but got {len(paths)}.")
    path = Path(paths[0])
    _require_run(path)
    found = details.read(path, time.time())
    return cli.show(details.render_json(found) if _value(fv, "json") else details.render(found, _options(), os.environ))


def _compare(fv: flags.FlagValues, paths: List[str]) -> int:
    if len(paths) < 2:
        raise cli.UsageError(f"compare needs two runs or more, like runs/first runs/second, but got {len(paths)}.")
    files = [Path(name) for name in _value(fv, "out") or ()]
    for path in files:
        drawings.check_file("out", path)
    metrics = [word.strip() for word in _value(fv, "metric").split(",")]
    for metric in metrics:
        if metric not in comparison.METRICS:
            near = difflib.get_close_matches(metric, comparison.METRICS, n=1)
            advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(comparison.METRICS)}."
            raise cli.UsageError(f"--metric={metric} is not a metric that can be drawn. {advice}")
    found = comparison.compare([Path(path) for path in paths], _value(fv, "x"))
    if _value(fv, "json"):
        sys.stdout.write(comparison_text.render_json(found))
    else:
        sys.stdout.write(comparison_text.render(found, metrics, _options()))
    if files:
        from tf_ipu_dp.run_catalogue import comparison_page

        for path in files:
            if path.suffix.lower() != ".html" and not found.curves:
                raise cli.UsageError(f"--out={path}: the runs have no records to draw. Use a .html file.")
            comparison_page.write(found, path)
            cli.announce("runs", f"written: {path}")
    return 0


def _clean(fv: flags.FlagValues, folders: List[str]) -> int:
    age = _value(fv, "older_than")
    if age is None and not any(_value(fv, name) for name in _SELECTION):
        raise cli.UsageError(
            "clean needs to know which runs are meant. Give --older_than=30d, --state=failed, --model, --dataset or "
            "--match='old-*'."
        )
    now = time.time()
    runs, chosen = _read(fv, folders)
    found = cleaning.plan(
        chosen, runs, older_than_s=None if age is None else age.seconds, keep_best=_value(fv, "keep_best"), now=now
    )
    deleted, failures = [], 0
    is_asked = _value(fv, "yes")
    for each in found:
        why = each.kept or (cleaning.delete(each, now) if is_asked else "")
        if why:
            failures += not each.kept
            cli.announce("runs", f"kept {each.run.name}: {why}.")
        else:
            deleted.append(each)
    verb = "Deleted" if is_asked else "Would delete"
    sizes = sum(each.bytes for each in deleted)
    rows = [
        (table.shown_text(each.run.name), table.when(each.run.changed), each.run.state, table.size(each.bytes))
        for each in deleted
    ]
    if rows:
        sys.stdout.write(
            cli.render_table(
                ("Run", "Last changed", "State", "Size"),
                rows,
                _options().width,
                right=(3,),
            )
        )
    what = cli.count(len(deleted), "run")
    end = "" if is_asked or not deleted else " Add --yes to delete."
    print(f"{verb} {what} and free{'d' if is_asked else ''} {table.size(sizes)}.{end}")
    return 1 if failures else 0


def _read(fv: flags.FlagValues, folders: List[str]) -> Tuple[List[RunSummary], List[RunSummary]]:
    """Returns all runs below the folders, and those that the flags select."""
    if not folders and not Path(_FOLDER).is_dir():
        raise cli.UsageError(f"There is no folder {_FOLDER} here. Give the folder that has the runs in it.")
    now = time.time()
    found: Dict[str, RunSummary] = {}
    for folder in folders or [_FOLDER]:
        for run in summaries.read_summaries(Path(folder), now):
            found.setdefault(str(Path(run.run_dir).absolute()), run)
    states = [word.strip() for word in (_value(fv, "state") or "").split(",") if word.strip()]
    for state in states:
        if state not in summaries.STATES:
            raise cli.UsageError(f"--state={state} is not a state of a run. Use {cli.alternatives(summaries.STATES)}.")
    selection = table.Selection(
        _value(fv, "match") or "", _value(fv, "model") or "", _value(fv, "dataset") or "", states
    )
    runs = list(found.values())
    return runs, selection.choose(runs)


def _require_run(path: Path) -> None:
    if not summaries.is_run(path):
        near = [str(each) for each in summaries.find_runs(path)[:3]] if path.is_dir() else []
        advice = f"Runs below it: {', '.join(near)}." if near else "Give a run's folder, like runs/first."
        raise cli.UsageError(f"{path} is not the folder of a run: it has no run.flags. {advice}")


def _explain_unknown(word: str) -> str:
    near = [_MEANT[word]] if word in _MEANT else difflib.get_close_matches(word, SUBCOMMANDS, n=1)
    advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(SUBCOMMANDS)}, or a folder."
    return f"{word} is neither a subcommand nor a folder. {advice}"


def _options() -> DisplayOptions:
    return terminal.detect_options(sys.stdout)


def _value(fv: flags.FlagValues, name: str) -> Any:
    return fv[name].value


def _make_flags(subcommand: str) -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    if subcommand in ("list", "clean"):
        for name, placeholder, text in (
            ("match", "PATTERN", "Only runs whose name fits a pattern, like 'resnet*'."),
            ("model", "NAME", "Only runs of this model."),
            ("dataset", "NAME", "Only runs on this data set."),
            ("state", "a,b", f"Only runs in these states: {', '.join(summaries.STATES)}."),
        ):
            _define_text(fv, name, None, text, placeholder)
    if subcommand == "list":
        flags.DEFINE_enum(
            "sort", "started", list(table.SORTS), "Order of the table; what is best or newest is first.",
            flag_values=fv,
        )  # fmt: skip
        flags.DEFINE_bool("reverse", False, "Turn the order round.", flag_values=fv)
        flags.DEFINE_integer("limit", None, "Show the first N only.", lower_bound=1, flag_values=fv)
    if subcommand == "compare":
        flags.DEFINE_enum("x", comparison.STEP, list(comparison.AXES), "What curves are drawn over.", flag_values=fv)
        _define_text(
            fv, "metric", ",".join(comparison.IN_A_TERMINAL),
            f"Curves in the terminal, of {', '.join(comparison.METRICS)}. Files have all of them.", "a,b",
        )  # fmt: skip
        flags.DEFINE_multi(_TextParser("FILE"), _SERIALIZER, "out", None, "", flag_values=fv)
        # Set afterwards: absl adds a remark of its own to the help of a flag that may be repeated.
        fv[
            "out"
        ].help = (
            f"Write the comparison to a file, by its type: {', '.join(drawings.FORMATS)}. May be given several times."
        )
    if subcommand == "clean":
        flags.DEFINE(
            parsers.TimeParser(), "older_than", None, "Only runs that nothing was written to for so long, like 30d.",
            fv, parsers.Serializer(),
        )  # fmt: skip
        flags.DEFINE_bool(
            "keep_best", False, "Keep the run with the best accuracy of each model and data set.", flag_values=fv
        )
        flags.DEFINE_bool("yes", False, "Delete. Without it nothing is deleted.", flag_values=fv)
    else:
        flags.DEFINE_bool("json", False, "Print JSON.", flag_values=fv)
    return fv


def _define_text(fv: flags.FlagValues, name: str, default: Optional[str], text: str, placeholder: str) -> None:
    flags.DEFINE(_TextParser(placeholder), name, default, text, fv, _SERIALIZER)


def _help(subcommand: str) -> str:
    arguments = {"list": "[FOLDER ...]", "show": "RUN_DIR", "compare": "RUN_DIR RUN_DIR ...", "clean": "[FOLDER ...]"}
    fv = _make_flags(subcommand)
    names = [name for names in fv.flags_by_module_dict().values() for name in (flag.name for flag in names)]
    return cli.render_help(
        f"python -m tf_ipu_dp.runs {subcommand} {arguments[subcommand]} [--flag=value ...]",
        SUBCOMMANDS[subcommand],
        {"Flags": tuple(names)},
        fv,
        shutil.get_terminal_size().columns,
        _EXAMPLES[subcommand],
    )


def _render_subcommands() -> str:
    width = shutil.get_terminal_size().columns
    usage = cli.as_started("python -m tf_ipu_dp.runs [SUBCOMMAND] [ARGS] [--flag=value ...]", os.environ)
    examples = [f"  {cli.as_started(line, os.environ)}" for each in _EXAMPLES.values() for line in each]
    blocks = [
        flag_help.fill_usage(usage, width),
        terminal_text.render_names(SUBCOMMANDS, width),
        "SUBCOMMAND --help lists its flags.",
        "\n".join(["Examples", *examples]),
    ]
    return "\n\n".join(blocks) + "\n"


if __name__ == "__main__":
    sys.exit(cli.run("runs", lambda: main(sys.argv[1:]), sys.stderr))
