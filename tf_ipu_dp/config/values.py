"""Types of flag values that are more than a number or a name: durations, times, hosts, loss scaling. Pure."""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

SCHEDULES = ("grouped", "interleaved", "sequential")
TRACKERS = ("wandb", "mlflow")
TIME_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


@dataclasses.dataclass(frozen=True)
class Duration:
    """How long to train: in epochs, or in steps (weight updates)."""

    count: int
    unit: str = "epochs"

    def __str__(self) -> str:
        return str(self.count) if self.unit == "epochs" else f"{self.count}steps"


@dataclasses.dataclass(frozen=True)
class TimeSpan:
    """A time by the clock."""

    seconds: int

    def __str__(self) -> str:
        unit, length = next((unit, length) for unit, length in TIME_UNITS.items() if self.seconds % length == 0)
        return f"{self.seconds // length}{unit}"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The machines of a job: how many, and their names where these were given."""

    count: int
    names: Tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(self.names) if self.names else str(self.count)


@dataclasses.dataclass(frozen=True)
class LossScaling:
    """What the loss is multiplied by before the backward pass: a constant (1: no scaling), or dynamic (None)."""

    factor: Optional[float]

    def __str__(self) -> str:
        return "dynamic" if self.factor is None else "none" if self.factor == 1 else f"{self.factor:g}"
