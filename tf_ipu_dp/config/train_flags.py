"""The flags of a training run, each declared once. Pure.

Each declaration defines the absl flag, its lines in `--help` and in docs/flags.md, and what a run checks: which values
must match a checkpoint, which an evaluation takes from the run, and which may differ between instances.
A new flag is a row here and a field of `TrainConfig`, or of `RecipeFlags` if it changes how the weights are updated.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config import parsers, recipe
from tf_ipu_dp.config.parsers import Parser, choice, real, switch, whole
from tf_ipu_dp.config.values import SCHEDULES, TRACKERS, Duration, Hosts, LossScaling, TimeSpan
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import architectures

PRECISIONS = ("32.32", "16.32", "16.16")
LR_SCHEDULES = ("constant", "step", "cosine", "polynomial")
AUGMENTATIONS = ("auto", "none", "crop", "crop_flip", "imagenet")


@dataclasses.dataclass(frozen=True)
class RecipeFlags:
    """Flags of a run that are part of its planned recipe as they are. No flag here may be None."""

    optimizer: str
    momentum: float
    weight_decay: float
    l2: float
    label_smoothing: float
    reduction: str
    precision: str


@dataclasses.dataclass(frozen=True)
class TrainConfig(RecipeFlags):
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
    init_from: Optional[str]
    freeze: Optional[Tuple[str, ...]]
    recompute: bool
    dataset: str
    validation_split: float
    label_column: str
    skip_bad_samples: bool
    data_dir: Optional[str]
    image_size: Optional[int]
    augment: str
    eight_bit_io: bool
    prefetch: bool
    micro_batch_size: int
    gradient_accumulation: Optional[int]
    global_batch_size: Optional[int]
    device_iterations: Optional[int]
    updates_per_epoch: Optional[int]
    epochs: Duration
    learning_rate: Optional[float]
    lr_scaling: str
    lr_base_batch: int
    lr_schedule: str
    lr_drop_epochs: Optional[Tuple[float, ...]]
    warmup_epochs: Optional[float]
    loss_scaling: Optional[LossScaling]
    run_dir: Optional[str]
    resume: bool
    checkpoint_every: Optional[int]
    keep_checkpoints: int
    log_every: Optional[int]
    time_limit: Optional[TimeSpan]
    validate: bool
    keep_best: Optional[str]
    early_stop: Optional[int]
    weights: str
    export: bool
    seed: int
    deterministic: bool
    check_weights_every: int
    stall_timeout: TimeSpan
    sdk: str
    executable_cache: Optional[str]
    callbacks: Optional[str]
    track: Optional[Tuple[str, ...]]
    json: bool
    dry_run: bool
    format: str
    evaluate: bool
    input_only: bool

    @property
    def requested_stages(self) -> Optional[int]:
        """Pipeline stages that the flags ask for, by number or by their split points; None if they do not set it."""
        return self.pipeline_stages or (len(self.pipeline_splits) + 1 if self.pipeline_splits else None)

    @property
    def has_own_model(self) -> bool:
        """Whether --model names a function of the user."""
        return user_code.is_reference(self.model)

    @property
    def own_code(self) -> Dict[str, str]:
        """The functions of the user that the flags name, by the flag."""
        return {**self.planned_code, **({"callbacks": self.callbacks} if self.callbacks else {})}

    @property
    def planned_code(self) -> Dict[str, str]:
        """Those of them that the plan depends on."""
        named = {"model": self.model, "dataset": self.dataset}
        return {name: text for name, text in named.items() if user_code.is_reference(text)}

    @property
    def best_metric(self) -> Optional[str]:
        """What the best weights are known by; None: they are not kept."""
        return self.keep_best or ("loss" if self.early_stop else None)

    def norm_for(self, stages: int) -> str:
        """Returns the normalisation of a model that is cut into some stages."""
        return self.norm or ("group" if stages > 1 else "batch")

    @classmethod
    def from_flags(cls, fv: flags.FlagValues) -> TrainConfig:
        """Returns the config of parsed flags. Other code reads the config, never the flags."""
        values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(cls)}
        return cls(**values)

    def flag_lines(self) -> Tuple[str, ...]:
        """Returns the flags that parse into this config, one per line of a flag file."""
        values = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return tuple(cli.flag_text(name, value) for name, value in values if value is not None)


class Effect(enum.Enum):
    """What a flag changes, which decides whether a checkpoint made with another value can be used."""

    MODEL = "model"  # the model or its data: such a checkpoint can be neither resumed nor evaluated
    WEIGHTS = "weights"  # the trained weights: it can be evaluated, but not resumed
    LATER_UPDATES = "later updates"  # updates from now on: it can be evaluated, and resumed with a line in the log
    RUN = "run"  # how, where or how long the run executes: it can be resumed and evaluated


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag: its values, its help text, and what depends on its value."""

    name: str
    default: Any  # None: the planner, the launcher or the run decides
    parser: Parser
    effect: Effect
    help: str
    open_default: str = ""  # completes "Default: ..." in the help where `default` is None
    # Whether --evaluate takes the run's saved value if none is given. How training was divided is not needed.
    kept_for_evaluation: bool = True
    # Whether the instances of a job may have different values, such as paths that differ between hosts.
    per_instance: bool = False

    def define(self, fv: flags.FlagValues) -> None:
        """Defines the flag in absl."""
        text = f"{self.help} Default: {self.open_default}." if self.open_default else self.help
        if isinstance(self.parser, parsers.BestMetricParser):
            define: Any = flags.DEFINE
            define(self.parser, self.name, self.default, text, fv, parsers.Serializer(), boolean=True)
        elif isinstance(self.parser, flags.BooleanParser):
            flags.DEFINE_bool(self.name, self.default, text, flag_values=fv)
        elif type(self.parser) is flags.EnumParser:
            flags.DEFINE_enum(self.name, self.default, self.parser.enum_values, text, flag_values=fv)
        else:
            flags.DEFINE(self.parser, self.name, self.default, text, fv, parsers.Serializer())


