"""What a run's folder has to predict with: a checkpoint whose model can be built, or an export. No TensorFlow.

Code is loaded only if the caller names it: a run of an own model is predicted from its export, or with --model.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Sequence, Tuple

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import run_folder, safe_files, saved_flags
from tf_ipu_dp.runs.run_folder import RunFolder

CLASSES = "classes.txt"
_CODE_FLAGS = ("model", "dataset")
_MAX_CLASSES_BYTES = 1 << 24


@dataclasses.dataclass(frozen=True)
class Buildable:
    """A run whose model can be built: its flags, and its plan for predictions."""

    config: TrainConfig
    plan: plan.RunPlan


def plan_prediction(
    folder: RunFolder, words: Sequence[str], samples: int, learn_here: Optional[facts.Learn] = None
) -> Buildable:
    """Returns the plan for so many samples; UsageError if the run's model cannot be built.

    `words` are flags of train that the caller gives: only they may name code. `learn_here` is called for functions that
    only this process has.
    """
    _require_named_code(folder, words)
    config = saved_flags.complete([f"--run_dir={folder.path}", "--evaluate", *words]).config
    found = facts.find(config, learn_here=learn_here)  # it loads code only if the caller names it
    # The inputs take the place of the validation: every sample once, in order, on any number of replicas.
    return Buildable(config, plan.plan_run(config, dataclasses.replace(found, validation_samples=samples)))


def read_class_names(folder: RunFolder) -> Tuple[str, ...]:
    """Returns the names of the classes in a run's export; nothing if it has none."""
    try:
        text = safe_files.read_bytes(folder.export / CLASSES, _MAX_CLASSES_BYTES).decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(text.split("\n")[:-1])


def has_export(folder: RunFolder) -> bool:
    """Whether a run has exported its model."""
    return (folder.export / "saved_model.pb").is_file()


def code_that_is_not_named(folder: RunFolder, words: Sequence[str]) -> Optional[str]:
    """Returns the flag of a run that names code, like `--model=FILE.py:function`, if the caller does not give it."""
    typed = {word.lstrip("-").partition("=")[0] for word in words}
    for name, value in _saved_values(folder).items():
        if name in _CODE_FLAGS and name not in typed and user_code.is_reference(value):
            return cli.flag_text(name, value)
    return None


def _require_named_code(folder: RunFolder, words: Sequence[str]) -> None:
    flag = code_that_is_not_named(folder, words)
    if flag is not None:
        raise cli.UsageError(
            f"{folder.path} was trained with {flag}, and code is only loaded if you name it. Add {flag}, or train with "
            "--export: an export needs no code."
        )


def _saved_values(folder: RunFolder) -> Dict[str, str]:
    pairs = (line.lstrip("-").partition("=") for line in run_folder.read_run_flags(folder.path))
    return {name: value for name, _, value in pairs}
