"""The Poplar SDK for the application: its real modules where there are IPUs, and the emulator's elsewhere.

The only module that imports the emulator: no other code checks which of them is loaded. The choice is made once per
process. Only `load` imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, List, Mapping, MutableMapping, Optional, Tuple

from tf_ipu_dp import cli, sdk_types

# The device makes images and labels itself. All are 1: random labels would not stay among the classes, and memory that
# is not initialised may hold NaN. Without --use_synthetic_data, which would make weights and results synthetic too.
SYNTHETIC_INPUT = ("--synthetic_data_categories=infeed", "--synthetic_data_initializer=1")
_EMULATOR_INSTALLED = "the emulator replaces the Poplar SDK in this process"
_NOT_ENABLED = "the Poplar SDK is not enabled here (no module gcipuinfo)"


class SdkError(Exception):
    """The requested SDK cannot be used. The text is shown to the user as is."""


class AttachError(Exception):
    """IPUs cannot be attached; the text is the reason."""


class TooFewIpusError(AttachError):
    """There are not so many IPUs."""


class BusyIpusError(AttachError):
    """Other processes hold the IPUs."""


@dataclasses.dataclass(frozen=True)
class Sdk:
    """The modules that the application is written against."""

    name: str  # poplar or emulator
    ipu: sdk_types.IpuModule
    popdist: sdk_types.PopdistModule
    gcipuinfo: sdk_types.GcipuinfoModule

    @property
    def executable_cache(self) -> Optional[Path]:
        """Returns where the SDK caches compiled programs; None if it has no cache or compiles nothing."""
        return _read_executable_cache(os.environ) if self.name == "poplar" else None

    @property
    def serves_ipus(self) -> bool:
        """Whether a model can be exported for serving on IPUs."""
        return self.name == "poplar"

    def waits_for(self) -> Optional[str]:
        """Returns what the device is waiting for: input, other instances or nothing. None: not reported."""
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import feeds, instances

        return "other instances" if instances.is_waiting() else "input" if feeds.is_waiting() else "nothing"

    def collective_s(self) -> Optional[float]:
        """Returns the seconds that this instance has spent in collectives. None: not reported."""
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import instances

        return instances.seconds_in_collectives()

    def program_collective_s(self) -> Optional[float]:
        """Returns the part of them inside the device's programs, which executions wait for. None: not reported."""
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import instances

        return instances.seconds_in_program_collectives()

    def optimizer_s(self) -> Optional[float]:
        """Returns the seconds that optimizers have taken on this instance. None: not reported."""
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import optimizer_meter

        return optimizer_meter.seconds_in_optimizer()

    def exchange_times(self) -> Optional[Tuple[int, List[float]]]:
        """Returns how often this instance has exchanged gradients with others, and the seconds of the last exchanges.

        None: not reported. IPUs exchange them without the host.
        """
        if self.name != "emulator":
            return None
        from tf_ipu_dp.emulator.runtime import instances

        return instances.exchange_times()

    def make_strategy(self, *, distributed: bool) -> sdk_types.Strategy:
        """Returns the strategy of one instance alone, or of one of a PopDist job."""
        if not distributed:
            return self.ipu.ipu_strategy.IPUStrategy()
        module = importlib.import_module("tensorflow.python.ipu.distributed.popdist_strategy")
        strategy: sdk_types.Strategy = module.PopDistStrategy()
        return strategy

    def set_popdist_config(self, ipu_config: sdk_types.IpuConfig, *, ipus_per_replica: int) -> None:
        """Adds the IPUs that poprun assigned to this instance to a configuration."""
        importlib.import_module("popdist.tensorflow").set_ipu_config(ipu_config, ipus_per_replica=ipus_per_replica)

    def host_collectives(self) -> Any:
        """Returns the module with the collectives between the hosts of a PopDist job."""
        return importlib.import_module("tensorflow.python.ipu.distributed")

    @property
    def title(self) -> str:
        return {"poplar": "Poplar SDK", "emulator": "emulator"}[self.name]


@functools.lru_cache(maxsize=None)
def load(choice: str = "auto", *, needs_ipus: bool = True) -> Sdk:
    """Returns the SDK of --sdk. When auto falls back to the emulator, the reason is printed to stderr.

    Who only compiles programs needs no IPUs.
    """
    from tf_ipu_dp import emulator

    if choice == "emulator" or (choice == "auto" and emulator.is_installed()):
        return _load_emulator()
    missing = _EMULATOR_INSTALLED if emulator.is_installed() else _explain_missing_poplar(needs_ipus)
    if missing is None:
        return _load_modules("poplar")
    if choice == "poplar":
        raise SdkError(
            f"--sdk=poplar cannot be used: {missing}. Source the Poplar SDK's enable script, or use --sdk=emulator."
        )
    cli.announce("sdk", f"{missing}; using the emulator on this host's CPU.")
    return _load_emulator()


