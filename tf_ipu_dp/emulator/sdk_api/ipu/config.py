"""`tensorflow.python.ipu.config`: the configuration of the IPU system, on the emulated partition."""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

from tensorflow.python.framework import errors

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.runtime import (
    cores,
    feeds,
    floating_point,
    instances,
    poplar_flags,
    poplar_options,
    random_numbers,
    synthetic_data,
)
from tf_ipu_dp.emulator.sdk_api.ipu.settings import Attribute, Settings

_IpuSelection = Union[int, List[int], Tuple[int, ...]]
_ON_DEMAND_POLL_MS = 1000
_ON_DEMAND_LIMIT_MS = 3_600_000
_UNCONFIGURED_DEVICES = 2  # the number that the SDK lists
_numbers = itertools.count()


class SelectionOrder(enum.Enum):
    """How the IPUs of a device are mapped to the logical ones; no effect on the emulator."""

    AUTO = 0
    ZIGZAG = 1
    SNAKE = 2
    HOOF = 3


class DeviceConnectionType(enum.Enum):
    """When the IPUs are attached."""

    ALWAYS = 0
    ON_DEMAND = 1
    PRE_COMPILE = 3
    NEVER = 2


class MergeRemoteBuffersBehaviour(enum.Enum):
    """When remote buffers are merged."""

    NO_MERGING = 0
    MERGE = 1
    IF_BENEFICIAL = 2


class SchedulingAlgorithm(enum.Enum):
    """How the compiler orders operations."""

    CHOOSE_BEST = 0
    CLUSTERING = 1
    POST_ORDER = 2
    LOOK_AHEAD = 3
    SHORTEST_PATH = 4


class StochasticRoundingBehaviour(enum.Enum):
    """Where stochastic rounding is on."""

    OFF = 0
    ON = 1
    REPLICA_IDENTICAL_ONLY = 2

    @classmethod
    def from_bool(cls, value: bool) -> StochasticRoundingBehaviour:
        """Returns ON or OFF."""
        return cls.ON if value else cls.OFF


class ExecutionProfileType(enum.Enum):
    """How executions are profiled."""

    NO_PROFILE = 0
    DEVICE_PROFILE = 1
    IPU_PROFILE = 2
    TILE_PROFILE = 3


