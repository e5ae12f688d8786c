"""What is wrong with a command line, as a sentence that says what to type. Pure."""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import List, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import flag_help
from tf_ipu_dp.terminal_text import shorten

# What people type who know other trainers: the flag that is meant, and what to type, with the value that they gave.
_ALIASES = {
    "lr": ("learning_rate", "--learning_rate={value}"),
    "batch": ("micro_batch_size", "--micro_batch_size={value} (one replica) or --global_batch_size={value} (the job)"),
    "batch_size": (
        "micro_batch_size",
        "--micro_batch_size={value} (one replica) or --global_batch_size={value} (the job)",
    ),
    "steps": ("epochs", "--epochs={value}steps"),
    "max_steps": ("epochs", "--epochs={value}steps"),
    "num_steps": ("epochs", "--epochs={value}steps"),
    "num_epochs": ("epochs", "--epochs={value}"),
    "max_epochs": ("epochs", "--epochs={value}"),
    "max_time": ("time_limit", "--time_limit={value}"),
    "replicas": ("ipus", "--ipus={value} (each replica takes 1 IPU per pipeline stage)"),
    "num_replicas": ("ipus", "--ipus={value} (each replica takes 1 IPU per pipeline stage)"),
    "num_ipus": ("ipus", "--ipus={value}"),
    "gpus": ("ipus", "--ipus={value}"),
    "devices": ("ipus", "--ipus={value}"),
    "workers": ("instances", "--instances={value}"),
    "num_instances": ("instances", "--instances={value}"),
    "output": ("run_dir", "--run_dir={value}"),
    "output_dir": ("run_dir", "--run_dir={value}"),
    "log_dir": ("run_dir", "--run_dir={value}"),
    "model_dir": ("run_dir", "--run_dir={value}"),
    "save_dir": ("run_dir", "--run_dir={value}"),
    "resume_from": ("run_dir", "--run_dir={value} (it resumes from the newest checkpoint of that run)"),
    "resume_from_checkpoint": ("run_dir", "--run_dir=FOLDER (it resumes from the newest checkpoint of that run)"),
    "name": ("run_dir", "--run_dir=runs/{value}"),
    "checkpoint": ("run_dir", "--run_dir=FOLDER (it resumes from the newest checkpoint of that run)"),
    "checkpoint_dir": ("run_dir", "--run_dir={value} (its checkpoints are in it)"),
    "interval": ("watch", "--watch={value}"),
}
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
        near = _nearest_choice(given.lower(), getattr(flag.parser, "enum_values", None) or ())
        guess = f" Did you mean --{bad[1]}={near}?" if near else ""
        sentence = (
            f"--{bad[1]}={shorten(given)} is not possible{reason}.{guess} It takes {flag_help.accepted_values(flag)}."
        )
        return bad[1], sentence
    denied = _NO_ARGUMENT.match(text)
    if denied:
        return denied[1], f"{text}. Write --{denied[1]}, or --{denied[1][2:]}."
    return "", text


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
        return f"Use {form.format(value=shorten(value) or 'VALUE')}."
    # Below this, flags that merely share letters would be offered: --precision for --version.
    near = get_close_matches(plain, [*fv, "version", "help"], n=1, cutoff=0.7)
    return f"Did you mean --{near[0]}?" if near else "See --help for those that are."


def _nearest_choice(given: str, choices: Sequence[str]) -> Optional[str]:
    """Returns the choice that was probably meant: of names with a number, like resnet50, that with the nearest one."""
    parts = re.fullmatch(r"([a-z]+)(\d{1,9})", given)
    if parts:
        alike = [each for each in choices if re.fullmatch(parts[1] + r"\d+", each)]
        if alike:
            return min(alike, key=lambda each: abs(int(each[len(parts[1]) :]) - int(parts[2])))
    return next(iter(get_close_matches(given, choices, n=1)), None)
