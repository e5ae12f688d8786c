"""Flags in, one frozen TrainConfig out. Pure: no TensorFlow, no environment, no printing."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Dict, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli

# Bounds that no job reaches, so that a slip of the finger is refused and not computed.
_MOST = 2**31 - 1
_MOST_IPUS = 2**20

SCHEDULES = ("grouped", "interleaved", "sequential")

GROUPS = {
    "IPUs": ("ipus", "pipeline_stages", "pipeline_schedule", "instances", "hosts"),
    "Batch": ("micro_batch_size", "gradient_accumulation", "global_batch_size", "device_iterations"),
    "Run": ("dataset", "epochs", "seed", "sdk", "run_dir"),
    "Plan only": ("dry_run", "format", "json"),
}


@dataclasses.dataclass(frozen=True)
class Duration:
    """How long to train: in epochs, or in steps (weight updates)."""

    count: int
    unit: str = "epochs"

    def __str__(self) -> str:
        return str(self.count) if self.unit == "epochs" else f"{self.count}steps"


@dataclasses.dataclass(frozen=True)
class Hosts:
    """The machines of a job: how many, and their names where these were given."""

    count: int
    names: Tuple[str, ...] = ()

    def __str__(self) -> str:
        return ",".join(self.names) if self.names else str(self.count)


@dataclasses.dataclass(frozen=True)
class DatasetFacts:
    """What the planner needs to know about a data set."""

    name: str
    train_samples: int
    validation_samples: int


# Validation is the test split where a set has one, and ImageNet's validation split.
DATASETS = {
    facts.name: facts
    for facts in (
        DatasetFacts("fashion_mini", 8_192, 2_048),
        DatasetFacts("mnist", 60_000, 10_000),
        DatasetFacts("fashion_mnist", 60_000, 10_000),
        DatasetFacts("cifar10", 50_000, 10_000),
        DatasetFacts("cifar100", 50_000, 10_000),
        DatasetFacts("svhn_cropped", 73_257, 26_032),
        DatasetFacts("imagenet2012", 1_281_167, 50_000),
    )
}


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One run as it was asked for. Field names are the flag names; defaults live in the flags only.

    None means that the flag was not given, and that the planner or poprun decides.
    """

    ipus: Optional[int]
    pipeline_stages: Optional[int]
    pipeline_schedule: str
    instances: Optional[int]
    hosts: Optional[Hosts]
    micro_batch_size: int
    gradient_accumulation: Optional[int]
    global_batch_size: Optional[int]
    device_iterations: int
    dataset: str
    epochs: Duration
    seed: int
    sdk: str
    run_dir: Optional[str]
    dry_run: bool
    format: str
    json: bool

    @classmethod
    def from_flags(cls, fv: flags.FlagValues) -> TrainConfig:
        """Reads the flags' values once; after this nobody looks at the flags."""
        values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(cls)}
        return cls(**values)

    def flag_lines(self) -> Tuple[str, ...]:
        """Returns the flags that make this config again, one per line of a flag file."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return tuple(cli.flag_text(name, value) for name, value in values if value is not None)


def parse(words: Sequence[str]) -> TrainConfig:
    """Makes the config of a command line (without the program's name), or refuses it with every mistake in it."""
    fv = make_flags()
    cli.parse(words, fv)
    config = TrainConfig.from_flags(fv)
    sentences = []
    if config.format != "table" and config.json:
        sentences.append(f"--json and --format={config.format} exclude each other. Leave one of them out.")
    if config.format != "table" and not config.dry_run:
        sentences.append(f"--format={config.format} draws a plan and does not train. Add --dry_run.")
    if sentences:
        raise cli.UsageError(*sentences)
    return config


def make_flags() -> flags.FlagValues:
    """Returns a training run's flags with their defaults, apart from the process-wide ones of other libraries."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define_flags(fv)
    return fv


def define_flags(fv: flags.FlagValues) -> None:
    """Defines every flag of a training run."""

    def whole(name: str, default: Optional[int], lowest: int, text: str, most: int = _MOST) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=lowest, upper_bound=most, flag_values=fv)

    whole("ipus", None, 1, "IPUs in the whole job, a power of two. Default: 1, or what poprun gives.", _MOST_IPUS)
    whole(
        "pipeline_stages", None, 1,
        "Parts the model is cut into, one per IPU. A replica takes the next power of two of IPUs. "
        "Default: 1, or the IPUs per replica that poprun gives.", _MOST_IPUS,
    )  # fmt: skip
    flags.DEFINE_enum(
        "pipeline_schedule", "grouped", SCHEDULES, "Order in which a pipeline works through its micro batches.",
        flag_values=fv,
    )  # fmt: skip
    whole(
        "instances",
        None,
        1,
        "Host processes, each with as many replicas. Default: 1, or what poprun gives.",
        _MOST_IPUS,
    )
    flags.DEFINE(
        _HostsParser(), "hosts", None, "Machines: how many, or their names. Instances are dealt evenly. Default: 1.",
        fv, _StrSerializer(),
    )  # fmt: skip

    whole("micro_batch_size", 32, 1, "Samples in one forward pass of one replica.")
    whole(
        "gradient_accumulation", None, 1,
        "Micro batches that each replica adds up for one weight update. "
        "Default: the fewest that the schedule takes (1 without a pipeline).",
    )  # fmt: skip
    whole(
        "global_batch_size", None, 1,
        "Samples in one weight update of the whole job, in place of --gradient_accumulation, which is then solved.",
    )  # fmt: skip
    whole("device_iterations", 1, 1, "Weight updates in one call into the device; must divide the epoch.")

    flags.DEFINE_enum("dataset", "fashion_mini", list(DATASETS), "Data set to train on.", flag_values=fv)
    flags.DEFINE(
        _DurationParser(), "epochs", Duration(5), "How long to train: 5 (epochs), or 200steps (weight updates).", fv,
        _StrSerializer(),
    )  # fmt: skip
    whole("seed", 42, 0, "Seed of weights, sample order and augmentation; the same on all instances.")
    flags.DEFINE_enum(
        "sdk", "auto", ["auto", "poplar", "emulator"],
        "Where to run: on IPUs through the Poplar SDK, or on this host's CPU through the emulator. "
        "auto takes the Poplar SDK if it is enabled and finds an IPU.", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string("run_dir", None, "Folder of the run. Default: a new one below runs/.", flag_values=fv)

    flags.DEFINE_bool("dry_run", False, "Show the plan and stop.", flag_values=fv)
    flags.DEFINE_enum("format", "table", ["table", "mermaid"], "How --dry_run shows the plan.", flag_values=fv)
    flags.DEFINE_bool("json", False, "Print the result (with --dry_run: the plan) as JSON.", flag_values=fv)


def _bounded(digits: str, most: int) -> int:
    """Reads a number; int() itself would fail on thousands of digits."""
    if len(digits) > 10 or int(digits) > most:
        raise ValueError(f"it is more than {most}")
    return int(digits)


class _StrSerializer(flags.ArgumentSerializer):  # type: ignore[misc, type-arg, unused-ignore]
    def serialize(self, value: object) -> str:
        return str(value)


class _DurationParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    syntactic_help = "a number of epochs like 5, or of weight updates like 200steps"
    placeholder = "N|Nsteps"

    def parse(self, argument: Any) -> Duration:
        if isinstance(argument, Duration):
            return argument
        match = re.fullmatch(r"\s*(\d+)\s*(epochs?|steps?)?\s*", str(argument), re.ASCII)
        if not match:
            raise ValueError("it is not a duration")
        count = _bounded(match[1], _MOST)
        if count < 1:
            raise ValueError("nothing would be trained")
        return Duration(count, "steps" if (match[2] or "").startswith("step") else "epochs")

    def flag_type(self) -> str:
        return "duration"


class _HostsParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    syntactic_help = "a number of hosts like 2, or different names like node1,node2"
    placeholder = "N|a,b"

    def parse(self, argument: Any) -> Hosts:
        if isinstance(argument, Hosts):
            return argument
        text = str(argument).strip()
        if re.fullmatch(r"\d+", text, re.ASCII):
            count = _bounded(text, _MOST_IPUS)
            if count < 1:
                raise ValueError("a job has at least 1 host")
            return Hosts(count)
        names = tuple(name.strip() for name in text.split(","))
        if not all(re.fullmatch(r"[a-z0-9][\w.:@%-]*", name, re.ASCII | re.IGNORECASE) for name in names):
            raise ValueError("there is an empty or impossible host name in it")
        if any(re.fullmatch(r"\d+\.?\d*|0x[\da-f]*", name, re.ASCII | re.IGNORECASE) for name in names):
            raise ValueError("it is neither a whole number nor names")
        if len(set(names)) < len(names):
            raise ValueError("a host is named twice")
        return Hosts(len(names), names)

    def flag_type(self) -> str:
        return "hosts"
