"""`tensorflow.python.ipu.optimizers.sharded_optimizer`."""

from __future__ import annotations

from typing import Any

from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.ipu_optimizer import IpuOptimizer


class ShardedOptimizer(IpuOptimizer):
    """On an IPU, places gradients on the shards of their operations. The emulator has no shards."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer, "ShardedOptimizer")
