"""What is wrong with a command line, as a sentence that says what to type. Pure."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import List, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import flag_help
from tf_ipu_dp.terminal_text import shorten

_BATCH = "--micro_batch_size={value} (one replica) or --global_batch_size={value} (the job)"
_REPLICAS = "--ipus={value} (each replica takes 1 IPU per pipeline stage)"
_RESUME = "--run_dir=FOLDER (it resumes from the newest checkpoint of that run)"
_HALF = "--precision=16.16 (or 16.32, with 32-bit weights)"
# What people type who know other trainers: the flag that is meant, what to type, with the value that they gave, and
# the names for it.
_MEANT: Tuple[Tuple[str, str, str], ...] = (
    ("learning_rate", "--learning_rate={value}", "lr"),
    ("micro_batch_size", _BATCH, "batch batch_size bs train_batch_size per_device_train_batch_size"),
    ("epochs", "--epochs={value}steps", "steps max_steps num_steps train_steps iterations"),
    ("epochs", "--epochs={value}", "num_epochs max_epochs"),
    ("early_stop", "--early_stop={value}", "patience"),
    ("time_limit", "--time_limit={value}", "max_time"),
    ("warmup_epochs", "--warmup_epochs={value}", "warmup"),
    ("warmup_epochs", "--warmup_epochs=X (epochs, which may be a fraction)", "warmup_steps"),
    ("ipus", _REPLICAS, "replicas num_replicas"),
    ("ipus", "--ipus={value}", "num_ipus n_ipus gpu gpus num_gpus n_gpus ngpu ngpus devices num_devices"),
    ("instances", "--instances={value}", "workers num_instances processes nproc nproc_per_node"),
    ("hosts", "--hosts={value}", "nodes num_nodes machines"),
    ("pipeline_stages", "--pipeline_stages={value}", "stages"),
    ("run_dir", "--run_dir={value}", "output out output_dir log_dir logdir model_dir save_dir"),
    ("run_dir", "--run_dir={value} (it resumes from the newest checkpoint of that run)", "resume_from"),
    ("run_dir", _RESUME, "resume_from_checkpoint checkpoint ckpt load"),
    ("run_dir", "--run_dir={value} (its checkpoints are in it)", "checkpoint_dir"),
    ("run_dir", "--run_dir=runs/{value}", "name run_name"),
    ("run_dir", "tensorboard --logdir=runs/NAME/tensorboard; every run writes it", "tensorboard"),
    ("init_from", "--init_from=PATH", "pretrained"),
    ("evaluate", "--evaluate", "eval"),
    ("precision", _HALF, "fp16 half amp mixed_precision"),
    ("sdk", "--sdk=emulator (on this host's CPU)", "cpu device"),
    ("track", "--track=wandb", "wandb"),
    ("track", "--track=mlflow", "mlflow"),
    ("log_every", "--log_every=1 (a line for each weight update)", "verbose"),
    ("model", "--model={value}", "arch network"),
    ("model", "python -m tf_ipu_dp.list models", "list_models models"),
    ("dataset", "--dataset={value}", "data data_path dataset_dir"),
    ("dataset", "python -m tf_ipu_dp.list datasets", "list_datasets datasets"),
    ("watch", "--watch={value}", "interval"),
)
_ALIASES = {name: (flag, form) for flag, form, names in _MEANT for name in names.split()}
# Values that are meant as another choice, or as the value of another flag: by the flag, what was meant.
_CHOICES = {
    "precision": {
        **dict.fromkeys(("16", "fp16", "float16", "half"), "16.16"),
        **dict.fromkeys(("mixed", "mixed_float16"), "16.32"),
        **dict.fromkeys(("32", "fp32", "float32", "single"), "32.32"),
    }
}
_OTHER_FLAGS = {"resume": "--run_dir={value}", "export": "--export (it writes to export/ in the run's folder)"}
_BAD_VALUE = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)
_WORDS_OF_LIBRARIES = re.compile(r"could not convert|is not a number in the range|invalid literal")
_NO_VALUE = re.compile(r"Missing value for flag --(\w+)")
_NO_ARGUMENT = re.compile(r"-{1,2}(no\w+)=.* does not take an argument", re.DOTALL)
_MAX_NAME = 100


def find_impossible_names(words: Sequence[str]) -> List[str]:
    """Returns a sentence for each flag whose name is too long: comparing it with all others would take seconds."""
    names = (word.lstrip("-").split("=")[0] for word in words if word.startswith("-"))
    return [
        f"--{shorten(name)} is not a flag. See --help for those that are." for name in names if len(name) > _MAX_NAME
    ]


def explain(error: Exception, words: Sequence[str], fv: flags.FlagValues) -> Tuple[str, str]:
    """Returns the name on the line that an absl error is about, and the sentence for the user."""
    text = _reason(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        advice = _suggest_flag(error.flagname, _last_value(error.flagname, words), fv)
        return error.flagname, f"--{error.flagname} is not a flag. {advice}"
    missing = _NO_VALUE.match(text)
    if missing:
        return missing[1], f"--{missing[1]} needs a value: {flag_help.flag_form(fv[missing[1]])}."
    bad = _BAD_VALUE.match(text)
    if bad:
        flag = fv[bad[1]]
        reason = f": {bad[3].rstrip('.')}" if hasattr(flag.parser, "placeholder") else ""
        if _WORDS_OF_LIBRARIES.search(reason):  # what the flag takes says the same
            reason = ""
        given = _last_value(bad[1], words)
        near = _CHOICES.get(bad[1], {}).get(given.lower()) or _nearest_choice(
            given.lower(), getattr(flag.parser, "enum_values", None) or ()
        )
        guess = f" Did you mean --{bad[1]}={near}?" if near else ""
        if flag.boolean and bad[1] in _OTHER_FLAGS:
            guess = f" Did you mean {_OTHER_FLAGS[bad[1]].format(value=shorten(given))}?"
        sentence = (
            f"--{bad[1]}={shorten(given)} is not possible{reason}.{guess} It takes {flag_help.accepted_values(flag)}."
        )
        return bad[1], sentence
    denied = _NO_ARGUMENT.match(text)
    if denied:
        return denied[1], f"{text}. Write --{denied[1]}, or --{denied[1][2:]}."
    return "", text


def explain_argument(word: str, fv: flags.FlagValues) -> str:
    """Returns the sentence for a word that belongs to no flag, where none is expected."""
    name = word.split("=", maxsplit=1)[0]
    advice = f"Did you mean --{shorten(word)}?" if "=" in word and name in fv else "Options start with --."
    return f"{shorten(repr(word))} is not expected here. {advice}"


def _last_value(name: str, words: Sequence[str]) -> str:
    """Returns the value that the line gives a flag: the last one, as in absl."""
    value = ""
    for word, following in zip(words, [*words[1:], ""]):
        bare = word.lstrip("-") if word.startswith("-") else ""
        if bare == name:
            value = following
        elif bare.startswith(f"{name}="):
            value = bare[len(name) + 1 :]
    return value


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".").replace("ERROR:: ", "")


def _suggest_flag(name: str, value: str, fv: flags.FlagValues) -> str:
    plain = name.lower().replace("-", "_")
    flag, form = _ALIASES.get(plain, ("", ""))
    if flag in fv:
        return f"Use {form.format(value=shorten(value) if _is_value(fv[flag], form, value) else 'VALUE')}."
    # Below this, flags that merely share letters would be offered: --precision for --version.
    near = get_close_matches(plain, [*fv, "version", "help"], n=1, cutoff=0.7)
    return f"Did you mean --{near[0]}?" if near else "See --help for those that are."


def _is_value(flag: flag_help.Flag, form: str, value: str) -> bool:
    """Whether a flag takes the value that was given to its other name: advice that is refused as well is none."""
    written = re.match(r"--\w+=(\S*{value}\S*)", form)
    if not value or value.startswith("--"):
        return False
    try:
        return not written or flag.parser.parse(written[1].format(value=value)) is not None
    except (ValueError, TypeError):
        return False


def _nearest_choice(given: str, choices: Sequence[str]) -> Optional[str]:
    """Returns the choice that was probably meant: of names with a number, like resnet50, that with the nearest one."""
    parts = re.fullmatch(r"([a-z]+)(\d{1,9})", given)
    if parts:
        alike = [each for each in choices if re.fullmatch(parts[1] + r"\d+", each)]
        if alike:
            return min(alike, key=lambda each: abs(int(each[len(parts[1]) :]) - int(parts[2])))
    return next(iter(get_close_matches(given, choices, n=1)), None)
