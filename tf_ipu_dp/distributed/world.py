"""This instance's place in the job, from the launcher's environment variables, and collectives between instances.

Imports no TensorFlow: collectives use the SDK's `ipu.distributed`, which is passed in.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import socket
import struct
import zlib
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.planning.plan import LaunchedTopology

_MAX_COUNT = 2**20

# Variables that poprun sets for each instance. `popdist` reads the same.
_TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
_LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
_IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
_REPLICA_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
_IS_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
_LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
_REQUIRED = (_TOTAL_REPLICAS, _LOCAL_REPLICAS, _IPUS_PER_REPLICA, _REPLICA_OFFSET)

# Other launchers do not support IPUs: they only set the rank, the number of processes, and the rank on the host.
_RANKS = {
    "horovodrun": ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    # SLURM_STEP_NUM_TASKS is set inside srun only; a batch script also has SLURM_PROCID.
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_MAX_DIFFERENCES = 3
_HOST = "host"


def read_launched(environ: Mapping[str, str]) -> Optional[LaunchedTopology]:
    """Returns the job that poprun started this process in; None without poprun."""
    present = [name for name in _REQUIRED if name in environ]
    if not present:
        return None
    missing = [name for name in _REQUIRED if name not in environ]
    if missing:
        raise cli.UsageError(
            f"{present[0]} is set but {cli.alternatives(missing)} is not: poprun sets all of them. "
            "Start through poprun, or unset the POPDIST_* variables."
        )
    if environ.get(_IS_UNIFORM, "1") == "0":
        raise cli.UsageError(
            "poprun gave the instances different numbers of replicas. "
            "Make its --num-replicas a multiple of --num-instances."
        )
    replicas, local, per_replica = (
        _read_count(environ, name, 1) for name in (_TOTAL_REPLICAS, _LOCAL_REPLICAS, _IPUS_PER_REPLICA)
    )
    offset = _read_count(environ, _REPLICA_OFFSET, 0)
    if replicas % local or offset % local or offset >= replicas:
        raise cli.UsageError(
            f"{_TOTAL_REPLICAS}={replicas}, {_LOCAL_REPLICAS}={local} and {_REPLICA_OFFSET}={offset} "
            "do not describe equal instances. Start through poprun."
        )
    return LaunchedTopology(
        launcher="poprun",
        replicas=replicas,
        ipus_per_replica=per_replica,
        instances=replicas // local,
        instance=offset // local,
        hosts=_read_hosts(environ, replicas // local),
    )


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The place of a process among those that a launcher other than poprun started."""

    launcher: str
    instance: int
    instances: int
    local_instance: int

    def variables(self, *, replicas: int, ipus_per_replica: int) -> Dict[str, str]:
        """Returns the variables that poprun would have set for this process."""
        local = replicas // self.instances
        values = {
            _TOTAL_REPLICAS: replicas,
            _LOCAL_REPLICAS: local,
            _IPUS_PER_REPLICA: ipus_per_replica,
            _REPLICA_OFFSET: self.instance * local,
            _IS_UNIFORM: 1,
            _LOCAL_INSTANCE: self.local_instance,
        }
        return {name: str(value) for name, value in values.items()}


def read_ranks(environ: Mapping[str, str]) -> Optional[Ranks]:
    """Returns this process's place among those of horovodrun, mpirun or srun; None if there is only one."""
    for launcher, (rank, size, local_rank) in _RANKS.items():
        if rank in environ and size in environ:
            instances, instance = _read_count(environ, size, 1), _read_count(environ, rank, 0)
            if instance >= instances:
                raise cli.UsageError(f"{rank}={instance} and {size}={instances} do not fit. Start through {launcher}.")
            if instances > 1:
                local = _read_count(environ, local_rank, 0) if local_rank in environ else instance
                return Ranks(launcher, instance, instances, local)
    return None