class IPUConfig(Settings):
    """The configuration of the IPU system. Nothing has an effect before `configure_ipu_system`."""

    auto_select_ipus = Attribute(_IpuSelection, [], "IPUs of each TensorFlow device; any free device will do.")
    select_ipus = Attribute(_IpuSelection, [], "Ids of the devices to attach, one TensorFlow device each.")
    allow_recompute = Attribute(bool, False, "Recompute activations in the backward pass.")
    selection_order = Attribute(SelectionOrder, SelectionOrder.AUTO, "Order of the IPUs in a device.")
    serialization_output_folder = Attribute(str, "", "Where programs are serialised to.")
    compilation_poplar_options = Attribute(dict, {}, "Options of the Poplar engine; keys and values are strings.")
    gcl_poplar_options = Attribute(dict, {}, "Options of the collectives; keys and values are strings.")

    class device_connection(Settings):  # noqa: N801
        """When and how devices are attached."""

        type = Attribute(DeviceConnectionType, DeviceConnectionType.ALWAYS, "When devices are attached.")
        version = Attribute(str, "", "Architecture to compile for when no device is attached.")
        enable_remote_buffers = Attribute(bool, False, "Assume that the device supports remote buffers.")

    class floating_point_behaviour(Settings):  # noqa: N801
        """Exceptions and rounding of floating point arithmetic."""

        inv = Attribute(bool, False, "Invalid operations raise.")
        div0 = Attribute(bool, False, "Divisions by zero raise.")
        oflo = Attribute(bool, False, "Overflows raise.")
        esr = Attribute(StochasticRoundingBehaviour, StochasticRoundingBehaviour.OFF, "Stochastic rounding.")
        nanoo = Attribute(bool, False, "Half precision overflows become NaN.")
        set_all = Attribute(bool, False, "Switches all of them on.")

    class io_tiles(Settings):  # noqa: N801
        """Tiles reserved for input and output."""

        num_io_tiles = Attribute(int, 0, "How many.")
        place_ops_on_io_tiles = Attribute(bool, False, "Whether operations may be placed on them.")
        available_memory_proportion = Attribute(float, 0.9, "Share of their memory that may be used.")

    class convolutions(Settings):  # noqa: N801
        """Convolutions."""

        poplar_options = Attribute(dict, {}, "Options of the convolutions; keys and values are strings.")

    class matmuls(Settings):  # noqa: N801
        """Matrix multiplications."""

        clear_pass_type = Attribute(bool, False, "Do not set the pass type.")
        poplar_options = Attribute(dict, {}, "Options of the multiplications; keys and values are strings.")

    class slices(Settings):  # noqa: N801
        """Slices."""

        poplar_options = Attribute(dict, {}, "Options of the slices; keys and values are strings.")

    class pooling(Settings):  # noqa: N801
        """Pooling."""

        poplar_options = Attribute(dict, {}, "Options of the pooling; keys and values are strings.")

    class norms(Settings):  # noqa: N801
        """Normalisation."""

        use_stable_statistics = Attribute(bool, False, "Compute the mean first.")

        class experimental(Settings):  # noqa: N801
            """May change."""

            distributed_batch_norm_replica_group_size = Attribute(int, 1, "Replicas that share batch statistics.")

    class optimizations(Settings):  # noqa: N801
        """Of the compiler."""

        prefetch_data_streams = Attribute(bool, True, "Prefetch streams from the host.")
        combine_embedding_lookups = Attribute(bool, False, "Combine lookups.")
        combine_matmuls = Attribute(bool, False, "Combine multiplications.")
        enable_graph_outlining = Attribute(bool, True, "Reuse code for repeated parts.")
        merge_infeed_io_copies = Attribute(bool, True, "Merge copies from the infeed.")
        maximum_cross_replica_sum_buffer_size = Attribute(int, 0, "Bytes.")
        maximum_reduce_scatter_buffer_size = Attribute(int, 0, "Bytes.")
        maximum_inter_ipu_copies_buffer_size = Attribute(int, 0, "Bytes.")
        maximum_send_recv_cluster_size = Attribute(int, 0, "Bytes.")
        maximum_reduce_many_buffer_size = Attribute(int, 0, "Bytes.")
        maximum_all_gather_buffer_size = Attribute(int, 0, "Bytes.")
        minimum_remote_tensor_size = Attribute(int, 128, "Bytes.")
        merge_remote_buffers = Attribute(
            MergeRemoteBuffersBehaviour, MergeRemoteBuffersBehaviour.IF_BENEFICIAL, "Merge remote buffers."
        )
        enable_gather_simplifier = Attribute(bool, True, "Simplify gathers.")
        triangular_solve_expander_block_size = Attribute(int, 0, "Block size.")
        cholesky_block_size = Attribute(int, 0, "Block size.")
        enable_fast_math = Attribute(bool, False, "Fast arithmetic.", deprecated_msg="use optimizations.math.fast")
        enable_dynamic_slice_replacement = Attribute(bool, True, "Replace dynamic slices.")

        class math(Settings):  # noqa: N801
            """Of arithmetic."""

            fast = Attribute(bool, False, "Allow changes of the result.")
            dot_strength = Attribute(bool, True, "Turn products into cheaper operations.")

    class scheduling(Settings):  # noqa: N801
        """Of the compiler."""

        algorithm = Attribute(SchedulingAlgorithm, SchedulingAlgorithm.CHOOSE_BEST, "Which one.")
        maximum_scheduler_lookahead_depth = Attribute(int, 5, "For LOOK_AHEAD.")
        maximum_scheduler_search_space_size = Attribute(int, 64, "For LOOK_AHEAD.")

    class experimental(Settings):  # noqa: N801
        """May change."""

        always_rearrange_copies_on_the_host = Attribute(bool, False, "Rearrange on the host.")
        enable_remote_buffer_embedding = Attribute(bool, False, "Embeddings in remote buffers.")
        enable_prng_stability = Attribute(bool, False, "Keep random numbers stable.")

        class multi_replica_distribution(Settings):  # noqa: N801
            """This process's part in a job of several."""

            process_index = Attribute(int, 0, "Which.")
            process_count = Attribute(int, 0, "Of how many; 0 for none.")

    class ipu_model(Settings):  # noqa: N801
        """The vendor's IPU Model."""

        compile_ipu_code = Attribute(bool, True, "Compile for the IPU.")
        tiles_per_ipu = Attribute(int, 0, "0 for all.")
        version = Attribute(str, "ipu2", "Architecture.")

    def configure_ipu_system(self, device: str = "cpu") -> None:
        """Checks the configuration and attaches the devices."""
        configure_ipu_system(self, device)


