"""Flags in, one frozen TrainConfig out. Pure: no TensorFlow, no environment, no printing."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Dict, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import architectures, cli

# Bounds that no job reaches, so that a slip of the finger is refused and not computed.
_MOST = 2**31 - 1
_MOST_IPUS = 2**20
_UNITS = {"h": 3600, "m": 60, "s": 1}

SCHEDULES = ("grouped", "interleaved", "sequential")
PRECISIONS = ("32.32", "16.32", "16.16")
OPTIMIZERS = ("sgd", "adam", "lars")
LR_SCHEDULES = ("constant", "step", "cosine", "polynomial")
AUGMENTATIONS = ("auto", "none", "crop", "crop_flip", "imagenet")

GROUPS = {
    "IPUs": ("ipus", "pipeline_stages", "pipeline_schedule", "pipeline_splits", "instances", "hosts"),
    "Model": ("model", "norm", "precision", "recompute"),
    "Data": ("dataset", "data_dir", "image_size", "augment", "eight_bit_io", "prefetch"),
    "Batch": (
        "micro_batch_size", "gradient_accumulation", "global_batch_size", "device_iterations", "updates_per_epoch",
    ),
    "Recipe": (
        "epochs", "optimizer", "learning_rate", "lr_scaling", "lr_base_batch", "lr_schedule", "lr_drop_epochs",
        "warmup_epochs", "momentum", "weight_decay", "l2", "label_smoothing", "loss_scaling", "reduction",
    ),
    "Run": (
        "run_dir", "resume", "checkpoint_every", "keep_checkpoints", "log_every", "time_limit", "early_stop", "export",
        "seed", "deterministic", "check_weights_every", "stall_timeout", "sdk", "executable_cache", "json",
    ),
    "In place of training": ("dry_run", "format", "evaluate", "input_only"),
}  # fmt: skip


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
        unit, length = next((unit, length) for unit, length in _UNITS.items() if self.seconds % length == 0)
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
    """What the loss is multiplied by before the backward pass: a constant (1: nothing), or what suits (None)."""

    factor: Optional[float]

    def __str__(self) -> str:
        return "dynamic" if self.factor is None else "none" if self.factor == 1 else f"{self.factor:g}"


@dataclasses.dataclass(frozen=True)
class DatasetFacts:
    """What the planner needs to know about a data set."""

    name: str
    train_samples: int
    validation_samples: int
    height: int
    width: int
    channels: int
    classes: int
    # Per channel, of pixels from 0 to 1: images are normalised to mean 0 and deviation 1.
    mean: Tuple[float, ...] = ()
    deviation: Tuple[float, ...] = ()
    # Read from files while training, in place of being kept in memory; height and width are then what is cut out.
    streamed: bool = False
    augment: str = "none"


_CIFAR = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_SVHN = ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))

# Validation is the test split where a set has one, and ImageNet's validation split.
DATASETS = {
    facts.name: facts
    for facts in (
        DatasetFacts("fashion_mini", 8_192, 2_048, 28, 28, 1, 10, (0.2860,), (0.3530,)),
        DatasetFacts("mnist", 60_000, 10_000, 28, 28, 1, 10, (0.1307,), (0.3081,)),
        DatasetFacts("fashion_mnist", 60_000, 10_000, 28, 28, 1, 10, (0.2860,), (0.3530,)),
        DatasetFacts("cifar10", 50_000, 10_000, 32, 32, 3, 10, *_CIFAR, augment="crop_flip"),
        DatasetFacts("cifar100", 50_000, 10_000, 32, 32, 3, 100, *_CIFAR, augment="crop_flip"),
        DatasetFacts("svhn_cropped", 73_257, 26_032, 32, 32, 3, 10, *_SVHN, augment="crop"),
        DatasetFacts("imagenet2012", 1_281_167, 50_000, 224, 224, 3, 1000, *_IMAGENET, True, "imagenet"),
        DatasetFacts("synthetic", 8_192, 2_048, 32, 32, 3, 10, (0.5,) * 3, (0.25,) * 3),
        # Made by the device where the SDK can; nothing then travels from the host.
        DatasetFacts("synthetic_device", 8_192, 2_048, 32, 32, 3, 10, (0.5,) * 3, (0.25,) * 3),
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
    modes = [name for name in ("dry_run", "evaluate", "input_only") if getattr(config, name)]
    if len(modes) > 1:
        sentences.append(f"--{' and --'.join(modes)} exclude each other. Leave {cli.alternatives(modes)} out.")
    if sentences:
        raise cli.UsageError(*sentences)
    return config


def make_flags() -> flags.FlagValues:
    """Returns a training run's flags with their defaults, apart from the process-wide ones of other libraries."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define_flags(fv)
    return fv


