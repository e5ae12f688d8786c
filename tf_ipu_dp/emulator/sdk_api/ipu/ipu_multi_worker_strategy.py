"""`tensorflow.python.ipu.ipu_multi_worker_strategy`: the deprecated strategy for several hosts, refused."""

from __future__ import annotations

from tf_ipu_dp.emulator.refusal import refused

_WHY = "it is deprecated and replaced by PopDistStrategy"

IPUMultiWorkerStrategy = refused("ipu.ipu_multi_worker_strategy.IPUMultiWorkerStrategy", _WHY)
IPUMultiWorkerStrategyV1 = refused("ipu.ipu_multi_worker_strategy.IPUMultiWorkerStrategyV1", _WHY)

__all__ = [
    "IPUMultiWorkerStrategy",
    "IPUMultiWorkerStrategyV1",
]