@dataclasses.dataclass(frozen=True)
class World:
    """The instances of a job, seen from one of them. All of them must call the same methods in the same order."""

    instance: int = 0
    instances: int = 1
    distributed: Any = None  # the SDK's module, if there are several

    @property
    def is_leader(self) -> bool:
        """Whether this is the instance that prints and writes the run's folder."""
        return self.instance == 0

    def sum_over_instances(self, values: Sequence[float]) -> List[float]:
        """Returns the sums over all instances. Doubles are sent exactly, though the SDK gathers 32-bit numbers only."""
        return [sum(column) for column in zip(*self.gather_numbers(values))]

    def gather_numbers(self, values: Sequence[float]) -> List[Sequence[float]]:
        """Returns the numbers of every instance; all pass the same count."""
        if self.instances == 1:
            return [tuple(values)]
        words = struct.unpack(f"<{2 * len(values)}i", struct.pack(f"<{len(values)}d", *values))
        everyone = self._gather_numbers(list(words))
        return [struct.unpack(f"<{len(values)}d", struct.pack(f"<{len(row)}i", *row)) for row in everyone]

    def gather(self, message: bytes) -> List[bytes]:
        """Returns the messages of all instances; they may differ in length."""
        if self.instances == 1:
            return [message]
        lengths = self._gather_numbers([len(message)])
        longest = max(length for (length,) in lengths)
        padded = list(message.ljust(longest, b"\0"))
        return [bytes(part[:length]) for part, (length,) in zip(self._gather_numbers(padded), lengths)]

    def compare(self, values: Mapping[str, str]) -> None:
        """Raises a UsageError that names the instances whose values differ from the others'."""
        message = json.dumps({**values, _HOST: socket.gethostname()}).encode()
        everyone = [json.loads(each) for each in self.gather(message)]
        differences = describe_differences(everyone)
        if differences:
            rest = len(differences) - _MAX_DIFFERENCES
            more = f"; and {rest} more" if rest > 0 else ""
            raise cli.UsageError(
                f"The instances differ: {'; '.join(differences[:_MAX_DIFFERENCES])}{more}. "
                "Start all of them with the same flags, data and versions."
            )

    def compare_digests(self, digests: Sequence[Tuple[str, int]]) -> Optional[str]:
        """Returns the first name whose digest differs between the instances, and which instances differ from most."""
        total = hash_of(number for _, number in digests)
        if len(set(self.gather_numbers([float(total)]))) == 1:
            return None
        every = self.gather_numbers([float(number) for _, number in digests])
        for (name, _), numbers in zip(digests, zip(*every)):
            usual, times = collections.Counter(numbers).most_common(1)[0]
            odd = [instance for instance, number in enumerate(numbers) if number != usual]
            if odd and 2 * times <= len(numbers):
                return f"{name} differs between the instances"
            if odd:
                return f"{name} of instance {cli.alternatives(odd)} differs from the others'"
        return None

    def hosts_where(self, condition: bool) -> List[str]:
        """Returns the hosts of the instances that pass True."""
        answers = self.gather(socket.gethostname().encode() if condition else b"")
        return sorted({answer.decode() for answer in answers if answer})

    def broadcast_from_leader(self, text: str) -> str:
        """Returns the leader's text on all instances."""
        return self.gather(text.encode())[0].decode()

    def barrier(self) -> None:
        """Returns once all instances have called it."""
        self.gather_numbers([0.0])

    def _gather_numbers(self, numbers: List[int]) -> List[List[int]]:
        import numpy as np

        gathered: List[List[int]] = np.asarray(self.distributed.allgather(np.asarray(numbers, np.int32))).tolist()
        return gathered


def hash_of(numbers: Iterable[int]) -> int:
    """Returns a 32-bit hash of many 32-bit numbers."""
    return zlib.crc32(b"".join(struct.pack("<I", number) for number in numbers))


def describe_differences(everyone: Sequence[Mapping[str, str]]) -> List[str]:
    """Returns a sentence for each value in which an instance differs from most of the others."""
    sentences = []
    names = dict.fromkeys(name for values in everyone for name in values if name != _HOST)
    for name in names:
        values = [each.get(name, "nothing") for each in everyone]
        usual, _ = collections.Counter(values).most_common(1)[0]
        odd = [number for number, value in enumerate(values) if value != usual]
        if odd:
            subject = f"instance {odd[0]} on {everyone[odd[0]].get(_HOST, '?')}"
            more = f" (and {len(odd) - 1} more)" if odd[1:] else ""
            sentences.append(f"{subject}{more} has {name} {values[odd[0]]} where the others have {usual}")
    return sentences


def _read_hosts(environ: Mapping[str, str], instances: int) -> Optional[int]:
    """Returns the number of hosts, if the launcher sets how many instances share this one."""
    if _LOCAL_SIZE not in environ:
        return None
    on_this_host = _read_count(environ, _LOCAL_SIZE, 1)
    return instances // on_this_host if instances % on_this_host == 0 else None


def _read_count(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 7) or not least <= int(text) <= _MAX_COUNT:
        shown = environ[name][:20]
        raise cli.UsageError(
            f"{name}={shown!r} is not a whole number from {least} to {_MAX_COUNT}. Start through poprun."
        )
    return int(text)
