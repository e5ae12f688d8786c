"""`tensorflow.python.ipu.horovod.popdist_strategy` of releases up to 3.0: where the strategy was."""

from tf_ipu_dp.emulator.sdk_api.ipu.distributed.popdist_strategy import PopDistStrategy

__all__ = ["PopDistStrategy"]
