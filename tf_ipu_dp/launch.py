"""Starts a training run as several instances: `python -m tf_ipu_dp.launch --instances=4 -- --ipus=8 --model=resnet20`.

Plans first, shows the plan and the exact command, and starts it through what is there: poprun, the emulator's stand-in
for it, srun or mpirun. When an instance fails it tells which was the first and why, and starts all of them again from
the last checkpoint as often as it may. No TensorFlow.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any, Callable, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, TextIO, Tuple

from absl import flags

from tf_ipu_dp import cli, environment
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.schema import Duration, Hosts, TimeSpan, TrainConfig
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.distributed import failures, launchers, world
from tf_ipu_dp.planning import plan, relayout, report
from tf_ipu_dp.runs import checkpoints, run_folder
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.training import console

_INSTANCES = 2
_OWN = ("launcher", "launcher_args", "max_restarts", "verify", "dry_run")
_VERIFIED_UPDATES = 8
_LIMITS = {"32.32": 1e-5, "16.32": 1e-2, "16.16": 1e-2}
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_REMOTE_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_AGENT_VARIABLE = "OMPI_MCA_plm_rsh_agent"  # as Open MPI has it
_ANSWER_S = 15.0
_OWN_LINES = 50
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Options:
    """What is asked of the launcher itself."""

    launcher: str
    launcher_args: Optional[str]
    max_restarts: int
    verify: bool
    dry_run: bool


@dataclasses.dataclass(frozen=True)
class Job:
    """A run to be started: the words for train, what they mean, and how it is laid out."""

    words: Tuple[str, ...]
    config: TrainConfig
    plan: plan.RunPlan

    @property
    def layout(self) -> str:
        """In words."""
        topology = self.plan.topology
        return f"{cli.count(topology.instances, 'instance')} x {cli.count(topology.local_replicas, 'replica')}"


def main(words: Sequence[str]) -> int:
    """Parses, plans, shows or refuses, starts."""
    own, train = split(words)
    if cli.wants_help(train):
        sys.stdout.write(_help())
        return 0
    options = _parse(own, train)
    cfg = train_flags.parse(train)
    if cfg.evaluate and cfg.run_dir is not None:
        train = [*run_folder.read_flags_to_evaluate(Path(cfg.run_dir).expanduser()), *train]
        cfg = train_flags.parse(train)
    _refuse_what_is_not_to_be_started(cfg)
    launcher = launchers.choose(options.launcher, cfg.sdk, os.environ, shutil.which)
    dataset = lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)
    job = plan_job(train, dataset, _read_allocation(launcher), _read_saved(cfg))
    hosts = job.plan.topology.hosts
    if hosts.count > max(len(hosts.names), 1) and launcher != "srun":
        raise cli.UsageError(f"--hosts={hosts} can be planned; to start on them takes their names, like --hosts=a,b.")
    starter = _Starter(launcher, _cut(options.launcher_args or ""))
    if options.dry_run:
        _show(job, starter)
        return 0
    if launcher != "poprun" and job.plan.topology.instances > 1:
        try:
            environment.require_horovod(job.plan.topology.instances, environment.Status("launch", sys.stderr))
        except environment.SetupError as error:
            raise cli.UsageError(str(error)) from error
    if options.verify:
        return _verify(job, dataset, starter)
    return _Launch(job, train, dataset, starter, options.max_restarts, own).run()


def split(words: Sequence[str]) -> Tuple[List[str], List[str]]:
    """Returns the launcher's own words and train's, to which all belongs that the launcher does not know."""
    own: List[str] = []
    train: List[str] = []
    pending = list(words)
    ended = False
    while pending:
        word = pending.pop(0)
        name = word.lstrip("-").split("=")[0] if word.startswith("-") else ""
        switch = name if name in _OWN else name[2:] if name.startswith("no") else ""
        if word == "--" and not ended:
            ended = True
        elif switch not in _OWN:
            train.append(word)
        elif "=" in word or switch in ("verify", "dry_run"):
            own.append(word)
        else:
            own += [word, *pending[:1]]
            pending = pending[1:]
    return own, train


def plan_job(
    words: Sequence[str], dataset: DatasetInfo, allocation: Sequence[str] = (), saved: Optional[plan.Batch] = None
) -> Job:
    """Lays a job out, with what its words leave open: 2 instances or one per host, as many replicas, the saved batch.

    `allocation` are the hosts that a scheduler has given.
    """
    cfg = train_flags.parse(words)
    instances = cfg.instances or max(_INSTANCES, cfg.hosts.count if cfg.hosts else len(allocation))
    # Of instances that are no power of two it is they that are refused, and not IPUs that nobody has asked for.
    ipus = cfg.ipus or plan.ipus_per_replica(instances) * plan.ipus_per_replica(cfg.requested_stages or 1)
    hosts = cfg.hosts or _first_hosts(allocation, instances)
    wanted = dataclasses.replace(cfg, instances=instances, ipus=ipus, hosts=hosts)
    return make_job(words, relayout.keep_global_batch(wanted, dataset, saved) if saved else wanted, dataset)


def make_job(words: Sequence[str], wanted: TrainConfig, dataset: DatasetInfo) -> Job:
    """Returns the job of a config that differs from what was typed: the words are those, and what makes the difference.

    A flag cannot be taken back, so the batch is set with the one that was typed.
    """
    asked = train_flags.parse(words)
    batch = plan.plan_run(wanted, dataset).batch
    names = (field.name for field in dataclasses.fields(wanted))
    changed = {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(asked, name)}
    solved = [changed.pop(name, None) for name in ("gradient_accumulation", "global_batch_size")]
    if asked.gradient_accumulation is not None:
        changed["gradient_accumulation"] = batch.accumulation
    elif any(solved):
        changed["global_batch_size"] = batch.global_batch_size
    added = [cli.flag_text(name, value) for name, value in changed.items() if value != getattr(asked, name)]
    made = train_flags.parse([*words, *added])
    return Job((*words, *added), made, plan.plan_run(made, dataset))


def plan_fewer(job: Job, dataset: DatasetInfo, lost: Sequence[str]) -> Optional[TrainConfig]:
    """Returns the config on the next fewer instances that keeps the global batch, without the hosts that were lost."""
    topology, cfg = job.plan.topology, job.config
    left = [name for name in topology.hosts.names if name not in lost]
    count = topology.instances // 2
    while count and (left or not topology.hosts.names):
        hosts = _first_hosts(left, count) or (cfg.hosts and Hosts(min(cfg.hosts.count, count)))
        fewer = dataclasses.replace(cfg, ipus=count * topology.ipus_per_instance, instances=count, hosts=hosts)
        for layout in relayout.layouts(fewer, dataset, job.plan.batch.global_batch_size):
            if layout.instances == count:
                return layout.apply(fewer)
        count //= 2
    return None


@dataclasses.dataclass(frozen=True)
class Failure:
    """How an attempt ended, and the step that it had saved."""

    cause: failures.Cause
    step: int


def judge(past: Sequence[Failure], unreachable: Sequence[str], max_restarts: int) -> Tuple[str, str]:
    """Returns what to do after the last of some failures: `again`, `fewer` (instances) or `stop`, and why."""
    last = past[-1]
    before = past[-2] if len(past) > 1 else None
    same_end = before is not None and last.step <= before.step and last.cause.resembles(before.cause)
    stuck = f"it ended the same twice, with no step beyond {last.step:,}"
    twice = before is not None and last.cause.instance is not None and last.cause.instance == before.cause.instance
    verdicts = [
        (not max_restarts, "stop", ""),
        (last.cause.final, "stop", "it is not started again, because it would end the same"),
        (len(past) > max_restarts, "stop", f"{cli.count(max_restarts, 'restart')} did not help"),
        (bool(unreachable), "fewer", f"{cli.alternatives(unreachable)} cannot be reached"),
        (same_end and not last.cause.is_death, "stop", stuck),
        (twice, "fewer", f"instance {last.cause.instance} has failed twice in a row"),
        (same_end, "fewer", stuck),
    ]
    return next(((action, reason) for applies, action, reason in verdicts if applies), ("again", ""))


class _Starter:
    """Starts a job through one launcher, waits for it, and hands signals on."""

    def __init__(self, launcher: str, extra: Tuple[str, ...]) -> None:
        self.launcher = launcher
        self._extra = extra
        self._salt = os.getpid() + int(re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", "")) or 0)

    def command(self, job: Job) -> launchers.Start:
        """Returns what is started."""
        program = [sys.executable, "-m", "tf_ipu_dp.train", *job.words]
        return launchers.make_start(
            self.launcher,
            job.plan.topology,
            program,
            python=sys.executable,
            environ=os.environ,
            extra=self._extra,
            salt=self._salt,
            root=os.geteuid() == 0,
        )

    def run(
        self, job: Job, output: Optional[IO[str]] = None, environ: Optional[Mapping[str, str]] = None
    ) -> Tuple[int, Optional[Mapping[str, Any]]]:
        """Returns the exit status, and what the emulator's poprun or mpirun tells of the first instance that failed.

        Output goes where the launcher's own does, or into a file. `environ` is added to the launcher's environment.
        """
        start = self.command(job)
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "report.json"
            given = {**os.environ, **(environ or {}), **start.environ, "IPU_EMULATOR_REPORT": str(told)}
            with _Forwarding(self._ask_to_stop) as forwarding:
                process = subprocess.Popen(
                    list(start.words),
                    env=given,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.PIPE if self.launcher == "mpirun" else output,
                    # A terminal's Ctrl-C is handed on once, and not sent to all at once.
                    start_new_session=True,
                    preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
                )
                with _overhear(process.stderr, output or sys.stderr) as own_words:
                    status = forwarding.wait(process)
            return status, _read_object(told) or launchers.read_death(b"".join(own_words).decode(errors="replace"))

    def _ask_to_stop(self, pid: int) -> bool:
        """Asks the instances to save and to end; returns whether that was possible.

        The emulator's poprun hands a signal on. The others would have the instances killed a second later, or at once.
        """
        if self.launcher == "srun":
            return _signal_step(os.environ.get("SLURM_JOB_ID", ""), launchers.step_name(self._salt))
        # One that wants to stop stops all of them, on other hosts, too.
        return self.launcher != "emulator" and _signal_instances_below(pid)


class _Forwarding:
    """Hands SIGINT and SIGTERM on to a process, each time that they come.

    For the first, `ask` is called with the process; if it returns true, the process itself is spared.
    """

    def __init__(self, ask: Callable[[int], bool]) -> None:
        self._ask = ask
        self._process: Optional[Any] = None
        self._signal = 0

    def __enter__(self) -> _Forwarding:
        self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, process: Any) -> int:
        """Returns the exit status: 128 and the number for a signal, also where the launcher forgets about it."""
        self._process = process
        if self._signal:
            self._send(self._signal, first=True)
        code = int(process.wait())
        if self._signal and code:
            return 128 + self._signal
        return code if code >= 0 else 128 - code

    def _note(self, number: int, _: Optional[FrameType]) -> None:
        first, self._signal = not self._signal, number
        if self._process:
            self._send(number, first)

    def _send(self, number: int, first: bool) -> None:
        if self._process and not (first and self._ask(self._process.pid)):
            self._process.send_signal(number)


class _Launch:
    """A run from its first start to its end, over failures."""

    def __init__(
        self,
        job: Job,
        typed: Sequence[str],
        dataset: DatasetInfo,
        starter: _Starter,
        max_restarts: int,
        own: Sequence[str],
    ) -> None:
        self._job, self._typed, self._dataset = job, list(typed), dataset
        self._starter, self._max_restarts, self._own = starter, max_restarts, list(own)

    def run(self) -> int:
        """Returns the exit status of the last attempt."""
        cfg = self._job.config
        if cfg.run_dir is not None:
            return self._run(run_folder.RunFolder(Path(cfg.run_dir).expanduser()))
        name = f"{cfg.model}-{cfg.dataset.replace('/', '-')}"
        path = run_folder.make_folder(name, datetime.now())
        self._typed.append(f"--run_dir={path}")
        self._job = make_job(self._typed, dataclasses.replace(cfg, run_dir=str(path)), self._dataset)
        try:
            return self._run(run_folder.RunFolder(path))
        finally:
            with contextlib.suppress(OSError):  # of a run that came to nothing, nothing stays
                path.rmdir()

    def _run(self, folder: run_folder.RunFolder) -> int:
        began = time.monotonic()
        job = self._job
        past: List[Failure] = []
        _say(f"{_batch_words(job.plan)}; {folder.path}")
        if cli.speaks_unicode(sys.stderr):
            sys.stderr.write(report.render_drawing(job.plan.topology, _width(sys.stderr)))
        while True:
            _say(str(self._starter.command(job)))
            folder.set_errors_aside()
            # One object and no tags: what instance 0 prints as JSON is in the run's folder, too.
            status, told = self._starter.run(job, sys.stderr if job.config.json else None)
            took = console.render_duration(time.monotonic() - began)
            if status == 0:
                _say(f"done in {took}; {folder.path}")
                if job.config.json:
                    sys.stdout.write(json.dumps(_read_object(folder.result_json)) + "\n")
                return 0
            if status in failures.STOPPED:
                _say(f"stopped after {took}. Go on with: {self._same_command()}")
                return status
            cause = _with_host(
                failures.find_cause(status, told, folder.read_errors(), job.plan.topology.instances), job.plan.topology
            )
            if cause.lines:
                _say(_failure_words(cause))
            past.append(Failure(cause, _saved_step(folder)))
            following = self._next(job, past, time.monotonic() - began)
            if following is None:
                return status
            job = following

    def _next(self, job: Job, past: Sequence[Failure], spent_s: float) -> Optional[Job]:
        """Returns the job to go on with, after saying so; None after saying why not."""
        last = past[-1]
        named = job.plan.topology.hosts.names
        wanted: Optional[TrainConfig] = job.config
        action, reason = judge(past, (), self._max_restarts)
        unreachable = _unreachable(named) if action != "stop" and self._starter.launcher != "srun" else []
        if unreachable:
            action, reason = judge(past, unreachable, self._max_restarts)
        if action == "fewer":
            lost = unreachable or [name for name in named if name == last.cause.host]
            wanted = plan_fewer(job, self._dataset, lost if set(lost) < set(named) else ())
            if wanted is None:
                action, reason = "stop", f"{reason}, and no layout on fewer instances is left"
        if action == "stop" or wanted is None:
            why = f" {reason[0].upper()}{reason[1:]}." if reason else ""
            saved = f"step {last.step:,} is saved" if last.step else "nothing is saved"
            _say(f"{last.cause}; {saved}.{why} Go on with: {self._same_command()}")
            return None
        limit = self._job.config.time_limit
        if limit:
            wanted = dataclasses.replace(wanted, time_limit=TimeSpan(max(limit.seconds - int(spent_s), 1)))
        following = job if wanted == job.config else make_job(self._typed, wanted, self._dataset)
        _say(_restart_words(last, reason, job, following, f"Restart {len(past)} of {self._max_restarts}."))
        return following

    def _same_command(self) -> str:
        words = ["python", "-m", "tf_ipu_dp.launch", *self._own, "--", *self._typed]
        return " ".join(map(shlex.quote, words))


def _verify(job: Job, dataset: DatasetInfo, starter: _Starter) -> int:
    """Trains a few updates on one instance and on all, and compares the weights, layer by layer."""
    cfg = job.config
    if job.plan.topology.instances == 1:
        raise cli.UsageError("--verify compares one instance with several, but --instances=1. Use --instances=2.")
    iterations = cfg.device_iterations
    updates = Duration(-(-_VERIFIED_UPDATES // iterations) * iterations, "steps")
    few = updates if cfg.epochs.unit == "epochs" else cfg.epochs
    # Kernels of the host cut their sums by threads, so that both have as many of them.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(cores // job.plan.topology.instances_per_host, 1))
    environ = {name: threads for name in _THREADS if name not in os.environ}
    speaker = console.Console(sys.stderr)
    # Other hosts see the present folder rather than this machine's temporary ones.
    place = str(Path.cwd()) if job.plan.topology.hosts.names else None
    with tempfile.TemporaryDirectory(prefix="verify-", dir=place) as top:
        runs = []
        for instances in (1, job.plan.topology.instances):
            folder = Path(top) / f"{instances}-instances"
            hosts = cfg.hosts and (cfg.hosts if instances > 1 else Hosts(1, cfg.hosts.names[:1]))
            wanted = dataclasses.replace(
                cfg, instances=instances, hosts=hosts, epochs=few, deterministic=True, run_dir=str(folder)
            )
            each = make_job(job.words, wanted, dataset)
            log = Path(top) / f"{instances}.log"
            with speaker.waiting(f"training {few.count:,} updates on {each.layout}"), log.open("w") as output:
                status, told = starter.run(each, output, environ)
            if status:
                errors = run_folder.RunFolder(folder).read_errors()
                cause = failures.find_cause(status, told, errors, instances)
                said = cause if cause.lines else dataclasses.replace(cause, lines=_last_lines(log))
                if status not in failures.STOPPED:
                    _say(_failure_words(said))
                return status
            runs.append(folder)
        words = [sys.executable, "-m", "tf_ipu_dp.compare", f"--limit={_LIMITS[cfg.precision]:g}", *map(str, runs)]
        given = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        return subprocess.run(words, env=given, check=False).returncode


def _show(job: Job, starter: _Starter) -> None:
    command = starter.command(job)
    if job.config.json:
        made = PlanRecord.of(job.plan).to_json()
        value = {"schema": 1, "command": command.words, "environment": dict(command.environ), "plan": made}
        print(json.dumps(value, indent=2))
        return
    sys.stdout.write(report.render_plan(job.plan, _width(sys.stdout), not cli.speaks_unicode(sys.stdout)))
    print(f"\n{command}")


def _width(stream: TextIO) -> int:
    return shutil.get_terminal_size().columns if stream.isatty() else 200


def _batch_words(made: plan.RunPlan) -> str:
    topology, batch = made.topology, made.batch
    return (
        f"{cli.count(topology.instances, 'instance')} x {cli.count(topology.local_replicas, 'replica')} on "
        f"{cli.count(topology.ipus, 'IPU')}, micro batch {batch.micro_batch_size} x accumulation {batch.accumulation} "
        f"x {cli.count(batch.replicas, 'replica')} = global batch {batch.global_batch_size}"
    )


def _failure_words(cause: failures.Cause) -> str:
    others = f" ({cli.count(cause.echoes, 'other')} failed because of it)" if cause.echoes else ""
    return "\n  ".join([f"{cause}{others}. Its last lines:" if cause.lines else f"{cause}{others}.", *cause.lines])


def _with_host(cause: failures.Cause, topology: plan.Topology) -> failures.Cause:
    """Calls the host what it was called in --hosts, whatever it calls itself."""
    if cause.instance is None or not topology.hosts.names:
        return cause
    return dataclasses.replace(cause, host=topology.host_name(cause.instance // topology.instances_per_host))


def _restart_words(last: Failure, reason: str, before: Job, after: Job, number: str) -> str:
    text = f"{last.cause}; {f'{reason}; ' if reason else ''}starting again from "
    text += f"step {last.step:,}" if last.step else "the beginning"
    text += f" on {after.layout}"
    kept = after.plan.topology.hosts.names
    left_out = [name for name in before.plan.topology.hosts.names if name not in kept]
    if left_out:
        text += f" without {' and '.join(left_out)}"
    old, new = before.plan.batch, after.plan.batch
    changes = [("micro batch", old.micro_batch_size, new.micro_batch_size)]
    changes += [("accumulation", old.accumulation, new.accumulation)]
    solved = [f"{name} {now} in place of {then}" for name, then, now in changes if then != now]
    if solved:
        text += f", {', '.join(solved)} (global batch {new.global_batch_size} kept)"
    return f"{text}. {number}"


def _saved_step(folder: run_folder.RunFolder) -> int:
    newest = checkpoints.Store(folder.checkpoints, 1, lambda _: None).newest()
    return newest.manifest.step if newest else 0


def _read_saved(cfg: TrainConfig) -> Optional[plan.Batch]:
    """Returns the batch of the run that goes on, if one does."""
    if cfg.run_dir is None or not cfg.resume or cfg.evaluate or cfg.input_only:
        return None
    folder = run_folder.RunFolder(Path(cfg.run_dir).expanduser())
    saved = folder.read_plan() if folder.has_checkpoints() else None
    return saved.job_batch if saved else None


def _read_allocation(launcher: str) -> List[str]:
    """Returns the hosts that Slurm has given to this job; the emulator's poprun starts on this one."""
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if launcher == "emulator" or not nodes or not shutil.which("scontrol"):
        return []
    done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False)
    return done.stdout.split()