def define_flags(fv: flags.FlagValues) -> None:  # noqa: PLR0915
    """Defines every flag of a training run."""

    def whole(name: str, default: Optional[int], lowest: int, text: str, most: int = _MOST) -> None:
        flags.DEFINE_integer(name, default, text, lower_bound=lowest, upper_bound=most, flag_values=fv)

    def real(name: str, default: Optional[float], text: str, most: float = 1e6) -> None:
        own(_RealParser(lower_bound=0.0, upper_bound=most), name, default, text)

    def own(parser: flags.ArgumentParser, name: str, default: object, text: str) -> None:  # type: ignore[type-arg, unused-ignore]
        flags.DEFINE(parser, name, default, text, fv, _TypedSerializer())

    def choice(name: str, default: Optional[str], values: Sequence[str], text: str) -> None:
        flags.DEFINE_enum(name, default, list(values), text, flag_values=fv)

    def switch(name: str, default: bool, text: str) -> None:
        flags.DEFINE_bool(name, default, text, flag_values=fv)

    def path(name: str, text: str) -> None:
        flags.DEFINE_string(name, None, text, flag_values=fv)

    whole("ipus", None, 1, "IPUs in the whole job, a power of two. Default: 1, or what poprun gives.", _MOST_IPUS)
    whole(
        "pipeline_stages", None, 1,
        "Parts the model is cut into, one per IPU. A replica takes the next power of two of IPUs. "
        "Default: 1, or the IPUs per replica that poprun gives.", _MOST_IPUS,
    )  # fmt: skip
    choice("pipeline_schedule", "grouped", SCHEDULES, "Order in which a pipeline works through its micro batches.")
    own(
        _NamesParser(), "pipeline_splits", None,
        "Blocks of the model with which a new pipeline stage begins, like conv3_block1,conv4_block1 (--dry_run shows "
        "them). Default: what balances the work.",
    )  # fmt: skip
    whole(
        "instances",
        None,
        1,
        "Host processes, each with as many replicas. Default: 1, or what poprun gives.",
        _MOST_IPUS,
    )
    own(_HostsParser(), "hosts", None, "Machines: how many, or their names. Instances are dealt evenly. Default: 1.")

    choice("model", "cnn", architectures.MODELS, "Model to train")
    choice(
        "norm", None, architectures.NORMS,
        "Normalisation in the model. In a pipeline the SDK does not keep batch norm's moving statistics. "
        "Default: batch, or group in a pipeline.",
    )  # fmt: skip
    choice("precision", "32.32", PRECISIONS, "Bits of the computation and of the weights.")
    switch("recompute", False, "Compute activations again in the backward pass, to save memory of the IPU.")

    own(
        _NameParser(), "dataset", "fashion_mini",
        f"Data set to train on: {cli.alternatives(DATASETS)}, or the name of any image classification set that "
        "tensorflow-datasets has prepared in --data_dir.",
    )  # fmt: skip
    path("data_dir", "Folder of tensorflow-datasets. Default: its own, ~/tensorflow_datasets.")
    whole(
        "image_size", None, architectures.LEAST_SIZE,
        "Height and width that images are brought to. Default: those of the data set (224 where they differ).", 4096,
    )  # fmt: skip
    choice(
        "augment", "auto", AUGMENTATIONS,
        "Change of the training images, seeded per sample: crop (shifts by up to 4 pixels), crop_flip (mirrors too) or "
        "imagenet (a random part). auto is what is usual for the data set.",
    )  # fmt: skip
    switch("eight_bit_io", False, "Send images to the IPU as 8-bit numbers and normalise them there.")
    switch("prefetch", True, "Load and prepare the next micro batches while the IPUs compute.")

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
    whole("updates_per_epoch", None, 1, "Weight updates in an epoch. Default: as many as the data set fills.")

    own(_DurationParser(), "epochs", Duration(5), "How long to train: 5 (epochs), or 200steps (weight updates).")
    choice("optimizer", "sgd", OPTIMIZERS, "Rule of the weight update; sgd has momentum.")
    real(
        "learning_rate", None,
        "Highest learning rate, before --lr_scaling. Default: 0.05 for sgd, 0.001 for adam, 1 for lars.",
    )  # fmt: skip
    choice(
        "lr_scaling", "none", ["none", "linear", "sqrt"],
        "How the learning rate grows with the global batch over --lr_base_batch.",
    )  # fmt: skip
    whole("lr_base_batch", 256, 1, "Global batch that --learning_rate is meant for.")
    choice(
        "lr_schedule", "cosine", LR_SCHEDULES,
        "Course of the learning rate after the warm-up: step drops to a tenth, cosine and polynomial (of power 2) go "
        "down to 0 at the end.",
    )  # fmt: skip
    own(
        _NumbersParser(), "lr_drop_epochs", None,
        "Epochs after which --lr_schedule=step drops, like 30,60,80. Default: after a half and three quarters.",
    )  # fmt: skip
    real(
        "warmup_epochs", None,
        "Epochs in which the learning rate rises from 0. Default: half an epoch, or a tenth of a shorter run.",
    )  # fmt: skip
    real("momentum", 0.9, "Momentum of sgd and lars.", 1.0)
    real("weight_decay", 0.0, "Share of the weights taken off in each update, times the learning rate (decoupled).")
    real("l2", 0.0, "Weight of the squared weights (halved) in the loss; enters through the gradient.")
    real("label_smoothing", 0.0, "Share of the label spread over all classes.", 1.0)
    own(
        _LossScalingParser(), "loss_scaling", None,
        "What the loss is multiplied by for 16-bit gradients: none, dynamic or a number. "
        "Default: 128, or none with --precision=32.32.",
    )  # fmt: skip
    choice(
        "reduction", "mean", ["mean", "sum"],
        "How the gradients of replicas and of the accumulation become one: mean gives one big batch's.",
    )  # fmt: skip

    path("run_dir", "Folder of the run. Default: a new one below runs/.")
    switch("resume", True, "Go on from the newest good checkpoint in --run_dir, if there is one.")
    whole("checkpoint_every", None, 1, "Weight updates between checkpoints. Default: an epoch's.")
    whole("keep_checkpoints", 3, 1, "Newest checkpoints to keep.")
    whole(
        "log_every",
        None,
        1,
        "Weight updates between lines of the log. Default: a tenth of an epoch, and a second or more.",
    )
    own(
        _TimeParser(), "time_limit", None,
        "How long the run may take before it saves and ends, like 90s, 30m or 2h. Default: no limit.",
    )  # fmt: skip
    whole(
        "early_stop", None, 1,
        "Validations without a lower loss after which the run ends. Default: it goes on to its end.",
    )  # fmt: skip
    switch("export", False, "Write the trained model for serving: 8-bit images in, class probabilities out.")
    whole("seed", 42, 0, "Seed of weights, sample order and augmentation; the same on all instances.")
    switch("deterministic", False, "Give the same weights, to the bit, every time and after every interruption.")
    whole(
        "check_weights_every", 100, 0,
        "Weight updates between comparisons of the weights of all instances, which must be equal; 0: never.",
    )  # fmt: skip
    own(
        _TimeParser(), "stall_timeout", TimeSpan(600),
        "How long an instance may stand still, like 90s or 10m, before the run ends and names it; 0s: for ever.",
    )  # fmt: skip
    choice(
        "sdk", "auto", ["auto", "poplar", "emulator"],
        "Where to run: on IPUs through the Poplar SDK, or on this host's CPU through the emulator. "
        "auto takes the Poplar SDK if it is enabled and finds an IPU.",
    )  # fmt: skip
    path("executable_cache", "Folder in which the Poplar SDK keeps compiled programs.")
    switch("json", False, "Print the result (with --dry_run: the plan) as JSON.")

    switch("dry_run", False, "Show the plan and stop.")
    choice("format", "table", ["table", "mermaid"], "How --dry_run shows the plan.")
    switch("evaluate", False, "Measure the newest checkpoint in --run_dir on every validation sample and stop.")
    switch("input_only", False, "Measure how fast the input can be loaded and prepared, and stop.")


