"""Who am I, and how many are we: the job as the launcher's environment describes it, and what its instances exchange.

No TensorFlow of its own: collectives go through the SDK's `ipu.distributed`, which is handed in.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any, List, Mapping, Optional, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.plan import LaunchedTopology

_MOST = 2**20
_POPDIST = {
    "replicas": "POPDIST_NUM_TOTAL_REPLICAS",
    "local_replicas": "POPDIST_NUM_LOCAL_REPLICAS",
    "ipus_per_replica": "POPDIST_NUM_IPUS_PER_REPLICA",
    "offset": "POPDIST_REPLICA_INDEX_OFFSET",
}


def read_launched(environ: Mapping[str, str]) -> Optional[LaunchedTopology]:
    """Returns the job that poprun started this process in, or None when nobody did."""
    present = [name for name in _POPDIST.values() if name in environ]
    if not present:
        return None
    missing = [name for name in _POPDIST.values() if name not in environ]
    if missing:
        raise cli.UsageError(
            f"{present[0]} is set but {cli.alternatives(missing)} is not: poprun sets all of them. "
            "Start through poprun, or unset the POPDIST_* variables."
        )
    if environ.get("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1") == "0":
        raise cli.UsageError(
            "poprun gave the instances different numbers of replicas. "
            "Make its --num-replicas a multiple of --num-instances."
        )
    replicas, local, per_replica = (
        _count(environ, _POPDIST[key], 1) for key in ("replicas", "local_replicas", "ipus_per_replica")
    )
    offset = _count(environ, _POPDIST["offset"], 0)
    if replicas % local or offset % local or offset >= replicas:
        raise cli.UsageError(
            f"POPDIST_NUM_TOTAL_REPLICAS={replicas}, POPDIST_NUM_LOCAL_REPLICAS={local} and "
            f"POPDIST_REPLICA_INDEX_OFFSET={offset} do not describe equal instances. Start through poprun."
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
class World:
    """The instances of a job, as one of them sees it. Every method is called by all of them, in the same order."""

    instance: int = 0
    instances: int = 1
    distributed: Any = None  # the SDK's module, if there are several

    @property
    def leads(self) -> bool:
        """Whether this is the instance that speaks and writes."""
        return self.instance == 0

    def sums(self, values: Sequence[float]) -> List[float]:
        """Returns the sums over all instances, of doubles: each travels exactly, whatever the wire carries."""
        return [sum(column) for column in zip(*self.gather_numbers(values))]

    def gather_numbers(self, values: Sequence[float]) -> List[Sequence[float]]:
        """Returns the numbers of all instances, which have as many."""
        if self.instances == 1:
            return [values]
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

    def agree(self, value: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns instance 0's value on all of them."""
        answer: Mapping[str, Any] = json.loads(self.gather(json.dumps(value).encode())[0])
        return answer

    def _gather_numbers(self, numbers: List[int]) -> List[List[int]]:
        import numpy as np

        gathered = self.distributed.allgather(np.asarray(numbers, np.int32))
        return [[int(number) for number in row] for row in np.asarray(gathered)]


def _read_hosts(environ: Mapping[str, str], instances: int) -> Optional[int]:
    """Open MPI, under poprun, tells how many instances share this host; without it the number of hosts is not known."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" not in environ:
        return None
    on_this_host = _count(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    return instances // on_this_host if instances % on_this_host == 0 else None


def _count(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 7) or not least <= int(text) <= _MOST:
        shown = environ[name][:20]
        raise cli.UsageError(f"{name}={shown!r} is not a whole number from {least} to {_MOST}. Start through poprun.")
    return int(text)
