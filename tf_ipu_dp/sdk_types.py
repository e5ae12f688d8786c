"""What the application uses of the Poplar SDK's modules and of its Keras models, as protocols. Types only.

The SDK ships no types. Each protocol has what the application calls and no more; methods keep the SDK's names.
"""

from __future__ import annotations

from typing import Any, ContextManager, Mapping, Optional, Protocol, Sequence


class DeviceInventory(Protocol):
    """`gcipuinfo.gcipuinfo()`: the IPUs of the partition."""

    def setUpdateMode(self, refresh: bool, /) -> None:  # noqa: N802
        """Makes every query read fresh values."""

    def getDevices(self) -> Sequence[Mapping[str, str]]:  # noqa: N802
        """Returns one mapping of attribute names to texts per IPU."""

    def checkHealthOfDevices(self) -> str:  # noqa: N802
        """Returns the faults as JSON text."""

    def getLastAppEventRecord(self, path: str, /) -> Mapping[str, str]:  # noqa: N802
        """Returns the last event record that an application has written."""


class GcipuinfoModule(Protocol):
    """`gcipuinfo`."""

    def gcipuinfo(self) -> DeviceInventory:
        """Opens the inventory."""


class PopdistModule(Protocol):
    """`popdist`."""

    def isPopdistEnvSet(self) -> bool:  # noqa: N802
        """Whether this process is an instance that poprun started."""

    def init(self) -> None:
        """Connects this instance with the others."""


class FloatingPointBehaviour(Protocol):
    """`IPUConfig().floating_point_behaviour`."""

    esr: Any  # a StochasticRoundingBehaviour
    nanoo: bool


class DeviceConnection(Protocol):
    """`IPUConfig().device_connection`."""

    type: Any  # a DeviceConnectionType


class ExperimentalSettings(Protocol):
    """`IPUConfig().experimental`."""

    enable_prng_stability: bool


class IpuConfig(Protocol):
    """`ipu.config.IPUConfig()`."""

    allow_recompute: bool
    auto_select_ipus: int
    compilation_poplar_options: Mapping[str, str]
    device_connection: DeviceConnection
    experimental: ExperimentalSettings
    floating_point_behaviour: FloatingPointBehaviour

    def configure_ipu_system(self) -> None:
        """Attaches the IPUs."""


class IpuConfigModule(Protocol):
    """`ipu.config`."""

    DeviceConnectionType: Any  # an enumeration
    StochasticRoundingBehaviour: Any  # an enumeration

    def IPUConfig(self) -> IpuConfig:  # noqa: N802
        """Makes a configuration with the SDK's defaults."""

    def reset_ipu_configuration(self) -> None:
        """Detaches the IPUs."""


class UtilsModule(Protocol):
    """`ipu.utils`."""

    def reset_ipu_seed(self, seed: int, /) -> None:
        """Seeds the IPUs' random numbers."""


class Strategy(Protocol):
    """`IPUStrategy` or `PopDistStrategy`."""

    def scope(self) -> ContextManager[Any]:
        """Returns the context in which models for the IPUs are made."""


class StrategyModule(Protocol):
    """`ipu.ipu_strategy`."""

    def IPUStrategy(self) -> Strategy:  # noqa: N802
        """Makes the strategy of a single instance."""


class PipeliningOpsModule(Protocol):
    """`ipu.ops.pipelining_ops`."""

    PipelineSchedule: Any  # an enumeration


class OpsModule(Protocol):
    """`ipu.ops`."""

    pipelining_ops: PipeliningOpsModule


class DatasetBenchmarkModule(Protocol):
    """`ipu.dataset_benchmark`."""

    def dataset_benchmark(self, dataset: Any, /, *args: Any, **options: Any) -> Any:
        """Returns an operation that measures how fast a data set is."""


class IpuModule(Protocol):
    """`tensorflow.python.ipu`."""

    config: IpuConfigModule
    dataset_benchmark: DatasetBenchmarkModule
    ipu_strategy: StrategyModule
    ops: OpsModule
    utils: UtilsModule


class Variable(Protocol):
    """A variable of TensorFlow."""

    name: str
    shape: Any
    dtype: Any

    def numpy(self) -> Any:
        """Returns the value as an array."""

    def assign(self, value: Any, /) -> Any:
        """Sets the value."""


class IpuModel(Protocol):
    """A Keras model with the SDK's methods for IPUs."""

    inputs: Sequence[Any]
    outputs: Sequence[Any]
    optimizer: Any
    weights: Sequence[Variable]

    def compile(self, **options: Any) -> None: ...

    def fit(self, x: Any, /, **options: Any) -> Any: ...

    def predict(self, x: Any, /, **options: Any) -> Any: ...

    def get_weights(self) -> Sequence[Any]: ...

    def set_weights(self, weights: Sequence[Any], /) -> None: ...

    def get_pipeline_stage_assignment(self) -> Sequence[Any]: ...

    def set_pipeline_stage_assignment(self, assignments: Sequence[Any], /) -> None: ...

    def set_replication_options(self, *, replicated_metric_reduction_method: str) -> None: ...

    def set_infeed_queue_options(self, *, prefetch_depth: Optional[int]) -> None: ...

    def set_gradient_accumulation_options(
        self, *, gradient_accumulation_steps_per_replica: int, gradient_accumulation_reduction_method: str
    ) -> None: ...

    def set_pipelining_options(
        self,
        *,
        gradient_accumulation_steps_per_replica: int,
        gradient_accumulation_reduction_method: str,
        pipeline_schedule: Any,
    ) -> None: ...

    def export_for_ipu_serving(self, path: str, /, **options: Any) -> Any: ...
