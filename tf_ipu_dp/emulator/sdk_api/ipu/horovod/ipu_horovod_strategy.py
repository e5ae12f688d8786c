"""`tensorflow.python.ipu.horovod.ipu_horovod_strategy` of releases up to 3.0."""

from tf_ipu_dp.emulator.refusal import refused

IPUHorovodStrategy = refused(
    "tensorflow.python.ipu.horovod.ipu_horovod_strategy.IPUHorovodStrategy",
    "release 3.1 removed it; use PopDistStrategy",
)