def _first_hosts(names: Sequence[str], instances: int) -> Optional[Hosts]:
    """The first of some hosts, as many as can share the instances evenly; None where one would do without a name."""
    count = 1
    while 2 * count <= min(len(names), instances):
        count *= 2
    return Hosts(count, tuple(names[:count])) if names else None


def _unreachable(names: Sequence[str]) -> List[str]:
    """Returns the hosts on which not even `true` can be run."""
    agent = shlex.split(os.environ.get(_AGENT_VARIABLE) or _REMOTE_SHELL)
    own = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}

    def answers(name: str) -> bool:
        try:
            words = [*agent, name, "true"]
            done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    remote = [name for name in names if name not in own]
    if not remote:
        return []
    with concurrent.futures.ThreadPoolExecutor(len(remote)) as pool:
        return [name for name, here in zip(remote, pool.map(answers, remote)) if not here]


@contextlib.contextmanager
def _overhear(source: Optional[IO[bytes]], to: IO[str]) -> Iterator[Deque[bytes]]:
    """Hands on what a launcher writes, and keeps the last lines that are its own: those without an instance's tag."""
    own_words: Deque[bytes] = collections.deque(maxlen=_OWN_LINES)

    def hand_on() -> None:
        for line in source or ():
            with contextlib.suppress(OSError):  # a launcher that cannot write would wait for ever
                os.write(to.fileno(), line)
            if not line.startswith(b"["):
                own_words.append(line)

    hearing = threading.Thread(target=hand_on, daemon=True)
    hearing.start()
    yield own_words
    hearing.join(_ANSWER_S)


