"""Starts the ranks of a measurement through a launcher, and collects what they answer."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import protocol
from tf_ipu_dp.collectives.network import EmulatedHosts
from tf_ipu_dp.collectives.protocol import Order
from tf_ipu_dp.collectives.results import Array
from tf_ipu_dp.config.values import Hosts
from tf_ipu_dp.distributed import job_process, launchers
from tf_ipu_dp.planning.topology import Topology

ENGINES = ("gloo", "mpi")
_STOP_S = 20.0
_WATCH_S = 0.2
_LAST_LINES = 20
_REMOTE_SHELL_VARIABLE = "OMPI_MCA_plm_rsh_agent"
# These programs need no IPUs, and what usually starts them (horovodrun, torchrun) does not pin them to cores.
_POPRUN_OPTIONS = ("--offline-mode", "on", "--process-placement", "disabled")


@dataclasses.dataclass
class SeriesAnswers:
    """What the ranks have answered about one series so far. Times are in seconds."""

    rank_seconds: List[List[float]] = dataclasses.field(default_factory=list)  # of each trial, by rank
    late_s: List[List[float]] = dataclasses.field(default_factory=list)
    tcp: List[List[int]] = dataclasses.field(default_factory=list)  # of each trial: TcpCounts of all hosts
    engine_s: List[float] = dataclasses.field(default_factory=list)
    wrong: int = 0
    busy: Optional[float] = None  # share of the cores of rank 0's machine that was used
    threads: List[float] = dataclasses.field(default_factory=list)  # of each rank: its busiest thread's share of a core
    emulator: Optional[float] = None  # the link emulator's share of a core

    def engine_times(self) -> Optional[Array]:
        """Returns the engine's time of every trial; None if it is not known of all."""
        return np.array(self.engine_s) if 0 < len(self.engine_s) == len(self.rank_seconds) else None


@dataclasses.dataclass
class Answers:
    """What the ranks have answered so far."""

    facts: Dict[str, Any]
    series: Tuple[SeriesAnswers, ...]
    was_interrupted: bool = False
    failure: Optional[str] = None  # why the ranks ended before all trials were made, as a sentence


def run(
    order: Order,
    ranks: int,
    *,
    engine: str,
    hosts: Sequence[str] = (),
    network: Optional[EmulatedHosts] = None,
    cycle_ms: Optional[float] = None,
    on_trials: Optional[Callable[[int, int], None]] = None,
) -> Answers:
    """Starts the ranks on this machine, on hosts or on emulated ones, and returns their answers.

    `on_trials` is called with a series and the number of trials that were added to it. Ctrl-C ends the ranks, and what
    they have answered is returned; so it is if they fail. UsageError if they fail before the first trial.
    """
    answers = Answers({}, tuple(SeriesAnswers() for _ in order.series))
    with tempfile.TemporaryDirectory(prefix="tf_ipu_dp-") as folder:
        order = dataclasses.replace(order, timeline=str(Path(folder) / "timeline.json"))
        program = [sys.executable, "-m", "tf_ipu_dp.collectives.rank", protocol.render_order(order)]
        words, environ = make_command(program, ranks, engine=engine, hosts=hosts, network=network)
        if cycle_ms is not None:
            environ["HOROVOD_CYCLE_TIME"] = f"{cycle_ms:g}"
        process = subprocess.Popen(
            words,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a terminal's Ctrl-C must not reach the ranks before this process
        )
        try:
            with _last_lines(process.stderr) as lines, _watch(process, network) as problems:
                _collect(process.stdout, answers, on_trials)
                status = process.wait()
        except KeyboardInterrupt:
            answers.was_interrupted = True
            return answers
        finally:
            job_process.stop_session(process)
    answers.failure = problems[0] if problems else _find_failure(answers, order, status, lines)
    if answers.failure is not None and not any(series.rank_seconds for series in answers.series):
        raise cli.UsageError(answers.failure)
    return answers


