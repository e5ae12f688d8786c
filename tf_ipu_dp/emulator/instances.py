"""Collectives between the instances of a job, over Horovod. With one instance nothing is sent, and nothing imported.

Everything that instances exchange goes through here, so that all of them make the same calls in the same order.
"""

from __future__ import annotations

import os
from typing import Any, List, Optional, Sequence

_connected = False


def count() -> int:
    """Returns the instances of the job."""
    total, local = (int(os.environ.get(f"POPDIST_NUM_{name}_REPLICAS", "1")) for name in ("TOTAL", "LOCAL"))
    return total // local


def connect() -> None:
    """Meets the other instances. Calling it again is harmless."""
    global _connected  # noqa: PLW0603
    if not _connected and count() > 1:
        _horovod().init()
        if _horovod().size() != count():
            raise RuntimeError(
                f"poprun started {count()} instances, but Horovod sees {_horovod().size()}: "
                "start them with python -m tf_ipu_dp.emulator.poprun."
            )
    _connected = True


def is_connected() -> bool:
    """Whether `connect` has been called."""
    return _connected


def disconnect() -> None:
    """Leaves the job."""
    global _connected  # noqa: PLW0603
    if _connected and count() > 1:
        _horovod().shutdown()
    _connected = False


def wait_for_all() -> None:
    """Returns when every instance has called it."""
    if count() > 1:
        import tensorflow as tf

        _horovod().allreduce(tf.zeros([1]), op=_horovod().Sum, name="synchronize")


def sum_over_instances(tensors: Sequence[Any], name: str) -> List[Any]:
    """Returns the sums over all instances, exchanged in one go."""
    if count() == 1:
        return list(tensors)
    horovod = _horovod()
    return list(horovod.grouped_allreduce(list(tensors), op=horovod.Sum, name=name))


def gather(tensor: Any, name: Optional[str] = None) -> Any:
    """Returns the tensors of all instances, stacked."""
    import tensorflow as tf

    return tensor[tf.newaxis] if count() == 1 else _horovod().allgather(tensor[tf.newaxis], name=name)


def broadcast(tensor: Any, name: Optional[str] = None) -> Any:
    """Returns the tensor of instance 0."""
    return tensor if count() == 1 else _horovod().broadcast(tensor, root_rank=0, name=name)


def _horovod() -> Any:
    import horovod.tensorflow as horovod

    return horovod
