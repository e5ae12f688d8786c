"""The flags of a study: its own, those of emulated hosts, and all flags of train."""

from __future__ import annotations

import dataclasses
import shutil
from typing import Any, Dict, Optional, Sequence

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric_flags
from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.config import parsers, train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts
from tf_ipu_dp.scaling import modes
from tf_ipu_dp.scaling.parts import Extent, Parts
from tf_ipu_dp.scaling.records import MODES, WEAK

_STUDY = ("mode", "sizes", "unit", "replicas_per_instance", "engines", "global_batch_size", "micro_batch_size",
          "gradient_accumulation", "model", "dataset")  # fmt: skip
_RUNS = ("repeats", "seconds", "updates", "order_seed", "target_accuracy", "epochs", "hosts")
_PREDICTION = ("predict", "predict_on", "compute_ms")
_DEFAULT_ENGINE = "tf_ipu_dp"
_OUTPUT = ("study_dir", "resume", "json", "dry_run")
# Cells say how many instances there are and where; a network that is built slower would not slow what computes.
_REFUSED_FABRIC_FLAGS = {
    "ranks_per_host": "--sizes says how many instances there are",
    "placement": "neighbouring instances are always on one host",
    "dilation": "it would slow the network and not the training, so that a study builds all links as they are",
}
_EXAMPLES = (
    "python -m tf_ipu_dp.scaling --mode=weak --sizes=1,2,4 --model=mlp",
    "python -m tf_ipu_dp.scaling --mode=strong --global_batch_size=512 --model=resnet20 --engines=tf_ipu_dp,ddp",
    "python -m tf_ipu_dp.scaling --mode=batch --sizes=16..512 --model=cnn --study_dir=runs/batch",
    "python -m tf_ipu_dp.scaling --mode=weak --fabric=ethernet-1g --model=mlp --predict=16..65536 --predict_on=pod64",
    "python -m tf_ipu_dp.scaling --flagfile=flags/r3_batch.flags",
    "python -m tf_ipu_dp.scaling report runs/batch",
)
_ABOUT = (
    "Trains at several sizes and says how well it scales, where the rest of the time went, and what to change. "
    "--mode=batch sweeps the batch of one replica, weak keeps the samples of a replica, strong the global batch; "
    "compare trains with one replica, with replicas in one instance and over several; instances spreads the same "
    "replicas. The same command continues a study that was interrupted. All flags of train are accepted; those that a "
    "cell sets (--ipus, --instances and so on) are replaced."
)


@dataclasses.dataclass(frozen=True)
class Options:
    """The study as the flags ask for it."""

    request: modes.Request
    repeats: int
    seconds: float
    updates: Optional[int]
    order_seed: int
    target_accuracy: Optional[float]
    extent: Optional[Extent]
    fabric: Optional[Fabric]  # as it is built: without dilation
    study_dir: Optional[str]
    resume: bool
    json: bool
    dry_run: bool

    @property
    def config(self) -> TrainConfig:
        return self.request.config


def parse(words: Sequence[str], parts: Parts) -> Options:
    """Returns the study that a command line asks for; UsageError with every mistake in it."""
    fv = make_flags()
    cli.parse(words, fv)
    values: Dict[str, Any] = {name: fv[name].value for name in fv}
    config = TrainConfig.from_flags(fv)
    _refuse(config, values)
    # Executions of the same length in cells of all sizes, and one update each as in the other engines' steps.
    config = dataclasses.replace(config, device_iterations=config.device_iterations or 1)
    fabric = fabric_flags.from_flags(fv)
    if fabric is not None and config.hosts is not None:
        raise cli.UsageError(
            "--fabric makes hosts of its own, so --hosts has no place beside it. Leave one of them out."
        )
    hosts = fabric.hosts if fabric is not None else config.hosts.count if config.hosts is not None else 1
    request = modes.Request(
        mode=values["mode"],
        sizes=modes.parse_sizes(_or_default(values["sizes"], modes.DEFAULT_SIZES[values["mode"]])),
        unit=values["unit"],
        replicas_per_instance=values["replicas_per_instance"],
        engines=modes.parse_engines(_or_default(values["engines"], _DEFAULT_ENGINE), parts.engines),
        config=config,
        dataset=facts.find(config),
        hosts=hosts,
    )
    if values["predict"] is not None and not any(map(parts.is_ours, request.engines)):
        raise cli.UsageError(
            f"--predict={values['predict']} extrapolates tf_ipu_dp, and --engines={','.join(request.engines)} is "
            f"without it. Use --engines={','.join((_DEFAULT_ENGINE, *request.engines))}, or leave --predict out."
        )
    return Options(
        request=request,
        repeats=values["repeats"],
        seconds=values["seconds"],
        updates=values["updates"],
        order_seed=values["order_seed"],
        target_accuracy=_share(values["target_accuracy"]),
        extent=_extent(values),
        fabric=None if fabric is None else dataclasses.replace(fabric, dilation=1.0),
        study_dir=values["study_dir"],
        resume=config.resume,
        json=config.json,
        dry_run=config.dry_run,
    )


def _or_default(text: Optional[str], default: str) -> str:
    """Returns a flag's text, an empty one too: that is a mistake, and no wish for the default."""
    return default if text is None else text


def _share(percent: Optional[float]) -> Optional[float]:
    """Returns an accuracy as records have it."""
    if percent is not None and 0 < percent <= 1:
        raise cli.UsageError(
            f"--target_accuracy={percent:g} would be {percent:g} %: accuracies are in per cent. Write "
            f"--target_accuracy={100 * percent:g}."
        )
    return None if percent is None else percent / 100