def _learning_rates() -> str:
    return ", ".join(f"{optimizer.learning_rate:g} for {name}" for name, optimizer in recipe.OPTIMIZERS.items())


def _with_momentum() -> str:
    return " and ".join(name for name, optimizer in recipe.OPTIMIZERS.items() if optimizer.has_momentum)


# fmt: off
_FLAGS_BY_GROUP: Dict[str, Tuple[Flag, ...]] = {
    "IPUs": (
        Flag("ipus", None, whole(1, parsers.LARGEST_JOB), Effect.RUN,
             "IPUs in the whole job, a power of two.", "1, or what poprun gives"),
        Flag("pipeline_stages", None, whole(1, parsers.LARGEST_JOB), Effect.RUN,
             "Parts that the model is cut into, one per IPU. A replica takes the next power of two of IPUs.",
             "1, or the IPUs per replica that poprun gives"),
        Flag("pipeline_schedule", "grouped", choice(SCHEDULES), Effect.RUN,
             "Order in which a pipeline works through its micro batches."),
        Flag("pipeline_splits", None, parsers.NamesParser(), Effect.RUN,
             "Blocks of the model at which a new pipeline stage begins, like conv3_block1,conv4_block1 (--dry_run "
             "shows them).", "what balances the work of the stages"),
        Flag("instances", None, whole(1, parsers.LARGEST_JOB), Effect.RUN,
             "Host processes, each with the same number of replicas.", "1, or what poprun gives",
             kept_for_evaluation=False),
        Flag("hosts", None, parsers.HostsParser(), Effect.RUN,
             "Machines of the job: how many, or their names. Each gets the same number of instances.", "1",
             kept_for_evaluation=False, per_instance=True),
    ),
    "Model": (
        Flag("model", "cnn", parsers.ModelParser(list(architectures.MODELS)), Effect.MODEL,
             f"Model to train: {cli.alternatives(architectures.MODELS)}, or a function that makes one, as "
             "FILE.py:function or package.module:function."),
        Flag("norm", None, choice(architectures.NORMS), Effect.MODEL,
             "Normalisation in the model. In a pipeline the SDK does not keep batch norm's moving statistics.",
             "batch, or group in a pipeline"),
        Flag("precision", "32.32", choice(PRECISIONS), Effect.WEIGHTS,
             "Bits of the computation and of the weights."),
        Flag("init_from", None, parsers.PathParser(), Effect.RUN,
             "Where the first weights come from: a run, a checkpoint, an .h5 or .keras file, or a SavedModel. Those of "
             "layers with the same names and shapes are taken, and what fits not is listed.", "drawn from the seed",
             per_instance=True, kept_for_evaluation=False),
        Flag("freeze", None, parsers.PatternsParser(), Effect.WEIGHTS,
             "Layers whose weights are not trained, by name, like conv1_conv,conv2_*.", "none"),
        Flag("recompute", False, switch(), Effect.RUN,
             "Compute activations again in the backward pass, which saves memory of the IPU."),
    ),
    "Data": (
        Flag("dataset", "fashion_mini", parsers.DatasetNameParser(), Effect.MODEL,
             f"Data set to train on: {cli.alternatives(info.DATASETS)}, or the name of any image classification set "
             "that tensorflow-datasets has prepared in --data_dir; a function that returns arrays or tf.data datasets, "
             "as FILE.py:function; or a path: a folder with a folder of images for each class, an .npz file with "
             "x_train and y_train, a .csv file with --label_column, a set that tensorflow-datasets has prepared."),
        Flag("validation_split", 0.2, real(0.9), Effect.WEIGHTS,
             "Share of an own data set that is held out for validation, drawn with --seed, where it has no validation "
             "part."),
        Flag("label_column", "label", parsers.PathParser(), Effect.MODEL,
             "Column of a .csv file that is to be learned; the others must be numbers."),
        Flag("skip_bad_samples", False, switch(), Effect.WEIGHTS,
             "Leave out images that cannot be decoded, and say how many, in place of refusing the data."),
        Flag("data_dir", None, parsers.PathParser(), Effect.RUN,
             "Folder of tensorflow-datasets.", "its own, ~/tensorflow_datasets", per_instance=True),
        Flag("image_size", None, whole(architectures.MIN_SIZE, 4096), Effect.MODEL,
             "Height and width that images are resized to.",
             f"those of the data set ({info.SIZE_WHERE_IMAGES_DIFFER} where its images differ)"),
        Flag("augment", "auto", choice(AUGMENTATIONS), Effect.WEIGHTS,
             "Random change of the training images, seeded per sample: crop shifts by up to 4 pixels, crop_flip also "
             "mirrors, imagenet cuts out a random part, auto does what is usual for the data set."),
        Flag("eight_bit_io", False, switch(), Effect.RUN,
             "Send images to the IPU as 8-bit numbers and normalise them there."),
        Flag("prefetch", True, switch(), Effect.RUN,
             "Load and prepare the next micro batches while the IPUs compute."),
    ),
    "Batch": (
        Flag("micro_batch_size", 32, whole(1), Effect.RUN, "Samples in one forward pass of one replica."),
        Flag("gradient_accumulation", None, whole(1), Effect.RUN,
             "Micro batches that each replica accumulates for one weight update.",
             "the fewest that the schedule takes (1 without a pipeline)", kept_for_evaluation=False),
        Flag("global_batch_size", None, whole(1), Effect.WEIGHTS,
             "Samples in one weight update of the whole job. Use it in place of --gradient_accumulation, which is then "
             "calculated.", "micro batch x accumulation x replicas", kept_for_evaluation=False),
        Flag("device_iterations", None, whole(1), Effect.RUN,
             "Weight updates in one call into the device (one execution); must divide the epoch.",
             "by the model's work: 1, and more for small models, whose executions would be too short",
             kept_for_evaluation=False),
        Flag("updates_per_epoch", None, whole(1), Effect.WEIGHTS,
             "Weight updates in an epoch.", "as many as the data set fills", kept_for_evaluation=False),
    ),
    "Recipe": (
        Flag("epochs", Duration(5), parsers.DurationParser(), Effect.RUN,
             "How long to train: 5 (epochs), or 200steps (weight updates).", kept_for_evaluation=False),
        Flag("optimizer", "sgd", choice(tuple(recipe.OPTIMIZERS)), Effect.WEIGHTS,
             "Rule of the weight update; sgd has momentum."),
        Flag("learning_rate", None, real(), Effect.LATER_UPDATES,
             "Highest learning rate, before --lr_scaling.", _learning_rates()),
        Flag("lr_scaling", "none", choice(("none", "linear", "sqrt")), Effect.LATER_UPDATES,
             "How the learning rate grows with the ratio of the global batch to --lr_base_batch."),
        Flag("lr_base_batch", 256, whole(1), Effect.LATER_UPDATES, "Global batch that --learning_rate is meant for."),
        Flag("lr_schedule", "cosine", choice(LR_SCHEDULES), Effect.LATER_UPDATES,
             "Course of the learning rate after the warm-up: step drops to a tenth, cosine and polynomial (of power 2) "
             "fall to 0 at the end."),
        Flag("lr_drop_epochs", None, parsers.AscendingNumbersParser(), Effect.LATER_UPDATES,
             "Epochs after which --lr_schedule=step drops, like 30,60,80.",
             f"after {' and '.join(f'{share:.0%}' for share in recipe.LR_DROP_SHARES)} of the run"),
        Flag("warmup_epochs", None, real(), Effect.LATER_UPDATES,
             "Epochs in which the learning rate rises from 0.",
             f"{recipe.WARMUP_EPOCHS:g}, but at most {recipe.MAX_WARMUP_SHARE:.0%} of the run"),
        Flag("momentum", 0.9, real(1.0), Effect.WEIGHTS, f"Momentum of {_with_momentum()}."),
        Flag("weight_decay", 0.0, real(), Effect.WEIGHTS,
             "Share of the weights, times the learning rate, that each update subtracts (decoupled)."),
        Flag("l2", 0.0, real(), Effect.LATER_UPDATES,
             "Factor of half the squared weights in the loss; it acts through the gradient."),
        Flag("label_smoothing", 0.0, real(1.0), Effect.LATER_UPDATES, "Share of the label spread over all classes."),
        Flag("loss_scaling", None, parsers.LossScalingParser(), Effect.WEIGHTS,
             "What the loss is multiplied by for 16-bit gradients: none, dynamic or a number.",
             f"{recipe.STATIC_LOSS_SCALE:g}, or none with --precision=32.32"),
        Flag("reduction", "mean", choice(("mean", "sum")), Effect.WEIGHTS,
             "How the gradients of all replicas and of the accumulation are combined: mean is what one big batch would "
             "give."),
    ),
    "Run": (
        Flag("run_dir", None, parsers.PathParser(), Effect.RUN,
             "Folder of the run.", "a new one in runs/", per_instance=True),
        Flag("resume", True, switch(), Effect.RUN,
             "Resume from the newest good checkpoint in --run_dir, if there is one."),
        Flag("checkpoint_every", None, whole(1), Effect.RUN,
             "Weight updates between checkpoints.", "those of an epoch", kept_for_evaluation=False),
        Flag("keep_checkpoints", 3, whole(1), Effect.RUN, "Newest checkpoints to keep."),
        Flag("log_every", None, whole(1), Effect.RUN,
             "Weight updates between lines of the log.", "a tenth of an epoch, but at least a second"),
        Flag("time_limit", None, parsers.TimeParser(), Effect.RUN,
             "How long the run may take, like 90s, 30m or 2h, before it saves a checkpoint and ends.", "no limit"),
        Flag("validate", True, switch(), Effect.RUN,
             "Validate after every epoch and at the end of the run."),
        Flag("keep_best", None, parsers.BestMetricParser(), Effect.RUN,
             "Keep the weights of the best validation beside the newest: by the loss, or by another metric, like "
             "accuracy.", "only with --early_stop, by the loss"),
        Flag("early_stop", None, whole(1), Effect.RUN,
             "Validations without a lower loss after which the run stops early. The best weights are kept beside the "
             "newest.", "no early stopping"),
        Flag("weights", "best", choice(("best", "newest")), Effect.RUN,
             "Weights that --export and --evaluate take: those of the best validation, which runs with --early_stop "
             "or --keep_best keep, or the newest. Runs without have the newest only."),
        Flag("export", False, switch(), Effect.RUN,
             "Write the trained model for serving: 8-bit images in, class probabilities out; of own tasks their inputs "
             "in and outputs out."),
        Flag("seed", 42, whole(0), Effect.WEIGHTS,
             "Seed of weights, sample order and augmentation; the same on all instances."),
        Flag("deterministic", False, switch(), Effect.RUN,
             "Give the same weights, to the bit, every time and after every interruption."),
        Flag("check_weights_every", 100, whole(0), Effect.RUN,
             "Weight updates between checks that all instances have equal weights; 0 turns them off."),
        Flag("stall_timeout", TimeSpan(600), parsers.TimeParser(), Effect.RUN,
             "How long an instance may make no progress, like 90s or 10m, before the run ends and names it; 0s turns "
             "the check off."),
        Flag("sdk", "auto", choice(("auto", "poplar", "emulator")), Effect.RUN,
             "Where to run: on IPUs through the Poplar SDK, or on this host's CPU through the emulator. "
             "auto takes the Poplar SDK if it is enabled and finds an IPU."),
        Flag("executable_cache", None, parsers.PathParser(), Effect.RUN,
             "Folder in which the Poplar SDK keeps compiled programs.", "none", per_instance=True),
        Flag("callbacks", None, parsers.ReferenceParser(), Effect.RUN,
             "Function that returns Keras callbacks, as FILE.py:function or package.module:function. They are called "
             "on the leader, after every execution and epoch.", "none", kept_for_evaluation=False),
        Flag("track", None, parsers.TrackersParser(), Effect.RUN,
             f"Trackers that get the run's flags and records, too: {cli.alternatives(TRACKERS)}, or several, separated "
             "by commas. Offline unless their own variables say otherwise.", "none"),
        Flag("json", False, switch(), Effect.RUN, "Print the result (with --dry_run: the plan) as JSON."),
    ),
    "In place of training": (
        Flag("dry_run", False, switch(), Effect.RUN, "Show the plan and stop."),
        Flag("format", "table", choice(("table", "mermaid")), Effect.RUN, "How --dry_run shows the plan."),
        Flag("evaluate", False, switch(), Effect.RUN,
             "Evaluate the checkpoint of --weights in --run_dir on every validation sample and stop."),
        Flag("input_only", False, switch(), Effect.RUN,
             "Measure how fast the input can be loaded and prepared, and stop."),
    ),
}
# fmt: on
_METRICS = ("loss", "accuracy", "top5")  # that a validation of a built-in model has
_MODES = {
    "dry_run": "only shows the plan",
    "evaluate": "evaluates a checkpoint",
    "input_only": "measures the input",
}
FLAGS = tuple(flag for group in _FLAGS_BY_GROUP.values() for flag in group)
GROUPS = {title: tuple(flag.name for flag in group) for title, group in _FLAGS_BY_GROUP.items()}


