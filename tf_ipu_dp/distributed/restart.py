"""Restarts a job after failures, on the same instances or on fewer.

`decide` and `plan_fewer_instances` are pure; `run_with_restarts` starts the job and calls them after each failure.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import shlex
import socket
import subprocess
import sys
import time
from typing import IO, Callable, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import Hosts, TimeSpan
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.distributed import failures
from tf_ipu_dp.distributed.failures import FirstFailure
from tf_ipu_dp.distributed.job import Job, replan_job, share_hosts
from tf_ipu_dp.distributed.job_process import JobStarter
from tf_ipu_dp.planning import plan, relayout
from tf_ipu_dp.runs import checkpoints, run_folder
from tf_ipu_dp.runs.saved_flags import TrainCommand

RESTART, SHRINK, STOP = "restart", "shrink", "stop"
_REMOTE_SHELL = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_REMOTE_SHELL_VARIABLE = "OMPI_MCA_plm_rsh_agent"  # of Open MPI
_ANSWER_TIMEOUT_S = 15.0


@dataclasses.dataclass(frozen=True)
class FailedAttempt:
    """The failure of an attempt, and the step of the newest checkpoint at that time; 0 without one."""

    failure: FirstFailure
    saved_step: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after a failure: RESTART, SHRINK (restart on fewer instances) or STOP, and why."""

    action: str
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """How a run ended, over all its attempts."""

    status: int
    last_attempt: Optional[FailedAttempt] = None  # None if the run succeeded, or was stopped by a signal
    reason: str = ""  # why it was not restarted


def run_with_restarts(
    job: Job,
    typed: TrainCommand,
    dataset: DatasetInfo,
    starter: JobStarter,
    folder: run_folder.RunFolder,
    *,
    max_restarts: int,
    announce: Callable[[str], None],
) -> RunEnd:
    """Starts a job, and restarts it from its last checkpoint after failures.

    Gives up after `max_restarts` restarts in a row without a newer checkpoint: progress resets their count.
    Flags are added to `typed`, the user's command. `announce` prints a sentence.
    """
    began = time.monotonic()
    attempts: List[FailedAttempt] = []
    first_step = _read_saved_step(folder)
    while True:
        folder.set_errors_aside()
        end = starter.run(job, _output(job.config))
        if end.status == 0 or end.status in failures.STOP_STATUSES:
            return RunEnd(end.status)
        instances = job.plan.topology.instances
        failure = failures.find_first_failure(end.status, end.report, folder.read_errors(), instances)
        failure = _with_given_host_name(failure, job.plan.topology)
        if failure.last_lines:
            announce(render_failure(failure))
        attempts.append(FailedAttempt(failure, _read_saved_step(folder)))
        decision, config = _decide_next(attempts, job, dataset, starter.launcher, max_restarts, first_step)
        if config is None:
            return RunEnd(end.status, attempts[-1], decision.reason)
        if typed.config.time_limit:
            left_s = max(typed.config.time_limit.seconds - int(time.monotonic() - began), 1)
            config = dataclasses.replace(config, time_limit=TimeSpan(left_s))
        restarted = job if config == job.config else replan_job(typed, config, dataset)
        number = f"Restart {count_without_progress(attempts, first_step)} of {max_restarts}."
        announce(f"{render_restart(attempts[-1], decision.reason, job, restarted)} {number}")
        job = restarted


def decide(
    attempts: Sequence[FailedAttempt], unreachable: Sequence[str], max_restarts: int, first_step: int = 0
) -> Decision:
    """Decides what to do after the last of some failed attempts, given the hosts that cannot be reached.

    `first_step` is that of the checkpoint which the first attempt started from.
    """
    last = attempts[-1]
    in_a_row = count_without_progress(attempts, first_step)
    is_same = in_a_row > 1 and last.failure.resembles(attempts[-2].failure)
    no_progress = f"it failed twice in the same way without getting past step {last.saved_step:,}"
    not_helped = f"{cli.count(max_restarts, 'restart')} without progress did not help"
    # Fewer instances are slower, and hide what is wrong with the others. So they come last.
    is_last_restart = in_a_row == max_restarts and in_a_row > 1
    rules = [
        (not max_restarts, Decision(STOP)),
        (not last.failure.transient, Decision(STOP, "it was not restarted, because it would fail again")),
        (in_a_row > max_restarts, Decision(STOP, not_helped)),
        (bool(unreachable), Decision(SHRINK, f"{cli.alternatives(unreachable)} cannot be reached")),
        (is_same and not last.failure.is_kill, Decision(STOP, no_progress)),
        (is_last_restart, Decision(SHRINK, f"{in_a_row} failures in a row without progress")),
    ]
    return next((decision for applies, decision in rules if applies), Decision(RESTART))


