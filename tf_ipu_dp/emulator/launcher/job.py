"""The job that poprun starts: replicas, instances, IPUs and hosts, and the rules that they must follow. Pure."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.emulator import popdist_variables
from tf_ipu_dp.emulator.launcher.poprun_options import OptionError

_MAX_SUGGESTION = 4096


@dataclasses.dataclass(frozen=True)
class Job:
    """The number of replicas, instances and IPUs, and the hosts."""

    replicas: int
    instances: int
    ipus_per_replica: int
    hosts: Tuple[str, ...] = ("localhost",)
    link_domains: int = 1
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    @property
    def local_replicas(self) -> int:
        return self.replicas // self.instances

    @property
    def ipus(self) -> int:
        return self.replicas * self.ipus_per_replica

    @property
    def instances_per_host(self) -> int:
        return self.instances // len(self.hosts)

    def host_of(self, instance: int) -> str:
        """Returns where an instance runs."""
        return self.hosts[instance // self.instances_per_host]

    def instances_on(self, host: str) -> List[int]:
        """Returns the instances of a host."""
        return [instance for instance in range(self.instances) if self.host_of(instance) == host]

    def link_domain_of(self, instance: int) -> int:
        """Returns the IPU-Link domain of an instance's first IPU."""
        return instance * self.local_replicas * self.ipus_per_replica * self.link_domains // self.ipus

    def variables(self, instance: int) -> Dict[str, str]:
        """Returns the variables that describe an instance's place: those of PopDist, Open MPI and Horovod."""
        host, local = divmod(instance, self.instances_per_host)
        rank = {"RANK": instance, "SIZE": self.instances, "LOCAL_RANK": local, "LOCAL_SIZE": self.instances_per_host}
        popdist = {
            popdist_variables.TOTAL_REPLICAS: self.replicas,
            popdist_variables.IPUS_PER_REPLICA: self.ipus_per_replica,
            popdist_variables.LOCAL_REPLICAS: self.local_replicas,
            popdist_variables.IS_UNIFORM: 1,
            popdist_variables.REPLICA_OFFSET: instance * self.local_replicas,
            popdist_variables.LOCAL_INSTANCE: local,
        }
        mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in rank.items()}
        mpi.update(OMPI_COMM_WORLD_NODE_RANK=local, OMPI_UNIVERSE_SIZE=self.instances)
        horovod = {f"HOROVOD_{name}": value for name, value in rank.items()}
        horovod.update(HOROVOD_CROSS_RANK=host, HOROVOD_CROSS_SIZE=len(self.hosts))
        return {name: str(value) for name, value in {**popdist, **mpi, **horovod}.items()}


def plan_job(
    replicas: int,
    instances: int,
    ipus_per_replica: int,
    hosts: Sequence[str] = ("localhost",),
    link_domains: int = 1,
    partition: Optional[int] = None,
) -> Job:
    """Returns the job. Refuses what poprun refuses, and more IPUs than the partition has."""
    if instances % len(hosts):
        near = _nearest(instances, lambda n: n % len(hosts) == 0)
        raise OptionError(
            f"--num-instances {instances} cannot be spread evenly over {len(hosts)} hosts. Use --num-instances {near}."
        )
    if replicas % instances:
        near = _nearest(replicas, lambda n: n % instances == 0 and _is_power_of_two(n * ipus_per_replica))
        near = near or _nearest(replicas, lambda n: n % instances == 0)
        raise OptionError(
            f"--num-replicas {replicas} cannot be spread evenly over --num-instances {instances}. "
            f"Use --num-replicas {near}."
        )
    job = Job(replicas, instances, ipus_per_replica, tuple(hosts), link_domains)
    given = f"--num-replicas {replicas} x --ipus-per-replica {ipus_per_replica} = {job.ipus} IPUs"
    if partition is not None and not _is_power_of_two(job.ipus):  # without one, nothing is attached
        raise OptionError(f"{given}, but partitions come in powers of two. {_suggest_powers_of_two(job)}")
    if partition is not None and job.ipus > partition:
        fits = partition // ipus_per_replica
        fewer = f"--num-replicas {fits} or " if fits >= instances else ""
        raise OptionError(
            f"{given}, but the emulated partition has {partition}. Use {fewer}IPU_EMULATOR_IPUS={job.ipus}."
        )
    if job.ipus % link_domains:
        near = _nearest(link_domains, lambda n: job.ipus % n == 0)
        raise OptionError(f"--num-ilds {link_domains} does not divide {job.ipus} IPUs. Use --num-ilds {near}.")
    return job


def render_topology(job: Job) -> str:
    """Returns the table of --print-topology."""
    rows = [("host", "ILD", "instance", "replicas", "IPUs")]
    width = job.local_replicas * job.ipus_per_replica
    for instance in range(job.instances):
        first = instance * job.local_replicas
        replicas = _render_range(first, first + job.local_replicas - 1)
        ipus = _render_range(instance * width, (instance + 1) * width - 1)
        rows.append((job.host_of(instance), str(job.link_domain_of(instance)), str(instance), replicas, ipus))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _render_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _nearest(number: int, is_possible: Callable[[int], bool]) -> str:
    below = next((n for n in range(min(number, _MAX_SUGGESTION) - 1, 0, -1) if is_possible(n)), None)
    above = next((n for n in range(number + 1, max(2 * number, _MAX_SUGGESTION) + 1) if is_possible(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def _suggest_powers_of_two(job: Job) -> str:
    """Returns what to change. All numbers must be powers of two, so one change is not always enough."""
    options = {"--num-replicas": job.replicas, "--ipus-per-replica": job.ipus_per_replica}
    options.update({"--num-instances": job.instances})
    odd = {name: number for name, number in options.items() if not _is_power_of_two(number)}
    advice = [f"{name} {_nearest(number, _is_power_of_two)}" for name, number in odd.items()]
    if not _is_power_of_two(len(job.hosts)):
        advice.append(f"{_nearest(len(job.hosts), _is_power_of_two)} hosts")
    return f"Use {', and '.join(advice)}."


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
