"""One run in full: its result, flags that are not the defaults, checkpoints, files, and what to do with it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.monitoring import text_layout
from tf_ipu_dp.monitoring.text_layout import BOLD, DisplayOptions, printable
from tf_ipu_dp.run_catalogue import cleaning, summaries, table
from tf_ipu_dp.run_catalogue.comparison import read_flags
from tf_ipu_dp.run_catalogue.summaries import RunSummary
from tf_ipu_dp.runs import result_report, run_folder
from tf_ipu_dp.runs.json_files import plain
from tf_ipu_dp.runs.records import RunResult

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class RunDetails:
    """What is shown of one run."""

    summary: RunSummary
    result: Optional[RunResult]
    flags: Dict[str, str]  # that are not the defaults
    checkpoints: Tuple[int, ...]  # their steps
    best_checkpoint: Optional[int]
    has_export: bool
    bytes: int


def read(path: Path, now: float) -> RunDetails:
    """Reads what a run's folder has; what cannot be read is missing."""
    folder = run_folder.RunFolder(path)
    defaults = train_flags.default_texts()
    flags = {name: text for name, text in read_flags(path).items() if text != defaults.get(name) and name != "run_dir"}
    best = summaries.saved_steps(folder.best)
    return RunDetails(
        summary=summaries.read_summary(path, now, str(path)),
        result=folder.read_result(),
        flags=flags,
        checkpoints=summaries.saved_steps(folder.checkpoints),
        best_checkpoint=best[-1] if best else None,
        has_export=folder.export.is_dir(),
        bytes=cleaning.measure(path),
    )


def render(details: RunDetails, options: DisplayOptions, environ: Mapping[str, str]) -> str:
    """Returns all of it as text, with the commands that go on with the run."""
    run = details.summary
    saved = ", ".join(f"{step:,}" for step in details.checkpoints) or "none"
    if details.best_checkpoint is not None:
        saved += f"; the best is of step {details.best_checkpoint:,}"
    rows = [
        ("State", run.state if not run.problem else f"{run.state}: {run.problem}"),
        ("Started", table.when(run.started)),
        ("Model", run.model or "-"),
        ("Data", run.dataset or "-"),
        ("Layout", f"{run.layout} (instances x replicas)"),
        ("Global batch", table.number(run.global_batch_size, 0)),
        ("Steps", table.steps(run)),
        ("Best accuracy", f"{table.per_cent(run.best_accuracy)} %"),
        ("Best loss", table.number(run.best_loss, 4)),
        ("Checkpoints", saved),
        ("Export", "yes" if details.has_export else "no"),
        ("Size", table.size(details.bytes)),
        ("Version", run.version or "-"),
    ]
    flags = [_flag_line(name, text) for name, text in details.flags.items()]
    blocks = [_heading(run.name, options), _block(rows, options)]
    if flags:
        blocks += ["\n", _heading("Flags that are not the defaults", options)]
        blocks += [f"  {printable(flag)}\n" for flag in flags]
    if details.result is not None:
        result = _as_seen_from_here(_printable(details.result), printable(run.run_dir))
        blocks.append(result_report.render_result(result, options.width, options.colour))
    blocks += ["\n", _heading("To go on with it", options)]
    blocks += [f"  {line}\n" for line in _commands(details, environ)]
    return "".join(blocks)


def render_json(details: RunDetails) -> str:
    """Returns all of it as one JSON object."""
    value = {
        "schema": SCHEMA,
        **plain(dataclasses.asdict(details.summary)),
        "flags": details.flags,
        "checkpoints": list(details.checkpoints),
        "best_checkpoint": details.best_checkpoint,
        "export": details.has_export,
        "bytes": details.bytes,
        "result": details.result.to_json() if details.result is not None else None,
    }
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def _commands(details: RunDetails, environ: Mapping[str, str]) -> List[str]:
    folder = run_folder.RunFolder(Path(details.summary.run_dir))
    if not details.summary.run_dir.isprintable():  # nobody could type it
        return []
    path = shlex.quote(details.summary.run_dir)
    lines = []
    if details.checkpoints:
        own_code = _own_code(details.flags)
        code = {name: shlex.quote(f"--{name}={text}") for name, text in own_code.items()}
        both = "".join(f" {code[name]}" for name in ("model", "dataset") if name in code)
        model = f" {code['model']}" if "model" in code and not details.has_export else ""
        lines += [
            f"python -m tf_ipu_dp.train --run_dir={path}{both} --evaluate",
            f"python -m tf_ipu_dp.predict {path} {'INPUT' if code else 'IMAGE'} ...{model}",
        ]
        if details.summary.state in (summaries.INTERRUPTED, summaries.FAILED):
            lines.insert(0, cli.resume_command(folder.path, {}, own_code))
    lines.append(f"python -m tf_ipu_dp.monitor --explain={path}")
    if folder.tensorboard.is_dir():
        lines.append(f"tensorboard --logdir={shlex.quote(str(folder.tensorboard))}")
    return [cli.as_started(line, environ) for line in lines]


def _own_code(flags: Mapping[str, str]) -> Dict[str, str]:
    """Returns the functions of the user, by the flag: commands load them only if they name them again."""
    named = {name: flags.get(name, "") for name in ("model", "dataset", "callbacks")}
    return {name: text for name, text in named.items() if user_code.is_reference(text) and text.isprintable()}


def _as_seen_from_here(result: RunResult, run_dir: str) -> RunResult:
    """Returns a result with the folder as it was given, and without the command that resumes it.

    Both were recorded as seen from where the run was started; the command for here is among those below.
    """
    stopped = dataclasses.replace(result.stopped, resume="") if result.stopped is not None else None
    return dataclasses.replace(result, run_dir=run_dir, stopped=stopped)


def _flag_line(name: str, text: str) -> str:
    """Returns a flag as one would type it; a switch has no value."""
    return cli.flag_text(name, text == "True" if text in ("True", "False") else text)


def _printable(result: RunResult) -> RunResult:
    """Returns a result whose texts cannot move the cursor."""
    changes: Dict[str, Any] = {name: printable(getattr(result, name)) for name in ("run_dir", "model", "dataset")}
    verdict = dataclasses.replace(result.verdict, sentence=printable(result.verdict.sentence))
    stopped = result.stopped
    if stopped is not None:
        stopped = dataclasses.replace(
            stopped, message=printable(stopped.message), resume=printable(stopped.resume)
        )  # fmt: skip
    best = result.best
    if best is not None:
        best = dataclasses.replace(best, checkpoint=printable(best.checkpoint))
    return dataclasses.replace(result, verdict=verdict, stopped=stopped, best=best, **changes)


def _heading(text: str, options: DisplayOptions) -> str:
    return text_layout.render_lines([[(printable(text), BOLD)]], options)


def _block(rows: List[Tuple[str, str]], options: DisplayOptions) -> str:
    shown = [(name, printable(value)) for name, value in rows]
    return cli.render_table(("", ""), shown, options.width)