def parse(words: Sequence[str]) -> TrainConfig:
    """Returns the config of a command line (without the program's name), or refuses it with all of its mistakes."""
    fv = make_flags()
    cli.parse(words, fv)
    config = TrainConfig.from_flags(fv)
    sentences = []
    if config.format != "table" and config.json:
        sentences.append(
            f"--json and --format={config.format} exclude each other: --json prints the plan as JSON, "
            f"--format={config.format} draws it. Leave --json or --format out."
        )
    if config.format != "table" and not config.dry_run:
        sentences.append(f"--format={config.format} draws a plan and does not train. Add --dry_run.")
    if config.keep_best is not None and not config.validate:
        sentences.append(f"--keep_best={config.keep_best} needs validations. Leave --novalidate out.")
    if not config.has_own_model and config.keep_best not in (None, *_METRICS):  # others are known when code is loaded
        known = cli.alternatives(_METRICS)
        sentences.append(f"--keep_best={config.keep_best} is not a metric of this task. Use --keep_best={known}.")
    if config.early_stop is not None and not config.validate:
        sentences.append(f"--early_stop={config.early_stop} needs validations. Leave --novalidate out.")
    modes = [f"--{name}" for name in _MODES if getattr(config, name)]
    if len(modes) > 1:
        what = ", ".join(f"{mode} {_MODES[mode[2:]]}" for mode in modes)
        sentences.append(f"{' and '.join(modes)} exclude each other: {what}. Use {cli.alternatives(modes)} alone.")
    if sentences:
        raise cli.UsageError(*sentences)
    return config


