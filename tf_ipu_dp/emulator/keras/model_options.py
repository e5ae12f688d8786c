"""What the emulator stores for a Keras model: whether it is on an IPU, its options, and the state of its pipeline."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Dict, List, Optional

from tf_ipu_dp.emulator.keras import stages
from tf_ipu_dp.emulator.runtime.pipeline_layout import PipelineSchedule
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod as Method

_OPTIONS = "_ipu_emulator_options"
_PIPELINE = "_ipu_emulator_pipeline"


def is_on_ipu(model: Any) -> bool:
    """Whether a model was made in the scope of an IPU strategy with Keras extensions."""
    return bool(getattr(getattr(model, "_distribution_strategy", None), "enable_keras_extensions", False))


class ReplicatedMetricReductionMethod(enum.Enum):
    """How `fit` and `evaluate` report the replicas' metrics. NONE: those of the last replica."""

    NONE = 1
    LIST = 2
    SUM = 3
    MEAN = 4

    @classmethod
    def parse(cls, method: Any) -> ReplicatedMetricReductionMethod:
        """Returns the method of a name or of the enum itself."""
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        raise ValueError(f"{method!r} is not a reduction of metrics; it is one of {', '.join(cls.__members__)}.")


@dataclasses.dataclass
class Options:
    """The IPU options of a model that is not pipelined, and those that all models have."""

    accumulation: int = 1
    method: Method = Method.SUM
    metrics: ReplicatedMetricReductionMethod = ReplicatedMetricReductionMethod.NONE
    asynchronous: bool = False
    accumulator_dtype: Any = None  # a type, or a function of the variable

    def as_config(self) -> Dict[str, Any]:
        """Returns what is saved with a model: not the arguments of the accumulating optimizer, as in the SDK."""
        saved = {**vars(self), "method": self.method.name, "metrics": self.metrics.name}
        del saved["accumulator_dtype"]
        return saved

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> Options:
        """Makes the options from what was saved."""
        method, metrics = Method.parse(config["method"]), ReplicatedMetricReductionMethod.parse(config["metrics"])
        return cls(**{**config, "method": method, "metrics": metrics})


def options_of(model: Any) -> Options:
    """Returns a model's options; they are made on first use."""
    found: Options = vars(model).setdefault(_OPTIONS, Options())
    return found


def replace_options(model: Any, options: Options) -> None:
    """Gives a model other options, like those it was saved with."""
    vars(model)[_OPTIONS] = options


@dataclasses.dataclass
class PipeliningOptions:
    """What `set_pipelining_options` has set."""

    accumulation: Optional[int] = None
    method: Method = Method.SUM
    schedule: PipelineSchedule = PipelineSchedule.Grouped
    device_mapping: Optional[List[int]] = None
    accumulate_outfeed: bool = False
    others: Dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def accumulator_dtype(self) -> Any:
        """A type, a function of the variable, or None for the variable's type."""
        return self.others.get("gradient_accumulation_dtype")


@dataclasses.dataclass
class PipelineState:
    """The pipeline of one model."""

    options: PipeliningOptions = dataclasses.field(default_factory=PipeliningOptions)
    options_set: bool = False  # whether set_pipelining_options was called
    assignment: Optional[List[Any]] = None
    scopes: bool = True  # whether stages come from PipelineStage when none were assigned
    warned: bool = False  # about batch normalisation in a pipeline
    build_shape: Any = None  # that a Model subclass was built with
    trace: Optional[stages.Call] = None


def pipeline_state_of(model: Any) -> PipelineState:
    """Returns the state of a model's pipeline; it is made on first use."""
    found: PipelineState = vars(model).setdefault(_PIPELINE, PipelineState())
    return found


def pipelining_of(model: Any) -> PipeliningOptions:
    """Returns a model's options for pipelining; they are made on first use."""
    return pipeline_state_of(model).options
