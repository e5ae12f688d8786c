"""The launchers that can start the instances of a job: poprun, the emulator's poprun, mpirun and srun.

Chooses one, makes its command line, and reads its report of a failure. Pure: the environment and the lookup of programs
are passed in.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Callable, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.distributed.failures import LauncherReport
from tf_ipu_dp.planning.plan import Topology

NAMES = ("auto", "poprun", "emulator", "mpirun", "srun")

# Variables that instances on other hosts need; launchers forward few by themselves.
_FORWARDED = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CPATH", "OPAL_PREFIX", "VIRTUAL_ENV", "POPLAR_SDK_ENABLED",
    "POPLAR_ENGINE_OPTIONS", "POPLAR_RUNTIME_OPTIONS", "POPLAR_TARGET_OPTIONS", "POPLAR_LOG_LEVEL", "TF_POPLAR_FLAGS",
    "TF_CPP_MIN_LOG_LEVEL", "TFDS_DATA_DIR", "IPUOF_VIPU_API_TIMEOUT", "GCDA_MONITOR",
)  # fmt: skip
_FORWARDED_PREFIXES = ("IPU_EMULATOR_", "HOROVOD_")
_RENDEZVOUS_PORTS = range(20_000, 30_000)
# Open MPI's message, which may span several lines.
_KILLED = re.compile(r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)")


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """A command line, and the variables to add to the caller's environment."""

    words: Tuple[str, ...]
    environ: Mapping[str, str]

    def __str__(self) -> str:
        """The command as it would be typed into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*variables, *map(shlex.quote, self.words)])


def choose(requested: str, sdk: str, environ: Mapping[str, str], find: Callable[[str], Optional[str]]) -> str:
    """Returns the launcher to use; UsageError if it is missing. `find` looks up a program on the PATH."""
    if requested == "auto":
        if sdk != "emulator" and find("poprun"):
            return "poprun"
        if sdk == "poplar":
            raise cli.UsageError(
                "--sdk=poplar needs poprun, which is not on the PATH. Source the Poplar SDK's enable scripts, "
                "choose another --launcher, or use --sdk=emulator."
            )
        return "srun" if "SLURM_JOB_ID" in environ and find("srun") else "emulator"
    if requested == "poprun" and sdk == "emulator":
        raise cli.UsageError(
            "--launcher=poprun starts instances on IPUs, but --sdk=emulator uses none. Use --launcher=emulator."
        )
    if requested == "emulator" and sdk == "poplar":
        raise cli.UsageError("--launcher=emulator has emulated IPUs only, but --sdk=poplar. Use --launcher=poprun.")
    if requested != "emulator" and not find(requested):
        raise cli.UsageError(
            f"--launcher={requested} cannot be used: {requested} is not on the PATH. Use --launcher=auto."
        )
    return requested


def make_command(
    launcher: str,
    topology: Topology,
    program: Sequence[str],
    *,
    python: str,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
    job_id: int = 0,
    root: bool = False,
) -> LaunchCommand:
    """Returns the command that starts a program as the instances of a topology.

    `extra` are words for the launcher itself. Jobs with different `job_id` use different rendezvous ports and step
    names. `root`: the user is root, as in a container.
    """
    # Without it the monitor gets neither power nor temperature of the IPUs.
    wanted = {"GCDA_MONITOR": "1"}
    if launcher in ("poprun", "mpirun") and root:
        wanted.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    if launcher in ("mpirun", "srun") and topology.hosts.names[1:]:
        # The instances connect to the first host, at a port that all of them know.
        port = _RENDEZVOUS_PORTS[job_id % len(_RENDEZVOUS_PORTS)]
        wanted["IPU_EMULATOR_RENDEZVOUS"] = f"{topology.hosts.names[0]}:{port}"
    added = {name: value for name, value in wanted.items() if name not in environ}
    forwarded = [name for name in {**environ, **added} if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)]
    make = {"poprun": _poprun, "emulator": _poprun, "mpirun": _mpirun, "srun": _srun}[launcher]
    first = (python, "-m", "tf_ipu_dp.emulator.poprun") if launcher == "emulator" else (launcher,)
    name = (f"--job-name={step_name(job_id)}",) if launcher == "srun" else ()
    return LaunchCommand((*first, *make(topology, sorted(forwarded), environ), *name, *extra, *program), added)


def read_mpirun_output(text: str) -> Optional[LauncherReport]:
    """Returns which instance was killed or crashed first, according to mpirun's output, or None.

    Over MPI there may be no other evidence: mpirun ends the other instances before they notice.
    """
    found = _KILLED.search(text)
    return LauncherReport(int(found[1]), found[2], 128 + int(found[3])) if found else None


def step_name(job_id: int) -> str:
    """Returns the name of the job step that srun starts."""
    return f"tf_ipu_dp-{job_id}"


def _poprun(topology: Topology, forwarded: Sequence[str], _: Mapping[str, str]) -> List[str]:
    options = {
        "--num-instances": topology.instances,
        "--num-replicas": topology.replicas,
        "--ipus-per-replica": topology.ipus_per_replica,
    }
    words = [word for name, number in options.items() for word in (name, str(number))]
    if topology.hosts.names:
        words += ["--host", ",".join(topology.hosts.names)]
        words.append("--mpi-local-args=" + " ".join(f"-x {name}" for name in forwarded))
    return words


def _mpirun(topology: Topology, forwarded: Sequence[str], _: Mapping[str, str]) -> List[str]:
    # With explicit slots, Open MPI starts more processes than there are cores.
    hosts = topology.hosts.names or ("localhost",)
    slots = ",".join(f"{name}:{topology.instances // len(hosts)}" for name in hosts)
    words = ["-np", str(topology.instances), "--host", slots, "--tag-output", "--bind-to", "none"]
    return [*words, *(word for name in forwarded for word in ("-x", name))]


def _srun(topology: Topology, _: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    words = [f"--ntasks={topology.instances}", f"--nodes={topology.hosts.count}"]
    words += [f"--ntasks-per-node={topology.instances_per_host}", "--kill-on-bad-exit=1", "--label"]
    if topology.hosts.names:
        words.append(f"--nodelist={','.join(topology.hosts.names)}")
    if "SLURM_CPUS_PER_TASK" in environ:  # since Slurm 22.05 srun does not take it from sbatch
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return words
