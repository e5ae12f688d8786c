"""A stand-in for the Poplar SDK's Python API on stock TensorFlow. Imports nothing else of tf_ipu_dp.

`install()` makes the SDK's modules importable: `tensorflow.python.ipu`, `keras.ipu`, `ipu_tensorflow_addons`,
`popdist`, `popdist.tensorflow`, `gcipuinfo`, `libpvti`. Until one of them is imported nothing else happens; in
particular TensorFlow is not imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Optional, Sequence

_SERVED = {
    "tensorflow.python.ipu": "tf_ipu_dp.emulator.sdk_api.ipu",
    "tensorflow.keras.ipu": "tf_ipu_dp.emulator.sdk_api.keras_ipu",
    "keras.ipu": "tf_ipu_dp.emulator.sdk_api.keras_ipu",
    "ipu_tensorflow_addons": "tf_ipu_dp.emulator.sdk_api.addons",
    "popdist": "tf_ipu_dp.emulator.sdk_api.popdist",
    "gcipuinfo": "tf_ipu_dp.emulator.sdk_api.gcipuinfo",
    "libpvti": "tf_ipu_dp.emulator.sdk_api.libpvti",
    # Where releases of Keras after 2.10 have what programs for Keras 2.6 import from there.
    "keras.optimizer_v2.learning_rate_schedule": "keras.src.optimizers.schedules.learning_rate_schedule",
    "keras.optimizer_v2.utils": "keras.src.optimizers.utils",
    "keras.optimizer_v2": "keras.src.optimizers.legacy",
    # `from keras.optimizer_v2 import utils` asks for it by the package's own name.
    "keras.src.optimizers.legacy.learning_rate_schedule": "keras.src.optimizers.schedules.learning_rate_schedule",
    "keras.src.optimizers.legacy.utils": "keras.src.optimizers.utils",
}


def install() -> None:
    """Serves the SDK's modules from here on. Doing it twice is harmless."""
    if is_installed():
        return
    for name, ours in _SERVED.items():
        module = sys.modules.get(name)
        if ours.startswith(__name__) and module is not None and module.__name__ != ours:
            raise RuntimeError(
                f"The emulator cannot be installed: the real {name} is imported already, from "
                f"{getattr(module, '__file__', 'an unknown place')}. Call emulator.install() before that."
            )
    sys.meta_path.insert(0, _Finder())


def is_installed() -> bool:
    """Whether the SDK's modules are served from here."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder:
    """Answers for the SDK's names with our modules."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        for served, ours in _SERVED.items():
            if fullname == served or fullname.startswith(f"{served}."):
                name = ours + fullname[len(served) :]
                try:
                    found = importlib.util.find_spec(name)
                except ModuleNotFoundError:  # a Keras that has the older names itself
                    found = None
                if found is None:
                    return None
                package = found.submodule_search_locations is not None
                loader: Any = _AliasLoader(name)
                return importlib.machinery.ModuleSpec(fullname, loader, origin=found.origin, is_package=package)
        return None


class _AliasLoader:
    """Gives out one of our modules under the SDK's name: one module, two names, one set of classes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._own_spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It has been executed under its own name; the import system has meanwhile given it the alias's spec.
        module.__spec__ = self._own_spec
