"""Starts a training run as several instances: `python -m tf_ipu_dp.launch --instances=4 -- --ipus=8 --model=resnet20`.

Picks poprun where the Poplar SDK has it, else the emulator's poprun; shows the plan and the exact command, and tells at
the end which instance failed first, and why. No TensorFlow.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Sequence

from absl import flags

from tf_ipu_dp import catalogue, cli, config, plan

_LAUNCHERS = ("auto", "poprun", "emulator")
_LAST_LINES = 20
# What a run on other hosts needs to find its way; poprun hands on nothing else by itself.
_FORWARDED = ("PYTHONPATH", "LD_LIBRARY_PATH", "POPLAR_SDK_ENABLED", "TF_POPLAR_FLAGS", "TFDS_DATA_DIR")


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the launcher itself was asked for."""

    instances: int
    max_restarts: int
    launcher: str


def main(words: Sequence[str]) -> int:
    """Parses, plans, shows, starts, and starts again as often as it may."""
    own, rest = _cut(words)
    if cli.wants_help(own):
        sys.stdout.write(_help())
        return 0
    launch = _parse(own)
    train = [*rest, f"--instances={launch.instances}"]
    cfg = config.parse(train)
    run = plan.plan_run(cfg, catalogue.find(cfg.dataset, cfg.data_dir, cfg.image_size))
    launcher = _choose(launch.launcher, cfg.sdk)
    command = make_command(launcher, run.topology, rest, os.environ)
    print(f"launch: {plan_words(run)}", file=sys.stderr)
    print(f"launch: {' '.join(map(shlex.quote, command))}", file=sys.stderr)
    for attempt in range(launch.max_restarts + 1):
        code = subprocess.run(command, check=False).returncode
        if code in (0, 130, 143):
            return code
        _tell_first_failure(cfg.run_dir)
        if attempt < launch.max_restarts:
            print(
                f"launch: starting again from the last checkpoint ({attempt + 1} of {launch.max_restarts}).",
                file=sys.stderr,
            )
    return code


def make_command(launcher: str, topology: plan.Topology, train: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """Returns the command that starts the instances."""
    poprun = ["poprun"] if launcher == "poprun" else [sys.executable, "-m", "tf_ipu_dp.emulator.poprun"]
    shape = {
        "--num-instances": topology.instances,
        "--num-replicas": topology.replicas,
        "--ipus-per-replica": topology.ipus_per_replica,
    }
    options = [word for name, number in shape.items() for word in (name, str(number))]
    if topology.hosts.names:
        options += ["--host", ",".join(topology.hosts.names)]
    forwarded = [name for name in _FORWARDED if name in environ]
    if launcher == "poprun" and forwarded:
        options.append("--mpi-local-args=" + " ".join(f"-x {name}" for name in forwarded))
    return [*poprun, *options, sys.executable, "-m", "tf_ipu_dp.train", *train]


def plan_words(run: plan.RunPlan) -> str:
    """Returns the layout in one line."""
    topology, batch = run.topology, run.batch
    return (
        f"{cli.count(topology.instances, 'instance')} x {cli.count(topology.local_replicas, 'replica')} on "
        f"{cli.count(topology.ipus, 'IPU')}, global batch {batch.global_batch_size:,}"
    )


def _cut(words: Sequence[str]) -> tuple[List[str], List[str]]:
    words = list(words)
    where = words.index("--") if "--" in words else len(words)
    return words[:where], words[where + 1 :]


def _parse(words: Sequence[str]) -> Launch:
    fv = _make_flags()
    cli.parse(words, fv)
    return Launch(**{field.name: fv[field.name].value for field in dataclasses.fields(Launch)})


def _make_flags() -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_integer("instances", 2, "Host processes to start.", lower_bound=1, flag_values=fv)
    flags.DEFINE_integer(
        "max_restarts", 0, "How often to start again from the last checkpoint after a failure.", lower_bound=0,
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_enum(
        "launcher", "auto", list(_LAUNCHERS), "What starts the instances; auto takes poprun where it is.",
        flag_values=fv,
    )  # fmt: skip
    return fv


def _choose(asked: str, sdk: str) -> str:
    if asked != "auto":
        return asked
    return "poprun" if shutil.which("poprun") and sdk != "emulator" else "emulator"


def _tell_first_failure(run_dir: Optional[str]) -> None:
    """Shows the earliest error that an instance has left in the run's folder."""
    if run_dir is None:
        return
    found: Dict[float, Path] = {path.stat().st_mtime: path for path in Path(run_dir).glob("errors/instance-*.txt")}
    if found:
        first = found[min(found)]
        lines = first.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
        print(f"launch: {first.stem} failed first:", *lines, sep="\n  ", file=sys.stderr)


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.launch [--flag=value ...] -- [flags of train ...]",
        "Starts a training run as several instances, through poprun or the emulator's stand-in for it.",
        {"Launcher": ("instances", "max_restarts", "launcher")},
        _make_flags(),
        shutil.get_terminal_size().columns,
    )


if __name__ == "__main__":
    sys.exit(cli.run("launch", lambda: main(sys.argv[1:]), sys.stderr))
