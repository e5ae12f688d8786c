"""What starts the instances of a job: poprun, the emulator's stand-in for it, mpirun or srun. Which one, and how.

Pure: the environment, and what is on the PATH, are handed in.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.planning.plan import Topology

NAMES = ("auto", "poprun", "emulator", "mpirun", "srun")

# What an instance on another host needs to find its way; launchers hand on little by themselves.
_FORWARDED = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "CPATH", "OPAL_PREFIX", "VIRTUAL_ENV", "POPLAR_SDK_ENABLED",
    "POPLAR_ENGINE_OPTIONS", "POPLAR_RUNTIME_OPTIONS", "POPLAR_TARGET_OPTIONS", "POPLAR_LOG_LEVEL", "TF_POPLAR_FLAGS",
    "TF_CPP_MIN_LOG_LEVEL", "TFDS_DATA_DIR", "IPUOF_VIPU_API_TIMEOUT", "GCDA_MONITOR",
)  # fmt: skip
_FORWARDED_KINDS = ("IPU_EMULATOR_", "HOROVOD_")
_RENDEZVOUS_PORTS = range(20_000, 30_000)
# Open MPI's words, which it may break into lines.
_DEATH = re.compile(r"process\s+rank\s+(\d+)\s+with\s+PID\s+\d+\s+on\s+node\s+(\S+)\s+exited\s+on\s+signal\s+(\d+)")


@dataclasses.dataclass(frozen=True)
class Start:
    """A command, and what its environment has beside the caller's."""

    words: Tuple[str, ...]
    environ: Mapping[str, str]

    def __str__(self) -> str:
        """As one would type it into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items()]
        return " ".join([*variables, *map(shlex.quote, self.words)])


def choose(asked: str, sdk: str, environ: Mapping[str, str], find: Callable[[str], Optional[str]]) -> str:
    """Returns what starts the instances, or refuses what is not there; `find` looks a program up on the PATH."""
    if asked == "auto":
        if sdk != "emulator" and find("poprun"):
            return "poprun"
        if sdk == "poplar":
            raise cli.UsageError(
                "--sdk=poplar is started by poprun, which is not on the PATH. Source the Poplar SDK's enable scripts, "
                "choose another --launcher, or use --sdk=emulator."
            )
        return "srun" if "SLURM_JOB_ID" in environ and find("srun") else "emulator"
    if asked == "poprun" and sdk == "emulator":
        raise cli.UsageError(
            "--launcher=poprun starts instances on IPUs, but --sdk=emulator asks for none. Use --launcher=emulator."
        )
    if asked == "emulator" and sdk == "poplar":
        raise cli.UsageError("--launcher=emulator has emulated IPUs, but --sdk=poplar. Use --launcher=poprun.")
    if asked != "emulator" and not find(asked):
        raise cli.UsageError(f"--launcher={asked} cannot be used: {asked} is not on the PATH. Use --launcher=auto.")
    return asked


def make_start(
    launcher: str,
    topology: Topology,
    program: Sequence[str],
    *,
    python: str,
    environ: Mapping[str, str],
    extra: Sequence[str] = (),
    salt: int = 0,
    root: bool = False,
) -> Start:
    """Returns the command that starts a program as the instances of a topology.

    `extra` are words for the launcher itself. Jobs of different salt do not meet where their processes have to find
    each other by a port or a name. `root` says that root starts it, as in a container.
    """
    # Without it a monitor sees neither power nor temperature of the IPUs.
    wanted = {"GCDA_MONITOR": "1"}
    if launcher in ("poprun", "mpirun") and root:
        wanted.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    if launcher in ("mpirun", "srun") and topology.hosts.names[1:]:
        # Where the instances of several hosts meet: on the first, at a port that all are told.
        port = _RENDEZVOUS_PORTS[salt % len(_RENDEZVOUS_PORTS)]
        wanted["IPU_EMULATOR_RENDEZVOUS"] = f"{topology.hosts.names[0]}:{port}"
    own = {name: value for name, value in wanted.items() if name not in environ}
    forwarded = [name for name in {**environ, **own} if name in _FORWARDED or name.startswith(_FORWARDED_KINDS)]
    make = {"poprun": _poprun, "emulator": _poprun, "mpirun": _mpirun, "srun": _srun}[launcher]
    first = (python, "-m", "tf_ipu_dp.emulator.poprun") if launcher == "emulator" else (launcher,)
    name = (f"--job-name={step_name(salt)}",) if launcher == "srun" else ()
    return Start((*first, *make(topology, sorted(forwarded), environ), *name, *extra, *program), own)


def read_death(said: str) -> Optional[Dict[str, Any]]:
    """Returns who was killed or crashed first in what mpirun has said, as the emulator's poprun reports it, or None.

    Nobody else may know: over MPI the other instances are ended before they notice.
    """
    found = _DEATH.search(said)
    return {"instance": int(found[1]), "host": found[2], "status": 128 + int(found[3])} if found else None


def step_name(salt: int) -> str:
    """Returns by what name Slurm knows what srun has started."""
    return f"tf_ipu_dp-{salt}"


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
    # With the slots said, Open MPI starts more processes than there are cores.
    hosts = topology.hosts.names or ("localhost",)
    slots = ",".join(f"{name}:{topology.instances // len(hosts)}" for name in hosts)
    words = ["-np", str(topology.instances), "--host", slots, "--tag-output", "--bind-to", "none"]
    return [*words, *(word for name in forwarded for word in ("-x", name))]


def _srun(topology: Topology, _: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    words = [f"--ntasks={topology.instances}", f"--nodes={topology.hosts.count}"]
    words += [f"--ntasks-per-node={topology.instances_per_host}", "--kill-on-bad-exit=1", "--label"]
    if topology.hosts.names:
        words.append(f"--nodelist={','.join(topology.hosts.names)}")
    if "SLURM_CPUS_PER_TASK" in environ:  # which srun has not taken from sbatch since Slurm 22.05
        words.append(f"--cpus-per-task={environ['SLURM_CPUS_PER_TASK']}")
    return words
