"""`tensorflow.python.ipu.utils`: re-exports of the configuration, and small helpers."""

from __future__ import annotations

import enum
import os
from typing import Any

import numpy as np

from tf_ipu_dp.emulator.refusal import refused
from tf_ipu_dp.emulator.runtime import poplar_flags, random_numbers
from tf_ipu_dp.emulator.sdk_api.ipu.config import (
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
from tf_ipu_dp.emulator.sdk_api.ipu.dataset_extractor import (
    export_dataset_to_file,
    export_inputs_to_file,
    export_variables_from_live_model,
    export_variables_from_live_session,
    import_data_in_live_model,
    import_data_in_live_session,
)

IpuOptions = refused("ipu.utils.IpuOptions", "the emulator has no protobuf configuration; use ipu.config.IPUConfig")

__all__ = [
    "DeviceConnectionType",
    "ExecutionProfileType",
    "IPUConfig",
    "IpuOptions",
    "MergeRemoteBuffersBehaviour",
    "SchedulingAlgorithm",
    "SelectionOrder",
    "SyntheticDataCategory",
    "configure_ipu_system",
    "export_dataset_to_file",
    "export_inputs_to_file",
    "export_variables_from_live_model",
    "export_variables_from_live_session",
    "get_ipu_config",
    "get_num_of_ipus_in_device",
    "import_data_in_live_model",
    "import_data_in_live_session",
    "move_variable_initialization_to_cpu",
    "reset_ipu_configuration",
    "reset_ipu_seed",
    "running_on_ipu_model",
    "use_synthetic_data_for",
]


def get_num_of_ipus_in_device(ipu_device: str, device: str = "cpu") -> Any:
    """Returns the IPUs of a TensorFlow device like `/device:IPU:0`; of one that spans instances, those of all."""
    del device
    system = configured_system()
    processes = system.config.experimental.multi_replica_distribution.process_count or 1
    return np.int64(processes * system.ipus_per_device[int(ipu_device.rsplit(":", 1)[-1])])


class SyntheticDataCategory(enum.Enum):
    """The kinds of data that TF_POPLAR_FLAGS can make synthetic."""

    Infeed = 1
    Outfeed = 2
    Seed = 3
    HostEmbedding = 4
    Parameters = 5


def use_synthetic_data_for(synthetic_data_category: SyntheticDataCategory) -> bool:
    """Whether TF_POPLAR_FLAGS requests synthetic data of this kind."""
    return synthetic_data_category.name.lower() in poplar_flags.synthetic_categories(poplar_flags.read(os.environ))


def reset_ipu_seed(
    seed: int, device: str = "/device:IPU:0", cpu_device: str = "cpu", experimental_identical_replicas: bool = False
) -> None:
    """Restarts the device's random numbers; replicas get different ones unless identical ones are requested."""
    del cpu_device
    if not device.rsplit(":", 1)[-1].isdigit():
        import tensorflow as tf

        raise tf.errors.InvalidArgumentError(None, None, f"{device!r} has no number; it is like /device:IPU:0.")
    random_numbers.reset_seed(seed, experimental_identical_replicas)


def move_variable_initialization_to_cpu(graph: Any = None) -> None:
    """Does nothing: variables are made on the host anyway."""
    del graph
