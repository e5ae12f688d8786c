"""Typed records of what is written to and read from a run's folder. A dataclass is the schema of its file.

`to_json` returns an object with a schema number; `from_json` reads it back, including older schemas. Unknown keys are
ignored; anything else that does not fit is a RecordError. Numbers that are not finite are null in JSON and None here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from typing import Any, ClassVar, Dict, Mapping, Optional, Tuple, Type, TypeVar, Union

from tf_ipu_dp.runs.json_files import plain

_R = TypeVar("_R", bound="Record")


class RecordError(ValueError):
    """A JSON value is not the record that was expected. The text names the field that differs."""


@dataclasses.dataclass(frozen=True)
class Record:
    """Base of all records. A field's JSON key is its name, unless JSON_KEYS has another."""

    SCHEMA: ClassVar[int] = 1
    JSON_KEYS: ClassVar[Mapping[str, str]] = {}
    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ()  # fields that only runs with own models or data have

    def to_json(self) -> Dict[str, Any]:
        """Returns the record as a JSON object with its schema number; nested records have none."""
        return {"schema": self.SCHEMA, **self._fields_to_json()}

    @classmethod
    def from_json(cls: Type[_R], value: object) -> _R:
        """Returns the record in a JSON object, or raises RecordError."""
        if not isinstance(value, Mapping):
            raise RecordError(f"{cls.__name__} is not a JSON object")
        schema = value.get("schema", 1)
        if type(schema) is not int or not 1 <= schema <= cls.SCHEMA:
            raise RecordError(f"{cls.__name__} is of schema {schema!r}; this version reads 1 to {cls.SCHEMA}")
        return cls._fields_from_json(cls._upgrade(dict(value), schema))

    @classmethod
    def _upgrade(cls, value: Dict[str, Any], schema: int) -> Dict[str, Any]:
        """Returns an object of an older schema as the present one; overridden where there are older schemas."""
        del schema
        return value

    def _fields_to_json(self) -> Dict[str, Any]:
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {
            self._key(name): _to_json(value)
            for name, value in values
            if value or value == 0 or name not in self.LEFT_OUT_IF_EMPTY
        }

    @classmethod
    def _key(cls, name: str) -> str:
        return cls.JSON_KEYS.get(name, name)

    @classmethod
    def _fields_from_json(cls: Type[_R], value: Mapping[str, Any]) -> _R:
        made: _R = _make(cls, value, cls.JSON_KEYS)
        return made


@dataclasses.dataclass(frozen=True)
class InstanceTimes(Record):
    """Where one instance's seconds went between two training records. None: not reported."""

    instance: int
    seconds: float
    executing_s: float  # in executions, waiting for input and collectives included
    input_wait_s: Optional[float] = None
    collective_s: Optional[float] = None  # in collectives, waiting for the others included
    last: Optional[int] = None  # exchanges of gradients in which it was the last to arrive
    optimizer_s: Optional[float] = None  # from when an update's gradients are there until its variables are assigned
    program_collective_s: Optional[float] = None  # of collective_s, inside executions
    bookkeeping_s: Optional[float] = None  # logging and checkpoints, between executions


@dataclasses.dataclass(frozen=True)
class TrainingRecord(Record):
    """A line of metrics.jsonl: the steps since the line before."""

    KIND: ClassVar[str] = "train"
    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("metrics",)

    step: int
    epoch: float
    loss: Optional[float]
    accuracy: Optional[float]
    learning_rate: float
    samples_per_s: Optional[float] = None
    input_wait_s: Optional[float] = None
    elapsed_s: float = 0.0
    ipu_utilisation_pct: Dict[str, Optional[float]] = dataclasses.field(default_factory=dict)  # by the IPU's id
    instances: Tuple[InstanceTimes, ...] = ()
    executions: Optional[int] = None  # covered by these times; the one that compiled is not
    metrics: Dict[str, Optional[float]] = dataclasses.field(default_factory=dict)  # of an own task, by name

    def to_json(self) -> Dict[str, Any]:
        """Returns the line, with the kind that distinguishes training from validation."""
        return {"kind": self.KIND, **super().to_json()}


@dataclasses.dataclass(frozen=True)
class ValidationRecord(Record):
    """A line of metrics.jsonl: one validation."""

    KIND: ClassVar[str] = "validation"
    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("metrics",)

    step: int
    epoch: float
    loss: Optional[float]
    accuracy: Optional[float]
    top5: Optional[float]
    seconds: float
    samples: Optional[int] = None  # that were validated
    metrics: Dict[str, Optional[float]] = dataclasses.field(default_factory=dict)  # of an own task, by name

    def to_json(self) -> Dict[str, Any]:
        """Returns the line, with the kind that distinguishes training from validation."""
        return {"kind": self.KIND, **super().to_json()}