def make_command(
    program: Sequence[str],
    ranks: int,
    *,
    engine: str = "gloo",
    hosts: Sequence[str] = (),
    network: Optional[EmulatedHosts] = None,
) -> Tuple[List[str], Dict[str, str]]:
    """Returns the command that starts a program as ranks, and the variables to add to the caller's environment.

    `hosts` are those of a network, if there is one; none: all of them.
    """
    names = tuple(hosts or (network.hosts if network is not None else ()))
    topology = Topology(ranks, 1, "grouped", ranks, Hosts(max(len(names), 1), names), None)
    launcher = "mpirun" if engine == "mpi" else "emulator"
    if launcher == "mpirun" and not shutil.which("mpirun"):
        raise cli.UsageError("--engine=mpi needs mpirun, which is not on the PATH. Use --engine=gloo.")
    extra = _POPRUN_OPTIONS if launcher == "emulator" else _mpi_options(network)
    environ = {"HOROVOD_CPU_OPERATIONS": engine, "HOROVOD_CONTROLLER": engine}
    if network is not None:
        environ[_REMOTE_SHELL_VARIABLE] = network.remote_shell
    command = launchers.make_command(
        launcher, topology, program, python=sys.executable, environ={**os.environ, **environ},
        extra=extra, job_id=os.getpid(), root=os.geteuid() == 0,
    )  # fmt: skip
    words = list(command.words)
    return (network.command_inside(words) if network is not None else words), {**environ, **command.environ}


def _mpi_options(network: Optional[EmulatedHosts]) -> Tuple[str, ...]:
    options = {"mpi_yield_when_idle": "1"}  # ranks that wait leave the core to the others
    if network is not None:
        # Only the emulated network, although all hosts share one memory.
        subnet = f"{network.switch_address.rpartition('.')[0]}.0/24"
        options.update(btl="tcp,self", btl_tcp_if_include=subnet, oob_tcp_if_include=subnet)
    return tuple(word for name, value in options.items() for word in ("--mca", name, value))


def _collect(stream: Optional[IO[str]], answers: Answers, on_trials: Optional[Callable[[int, int], None]]) -> None:
    assert stream is not None
    for line in stream:
        answer = protocol.parse_answer(line)
        if answer is None:
            continue
        if answer["kind"] == "refused":
            raise cli.UsageError(str(answer["sentence"]))
        if answer["kind"] == "facts":
            answers.facts = {name: value for name, value in answer.items() if name != "kind"}
            continue
        series = answers.series[answer["series"]]
        if answer["kind"] == "trials":
            series.rank_seconds += _seconds(answer["took_ns"])
            series.late_s += _seconds(answer["late_ns"])
            series.tcp += answer["tcp"]
            series.wrong += answer["wrong"]
            if on_trials is not None:
                on_trials(answer["series"], len(answer["took_ns"]))
        elif answer["kind"] == "engine":
            series.engine_s = list(answer["seconds"])
        elif answer["kind"] == "end":
            series.busy, series.threads, series.emulator = answer["busy"], answer["threads"], answer["emulator"]


def _seconds(rows: Sequence[Sequence[int]]) -> List[List[float]]:
    return [[value / 1e9 for value in row] for row in rows]


def _find_failure(answers: Answers, order: Order, status: int, lines: Sequence[str]) -> Optional[str]:
    """Returns why the ranks have not made all trials, in a sentence; None if they have."""
    done = all(len(series.rank_seconds) == order.trials for series in answers.series)
    if status == 0 and done:
        return None
    told = [line for line in lines if line.startswith("poprun: ")]
    last = (told or list(lines) or [f"the launcher exited with status {status}"])[-1]
    return f"The ranks failed: {cli.first_line(last)}"


@contextlib.contextmanager
def _watch(process: subprocess.Popen[str], network: Optional[EmulatedHosts]) -> Iterator[List[str]]:
    """Ends the ranks if their network breaks, which TCP would wait for; yields a list for the sentence that says so."""
    problems: List[str] = []
    done = threading.Event()

    def watch(hosts: EmulatedHosts) -> None:
        while not done.wait(_WATCH_S):
            problem = hosts.why_broken()
            if problem is not None:
                problems.append(problem)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                return

    thread = threading.Thread(target=watch, args=(network,), daemon=True)
    if network is not None:
        thread.start()
    try:
        yield problems
    finally:
        done.set()
        if network is not None:
            thread.join()


@contextlib.contextmanager
def _last_lines(stream: Optional[IO[str]]) -> Iterator[Deque[str]]:
    """Reads a stream in the background and yields its last lines, complete after the context."""
    assert stream is not None
    kept: Deque[str] = collections.deque(maxlen=_LAST_LINES)

    def read(source: IO[str]) -> None:
        kept.extend(line.strip() for line in source if line.strip())

    thread = threading.Thread(target=read, args=(stream,), daemon=True)
    thread.start()
    yield kept
    thread.join(_STOP_S)