class ConfiguredSystem:
    """The devices of this process, and the configuration that they were made from."""

    def __init__(self, config: IPUConfig) -> None:
        self.number = next(_numbers)  # programs are compiled for one configuration
        self.config: Any = copy.deepcopy(config)  # what the program sets later has no effect
        self._attachments: List[registry.Attachment] = []
        kind = self.config.device_connection.type
        is_flagged = kind is DeviceConnectionType.ALWAYS and _read_flags().get("use_on_demand") == "true"
        self._on_demand = kind is DeviceConnectionType.ON_DEMAND or is_flagged
        self._attaches = kind in (DeviceConnectionType.ALWAYS, DeviceConnectionType.ON_DEMAND)
        self._poplar_options = {
            name: value for name, value in config.to_dict().items() if value and name.endswith("poplar_options")
        }
        counts = _as_list(self.config.auto_select_ipus)
        ids = _as_list(self.config.select_ipus)
        self._requests = [{"count": n} for n in counts] + [{"device_id": n} for n in ids] or [{"count": 1}]
        with _driver_errors():
            partition = registry.Partition.from_environment(os.environ)
            if not self._attaches:  # then a device may be larger than the partition
                partition = registry.Partition(max([partition.size, *map(_next_power_of_two, counts)]), Path())
            self.ipus_per_device = [len(partition.find(**request)[0].ipus) for request in self._requests]
        if max(self.ipus_per_device) > 1:
            cores.share_between_replicas()
        if not self._on_demand:
            self._attach_devices()

    def only_compiles(self) -> bool:
        """Whether programs are compiled and not executed. Raises where the SDK refuses to execute."""
        kind = self.config.device_connection.type
        if kind is DeviceConnectionType.NEVER:
            raise errors.InvalidArgumentError(
                None, None, "Trying to run a program on a device that is configured for compilation only (NEVER)."
            )
        return bool(kind is DeviceConnectionType.PRE_COMPILE)

    def attach(self) -> None:
        """Prepares the devices for a program: attaches those on demand, and checks options that programs are made with.

        Called before every program is traced.
        """
        for name, value in self._poplar_options.items():
            poplar_options.check(name, value)
        self._attach_devices()

    def _attach_devices(self) -> None:
        if not self._attaches or self._attachments:
            return
        flags = _read_flags()
        limit_ms = float(flags.get("on_demand_device_timeout", _ON_DEMAND_LIMIT_MS)) if self._on_demand else 0.0
        poll_ms = float(flags.get("on_demand_device_poll_time", _ON_DEMAND_POLL_MS))
        try:
            with _driver_errors():
                partition = registry.Partition.from_environment(os.environ)
                for request in self._requests:
                    self._attachments.append(_attach_one(partition, request, limit_ms / 1000, poll_ms / 1000))
        except BaseException:
            self.release()
            raise

    @contextlib.contextmanager
    def executing(self) -> Iterator[None]:
        """Inside, the devices count as busy, except for the time that they wait for input."""
        for attachment in self._attachments:
            attachment.begin_execution(feeds.seconds_waited_so_far)
        try:
            yield
        except errors.InvalidArgumentError as error:
            sentence = floating_point.explain(error)
            if sentence is None:
                raise
            raise errors.InternalError(None, None, sentence) from error
        finally:
            waited = feeds.seconds_waited()
            for attachment in self._attachments:
                attachment.end_execution(waited)

    def release(self) -> None:
        """Releases the devices."""
        for attachment in self._attachments:
            attachment.release()
        self._attachments = []


