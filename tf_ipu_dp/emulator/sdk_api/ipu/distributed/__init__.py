"""`tensorflow.python.ipu.distributed`: the strategy of a PopDist job, and collectives between its instances."""

from tf_ipu_dp.emulator.sdk_api.ipu.distributed import host_collective_ops, popdist_strategy
from tf_ipu_dp.emulator.sdk_api.ipu.distributed.host_collective_ops import allgather, allreduce, broadcast
from tf_ipu_dp.emulator.sdk_api.ipu.distributed.popdist_strategy import PopDistStrategy

__all__ = ["PopDistStrategy", "allgather", "allreduce", "broadcast", "host_collective_ops", "popdist_strategy"]
