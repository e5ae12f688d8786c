"""Which cores the instances of a host use. Standard library only.

On a machine with several NUMA nodes an instance is pinned to its node, where its memory is. On one node nothing is
pinned, because the scheduler does better; only the numbers of threads are divided.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

# Read by TensorFlow, its libraries and the emulator.
_THREADS = ("IPU_EMULATOR_CORES", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an instance runs."""

    threads: int
    cpus: Optional[Tuple[int, ...]]  # that it is pinned to; None if it is not pinned

    def variables(self) -> Dict[str, str]:
        """Returns the variables that limit the threads of a program. The user's own settings take precedence."""
        return {name: str(self.threads) for name in _THREADS}


def place(nodes: Sequence[Sequence[int]], instances: int) -> List[Place]:
    """Divides the nodes' cores between the instances: consecutive ones share a node, and every core is used."""
    filled = [tuple(node) for node in nodes if node]
    if len(filled) < 2:
        cores = sum(map(len, filled))
        return [Place(max(cores // instances, 1), None)] * instances
    if instances <= len(filled):
        bounds = [number * len(filled) // instances for number in range(instances + 1)]
        own = [sum(filled[first:last], ()) for first, last in zip(bounds, bounds[1:])]
        return [Place(len(cpus), cpus) for cpus in own]
    homes = [number * len(filled) // instances for number in range(instances)]
    return [Place(max(len(filled[home]) // homes.count(home), 1), filled[home]) for home in homes]


def read_nodes(numa: bool = True) -> List[List[int]]:
    """Returns the cores of each NUMA node that this process may use; with `numa` off, all of them as one node."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    lists = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"), key=_number) if numa else []
    nodes = [sorted(allowed.intersection(parse_cpus(path.read_text()))) for path in lists]
    known = {cpu for node in nodes for cpu in node}
    return nodes if known == allowed else [sorted(allowed)]


def parse_cpus(text: str) -> List[int]:
    """Reads the kernel's format for a set of cores, like 0-3,8."""
    cpus: List[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _number(path: Path) -> int:
    return int(path.parent.name[len("node") :])