MetricsRecord = Union[TrainingRecord, ValidationRecord]


def metrics_record(value: Mapping[str, Any]) -> MetricsRecord:
    """Returns the record in a line of metrics.jsonl, or raises RecordError."""
    if value.get("kind") == TrainingRecord.KIND:
        return TrainingRecord.from_json(value)
    if value.get("kind") == ValidationRecord.KIND:
        return ValidationRecord.from_json(value)
    raise RecordError(f"{value.get('kind')!r} is not a kind of metrics record")


@dataclasses.dataclass(frozen=True)
class Scores(Record):
    """The validation set's results, each sample counted once."""

    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("metrics",)

    samples: int
    loss: Optional[float]
    top1: Optional[float]  # None: the task is not a classification
    top5: Optional[float]
    metrics: Dict[str, Optional[float]] = dataclasses.field(default_factory=dict)  # of an own task, by name

    def by_name(self, name: str) -> Optional[float]:
        """Returns a score by the name that --keep_best takes; KeyError if there is none of that name."""
        known = {"loss": self.loss, **self.metrics}
        if self.top1 is not None:
            known.update(accuracy=self.top1, top5=self.top5)
        return known[name]


@dataclasses.dataclass(frozen=True)
class RunTimes(Record):
    """Where a run's seconds went. None: not reported by the device."""

    JSON_KEYS: ClassVar[Mapping[str, str]] = {
        "total_s": "total",
        "compile_s": "compile",
        "executing_s": "executing",
        "between_s": "between_executions",
        "bookkeeping_s": "logging_and_checkpoints",
        "evaluation_s": "evaluation",
        "input_wait_s": "input_wait",
        "startup_s": "startup",
        "collective_s": "collectives",
        "export_s": "export",
    }

    total_s: float
    compile_s: float  # with the first execution
    executing_s: float  # in the other executions, input wait included
    between_s: float  # between executions: calls, starts and ends of epochs
    bookkeeping_s: float  # logging and checkpoints
    evaluation_s: float
    input_wait_s: Optional[float] = None
    startup_s: Optional[float] = None  # from the start of the process: imports, IPUs, data, model; part of the overhead
    collective_s: Optional[float] = None  # waiting for other instances included; None with one instance, too
    export_s: Optional[float] = None  # part of the overhead; None without an export

    @property
    def training_s(self) -> float:
        """Returns the time in training, which throughput and verdicts are measured over."""
        return self.executing_s + self.between_s + self.bookkeeping_s

    @property
    def overhead_s(self) -> float:
        """Returns the time outside compiling, training and evaluation: these four sum to the total."""
        return max(self.total_s - self.compile_s - self.training_s - self.evaluation_s, 0.0)

    @property
    def other_s(self) -> float:
        """Returns the overhead after the start-up, without the export: the end of the run."""
        return max(self.overhead_s - (self.startup_s or 0.0) - (self.export_s or 0.0), 0.0)

    def _fields_to_json(self) -> Dict[str, Any]:
        return {**super()._fields_to_json(), "training": self.training_s, "overhead": self.overhead_s}


@dataclasses.dataclass(frozen=True)
class Verdict(Record):
    """The bottleneck of a run: what it is, in a sentence, and the flag to change."""

    UNKNOWN: ClassVar[str] = "unknown"  # the kind of a verdict that schema 1 kept as a sentence

    kind: str
    sentence: str
    share_pct: Optional[float] = None  # of training; for compiling: of the run
    instance: Optional[int] = None  # the instance that causes it
    last_pct: Optional[float] = None  # share of the exchanges in which that instance was last
    flag: Optional[str] = None  # what to change, without its dashes


@dataclasses.dataclass(frozen=True)
class ExchangeSummary(Record):
    """The exchanges of gradients since a run was last started; exchange_times.json has their histogram."""

    exchanges: int
    compared: int  # between the instances: fewer than all if an execution has very many
    p50_s: float  # of one exchange, from when the last instance had arrived
    p99_s: float
    max_s: float
    waited_s: float  # by the mean of the other instances for the last one, in all exchanges
    last_instance: int  # the one that was last most often
    last_pct: float  # share of the compared exchanges in which it was


@dataclasses.dataclass(frozen=True)
class StopReason(Record):
    """Why a run ends before its last step; the same on all instances."""

    # Kinds. The first two are requested by a user or a scheduler, and save a checkpoint to resume from.
    SIGNAL: ClassVar[str] = "signal"
    TIME_LIMIT: ClassVar[str] = "time limit"
    EARLY_STOPPING: ClassVar[str] = "early stopping"
    NOT_FINITE: ClassVar[str] = "not finite"
    WEIGHTS_DIFFER: ClassVar[str] = "weights differ"
    STALL: ClassVar[str] = "stall"

    kind: str
    transient: bool  # a restart of the same run may succeed
    message: str
    resume: str = ""  # the command that continues an interrupted run

    @property
    def is_failure(self) -> bool:
        return self.kind in (self.NOT_FINITE, self.WEIGHTS_DIFFER, self.STALL)

    @property
    def is_resumable(self) -> bool:
        """Whether the run was interrupted and resumes from its checkpoint when it is started again."""
        return self.kind in (self.SIGNAL, self.TIME_LIMIT)


