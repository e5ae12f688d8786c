"""The frozen TrainConfig that flags are parsed into, and the types of its values. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

from absl import flags

from tf_ipu_dp import cli

SCHEDULES = ("grouped", "interleaved", "sequential")
TIME_UNITS = {"h": 3600, "m": 60, "s": 1}


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


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run as the flags ask for it. Field names are the flag names; defaults are in `train_flags` only.

    None means that the flag was not given, and that the planner or the launcher decides.
    """

    ipus: Optional[int]
    pipeline_stages: Optional[int]
    pipeline_schedule: str
    pipeline_splits: Optional[Tuple[str, ...]]
    instances: Optional[int]
    hosts: Optional[Hosts]
    model: str
    norm: Optional[str]
    precision: str
    recompute: bool
    dataset: str
    data_dir: Optional[str]
    image_size: Optional[int]
    augment: str
    eight_bit_io: bool
    prefetch: bool
    micro_batch_size: int
    gradient_accumulation: Optional[int]
    global_batch_size: Optional[int]
    device_iterations: int
    updates_per_epoch: Optional[int]
    epochs: Duration
    optimizer: str
    learning_rate: Optional[float]
    lr_scaling: str
    lr_base_batch: int
    lr_schedule: str
    lr_drop_epochs: Optional[Tuple[float, ...]]
    warmup_epochs: Optional[float]
    momentum: float
    weight_decay: float
    l2: float
    label_smoothing: float
    loss_scaling: Optional[LossScaling]
    reduction: str
    run_dir: Optional[str]
    resume: bool
    checkpoint_every: Optional[int]
    keep_checkpoints: int
    log_every: Optional[int]
    time_limit: Optional[TimeSpan]
    early_stop: Optional[int]
    export: bool
    seed: int
    deterministic: bool
    check_weights_every: int
    stall_timeout: TimeSpan
    sdk: str
    executable_cache: Optional[str]
    json: bool
    dry_run: bool
    format: str
    evaluate: bool
    input_only: bool

    @property
    def requested_stages(self) -> Optional[int]:
        """Pipeline stages that the flags ask for, by number or by their split points; None if they do not set it."""
        return self.pipeline_stages or (len(self.pipeline_splits) + 1 if self.pipeline_splits else None)

    @classmethod
    def from_flags(cls, fv: flags.FlagValues) -> TrainConfig:
        """Returns the config of parsed flags. Other code reads the config, never the flags."""
        values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(cls)}
        return cls(**values)

    def flag_lines(self) -> Tuple[str, ...]:
        """Returns the flags that parse into this config, one per line of a flag file."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return tuple(cli.flag_text(name, value) for name, value in values if value is not None)
