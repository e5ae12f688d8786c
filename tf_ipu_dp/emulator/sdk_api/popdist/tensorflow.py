"""`popdist.tensorflow`: this instance's device for an `IPUConfig`."""

from __future__ import annotations

from typing import Any, Optional

from tf_ipu_dp.emulator.sdk_api import popdist


def set_ipu_config(config: Any, ipus_per_replica: Optional[int] = None, configure_device: bool = True) -> Any:
    """Selects this instance's device and writes its place in the job; returns the config, which it changes."""
    width = ipus_per_replica if ipus_per_replica is not None else popdist.getNumIpusPerReplica()
    if popdist.isPopdistEnvSet() and not popdist.checkNumIpusPerReplica(width):
        raise RuntimeError(
            f"ipus_per_replica={width} differs from poprun's {popdist.getNumIpusPerReplica()} IPUs per replica."
        )
    if configure_device:
        config.select_ipus = [popdist.getDeviceId(width)]
    if popdist.getNumInstances() > 1:
        config.experimental.multi_replica_distribution.process_count = popdist.getNumInstances()
        config.experimental.multi_replica_distribution.process_index = popdist.getInstanceIndex()
    return config
