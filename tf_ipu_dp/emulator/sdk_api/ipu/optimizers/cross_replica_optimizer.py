"""`tensorflow.python.ipu.optimizers.cross_replica_optimizer`."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Iterable, Iterator, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import replicas
from tf_ipu_dp.emulator.sdk_api.ipu.ops import cross_replica_ops
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.ipu_optimizer import IpuOptimizer


class CrossReplicaOptimizer(IpuOptimizer):
    """Updates with the mean of the replicas' gradients, so that their weights stay equal."""

    def __init__(self, opt: Any, name: str = "CrossReplicaOptimizer") -> None:
        super().__init__(opt, name)

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Applies the mean of the gradients over the replicas."""
        reduced = [
            (None if gradient is None else cross_replica_ops.cross_replica_mean(tf.convert_to_tensor(gradient)), var)
            for gradient, var in grads_and_vars
        ]
        with _without_reduction():
            return super().apply_gradients(reduced, global_step, name)


@contextlib.contextmanager
def _without_reduction() -> Iterator[None]:
    """Inside, the strategy does not sum over the replicas, as it otherwise does for TF1 optimizers."""
    program = replicas.current()
    if program is None:
        yield
        return
    updating = dataclasses.replace(program, updating=True)
    with replicas.traced_as(updating):
        yield
    program.random_ops = updating.random_ops