def typed_names(words: Sequence[str]) -> Tuple[str, ...]:
    """Returns the flags that a command line sets, itself or by a flag file."""
    fv = make_flags()
    cli.parse(words, fv)
    return tuple(flag.name for flag in FLAGS if fv[flag.name].present)


def make_flags() -> flags.FlagValues:
    """Returns a training run's flags with their defaults, separate from the process-wide flags of other libraries."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define_flags(fv)
    return fv


def define_flags(fv: flags.FlagValues) -> None:
    """Defines every flag of a training run."""
    for flag in FLAGS:
        flag.define(fv)


def check_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Returns a config, if some of its values could be typed; UsageError if a flag does not take them."""
    parsers_by_name = {flag.name: flag.parser for flag in FLAGS}
    for name, value in values.items():
        if value is not None:
            try:
                parsers_by_name[name].parse(cli.typed(value))
            except (ValueError, TypeError) as error:
                raise cli.UsageError(f"--{name}={cli.typed(value)} is not possible ({error}).") from error
    return config


def default_texts() -> Dict[str, str]:
    """Returns the defaults as typed after `=`: what runs of releases without a flag were trained with."""
    return {flag.name: cli.typed(flag.default) for flag in FLAGS if flag.default is not None}


def recipe_defaults() -> Dict[str, Any]:
    """Returns the defaults of the flags in a recipe: what plans of releases without a flag were made with."""
    names = {field.name for field in dataclasses.fields(RecipeFlags)}
    return {flag.name: flag.default for flag in FLAGS if flag.name in names}


def names_tied_to_weights() -> Tuple[str, ...]:
    """Returns the flags that must have the checkpoint's values for a run to resume from it."""
    return tuple(flag.name for flag in FLAGS if flag.effect in (Effect.MODEL, Effect.WEIGHTS))


def names_of_later_updates() -> Tuple[str, ...]:
    """Returns the flags that a resumed run may change, which its log then says."""
    return tuple(flag.name for flag in FLAGS if flag.effect is Effect.LATER_UPDATES)


def names_tied_for_evaluation() -> Tuple[str, ...]:
    """Returns the flags that must have the checkpoint's values for it to be evaluated."""
    return tuple(flag.name for flag in FLAGS if flag.effect is Effect.MODEL)


def names_dropped_for_evaluation() -> Tuple[str, ...]:
    """Returns the flags that an evaluation does not take from the run that it evaluates."""
    return tuple(flag.name for flag in FLAGS if not flag.kept_for_evaluation)


def names_per_instance() -> Tuple[str, ...]:
    """Returns the flags that may differ between the instances of a job."""
    return tuple(flag.name for flag in FLAGS if flag.per_instance)
