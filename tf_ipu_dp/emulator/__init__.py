"""An emulation of the Poplar SDK's Python API on stock TensorFlow. Imports nothing else of tf_ipu_dp.

`install()` makes the SDK's modules importable: `tensorflow.python.ipu`, `keras.ipu`, `ipu_tensorflow_addons`,
`popdist`, `popdist.tensorflow`, `gcipuinfo`, `libpvti`. Until one of them is imported nothing else happens; in
particular TensorFlow is not imported. `uninstall()` restores everything that `patches.PATCHES` lists.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Optional, Sequence

from tf_ipu_dp.emulator import keras_2, patches

_SERVED = {
    "tensorflow.python.ipu": "tf_ipu_dp.emulator.sdk_api.ipu",
    "tensorflow.keras.ipu": "tf_ipu_dp.emulator.sdk_api.keras_ipu",
    "keras.ipu": "tf_ipu_dp.emulator.sdk_api.keras_ipu",
    "ipu_tensorflow_addons": "tf_ipu_dp.emulator.sdk_api.addons",
    "popdist": "tf_ipu_dp.emulator.sdk_api.popdist",
    "gcipuinfo": "tf_ipu_dp.emulator.sdk_api.gcipuinfo",
    "libpvti": "tf_ipu_dp.emulator.sdk_api.libpvti",
    # Modules of Keras 2.6 by their old names, and Keras 2 where `keras` itself would be Keras 3.
    **keras_2.aliases(),
}
# Importing one of these applies the patches: the program will run TensorFlow and Keras on the device.
_PATCHED_ON_IMPORT = ("tensorflow.python.ipu", "tensorflow.keras.ipu", "keras.ipu", "ipu_tensorflow_addons")
# The module that starts Horovod, for TensorFlow and every other framework. Patched when a program imports it.
_HOROVOD = "horovod.common.basics"
_OPS = "tf_ipu_dp.emulator.sdk_api.ipu.ops"
_ABSENT = object()


def install() -> None:
    """Serves the SDK's modules from now on. Calling it twice is harmless."""
    if is_installed():
        return
    for name, ours in _SERVED.items():
        module = sys.modules.get(name)
        if ours.startswith(__name__) and module is not None and module.__name__ != ours:
            raise RuntimeError(
                f"The emulator cannot be installed: the real {name} is imported already, from "
                f"{getattr(module, '__file__', 'an unknown place')}. Call emulator.install() before that."
            )
    keras_2.require()
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    patches.on_undo("import finder", functools.partial(_remove_finder, finder))
    if _HOROVOD in sys.modules:
        _patch_horovod(sys.modules[_HOROVOD])


def uninstall() -> None:
    """Restores Keras, TensorFlow and the import system to what they were before `install()`; releases the IPUs.

    Models, strategies and functions that were made on the device cannot be used afterwards.
    """
    patches.undo_all()


def is_installed() -> bool:
    """Whether the SDK's modules are served from here."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder:
    """Finds the emulator's modules under the SDK's names."""

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[importlib.machinery.ModuleSpec]:
        keras_2.refuse_keras_3(fullname)
        if fullname == _HOROVOD:
            return _find_horovod(path)
        for served, ours in _SERVED.items():
            if fullname == served or fullname.startswith(f"{served}."):
                name = ours + fullname[len(served) :]
                try:
                    found = importlib.util.find_spec(name)
                except ModuleNotFoundError:  # a Keras that has the older names itself
                    found = None
                if found is None and _registers_gradients(name):
                    name = f"{_OPS}.registered_gradients"
                    found = importlib.util.find_spec(name)
                if found is None:
                    return None
                package = found.submodule_search_locations is not None
                loader: Any = _AliasLoader(name, fullname)
                return importlib.machinery.ModuleSpec(fullname, loader, origin=found.origin, is_package=package)
        return None


def _registers_gradients(name: str) -> bool:
    """Whether this is the SDK's module of the gradients of one of its modules of ops."""
    package, _, child = name.rpartition(".")
    is_one = package == _OPS and child.endswith("_grad")
    return is_one and importlib.util.find_spec(name[: -len("_grad")]) is not None


def _patch_horovod(module: ModuleType) -> None:
    importlib.import_module(f"{__name__}.launcher.exit_notices").send_at_exit_of_horovod(module)


def _find_horovod(path: Optional[Sequence[str]]) -> Optional[importlib.machinery.ModuleSpec]:
    spec = importlib.machinery.PathFinder.find_spec(_HOROVOD, path)
    if spec is not None and spec.loader is not None:
        spec.loader = _HorovodLoader(spec.loader)  # type: ignore[assignment]
    return spec


class _HorovodLoader:
    """Loads the module that starts Horovod as its own loader does, and patches it."""

    def __init__(self, stock: Any) -> None:
        self._stock = stock

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._stock.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._stock
        self._stock.exec_module(module)
        _patch_horovod(module)


class _AliasLoader:
    """Loads one of the emulator's modules under the SDK's name: one module, two names, one set of classes."""

    def __init__(self, name: str, alias: str) -> None:
        self._name, self._alias = name, alias
        self._original_spec: Any = None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._original_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module was executed under its own name. The import system has replaced its spec by the alias's.
        module.__spec__ = self._original_spec
        parent, _, child = self._alias.rpartition(".")
        before = vars(sys.modules[parent]).get(child, _ABSENT) if parent else _ABSENT
        patches.on_undo("served modules", functools.partial(_remove_alias, self._alias, module, before))
        if self._alias in _PATCHED_ON_IMPORT:
            importlib.import_module(f"{__name__}.sdk_api.on_import").apply_patches()


def _remove_finder(finder: Any) -> None:
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)


def _remove_alias(alias: str, module: ModuleType, before: Any) -> None:
    """Removes a served name, and the attribute that the import system has set for it in the parent package."""
    if sys.modules.get(alias) is module:
        del sys.modules[alias]
    parent_name, _, child = alias.rpartition(".")
    parent = sys.modules.get(parent_name)
    if parent is None or vars(parent).get(child) is not module:
        return
    if before is _ABSENT:
        delattr(parent, child)
    else:
        setattr(parent, child, before)
