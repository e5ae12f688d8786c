"""Where a job runs: IPUs, replicas, instances and hosts, and the formulas that tie them together. Pure."""

from __future__ import annotations

import dataclasses
from typing import Iterator, Optional, Sequence

from tf_ipu_dp.config.values import Hosts


@dataclasses.dataclass(frozen=True)
class LaunchedTopology:
    """What a launcher has already started: the job that this process is an instance of."""

    launcher: str
    replicas: int
    ipus_per_replica: int
    instances: int
    instance: int
    hosts: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Replica:
    """Where one copy of the model is. Stage s runs on `ipu_ids[s]`; IPUs beyond the stages are idle."""

    index: int
    instance: int
    host: int
    ipu_ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Topology:
    """IPUs, replicas, instances and hosts of the whole job."""

    ipus: int
    pipeline_stages: int
    pipeline_schedule: str
    instances: int
    hosts: Hosts
    launcher: Optional[str]

    @property
    def ipus_per_replica(self) -> int:
        return ipus_per_replica(self.pipeline_stages)

    @property
    def replicas(self) -> int:
        return self.ipus // self.ipus_per_replica

    @property
    def local_replicas(self) -> int:
        """Replicas that one instance drives."""
        return self.replicas // self.instances

    @property
    def ipus_per_instance(self) -> int:
        return self.ipus // self.instances

    @property
    def instances_per_host(self) -> int:
        return self.instances // self.hosts.count

    @property
    def idle_ipus(self) -> int:
        """IPUs that are reserved because a replica takes a power of two of them, but run no stage."""
        return self.replicas * (self.ipus_per_replica - self.pipeline_stages)

    def host_name(self, host: int) -> str:
        """Returns the name given for a host, or its number."""
        return self.hosts.names[host] if self.hosts.names else f"host {host}"

    def replica(self, index: int) -> Replica:
        """Returns where a replica is. Instances get consecutive replicas, and hosts consecutive instances."""
        instance = index // self.local_replicas
        first = index * self.ipus_per_replica
        ids = range(first, first + self.ipus_per_replica)
        return Replica(index, instance, instance // self.instances_per_host, ids)

    def all_replicas(self) -> Iterator[Replica]:
        """Yields the replicas in order."""
        return map(self.replica, range(self.replicas))


def ipus_per_replica(stages: int) -> int:
    """Returns the IPUs that a replica with this many pipeline stages takes: the next power of two."""
    return 1 << (stages - 1).bit_length()


def accumulation_unit(stages: int, schedule: str) -> int:
    """Returns the number that the accumulation must be a multiple of: a rule of the pipeline's compiler."""
    if stages == 1:
        return 1
    return {"grouped": 2 * stages, "interleaved": stages, "sequential": 1}[schedule]