def count_without_progress(attempts: Sequence[FailedAttempt], first_step: int = 0) -> int:
    """Returns how many of the last attempts failed in a row, the last one that made progress included."""
    best, count = first_step, 0
    for attempt in attempts:
        count = 1 if attempt.saved_step > best else count + 1
        best = max(best, attempt.saved_step)
    return count


def plan_fewer_instances(job: Job, dataset: DatasetInfo, lost_hosts: Sequence[str]) -> Optional[TrainConfig]:
    """Returns the config on the next fewer instances that keeps the global batch, without the lost hosts; or None."""
    topology, config = job.plan.topology, job.config
    left = [name for name in topology.hosts.names if name not in lost_hosts]
    count = topology.instances // 2
    while count and (left or not topology.hosts.names):
        hosts = share_hosts(left, count) or (config.hosts and Hosts(min(config.hosts.count, count)))
        fewer = dataclasses.replace(config, ipus=count * topology.ipus_per_instance, instances=count, hosts=hosts)
        for layout in relayout.layouts(fewer, dataset, job.plan.batch.global_batch_size):
            if layout.instances == count:
                return layout.apply(fewer)
        count //= 2
    return None


def render_failure(failure: FirstFailure) -> str:
    """Returns which instance failed first, and the last lines of its error or output."""
    others = failure.secondary_failures
    consequence = f" ({cli.count(others, 'other instance')} failed as a consequence)" if others else ""
    if not failure.last_lines:
        return f"{failure}{consequence}."
    return "\n  ".join([f"{failure}{consequence}. Its last lines:", *failure.last_lines])


def render_restart(last: FailedAttempt, reason: str, before: Job, after: Job) -> str:
    """Returns a sentence: what failed, from which step the next attempt starts, and what changes."""
    text = f"{last.failure}; {f'{reason}; ' if reason else ''}restarting from "
    text += f"step {last.saved_step:,}" if last.saved_step else "the beginning"
    text += f" on {after.layout}"
    kept = after.plan.topology.hosts.names
    removed = [name for name in before.plan.topology.hosts.names if name not in kept]
    if removed:
        text += f" without {' and '.join(removed)}"
    old, new = before.plan.batch, after.plan.batch
    changes = [("micro batch", old.micro_batch_size, new.micro_batch_size)]
    changes += [("accumulation", old.accumulation, new.accumulation)]
    changed = [f"{name} {now} instead of {then}" for name, then, now in changes if then != now]
    if changed:
        text += f", {', '.join(changed)} (global batch {new.global_batch_size} kept)"
    return f"{text}."


def _decide_next(
    attempts: Sequence[FailedAttempt], job: Job, dataset: DatasetInfo, launcher: str, max_restarts: int, first_step: int
) -> Tuple[Decision, Optional[TrainConfig]]:
    """Returns the decision and the config of the next attempt; None to stop."""
    names = job.plan.topology.hosts.names
    decision = decide(attempts, (), max_restarts, first_step)
    unreachable = _find_unreachable(names) if decision.action != STOP and launcher != "srun" else []
    if unreachable:
        decision = decide(attempts, unreachable, max_restarts, first_step)
    if decision.action == STOP:
        return decision, None
    if decision.action == RESTART:
        return decision, job.config
    lost = unreachable or [name for name in names if name == attempts[-1].failure.host]
    config = plan_fewer_instances(job, dataset, lost if set(lost) < set(names) else ())
    if config is None and not unreachable:
        return Decision(RESTART, decision.reason), job.config
    if config is None:
        return Decision(STOP, f"{decision.reason}, and there is no layout on fewer instances"), None
    return decision, config


def _output(config: TrainConfig) -> Optional[IO[str]]:
    """Returns where the job's output goes: with --json, stdout is only for the result."""
    return sys.stderr if config.json else None


def _with_given_host_name(failure: FirstFailure, topology: plan.Topology) -> FirstFailure:
    """Replaces the host's own name by its name in --hosts."""
    if failure.instance is None or not topology.hosts.names:
        return failure
    return dataclasses.replace(failure, host=topology.host_name(failure.instance // topology.instances_per_host))


def _read_saved_step(folder: run_folder.RunFolder) -> int:
    newest = checkpoints.Store(folder.checkpoints, 1, lambda _: None).newest()
    return newest.manifest.step if newest else 0


def _find_unreachable(names: Sequence[str]) -> List[str]:
    """Returns the hosts on which the remote shell cannot run `true`."""
    remote_shell = shlex.split(os.environ.get(_REMOTE_SHELL_VARIABLE) or _REMOTE_SHELL)
    this_host = {"localhost", "127.0.0.1", socket.gethostname(), socket.getfqdn()}

    def is_reachable(name: str) -> bool:
        words = [*remote_shell, name, "true"]
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_ANSWER_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return done.returncode == 0

    remote = [name for name in names if name not in this_host]
    if not remote:
        return []
    with concurrent.futures.ThreadPoolExecutor(len(remote)) as pool:
        return [name for name, reachable in zip(remote, pool.map(is_reachable, remote)) if not reachable]
