"""Predicts with the weights of a run: `python -m tf_ipu_dp.predict runs/first image.png`.

Images, arrays, tables or folders in; CSV, JSON or arrays out. Data-parallel over replicas, each input once, in order.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, NoReturn, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli, missing_packages
from tf_ipu_dp.config import parsers
from tf_ipu_dp.distributed import world
from tf_ipu_dp.planning.errors import PlanError
from tf_ipu_dp.prediction import inputs, output, trained_run
from tf_ipu_dp.runs import checkpoints, run_folder

_EXAMPLES = (
    "python -m tf_ipu_dp.predict runs/first image.png",
    "python -m tf_ipu_dp.predict runs/first photos/ --out=predictions.csv --top=3",
    "python -m tf_ipu_dp.predict runs/first test.npy --ipus=8 --out=probabilities.npy",
)
_DEFAULT_MICRO_BATCH = 32
_MAX_PART = 4096  # samples of one part of the inputs, for models whose inputs are only known once they are built
# Handed on to train's own flags, which check them.
_FLAGS_OF_TRAIN = ("ipus", "micro_batch_size", "weights", "model", "dataset", "data_dir", "sdk")
_SERIALIZER: Any = flags.ArgumentSerializer()


@dataclasses.dataclass(frozen=True)
class _Source:
    """What the predictions come from: a checkpoint with the plan of its model, or an export."""

    weights: str
    planned: Optional[trained_run.Buildable] = None
    checkpoint: Optional[checkpoints.Checkpoint] = None
    images: Tuple[inputs.InputSpec, ...] = ()  # what the model takes, if that is images


class _TextParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    def __init__(self, placeholder: str) -> None:
        super().__init__()
        self.placeholder = placeholder


def main(words: Sequence[str]) -> int:
    """Predicts, and writes the predictions."""
    if cli.wants_help(words):
        return cli.show(_help())
    fv = _make_flags()
    run_dir, *names = cli.parse(words, fv, arguments=True) or [""]
    if not run_dir or not names:
        raise cli.UsageError("the folder of a run and inputs are needed, for example: runs/first image.png.")
    started = world.read_launched(os.environ) or world.read_ranks(os.environ)
    if started and started.instances > 1:
        raise cli.UsageError(
            f"predict runs as one instance, and {started.launcher} started {started.instances}. Start it alone, with "
            "--ipus for more replicas."
        )
    files = [Path(name) for name in fv["out"].value or ()]
    for path in files:
        output.check_file(path)
    folder = run_folder.RunFolder(cli.expand_path(run_dir))
    given = [cli.flag_text(name, fv[name].value) for name in _FLAGS_OF_TRAIN if fv[name].value is not None]
    predictions, skipped = _predict(folder, given, names, fv)
    top: int = fv["top"].value  # type: ignore[assignment, unused-ignore]
    for path in files:
        output.write(predictions, path, top)
        _warn(f"written: {path}")
    if not files:
        content = output.render(predictions, f".{fv['format'].value}", top)
        sys.stdout.write(content.decode("utf-8", "backslashreplace"))
    if skipped:
        _warn(f"{cli.count(len(skipped), 'image')} could not be decoded: {skipped[0]}")
    return 0


def _predict(
    folder: run_folder.RunFolder, given: List[str], names: Sequence[str], fv: flags.FlagValues
) -> Tuple[output.Predictions, List[str]]:
    """Returns the predictions for all inputs, and the images that were left out."""
    source = _choose_source(folder, given)
    files: List[inputs.InputFile] = []

    def find_inputs(specs: Sequence[inputs.InputSpec]) -> int:
        files[:] = files or inputs.find_files(names, specs)
        return sum(file.samples for file in files)

    if source.images:
        find_inputs(source.images)  # before TensorFlow is imported: a mistake is refused at once
    missing_packages.require("tensorflow")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tf_ipu_dp import sdk

    try:
        modules = sdk.load(source.planned.config.sdk if source.planned else fv["sdk"].value or "auto")
    except sdk.SdkError as error:
        raise cli.UsageError(str(error)) from error
    from tf_ipu_dp.prediction import predictor

    if source.planned and source.checkpoint:
        most = inputs.most_samples(source.images) if source.images else _MAX_PART
        part = trained_run.plan_prediction(folder, given, min(find_inputs(source.images), most) if files else most)
        made = predictor.from_checkpoint(part.config, part.plan, modules, source.checkpoint)
        replicas = part.plan.topology.replicas
    else:
        replicas, micro_batch_size = _layout_of_export(folder, fv)
        made = predictor.from_export(
            folder.export, modules, replicas=replicas, micro_batch_size=micro_batch_size, count=find_inputs
        )
    samples = find_inputs(made.specs)
    where = f"{modules.title}, {cli.count(replicas, 'replica')}"
    _warn(f"{cli.count(samples, 'sample')} with {source.weights} ({where})")
    facts = source.planned.plan.dataset if source.planned else None
    decode = predictor.make_decoder(made.specs[0], facts) if made.specs[0].is_image else _decode_nothing
    reader = inputs.InputReader(made.specs, decode, skip_bad=bool(fv["skip_bad_samples"].value))
    kept: List[str] = []
    outputs: Dict[str, List[Any]] = {}
    for part_of_inputs in reader.read(files, made.slots):
        kept += part_of_inputs.names
        for name, array in made.predict(part_of_inputs.arrays).items():
            outputs.setdefault(name, []).append(array)
    if not kept:
        raise cli.UsageError(f"None of {cli.count(samples, 'sample')} could be decoded: {reader.skipped[0]}.")
    class_names = facts.class_names if facts else trained_run.read_class_names(folder)
    joined = {name: predictor.join(arrays) for name, arrays in outputs.items()}
    return output.Predictions(str(folder.path), source.weights, kept, joined, class_names), reader.skipped


def _choose_source(folder: run_folder.RunFolder, given: List[str]) -> _Source:
    """Returns a checkpoint of the run if its model can be built, else its export."""
    run_folder.read_run_flags(folder.path, flag="")  # refuses what is not a run
    try:
        planned = trained_run.plan_prediction(folder, given, samples=1)
        found = checkpoints.find(folder.stores_of(planned.config.weights), _warn)
        if found is not None:
            return _Source(str(found.path), planned, found, inputs.image_specs(planned.plan.dataset))
        reason = f"{folder.path} has no good checkpoint. Train it first, or give another run."
    except cli.UsageError as error:
        if isinstance(error, PlanError) or any(word.startswith(("--model=", "--dataset=")) for word in given):
            raise  # a mistake in the flags of this command
        reason = str(error)
    if not trained_run.has_export(folder):
        raise cli.UsageError(reason)
    if trained_run.code_that_is_not_named(folder, given) is None:  # else the export is what is expected
        _warn(f"the export is taken, because a checkpoint cannot be: {reason}")
    return _Source(str(folder.export))


def _decode_nothing(_: bytes) -> NoReturn:
    raise ValueError("the model takes no images")


def _layout_of_export(folder: run_folder.RunFolder, fv: flags.FlagValues) -> Tuple[int, int]:
    """Returns replicas and micro batch: as given, else those of the run."""
    saved = folder.read_plan()
    replicas = fv["ipus"].value or (saved.topology.replicas if saved else 1)
    return replicas, fv["micro_batch_size"].value or (
        saved.batch.micro_batch_samples if saved else _DEFAULT_MICRO_BATCH
    )


def _warn(text: str) -> None:
    cli.announce("predict", text)


def _make_flags() -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_multi(_TextParser("FILE"), _SERIALIZER, "out", None, "", flag_values=fv)
    # Set afterwards: absl adds a remark of its own to the help of a flag that may be repeated.
    fv["out"].help = (
        f"Write the predictions to a file, by its type: {', '.join(output.FILES)}. May be given several times. Without "
        "it they are printed."
    )
    flags.DEFINE_enum("format", "csv", ["csv", "json"], "What is printed without --out.", flag_values=fv)
    flags.DEFINE_integer(
        "top", 1, "Most probable classes of each input in CSV and JSON; arrays have all.", lower_bound=1, flag_values=fv
    )
    flags.DEFINE_bool(
        "skip_bad_samples", False, "Leave out images that cannot be decoded, and say how many.", flag_values=fv
    )
    flags.DEFINE_enum(
        "weights", None, ["best", "newest"],
        "Weights with the lowest validation loss, which runs with --early_stop keep, or the newest. Default: best.",
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_integer(
        "ipus", None, "IPUs to use, a power of two. Default: those of the run.", lower_bound=1, flag_values=fv
    )
    flags.DEFINE_integer(
        "micro_batch_size", None, "Samples in one pass of one replica. Default: that of the run.", lower_bound=1,
        flag_values=fv,
    )  # fmt: skip
    for name, text in (
        ("model", "The own model that the run was trained with: its code is loaded only if it is named here."),
        ("dataset", "The own data set that the run was trained with, likewise."),
    ):
        flags.DEFINE(_TextParser("FILE.py:function"), name, None, text, fv, _SERIALIZER)
    flags.DEFINE(
        parsers.PathParser(), "data_dir", None, "Folder of tensorflow-datasets. Default: that of the run.", fv,
        parsers.Serializer(),
    )  # fmt: skip
    flags.DEFINE_enum("sdk", None, ["auto", "poplar", "emulator"], "Where to run. Default: as the run.", flag_values=fv)
    return fv


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.predict RUN_DIR INPUT ... [--flag=value ...]",
        "Predicts with the weights of a run, data-parallel over the replicas. Inputs are images, .npy or .npz arrays "
        "or .csv tables with a row for each sample, or folders of these; each is predicted once, in order.",
        {
            "Output": ("out", "format", "top"),
            "Inputs": ("skip_bad_samples",),
            "Model": ("weights", "model", "dataset", "data_dir"),
            "IPUs": ("ipus", "micro_batch_size", "sdk"),
        },
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(cli.run("predict", lambda: main(sys.argv[1:]), sys.stderr))
