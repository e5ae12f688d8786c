"""The Poplar SDK for the application: its real modules where there are IPUs, and the emulator's elsewhere.

Nothing above this module asks which of them it got. The choice is made once per process.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any, Mapping, MutableMapping, Optional


class SdkError(Exception):
    """The SDK that was asked for cannot be had. The text is shown to the user as is."""


@dataclasses.dataclass(frozen=True)
class Sdk:
    """The modules that the application is written against."""

    name: str  # poplar or emulator
    ipu: Any
    popdist: Any
    gcipuinfo: Any

    @property
    def executable_cache(self) -> Optional[Path]:
        """Returns where the SDK keeps compiled programs, if it compiles any and was told to."""
        return _read_executable_cache(os.environ) if self.name == "poplar" else None

    @property
    def serves_ipus(self) -> bool:
        """Whether a model can be exported for serving on IPUs."""
        return self.name == "poplar"

    def waits_for(self) -> Optional[str]:
        """Returns what the device waits for now: input, other instances or nothing. The Poplar SDK does not tell."""
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import feeds, instances

        return "other instances" if instances.is_waiting() else "input" if feeds.is_waiting() else "nothing"

    def collective_s(self) -> Optional[float]:
        """Returns how long this instance has been in collectives so far. The Poplar SDK does not tell."""
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import instances

        return instances.seconds_in_collectives()

    @property
    def title(self) -> str:
        return {"poplar": "Poplar SDK", "emulator": "emulator"}[self.name]


def set_poplar_flags(environ: MutableMapping[str, str], *flags: str) -> None:
    """Adds flags for the SDK's TensorFlow, which reads them when it is imported: call it before load."""
    environ["TF_POPLAR_FLAGS"] = " ".join([*environ.get("TF_POPLAR_FLAGS", "").split(), *flags])


def _read_executable_cache(environ: Mapping[str, str]) -> Optional[Path]:
    """Returns where the SDK keeps compiled programs, if it does: the last such flag counts, then poprun's variable."""
    for flag in reversed(environ.get("TF_POPLAR_FLAGS", "").split()):
        if flag.startswith("--executable_cache_path="):
            return Path(flag.split("=", 1)[1])
    path = environ.get("POPDIST_EXECUTABLE_CACHE_PATH")
    return Path(path) if path else None


@functools.lru_cache(maxsize=None)
def load(choice: str = "auto") -> Sdk:
    """Returns the SDK of --sdk. What auto falls back to is said once, on stderr."""
    from tf_ipu_dp import emulator

    if choice == "emulator" or (choice == "auto" and emulator.is_installed()):
        return _emulator()
    missing = "the emulator stands in for it in this process" if emulator.is_installed() else _why_not_poplar()
    if missing is None:
        return _modules("poplar")
    if choice == "poplar":
        raise SdkError(
            f"--sdk=poplar cannot be used: {missing}. Source the Poplar SDK's enable script, or use --sdk=emulator."
        )
    print(f"sdk: {missing}; the emulator stands in on this host's CPU.", file=sys.stderr)
    return _emulator()


def _why_not_poplar() -> Optional[str]:
    """Returns what the real SDK lacks, or None. With no driver or partition gcipuinfo may raise anything."""
    try:
        devices = importlib.import_module("gcipuinfo").gcipuinfo().getDevices()
    except ImportError:
        return "the Poplar SDK is not enabled here (no module gcipuinfo)"
    except Exception as error:
        return f"gcipuinfo finds no IPU ({type(error).__name__}: {error})"
    if not devices:
        return "gcipuinfo finds no IPU"
    for name in ("tensorflow.python.ipu", "popdist"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"there are {len(devices)} IPUs, but {name} cannot be imported ({error})"
    return None


def _emulator() -> Sdk:
    from tf_ipu_dp import emulator
    from tf_ipu_dp.emulator.runtime import poplar_flags

    try:
        flags = poplar_flags.read(os.environ)
    except poplar_flags.FlagError as error:
        raise SdkError(str(error)) from error
    if "executable_cache_path" in flags:
        print("sdk: the emulator compiles nothing; --executable_cache has no effect on it.", file=sys.stderr)
    if "use_synthetic_data" in flags:
        print("sdk: the emulator makes no data of its own; the host's synthetic data is used.", file=sys.stderr)
    emulator.install()
    return _modules("emulator")


def _modules(name: str) -> Sdk:
    ipu, popdist, gcipuinfo = (
        importlib.import_module(module) for module in ("tensorflow.python.ipu", "popdist", "gcipuinfo")
    )
    return Sdk(name, ipu, popdist, gcipuinfo)
