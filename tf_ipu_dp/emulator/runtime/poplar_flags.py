"""TF_POPLAR_FLAGS as the SDK's TensorFlow reads it: an unknown flag ends the program. Pure."""

from __future__ import annotations

import difflib
import re
from typing import Dict, FrozenSet, Mapping

NAME = "TF_POPLAR_FLAGS"
_SWITCHES = (
    "allow_nans", "disable_poplar_version_check", "dump_schedule_as_dot", "enable_hlo_verifier", "fallback_scheduler",
    "help", "null_data_feed", "sync_replica_start", "use_ipu_model", "use_on_demand", "use_synthetic_data",
)  # fmt: skip
_NUMBERS = (
    "ipu_model_tiles", "log_cycle_count", "max_compilation_threads", "max_infeed_threads", "on_demand_device_poll_time",
    "on_demand_device_timeout", "while_loop_brute_force_max_trip_count",
)  # fmt: skip
_TEXTS = (
    "executable_cache_path", "show_progress_bar", "synthetic_data_categories", "synthetic_data_initializer",
    "tensor_map_file_path",
)  # fmt: skip
_KNOWN = (*_SWITCHES, *_NUMBERS, *_TEXTS)
_CATEGORIES = ("infeed", "outfeed", "seed", "hostembedding", "parameters")
_SHORTEST_POLL_MS = 100
_PROGRESS = ("true", "false", "auto")
_INITIALIZER = re.compile("random|uniform|normal|-?[0-9]+")


class FlagError(ValueError):
    """The SDK would end the process."""


def read(environ: Mapping[str, str]) -> Dict[str, str]:
    """Returns the flags by their names; a switch is "true" or "false". The last value of a flag counts."""
    flags: Dict[str, str] = {}
    for word in environ.get(NAME, "").split():
        name, given, value = word[2:].partition("=")
        if not word.startswith("--") or name not in _KNOWN:
            near = difflib.get_close_matches(name.lstrip("-"), _KNOWN, 1)
            advice = f"the nearest is --{near[0]}" if near else "they are " + ", ".join(f"--{each}" for each in _KNOWN)
            raise FlagError(f"{NAME} has the unknown flag {word}, which ends the program as with the SDK; {advice}.")
        flags[name] = _check(name, value) if given or name not in _SWITCHES else "true"
    if "synthetic_data_initializer" in flags and not {"use_synthetic_data", "synthetic_data_categories"} & set(flags):
        raise FlagError(f"{NAME} has --synthetic_data_initializer without --use_synthetic_data.")
    return flags


def synthetic_categories(flags: Mapping[str, str]) -> FrozenSet[str]:
    """Returns the kinds of data that are synthetic. --use_synthetic_data means all of them, whatever else is set."""
    if flags.get("use_synthetic_data") == "true":
        return frozenset(_CATEGORIES)
    return frozenset(filter(None, flags.get("synthetic_data_categories", "").lower().split(",")))


def _check(name: str, value: str) -> str:
    allowed = ""
    if name in _SWITCHES:
        value = {"1": "true", "0": "false"}.get(value, value.lower())
        allowed = "" if value in ("true", "false") else "true or false"
    elif name in _NUMBERS:
        allowed = "" if re.fullmatch("-?[0-9]+", value) else "a whole number"
        if not allowed and name == "on_demand_device_poll_time" and int(value) < _SHORTEST_POLL_MS:
            allowed = f"{_SHORTEST_POLL_MS} ms or more"
    elif name == "show_progress_bar":
        allowed = "" if value in _PROGRESS else ", ".join(_PROGRESS)
    elif name == "synthetic_data_categories":
        allowed = "" if set(value.lower().split(",")) <= set(_CATEGORIES) else f"some of {','.join(_CATEGORIES)}"
    elif name == "synthetic_data_initializer":
        allowed = "" if _INITIALIZER.fullmatch(value) else "random, uniform, normal or a whole number"
    elif not value:
        allowed = "a path"
    if allowed:
        raise FlagError(f"{NAME} has --{name}={value}; the SDK takes {allowed}.")
    return value