def _signal_step(job: str, name: str) -> bool:
    listing = ["squeue", "--steps", f"--jobs={job}", "--noheader", "--format=%i %j"]
    try:
        listed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        steps = [line.split()[0] for line in listed if line.split()[1:] == [name]]
        if steps:
            subprocess.run(["scancel", "--signal=TERM", *steps], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return bool(steps)


def _signal_instances_below(pid: int) -> bool:
    """Sends SIGTERM to the instances that a process has started on this host, if there are any."""
    found = False
    try:
        children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return False
    for child in children:
        with contextlib.suppress(OSError):
            # mpirun has the program among its words, too, and is not to be asked.
            if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"tf_ipu_dp.train"]:
                os.kill(child, signal.SIGTERM)
                found = True
                continue
        found = _signal_instances_below(child) or found
    return found


def _last_lines(path: Path) -> Tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines()[-failures.LAST_LINES :])


def _read_object(path: Path) -> Optional[Mapping[str, Any]]:
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_what_is_not_to_be_started(cfg: TrainConfig) -> None:
    ranks = world.read_launched(os.environ) or world.read_ranks(os.environ)
    if ranks:
        raise cli.UsageError(
            f"launch starts the instances, but {ranks.launcher} has started it as instance {ranks.instance} of "
            f"{ranks.instances}. Use python -m tf_ipu_dp.train there, or start launch alone."
        )
    if cfg.format != "table":
        raise cli.UsageError(
            f"--format={cfg.format} is drawn by python -m tf_ipu_dp.train --dry_run, which has the same plan."
        )


