"""Starts a training run as several instances: `python -m tf_ipu_dp.launch --instances=4 -- --ipus=8 --model=resnet20`.

Plans the job, shows the plan and the exact command, and starts it through poprun, the emulator's poprun, srun or
mpirun. After a failure it names the instance that failed first, and restarts the job from its last checkpoint up to
--max_restarts times. This module has the flags and the output; `distributed/` does the work. No TensorFlow.
"""

from __future__ import annotations

if __name__ == "__main__":  # before other modules are imported, so that a signal during their import is one line
    from tf_ipu_dp import early_signals

    early_signals.exit_in_one_line("launch", "the instances were started")

import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from datetime import datetime
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli, early_signals, missing_packages, sdk
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.distributed import launchers, restart, verify, world
from tf_ipu_dp.distributed.job import (
    DEFAULT_INSTANCES,
    Job,
    plan_job,
    read_saved_batch,
)
from tf_ipu_dp.distributed.job_process import JobStarter
from tf_ipu_dp.environment import installation
from tf_ipu_dp.environment.status import SetupError, Status
from tf_ipu_dp.planning import report
from tf_ipu_dp.runs import json_files, run_folder, saved_flags
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.saved_flags import TrainCommand
from tf_ipu_dp.training import console, preflight

_LAUNCHER_FLAGS = ("launcher", "launcher_args", "max_restarts", "verify", "dry_run")
_LAUNCHER_SWITCHES = ("verify", "dry_run")
_EXAMPLES = (
    "python -m tf_ipu_dp.launch --instances=4 -- --ipus=8 --model=resnet20 --dataset=cifar10",
    "python -m tf_ipu_dp.launch --instances=2 --hosts=node1,node2 --max_restarts=3 -- --ipus=8",
    "python -m tf_ipu_dp.launch --instances=2 --verify -- --ipus=4 --model=mlp",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The flags of the launcher itself."""

    launcher: str
    launcher_args: Optional[str]
    max_restarts: int
    verify: bool
    dry_run: bool


def main(words: Sequence[str]) -> int:
    """Parses the flags, plans the job, and starts it or shows the plan."""
    launcher_words, train_words = split_words(words)
    if cli.wants_help(train_words):
        sys.stdout.write(_help())
        return 0
    options = _parse_options(launcher_words, train_words)
    typed = saved_flags.complete(train_words)
    for warning in typed.warnings:
        _announce(warning)
    _refuse_nested_launch()
    if typed.config.format != "table":
        raise cli.UsageError(
            f"--format={typed.config.format} is not supported by launch. Use python -m tf_ipu_dp.train --dry_run."
        )
    launcher = launchers.choose(options.launcher, typed.config.sdk, os.environ, shutil.which)
    dataset = facts.find(typed.config)
    job = plan_job(typed, dataset, _read_allocation(launcher), read_saved_batch(typed.config))
    hosts = job.plan.topology.hosts
    if hosts.count > max(len(hosts.names), 1) and launcher != "srun":
        raise cli.UsageError(
            f"--hosts={hosts} is enough to plan the job, but not to start it. Give names, like --hosts=a,b."
        )
    starter = JobStarter(launcher, _split_launcher_args(options.launcher_args or ""))
    if options.dry_run:
        _show_plan(job, starter)
        return 0
    preflight.check(job.config, job.plan)
    needs_horovod = launcher != "poprun" and job.plan.topology.instances > 1
    missing_packages.require("tensorflow", target="distributed" if needs_horovod else "run")
    sdk.quieten_tensorflow(typed.config.sdk, os.environ)  # the instances inherit it
    if needs_horovod:
        _require_horovod(job.plan.topology.instances)
    if options.verify:
        return _verify(job, dataset, starter)
    with _run_folder(typed.config) as folder:
        run_dir = {} if typed.config.run_dir is not None else {"run_dir": str(folder.path)}
        job, typed = job.with_flags(run_dir), typed.with_flags(run_dir)
        return _train(job, typed, dataset, starter, folder, options.max_restarts, launcher_words)


def split_words(words: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Returns the words with flags of the launcher, and all others, which are for train."""
    launcher_words: List[str] = []
    train_words: List[str] = []
    pending = list(words)
    is_separated = False
    while pending:
        word = pending.pop(0)
        name = word.lstrip("-").split("=")[0] if word.startswith("-") else ""
        flag = name if name in _LAUNCHER_FLAGS else name[2:] if name.startswith("no") else ""
        if word == "--" and not is_separated:
            is_separated = True
        elif flag not in _LAUNCHER_FLAGS:
            train_words.append(word)
        elif "=" in word or flag in _LAUNCHER_SWITCHES:
            launcher_words.append(word)
        else:
            launcher_words += [word, *pending[:1]]
            pending = pending[1:]
    return launcher_words, train_words


def _train(
    job: Job,
    typed: TrainCommand,
    dataset: DatasetInfo,
    starter: JobStarter,
    folder: run_folder.RunFolder,
    max_restarts: int,
    launcher_words: Sequence[str],
) -> int:
    began = time.monotonic()
    _announce(f"{job.layout}; {folder.path}")
    end = restart.run_with_restarts(job, typed, dataset, starter, folder, max_restarts=max_restarts, announce=_announce)
    took = console.render_duration(time.monotonic() - began)
    resume = _resume_command(folder, launcher_words, typed.words)
    if end.status == 0:
        _announce(f"done in {took}; {folder.path}")
        if job.config.json:
            sys.stdout.write(json.dumps(json_files.read_object(folder.result_json)) + "\n")
    elif end.last_attempt is None:
        _announce(f"stopped after {took}. Resume with: {resume}")
    else:
        step = end.last_attempt.saved_step
        saved = f"the last checkpoint is of step {step:,}" if step else "there is no checkpoint"
        why = f" {end.reason[0].upper()}{end.reason[1:]}." if end.reason else ""
        _announce(f"{end.last_attempt.failure}; {saved}.{why} Resume with: {resume}")
    return end.status


def _verify(job: Job, dataset: DatasetInfo, starter: JobStarter) -> int:
    end = verify.verify(job, dataset, starter, console.Console(sys.stderr).waiting)
    if end.failure is not None:
        _announce(restart.render_failure(end.failure))
    return end.status


def _resume_command(folder: run_folder.RunFolder, launcher_words: Sequence[str], train_words: Sequence[str]) -> str:
    """Returns the command that resumes the run. A run that got so far has saved its flags; the launcher's never are."""
    has_flags = folder.run_flags.is_file()
    own_code = train_flags.parse(train_words).own_code
    if has_flags and not launcher_words:
        return cli.resume_command(folder.path, os.environ, own_code)
    named = [cli.flag_text(name, reference) for name, reference in own_code.items()]
    run = [f"--run_dir={folder.path}", *named] if has_flags else train_words
    words = " ".join(map(shlex.quote, [*launcher_words, "--", *run]))
    return cli.as_started(f"python -m tf_ipu_dp.launch {words}", os.environ)


@contextlib.contextmanager
def _run_folder(config: TrainConfig) -> Iterator[run_folder.RunFolder]:
    """Yields the run's folder: --run_dir, or a new one, which is removed if it stays empty."""
    if config.run_dir is not None:
        yield run_folder.RunFolder(cli.expand_path(config.run_dir))
        return
    path = run_folder.make_folder(preflight.folder_name(config), datetime.now())
    try:
        yield run_folder.RunFolder(path)
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()


def _show_plan(job: Job, starter: JobStarter) -> None:
    command = starter.command(job)
    if job.config.json:
        planned = PlanRecord.of(job.plan).to_json()
        value = {"schema": 1, "command": command.words, "environment": dict(command.environ), "plan": planned}
        print(json.dumps(value, indent=2))
        return
    text = report.render_plan(job.plan, cli.width_of(sys.stdout), not cli.supports_unicode(sys.stdout, os.environ))
    sys.stdout.write(cli.printable_lines(f"{text}\n{command}\n"))


def _announce(text: str) -> None:
    cli.announce("launch", text)


def _read_allocation(launcher: str) -> List[str]:
    """Returns the hosts that Slurm has given to this job; the emulator's poprun uses this host only."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if launcher == "emulator" or not nodes or not shutil.which("scontrol"):
        return []
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    return done.stdout.split()


def _require_horovod(instances: int) -> None:
    try:
        installation.require_horovod(instances, Status("launch", sys.stderr))
    except SetupError as error:
        raise cli.UsageError(str(error)) from error


def _refuse_nested_launch() -> None:
    ranks = world.read_launched(os.environ) or world.read_ranks(os.environ)
    if ranks:
        raise cli.UsageError(
            f"launch starts the instances itself, but {ranks.launcher} started it as instance {ranks.instance} of "
            f"{ranks.instances}. Use python -m tf_ipu_dp.train there, or start launch alone."
        )


def _split_launcher_args(text: str) -> Tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise cli.UsageError(
            f"--launcher_args={text} cannot be split into words ({error}). Write it like --launcher_args='--verbose'."
        ) from error


def _parse_options(launcher_words: Sequence[str], train_words: Sequence[str]) -> Options:
    """Parses all words at once, so that a misspelt flag is refused with the nearest one of launch or train."""
    fv = _make_flags()
    cli.parse([*train_words, *launcher_words], fv)
    values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(Options)}
    return Options(**values)


def _make_flags() -> flags.FlagValues:
    fv = train_flags.make_flags()
    fv["instances"].help = f"Host processes, with equal replicas. Default: {DEFAULT_INSTANCES}, or one per host."
    flags.DEFINE_enum(
        "launcher", "auto", list(launchers.NAMES),
        "What starts the instances. auto takes poprun where the Poplar SDK has it, else srun inside a Slurm job, else "
        "the emulator's poprun", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string(
        "launcher_args", None, "Options for poprun, mpirun or srun itself, like '--vipu-partition=p16'.", flag_values=fv
    )
    flags.DEFINE_integer(
        "max_restarts", 0,
        "How often in a row to restart from the last good checkpoint after a failure; a newer checkpoint resets the "
        "count. On the same instances; on fewer with the same global batch if a host is lost, and as the last restart.",
        lower_bound=0, flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_bool(
        "verify", False,
        "Train a few updates on 1 and on --instances instances, show the largest difference of each layer, and stop.",
        flag_values=fv,
    )  # fmt: skip
    return fv


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.launch [--flag=value ...] [--] [flags of python -m tf_ipu_dp.train ...]",
        "Starts a training run as several instances, and restarts it after a failure. Takes all flags of train, too.",
        {"Launcher": ("instances", "hosts", *_LAUNCHER_FLAGS)},
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


if __name__ == "__main__":
    early_signals.raise_interrupted()
    sys.exit(cli.run("launch", lambda: main(sys.argv[1:]), sys.stderr))
