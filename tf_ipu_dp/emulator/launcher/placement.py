"""Which cores the instances of a host use. Standard library only.

Each instance is pinned to cores of its own, on one NUMA node if possible, where its memory is. They wait for each other
after every update, and the scheduler would now and then wake two of them on one core while another one is idle. If
there are more instances than cores, those of a node share it.
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
    if instances <= len(filled):
        bounds = [number * len(filled) // instances for number in range(instances + 1)]
        own = [sum(filled[first:last], ()) for first, last in zip(bounds, bounds[1:])]
        return [Place(len(cpus), cpus) for cpus in own]
    homes = [number * len(filled) // instances for number in range(instances)]
    return [own for home, node in enumerate(filled) for own in _divide(node, homes.count(home))]


def place_anywhere(nodes: Sequence[Sequence[int]], instances: int) -> List[Place]:
    """Divides the threads between the instances, none of which is pinned."""
    return [Place(max(sum(map(len, nodes)) // instances, 1), None)] * instances


def _divide(node: Sequence[int], instances: int) -> List[Place]:
    threads = len(node) // instances
    if not threads:
        return [Place(1, tuple(node))] * instances
    bounds = [number * len(node) // instances for number in range(instances + 1)]
    return [Place(threads, tuple(node[first:last])) for first, last in zip(bounds, bounds[1:])]


def read_nodes() -> List[List[int]]:
    """Returns the cores of each NUMA node that this process may use; the threads of a physical core stand together."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    lists = sorted(Path("/sys/devices/system/node").glob("node[0-9]*/cpulist"), key=_number)
    nodes = [allowed.intersection(parse_cpus(path.read_text())) for path in lists]
    known = {cpu for node in nodes for cpu in node}
    return [sorted(node, key=_physical_core) for node in (nodes if known == allowed else [allowed])]


def _physical_core(cpu: int) -> Tuple[int, int]:
    """Returns the first thread of the core that this one belongs to, and this one."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return min(parse_cpus(path.read_text()), default=cpu), cpu
    except OSError:
        return cpu, cpu


def parse_cpus(text: str) -> List[int]:
    """Reads the kernel's format for a set of cores, like 0-3,8."""
    cpus: List[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return cpus


def _number(path: Path) -> int:
    return int(path.parent.name[len("node") :])
