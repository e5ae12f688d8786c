"""manifest.json of a checkpoint: the state of the run, and all that is needed to resume from it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Dict, Tuple

from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import Record

Variable = Tuple[str, Tuple[int, ...], str]  # name, shape and type of a weight


@dataclasses.dataclass(frozen=True)
class StateFile(Record):
    """Size and hash of a file, which show whether it is intact."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest(Record):
    """A checkpoint's manifest."""

    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("layers", "code")

    step: int
    epoch: int
    samples_into_epoch: int
    flags: Dict[str, str]  # as typed after `=`, by the flags' names; a flag that was not given is missing
    plan: PlanRecord
    variables: Tuple[Variable, ...]
    random_state: Dict[str, int]
    versions: Dict[str, str]
    time: str
    layers: Tuple[Tuple[str, str], ...] = ()  # of an own model: name and description
    code: Dict[str, str] = dataclasses.field(default_factory=dict)  # hashes of the user's files, by the flag
    files: Dict[str, StateFile] = dataclasses.field(default_factory=dict)  # filled in by the store