_system: Optional[ConfiguredSystem] = None


def configure_ipu_system(config: Any, device: str = "cpu", reset_configuration: bool = True) -> None:
    """Checks the configuration and attaches its devices. Devices that are configured differently are reset first.

    Devices that have an equal configuration stay attached.
    """
    del device
    global _system  # noqa: PLW0603
    if not isinstance(config, IPUConfig):
        raise TypeError(f"configure_ipu_system takes an IPUConfig, not {type(config).__name__}.")
    flags = _read_flags()
    _check(config, flags)
    _normalise(config)
    if _system is not None:
        if _system.config.to_dict() == config.to_dict():
            return
        if not reset_configuration:
            raise errors.FailedPreconditionError(
                None, None, "IPU devices are configured differently already; call reset_ipu_configuration first."
            )
        logging.getLogger("tensorflow").warning("IPU devices have been configured before; resetting them.")
        reset_ipu_configuration()
    synthetic_data.configure(flags)
    _configure_arithmetic(config.floating_point_behaviour)
    _system = ConfiguredSystem(config)
    if not patches.is_applied("configured devices"):
        patches.on_undo("configured devices", reset_ipu_configuration)


def _configure_arithmetic(asked: Any) -> None:
    names = ("inv", "div0", "oflo", "nanoo")
    behaviour = floating_point.Behaviour(**{name: asked.set_all or getattr(asked, name) for name in names})
    rounds = asked.set_all or asked.esr is not StochasticRoundingBehaviour.OFF
    # All instances have the same configuration: one message is enough.
    floating_point.configure(behaviour, stochastic_rounding=rounds and instances.position() == 0)


def reset_ipu_configuration() -> None:
    """Releases the devices. Harmless when nothing is configured."""
    global _system  # noqa: PLW0603
    if _system is not None:
        _system.release()
        _system = None
        random_numbers.forget_seed()
        synthetic_data.configure({})
        floating_point.configure(floating_point.Behaviour(), stochastic_rounding=False)


def get_ipu_config(session: Any = None) -> List[Any]:
    """Returns a list with the current configuration."""
    del session
    if _system is None:
        raise RuntimeError("No IPU devices are configured.")
    return [_system.config]


def ipus_of_first_device() -> int:
    """Returns the IPUs of the device that programs use by default; 1 before any is configured."""
    return 1 if _system is None else _system.ipus_per_device[0]


def is_pre_compiled() -> bool:
    """Whether devices are configured for which programs are compiled and not executed."""
    return _system is not None and _system.config.device_connection.type is DeviceConnectionType.PRE_COMPILE


def count_devices() -> int:
    """Returns how many IPU devices TensorFlow lists; before they are configured, the same number as with the SDK."""
    return _UNCONFIGURED_DEVICES if _system is None else len(_system.ipus_per_device)


def running_on_ipu_model() -> bool:
    """Whether TF_POPLAR_FLAGS selects the vendor's IPU Model."""
    return "--use_ipu_model" in os.environ.get("TF_POPLAR_FLAGS", "")


def _read_flags() -> Dict[str, str]:
    """Returns TF_POPLAR_FLAGS. An unknown flag ends the program, as with the SDK."""
    try:
        return poplar_flags.read(os.environ)
    except poplar_flags.FlagError as error:
        sys.exit(str(error))


def configured_system() -> ConfiguredSystem:
    """Returns the configured devices; configures one IPU when the program has configured none."""
    if _system is None:
        configure_ipu_system(IPUConfig())
    assert _system is not None
    return _system


def ipus_of_device(ordinal: Optional[int]) -> int:
    """Returns the IPUs of /device:IPU:ordinal; None stands for the first device."""
    devices = configured_system().ipus_per_device
    if (ordinal or 0) >= len(devices):
        raise errors.InvalidArgumentError(
            None, None, f"There is no /device:IPU:{ordinal}: {len(devices)} devices are configured."
        )
    return devices[ordinal or 0]