def _end_with_parent() -> None:
    """Whoever kills the launcher ends the job, which then saves."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _cut(text: str) -> Tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise cli.UsageError(f"--launcher_args={text} cannot be cut into words ({error}).") from error


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _parse(own: Sequence[str], train: Sequence[str]) -> Options:
    """Looks at all words at once, so that a slip is told with the nearest flag of either."""
    fv = _make_flags()
    cli.parse([*train, *own], fv)
    values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(Options)}
    return Options(**values)


def _make_flags() -> flags.FlagValues:
    fv = train_flags.make_flags()
    fv["instances"].help = f"Host processes, each with as many replicas. Default: {_INSTANCES}, or one per host."
    flags.DEFINE_enum(
        "launcher", "auto", list(launchers.NAMES),
        "What starts the instances. auto takes poprun where the Poplar SDK has it, else srun inside a Slurm job, else "
        "the emulator's stand-in for poprun", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string(
        "launcher_args", None, "Options for poprun, mpirun or srun itself, like '--vipu-partition=p16'.", flag_values=fv
    )
    flags.DEFINE_integer(
        "max_restarts", 0,
        "How often to start again from the last good checkpoint after a failure: on the same instances, or on fewer "
        "with the same global batch when a host is lost or an instance fails twice.", lower_bound=0, flag_values=fv,
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
        "Starts a training run as several instances, and again after a failure. All flags of train are taken, too.",
        {"Launcher": ("instances", "hosts", *_OWN)},
        _make_flags(),
        shutil.get_terminal_size().columns,
    )


if __name__ == "__main__":
    sys.exit(cli.run("launch", lambda: main(sys.argv[1:]), sys.stderr))
