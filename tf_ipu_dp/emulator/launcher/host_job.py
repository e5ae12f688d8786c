"""The part of a job that one host runs, and the environment variables that go there."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.launcher import failure_report, orphans, placement, processes

# Variables of this host that instances on other hosts need, besides those of --mpi-local-args="-x NAME".
_FORWARDED = (
    "CPATH", "GCDA_MONITOR", "LD_LIBRARY_PATH", "OPAL_PREFIX", "PATH", "PYTHONPATH", "TFDS_DATA_DIR",
)  # fmt: skip
_FORWARDED_PREFIXES = ("HOROVOD_", "IPUOF_", "IPU_EMULATOR_", "KMP_", "OMP_", "POPLAR_", "PYTHON", "TF_")


@dataclasses.dataclass(frozen=True)
class HostJob:
    """What one host runs. It is sent to other hosts as JSON."""

    program: Sequence[str]
    directory: str
    environ: Mapping[str, str]  # of all instances, added to the host's own
    instances: Mapping[int, Mapping[str, str]]  # by index, with the variables of each
    pins: bool  # whether each instance is pinned to cores of its own
    server: Optional[Tuple[str, int]] = None  # the rendezvous server
    own_name: str = ""  # a host name to set for the job, if two hosts have the same one
    ipus: int = 0  # to reserve for the whole job; 0 for none
    name: str = ""  # of the job
    stall_timeout_s: float = 0.0  # how long an instance may be stopped; 0 for no limit

    def commands(self, environ: Mapping[str, str]) -> Dict[int, processes.Command]:
        """Returns the processes to start, with this machine's cores divided between them and IPUs reserved for them."""
        block = None
        with contextlib.suppress(registry.RegistryError):  # it is raised again where a device is attached
            if self.ipus:
                partition = registry.Partition.from_environment({**environ, **self.environ})
                block = partition.reserve(self.ipus, self.name)
        reserved = {registry.BLOCK: registry.render_block(block) if block else ""}
        divide = placement.place if self.pins else placement.place_anywhere
        places = divide(placement.read_nodes(), len(self.instances))
        return {
            index: processes.Command(
                self.program,
                {**place.variables(), **environ, **self.environ, **variables, **reserved},
                self.directory,
                place.cpus,
            )
            for place, (index, variables) in zip(places, self.instances.items())
        }

    def to_json(self) -> Dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostJob:
        """Reverses `to_json`. The keys of JSON objects are strings."""
        return cls(**{**value, "instances": {int(index): each for index, each in value["instances"].items()}})


def forwarded_variables(environ: Mapping[str, str], extra: Sequence[str]) -> Dict[str, str]:
    """Returns the variables that instances on another host get from this one."""
    return {
        name: value
        for name, value in environ.items()
        if name in _FORWARDED or name in extra or name.startswith(_FORWARDED_PREFIXES)
    }


def inherited_environment() -> Dict[str, str]:
    """Returns this process's environment, without the variables that are meant for poprun only."""
    for_poprun = (failure_report.FILE_VARIABLE, orphans.JOB_VARIABLE)
    return {name: value for name, value in os.environ.items() if name not in for_poprun}