def _check(config: Any, flags: Dict[str, str]) -> None:  # noqa: PLR0912 one rule after the other
    """Checks the rules that the SDK checks in Python, in its order and with its exception types."""
    if _as_list(config.auto_select_ipus) and _as_list(config.select_ipus):
        raise Exception("Only one of auto_select_ipus and select_ipus can be set.")
    chosen = _as_list(config.select_ipus)
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"select_ipus={chosen} names a device twice.")
    if chosen and running_on_ipu_model():
        raise Exception("select_ipus cannot be used with the IPU Model; use auto_select_ipus.")
    connection = config.device_connection
    if connection.type in (DeviceConnectionType.PRE_COMPILE, DeviceConnectionType.NEVER) and not connection.version:
        raise ValueError(f"device_connection.version must be set for the connection type {connection.type.name}.")
    if connection.type is DeviceConnectionType.PRE_COMPILE and "executable_cache_path" not in flags:
        raise errors.FailedPreconditionError(
            None, None, "The connection type PRE_COMPILE needs --executable_cache_path=DIR in TF_POPLAR_FLAGS."
        )
    if connection.version not in ("", "ipu1", "ipu2", "ipu21"):
        raise ValueError(f"device_connection.version={connection.version!r} is not one of ipu1, ipu2, ipu21.")
    group = config.norms.experimental.distributed_batch_norm_replica_group_size
    if group < 1:
        raise ValueError(f"distributed_batch_norm_replica_group_size={group} must be at least 1.")
    if config.io_tiles.place_ops_on_io_tiles and not config.io_tiles.num_io_tiles:
        raise ValueError("io_tiles.place_ops_on_io_tiles needs io_tiles.num_io_tiles to be larger than 0.")
    if config.io_tiles.num_io_tiles and group > 1:
        raise ValueError("io_tiles.num_io_tiles cannot be used together with distributed batch normalisation.")
    distribution = config.experimental.multi_replica_distribution
    if distribution.process_count:
        if not 0 <= distribution.process_index < distribution.process_count:
            raise ValueError(
                f"multi_replica_distribution.process_index={distribution.process_index} is not in "
                f"[0, {distribution.process_count})."
            )
        if running_on_ipu_model():
            raise Exception("Multi-replica distribution cannot be used with the IPU Model.")
    for name, value in config.to_dict().items():
        if name.endswith("poplar_options"):
            for entry in (*value, *value.values()):
                if not isinstance(entry, str):
                    raise TypeError(
                        f"{name}: {entry!r} has type {type(entry).__name__}, but keys and values must be str."
                    )


def _normalise(config: Any) -> None:
    """Replaces an int by a list of one, as the SDK does."""
    for name in ("auto_select_ipus", "select_ipus"):
        if isinstance(getattr(config, name), int):
            setattr(config, name, [getattr(config, name)])


@contextlib.contextmanager
def _driver_errors() -> Iterator[None]:
    """Converts the registry's errors to those that TensorFlow raises for the Poplar driver."""
    try:
        yield
    except (registry.NoSuchDeviceError, registry.DeviceBusyError, registry.RegistryError) as error:
        if isinstance(error, registry.NoSuchDeviceError):
            message = f"Unsupported number of IPUs requested: {error}."
            raise errors.FailedPreconditionError(None, None, message) from error
        if isinstance(error, registry.DeviceBusyError):
            raise errors.InternalError(None, None, f"Could not find an available device: {error}.") from error
        raise errors.InvalidArgumentError(None, None, f"The emulated IPUs cannot be used: {error}.") from error


def _attach_one(partition: registry.Partition, request: Any, limit_s: float, poll_s: float) -> registry.Attachment:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            return partition.attach(**request)
        except registry.DeviceBusyError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(poll_s)


def _next_power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def _as_list(selection: _IpuSelection) -> List[int]:
    return [selection] if isinstance(selection, int) else list(selection)