def _bounded(digits: str, most: int) -> int:
    """Reads a number; int() itself would fail on thousands of digits."""
    if len(digits) > 10 or int(digits) > most:
        raise ValueError(f"it is more than {most}")
    return int(digits)


class _TypedSerializer(flags.ArgumentSerializer):  # type: ignore[misc, type-arg, unused-ignore]
    def serialize(self, value: object) -> str:
        return cli.typed(value)


class _Parser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    kind = ""

    def flag_type(self) -> str:
        return self.kind


class _RealParser(flags.FloatParser):  # type: ignore[misc, unused-ignore]
    placeholder = "X"

    def convert(self, argument: Any) -> float:
        value = super().convert(argument)
        if not math.isfinite(value):  # which passes absl's bounds
            raise ValueError("it is not a finite number")
        return float(value)


class _NameParser(_Parser):
    kind = "name"
    syntactic_help = "a name like cifar10, with a configuration like name/config where it has several"
    placeholder = "NAME"

    def parse(self, argument: Any) -> str:
        name = str(argument).strip()
        if not re.fullmatch(r"\w+(/[\w.+-]+)*(:[\w.]+)?", name, re.ASCII):
            raise ValueError("it is not a data set's name")
        return name


class _NamesParser(_Parser):
    kind = "names"
    syntactic_help = "names like conv3_block1,conv4_block1"
    placeholder = "a,b"

    def parse(self, argument: Any) -> Tuple[str, ...]:
        if isinstance(argument, tuple):
            return argument
        names = tuple(name.strip() for name in str(argument).split(","))
        if not all(re.fullmatch(r"\w+", name, re.ASCII) for name in names):
            raise ValueError("there is an empty or impossible name in it")
        return names


