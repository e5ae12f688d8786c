"""The flags of a training run: declared once, parsed into one frozen TrainConfig. Pure."""

from __future__ import annotations

import math
import re
from typing import Any, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.config.schema import SCHEDULES, TIME_UNITS, Duration, Hosts, LossScaling, TimeSpan, TrainConfig
from tf_ipu_dp.datasets.info import DATASETS
from tf_ipu_dp.planning import architectures

# Bounds that no job reaches, so that a slip of the finger is refused and not computed.
_MOST = 2**31 - 1


_MOST_IPUS = 2**20


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
        return TimeSpan(_bounded(match[1], _MOST) * TIME_UNITS[match[2] or "s"])


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