def check_ipus(choice: str, *, ipus_per_instance: int, instances: int) -> None:
    """Raises an AttachError if instances on this host could not attach their IPUs now. Imports no TensorFlow.

    Only emulated IPUs are checked: the Poplar SDK reports it when it attaches.
    """
    from tf_ipu_dp import emulator

    if choice == "poplar" or (choice == "auto" and not emulator.is_installed() and not explain_missing_gcipuinfo()):
        return
    from tf_ipu_dp.emulator.devices import registry

    try:
        registry.Partition.from_environment(os.environ).check_free(count=ipus_per_instance, devices=instances)
    except registry.NoSuchDeviceError as error:
        raise TooFewIpusError(str(error)) from error
    except registry.DeviceBusyError as error:
        raise BusyIpusError(str(error)) from error
    except registry.RegistryError as error:
        raise AttachError(str(error)) from error


def is_emulated(name: str) -> bool:
    """Whether the IPUs of an SDK with this name, which snapshots and recordings contain, are emulated."""
    return name == "emulator"


def set_poplar_flags(environ: MutableMapping[str, str], *flags: str) -> None:
    """Adds flags for the SDK's TensorFlow, which reads them when it is imported: call it before load."""
    environ["TF_POPLAR_FLAGS"] = " ".join([*environ.get("TF_POPLAR_FLAGS", "").split(), *flags])


def quieten_tensorflow(choice: str, environ: MutableMapping[str, str]) -> None:
    """Sets which lines TensorFlow logs itself, unless the user has: call it before load.

    On the emulator not even its errors: what fails is an exception, too, and loops in a pipeline make it report
    optimisations that it leaves out.
    """
    emulated = choice == "emulator" or (choice == "auto" and explain_missing_gcipuinfo() is not None)
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3" if emulated else "2")


def explain_missing_gcipuinfo() -> Optional[str]:
    """Returns why the Poplar SDK's gcipuinfo is not available in this process; None if it is. Does not import it."""
    from tf_ipu_dp import emulator

    try:
        spec = importlib.util.find_spec("gcipuinfo")
    except (ImportError, ValueError):
        spec = None
    origin = spec.origin if spec else None
    # The emulator's module may have been imported under the SDK's name before.
    emulated = origin is not None and Path(emulator.__file__).resolve().parent in Path(origin).resolve().parents
    if emulator.is_installed() or emulated:
        return _EMULATOR_INSTALLED
    return _NOT_ENABLED if spec is None else None


def load_emulated_gcipuinfo() -> sdk_types.GcipuinfoModule:
    """Returns the emulator's gcipuinfo, without installing the emulator in this process."""
    from tf_ipu_dp.emulator.sdk_api import gcipuinfo

    return gcipuinfo


def skips_interpreter_shutdown() -> bool:
    """Whether the process must end with os._exit once everything is written and closed.

    Stock TensorFlow, which the emulator runs on, has threads that can crash while the interpreter shuts down.
    The Poplar SDK detaches its IPUs during an ordinary shutdown.
    """
    from tf_ipu_dp import emulator

    return emulator.is_installed()


def _read_executable_cache(environ: Mapping[str, str]) -> Optional[Path]:
    """Returns the cache folder: of the last flag that sets it, else of poprun's variable."""
    for flag in reversed(environ.get("TF_POPLAR_FLAGS", "").split()):
        if flag.startswith("--executable_cache_path="):
            return Path(flag.split("=", 1)[1])
    path = environ.get("POPDIST_EXECUTABLE_CACHE_PATH")
    return Path(path) if path else None


def _explain_missing_poplar(needs_ipus: bool) -> Optional[str]:
    """Returns what the real SDK lacks, or None. With no driver or partition gcipuinfo may raise anything."""
    try:
        library: Any = importlib.import_module("gcipuinfo")
        devices = library.gcipuinfo().getDevices() if needs_ipus else []
    except ImportError:
        return _NOT_ENABLED
    except Exception as error:
        return f"gcipuinfo finds no IPU ({type(error).__name__}: {error})"
    if needs_ipus and not devices:
        return "gcipuinfo finds no IPU"
    found = f"there are {len(devices)} IPUs" if needs_ipus else "the SDK is enabled"
    for name in ("tensorflow.python.ipu", "popdist"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            return f"{found}, but {name} cannot be imported ({error})"
    return None


def _load_emulator() -> Sdk:
    from tf_ipu_dp import emulator
    from tf_ipu_dp.emulator.runtime import poplar_flags

    try:
        flags = poplar_flags.read(os.environ)
    except poplar_flags.FlagError as error:
        raise SdkError(str(error)) from error
    if "executable_cache_path" in flags:
        cli.announce("sdk", "the emulator compiles nothing; --executable_cache has no effect on it.")
    emulator.install()
    return _load_modules("emulator")


def _load_modules(name: str) -> Sdk:
    modules: List[Any] = [importlib.import_module(each) for each in ("tensorflow.python.ipu", "popdist", "gcipuinfo")]
    return Sdk(name, *modules)
