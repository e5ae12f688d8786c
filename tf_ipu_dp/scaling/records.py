"""Typed records of a study's folder: study.json is a `Study`, a line of cells.jsonl a `Measurement`. Pure.

A cell is one engine at one size. It is measured `repeats` times; a measurement that failed is kept with its reason.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Dict, Optional, Tuple

from tf_ipu_dp.runs.records import Record

BATCH, WEAK, STRONG, COMPARE, INSTANCES = "batch", "weak", "strong", "compare", "instances"
THIS_CPU = "compute of this CPU"  # of an extrapolation from emulated IPUs
MODES = (BATCH, WEAK, STRONG, COMPARE, INSTANCES)


@dataclasses.dataclass(frozen=True)
class Cell(Record):
    """One engine at one size, as it is planned."""

    key: str  # unique in a study, and a folder's name: "tf_ipu_dp-4", "ddp-2"
    engine: str  # a name of engines.ENGINES
    size: int  # the number on the x axis: samples in mode batch, otherwise replicas or instances
    replicas: int
    instances: int
    hosts: int
    micro_batch_size: int
    gradient_accumulation: int
    global_batch_size: int
    words: Tuple[str, ...]  # the flags of train that give this layout


@dataclasses.dataclass(frozen=True)
class UpdateParts(Record):
    """Where the seconds of one update go, on the slowest instance. They sum to the time of the update."""

    compute_s: float  # forward and backward passes
    input_wait_s: float
    collective_s: float  # exchanges, from when the last instance had arrived
    waiting_s: float  # for the last instance to arrive
    optimizer_s: float
    overhead_s: float  # between executions: calls, metrics, logging, checkpoints

    @property
    def total_s(self) -> float:
        return float(sum(getattr(self, field.name) for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class Validated(Record):
    """A validation during a run: what time to accuracy is read from."""

    step: int
    elapsed_s: float
    accuracy: float  # from 0 to 1
    epoch: Optional[float] = None


@dataclasses.dataclass(frozen=True)
class Measurement(Record):
    """One repeat of a cell."""

    DONE: ClassVar[str] = "done"
    FAILED: ClassVar[str] = "failed"
    MISSING: ClassVar[str] = "not installed"

    cell: str  # its key
    repeat: int  # from 0
    state: str
    reason: str = ""  # of what is not done: one sentence
    samples: int = 0  # of all processes, in the timed updates
    updates: int = 0  # timed ones, without the warm-up
    seconds: float = 0.0  # the slowest process's, of the timed updates
    total_s: float = 0.0  # of the whole run, with its start
    parts: Optional[UpdateParts] = None  # None: the engine does not report them
    input_wait_s: Optional[float] = None  # in the timed updates
    memory_bytes: Optional[int] = None  # the most that all processes had at once
    busy: Optional[float] = None  # share of this machine's cores that was used in the run
    others_busy: Optional[float] = None  # share of them that processes outside of the study used
    validations: Tuple[Validated, ...] = ()
    run_dir: str = ""  # relative to the study's folder

    @property
    def is_done(self) -> bool:
        return self.state == self.DONE

    @property
    def samples_per_s(self) -> float:
        """Returns all samples over the slowest process's time; 0 if it is not done."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def update_s(self) -> float:
        return self.seconds / self.updates if self.updates else 0.0


@dataclasses.dataclass(frozen=True)
class CellPrediction(Record):
    """What the calibration predicts for one update of a cell, and between which times 8 of 10 lie."""

    cell: str
    update_s: float
    low_s: float
    high_s: float
    parts: UpdateParts
    core_limited: bool = False  # the processes of this machine share cores, which machines of their own would not


@dataclasses.dataclass(frozen=True)
class Extrapolation(Record):
    """A prediction for a size that is not measured, on a named fabric."""

    fabric: str
    size: int
    samples_per_s: float
    low: float  # samples/s
    high: float
    efficiency: float
    parts: UpdateParts
    compute: str = ""  # whose compute it is: "compute of this CPU", or as it was given


@dataclasses.dataclass(frozen=True)
class Study(Record):
    """study.json: what is measured, and what was predicted before it was."""

    mode: str
    unit: str  # what a size counts: "samples", "replicas" or "instances"
    sizes: Tuple[int, ...]
    engines: Tuple[str, ...]
    repeats: int
    seed: int  # of the order of the cells
    seconds: float  # timed in a cell, about
    words: Tuple[str, ...]  # flags of train that all cells have in common
    cells: Tuple[Cell, ...]
    fabric: str = ""  # of emulated hosts; empty: none
    target_accuracy: Optional[float] = None
    predictions: Tuple[CellPrediction, ...] = ()
    extrapolations: Tuple[Extrapolation, ...] = ()
    facts: Dict[str, str] = dataclasses.field(default_factory=dict)  # machine, versions, calibration
    command: Tuple[str, ...] = ()  # the words after python -m tf_ipu_dp.scaling
    version: str = ""  # of tf_ipu_dp
    updates: Optional[int] = None  # timed in a cell, if they were given in place of seconds
    epochs: str = ""  # of a run to an accuracy; empty: the seconds decide
    hosts: Tuple[str, ...] = ()  # by name, that the cells are spread over