class _NumbersParser(_Parser):
    kind = "numbers"
    syntactic_help = "ascending numbers like 30,60,80"
    placeholder = "a,b"

    def parse(self, argument: Any) -> Tuple[float, ...]:
        if isinstance(argument, tuple):
            return argument
        words = [word.strip() for word in str(argument).split(",")]
        if not all(re.fullmatch(r"\d{1,9}(\.\d{1,9})?", word, re.ASCII) for word in words):
            raise ValueError("there is something else than numbers in it")
        numbers = tuple(float(word) for word in words)
        if list(numbers) != sorted(set(numbers)) or not numbers[0]:
            raise ValueError("the numbers do not ascend from above 0")
        return numbers


class _LossScalingParser(_Parser):
    kind = "loss scaling"
    syntactic_help = "none, dynamic, or a number from 1 to 2^31"
    placeholder = "none|dynamic|N"

    def parse(self, argument: Any) -> LossScaling:
        if isinstance(argument, LossScaling):
            return argument
        text = str(argument).strip()
        if text in ("none", "dynamic"):
            return LossScaling(1.0 if text == "none" else None)
        if not re.fullmatch(r"\d{1,10}(\.\d{1,9})?", text, re.ASCII) or not 1 <= float(text) <= 2**31:
            raise ValueError("it is none of them")
        return LossScaling(float(text))


class _DurationParser(_Parser):
    kind = "duration"
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


class _TimeParser(_Parser):
    kind = "time"
    syntactic_help = "a time like 90s, 30m or 2h"
    placeholder = "N[s|m|h]"

    def parse(self, argument: Any) -> TimeSpan:
        if isinstance(argument, TimeSpan):
            return argument
        match = re.fullmatch(r"\s*(\d+)\s*([smh]?)\s*", str(argument), re.ASCII)
        if not match:
            raise ValueError("it is not a time")
        return TimeSpan(_bounded(match[1], _MOST) * _UNITS[match[2] or "s"])


class _HostsParser(_Parser):
    kind = "hosts"
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
