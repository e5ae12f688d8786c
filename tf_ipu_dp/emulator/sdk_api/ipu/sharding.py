"""`tensorflow.python.ipu.sharding`: the shard of an operation. The emulator has no shards, so it is always None."""

from __future__ import annotations

from typing import Any, Iterable, Set


def get_sharding(op: Any) -> None:
    """Returns the shard of an operation: always None."""
    del op


def get_shard_from_colocation(op: Any) -> None:
    """Returns the shard of the operation that this one is colocated with: always None."""
    del op


def has_attr(o: Any, attr_name: str) -> bool:
    """Whether an operation has an attribute."""
    return attr_name in o.node_def.attr


def dependencies(roots: Iterable[Any]) -> Set[Any]:
    """Returns the operations that the given ones need, themselves included."""
    found: Set[Any] = set()
    open_ = list(roots)
    while open_:
        operation = open_.pop()
        if operation not in found:
            found.add(operation)
            open_ += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return found


def propagate_sharding(g: Any) -> None:
    """Does nothing: there is no shard to propagate."""
    del g


def enable_sharded_gradient_tape() -> None:
    """Does nothing: gradients would be computed on the shard of their forward operation."""


__all__ = [
    "dependencies",
    "enable_sharded_gradient_tape",
    "get_shard_from_colocation",
    "get_sharding",
    "has_attr",
    "propagate_sharding",
]
