"""--verify: trains a few updates on one instance and on several, and compares the weights, layer by layer."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable, ContextManager, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.values import Duration, Hosts
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.distributed import failures
from tf_ipu_dp.distributed.failures import FirstFailure
from tf_ipu_dp.distributed.job import Job, replan_job
from tf_ipu_dp.distributed.job_process import JobStarter
from tf_ipu_dp.runs import run_folder

_UPDATES = 8
_LIMITS = {"32.32": 1e-5, "16.32": 1e-2, "16.16": 1e-2}
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@dataclasses.dataclass(frozen=True)
class Verification:
    """The exit status of the comparison, or of the job that failed before it."""

    status: int
    failure: Optional[FirstFailure] = None


def verify(
    job: Job, dataset: DatasetInfo, starter: JobStarter, waiting: Callable[[str], ContextManager[None]]
) -> Verification:
    """Trains both ways and prints the difference of each layer; `waiting` is a context that shows a sentence."""
    config, topology = job.config, job.plan.topology
    if topology.instances == 1:
        raise cli.UsageError("--verify compares one instance with several, but --instances=1. Use --instances=2.")
    iterations = config.device_iterations or 1
    updates = Duration(-(-_UPDATES // iterations) * iterations, "steps")
    length = updates if config.epochs.unit == "epochs" else config.epochs
    # Kernels on the host divide their sums by thread, so both jobs need the same number of threads for the same bits.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(cores // topology.instances_per_host, 1))
    environ = {name: threads for name in _THREADS if name not in os.environ}
    # Other hosts share the working directory, but not this machine's temporary folder.
    parent = str(Path.cwd()) if topology.hosts.names else None
    with tempfile.TemporaryDirectory(prefix="verify-", dir=parent) as top:
        folders = []
        for instances in (1, topology.instances):
            folder = Path(top) / f"{instances}-instances"
            hosts = config.hosts and (config.hosts if instances > 1 else Hosts(1, config.hosts.names[:1]))
            wanted = dataclasses.replace(
                config, instances=instances, hosts=hosts, epochs=length, deterministic=True, run_dir=str(folder)
            )
            each = replan_job(job.command, wanted, dataset)
            log = Path(top) / f"{instances}.log"
            with waiting(f"training {length.count:,} updates on {each.layout}"), log.open("w") as output:
                end = starter.run(each, output, environ)
            if end.status:
                errors = run_folder.RunFolder(folder).read_errors()
                failure = failures.find_first_failure(end.status, end.report, errors, instances)
                if not failure.last_lines:
                    failure = dataclasses.replace(failure, last_lines=_read_last_lines(log))
                return Verification(end.status, None if end.status in failures.STOP_STATUSES else failure)
            folders.append(folder)
        limit = f"--limit={_LIMITS[config.precision]:g}"
        compare = [sys.executable, "-m", "tf_ipu_dp.compare", limit, *map(str, folders)]
        given = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ}
        return Verification(subprocess.run(compare, env=given, check=False).returncode)


def _read_last_lines(path: Path) -> Tuple[str, ...]:
    return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines()[-failures.LAST_LINES :])
