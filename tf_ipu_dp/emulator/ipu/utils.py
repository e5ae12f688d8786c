"""`tensorflow.python.ipu.utils`: re-exports of the configuration, and small helpers."""

from __future__ import annotations

from typing import Any

import numpy as np

from tf_ipu_dp.emulator.ipu.config import (
    DeviceConnectionType,
    ExecutionProfileType,
    IPUConfig,
    MergeRemoteBuffersBehaviour,
    SchedulingAlgorithm,
    SelectionOrder,
    configure_ipu_system,
    configured_system,
    get_ipu_config,
    reset_ipu_configuration,
    running_on_ipu_model,
)

__all__ = [
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "configure_ipu_system",
    "get_ipu_config",
    "get_num_of_ipus_in_device",
    "move_variable_initialization_to_cpu",
    "reset_ipu_configuration",
    "running_on_ipu_model",
]


def get_num_of_ipus_in_device(ipu_device: str, device: str = "cpu") -> Any:
    """Returns the IPUs of a TensorFlow device like `/device:IPU:0`."""
    del device
    return np.int64(configured_system().ipus_per_device[int(ipu_device.rsplit(":", 1)[-1])])


def move_variable_initialization_to_cpu(graph: Any = None) -> None:
    """Does nothing: variables are made on the host anyway."""
    del graph
