"""Which variables and queues of a graph are shared by all replicas, and which are per replica. No TensorFlow.

A graph is traced once and holds one handle for each of them. Variables are per replica unless they are kept on the
host; queues are shared unless each replica is assigned its own.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Set

_on_host: Set[int] = set()
_assigned: Dict[int, List[Any]] = {}


def handle_id(tensor: Any) -> int:
    """Returns TensorFlow's id of an eager tensor."""
    return int(tensor._id)


def keep_on_host(variable: Any) -> None:
    """Makes all replicas share a variable."""
    if hasattr(variable.handle, "_id"):  # not in a graph of TensorFlow 1, which has no replicas here
        _on_host.add(handle_id(variable.handle))


def is_on_host(handle: Any) -> bool:
    """Whether all replicas share the variable of a handle."""
    return handle_id(handle) in _on_host


def assign(handle: Any, handles: List[Any]) -> None:
    """Gives replica i the i-th of the handles where the graph has this one."""
    _assigned[handle_id(handle)] = handles


def unassign(handle: Any) -> None:
    """Drops the assignment of a handle that is no longer used."""
    _assigned.pop(handle_id(handle), None)


def assigned_to(handle: Any) -> Optional[List[Any]]:
    """Returns the replicas' own handles, or None if the handle is not assigned."""
    return _assigned.get(handle_id(handle))