@dataclasses.dataclass(frozen=True)
class BestWeights(Record):
    """The weights of a run's best validation."""

    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("metric", "value")

    step: int
    loss: Optional[float]
    checkpoint: str  # its folder
    metric: str = ""  # by which they are the best; empty: the loss
    value: Optional[float] = None  # of that metric


@dataclasses.dataclass(frozen=True)
class RunResult(Record):
    """result.json: the result of a run."""

    SCHEMA: ClassVar[int] = 2
    JSON_KEYS: ClassVar[Mapping[str, str]] = {"times": "seconds", "scores": "validation"}

    run_dir: str
    model: str
    dataset: str
    replicas: int
    updates: int  # in total, including those before a resumption
    planned_updates: int
    times: RunTimes
    samples_per_s: Optional[float]
    utilisation_pct: Optional[float]
    scores: Optional[Scores]
    verdict: Verdict
    stopped: Optional[StopReason] = None
    version: str = ""  # of tf_ipu_dp
    exchanges: Optional[ExchangeSummary] = None  # None: one instance, or not reported by the device
    best: Optional[BestWeights] = None  # None: without --early_stop

    @property
    def samples_per_s_per_replica(self) -> Optional[float]:
        if self.samples_per_s is None or self.replicas < 1:  # a damaged file may say that there are none
            return None
        return self.samples_per_s / self.replicas

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing left to resume."""
        return self.stopped is None or not self.stopped.is_resumable

    def _fields_to_json(self) -> Dict[str, Any]:
        return {**super()._fields_to_json(), "samples_per_s_per_replica": self.samples_per_s_per_replica}

    @classmethod
    def _upgrade(cls, value: Dict[str, Any], schema: int) -> Dict[str, Any]:
        """Schema 1 has sentences where schema 2 has a verdict and a stop reason."""
        if schema == 1:
            value["verdict"] = {"kind": Verdict.UNKNOWN, "sentence": value.get("verdict")}
            if isinstance(value.get("stopped"), str):
                limited = value["stopped"].startswith("--time_limit")
                kind = StopReason.TIME_LIMIT if limited else StopReason.SIGNAL
                value["stopped"] = {"kind": kind, "transient": True, "message": value["stopped"]}
        return value


def finite(number: float) -> Optional[float]:
    """Returns a number for a record: None where it is not finite."""
    return float(number) if math.isfinite(number) else None


@functools.lru_cache(maxsize=None)
def _hints(kind: Any) -> Dict[str, Any]:
    return typing.get_type_hints(kind)


def _make(kind: Any, value: Mapping[str, Any], keys: Mapping[str, str]) -> Any:
    """Returns the dataclass in a JSON object. A field that files of earlier releases lack needs a default."""
    found = {}
    for field in dataclasses.fields(kind):
        key = keys.get(field.name, field.name)
        if key in value:
            found[field.name] = _convert(_hints(kind)[field.name], value[key], f"{kind.__name__}.{key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{kind.__name__} has no {key}")
    return kind(**found)


def _to_json(value: Any) -> Any:
    if isinstance(value, Record):
        return value._fields_to_json()
    if dataclasses.is_dataclass(value):
        return {field.name: _to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_to_json(each) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _to_json(each) for key, each in value.items()}
    return plain(value)


def _convert(kind: Any, value: Any, where: str) -> Any:  # noqa: PLR0911
    """Returns a JSON value as the type that a field's annotation names."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Union:  # Optional is the only one that records use
        return None if value is None else _convert(arguments[0], value, where)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_convert(arguments[0], each, where) for each in value)
        if len(arguments) == len(value):
            return tuple(_convert(each_kind, each, where) for each_kind, each in zip(arguments, value))
    elif origin is dict and isinstance(value, dict):
        return {str(key): _convert(arguments[1], each, where) for key, each in value.items()}
    elif isinstance(kind, type) and issubclass(kind, Record) and isinstance(value, dict):
        return kind._fields_from_json(value)
    elif dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _make(kind, value, {})
    elif kind is float and type(value) in (int, float) and math.isfinite(_as_float(value)):
        return float(value)
    elif kind in (int, str, bool) and type(value) is kind:
        return value
    raise RecordError(f"{where} is {str(value)[:40]!r}, which does not fit")


def _as_float(value: Union[int, float]) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