def make_flags() -> flags.FlagValues:
    """Returns all flags with their defaults."""
    fv = train_flags.make_flags()
    fabric_flags.define_flags(fv)
    flags.DEFINE_enum("mode", WEAK, list(MODES), "What is varied, and what is kept.", flag_values=fv)
    fabric_flags.define_text(
        "sizes", "Sizes to measure, like 1,2,4 or 16..512, which doubles: samples in --mode=batch, else what --unit "
        f"says. Default: {', '.join(f'{sizes} in {mode}' for mode, sizes in modes.DEFAULT_SIZES.items())}.",
        "N,N|N..N", fv,
    )  # fmt: skip
    flags.DEFINE_enum("unit", modes.UNITS[0], list(modes.UNITS), "What sizes count in weak and strong.", flag_values=fv)
    flags.DEFINE_integer(
        "replicas_per_instance", 1, "Replicas of each instance, where sizes count instances.", lower_bound=1,
        flag_values=fv,
    )  # fmt: skip
    fabric_flags.define_text(
        "engines", "What trains: tf_ipu_dp (Horovod on Gloo), tf_ipu_dp_mpi, horovod (its Keras recipe), ddp "
        f"(PyTorch), keras (one process), separated by commas. Default: {_DEFAULT_ENGINE}.", "NAME,NAME", fv,
    )  # fmt: skip
    flags.DEFINE_integer("repeats", 3, "Runs of every cell.", lower_bound=1, upper_bound=1000, flag_values=fv)
    flags.DEFINE_float(
        "seconds", 8.0, "How long to time each run, about, after its warm-up.", lower_bound=0.1, flag_values=fv
    )
    flags.DEFINE_integer(
        "updates", None, "Weight updates to time in each run. Default: as many as --seconds takes.", lower_bound=1,
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_integer("order_seed", 1, "Seed of the order of the runs.", lower_bound=0, flag_values=fv)
    flags.DEFINE_float(
        "target_accuracy", None, "Accuracy to time, in per cent: trains for --epochs, with a validation after each; "
        "other engines are not evaluated. Default: none, throughput only.", lower_bound=0.0, upper_bound=100.0,
        flag_values=fv,
    )  # fmt: skip
    fabric_flags.define_text(
        "predict", "Sizes to extrapolate to, like 16..65536; they are labelled as prediction.", "N..N", fv
    )
    fabric_flags.define_text(
        "predict_on", "Fabrics to extrapolate on, like pod64 or pod16,pod256. Default: PODs, and Ethernet.",
        "NAME,NAME", fv,
    )  # fmt: skip
    flags.DEFINE_float(
        "compute_ms", None, "Milliseconds of one micro batch on the device to extrapolate for, forward and backward. "
        "Default: what this machine takes, which on the emulator is the time of its CPU and not of an IPU.",
        flag_values=fv,
    )  # fmt: skip
    parsers.define_path("study_dir", None, "Folder of the study. Default: a new one in runs/.", flag_values=fv)
    fv["resume"].help = "Continue the study in --study_dir; --noresume sets aside what it has measured."
    fv["json"].help = "Print the result (with --dry_run: the cells) as JSON."
    fv["dry_run"].help = "Show the cells and stop."
    fv["epochs"].help = "How long to train with --target_accuracy; without it --seconds decides."
    return fv


def render_help() -> str:
    """Returns the help text with examples."""
    fabric = tuple(name for name in fabric_flags.FLAG_NAMES if name not in _REFUSED_FABRIC_FLAGS)
    groups = {
        "Study": _STUDY,
        "Runs": _RUNS,
        "Emulated hosts": fabric,
        "Prediction": _PREDICTION,
        "Output": _OUTPUT,
    }
    usage = "python -m tf_ipu_dp.scaling [report STUDY_DIR] [--flag=value ...]"
    width = shutil.get_terminal_size().columns
    return cli.render_help(usage, _ABOUT, groups, make_flags(), width, _EXAMPLES)


def _refuse(config: TrainConfig, values: Dict[str, Any]) -> None:
    sentences = []
    if config.run_dir is not None:
        sentences.append(f"--run_dir={config.run_dir} is of one run. Use --study_dir={config.run_dir}.")
    sentences += [
        f"--{name} has no place in a study, which trains. Leave it out."
        for name in ("evaluate", "input_only", "export")
        if getattr(config, name)
    ]
    if config.hosts is not None and not config.hosts.names:
        sentences.append(f"--hosts={config.hosts} says how many, but not which. Give names, like --hosts=a,b.")
    sentences += [
        f"--{name}={values[name]} has no place in a study: {why}. Leave it out."
        for name, why in _REFUSED_FABRIC_FLAGS.items()
        if values[name] is not None
    ]
    if values["predict_on"] is not None and values["predict"] is None:
        sentences.append(f"--predict_on={values['predict_on']} needs sizes. Add --predict=16..65536.")
    compute_ms = values["compute_ms"]
    if compute_ms is not None and not 0 < compute_ms < float("inf"):
        sentences.append(f"--compute_ms={compute_ms:g} is not a time. Give that of one micro batch on the device.")
    elif compute_ms is not None and values["predict"] is None:
        sentences.append(f"--compute_ms={compute_ms:g} needs sizes to extrapolate to. Add --predict=16..65536.")
    if sentences:
        raise cli.UsageError(*sentences)


def _extent(values: Dict[str, Any]) -> Optional[Extent]:
    if values["predict"] is None:
        return None
    names = [name.strip() for name in values["predict_on"].split(",")] if values["predict_on"] else []
    if names:
        from tf_ipu_dp.collectives import topology  # imports numpy

        for name in names:
            try:
                topology.preset(name)
            except cli.UsageError as error:
                raise cli.UsageError(f"--predict_on={values['predict_on']}: {error}") from None
    return Extent(modes.parse_sizes(values["predict"], "predict"), tuple(names), values["compute_ms"])
