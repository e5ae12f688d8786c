"""Names that programs for the SDK expect in Keras: `keras.ipu`, and the optimizers of Keras 2.6 in later releases."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from typing import Any, List

import tensorflow as tf

from tf_ipu_dp.emulator import keras_2, patches

_PACKAGE = keras_2.package_name()
importlib.import_module(_PACKAGE)
keras_2.require()
# Keras' API has several modules. Importing one after patching would replace `tf.keras` by an unpatched one.
_KERAS = [importlib.import_module(name) for name in (_PACKAGE, "tensorflow.keras", f"{_PACKAGE}.api._v2.keras")]
_V1_OPTIMIZERS = tf.compat.v1.keras.optimizers  # imported before patching too, since it copies names
_NAMES, _CLASSES = "keras names", "keras optimizers"
_OPTIMIZERS = ("Optimizer", "SGD", "Adam", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Nadam", "Ftrl")
_LEGACY_ARGUMENTS = ("decay", "gradient_aggregator", "gradient_transformers", "lr")


def add_to_keras(keras_ipu: Any) -> None:
    """Sets `ipu` in every module that programs use as Keras. Calling it twice is harmless."""
    if patches.is_applied(_NAMES):
        return
    modules = list({id(module): module for module in (*_KERAS, tf.keras)}.values())
    for module in modules:
        patches.set_attribute(_NAMES, module, "ipu", keras_ipu)
    patches.set_attribute(_NAMES, _KERAS[0], "__getattr__", _explain_missing)
    legacy = getattr(tf.keras.optimizers, "legacy", None)
    if legacy is not None:
        _add_legacy_optimizers([module.optimizers for module in modules], legacy)


def _explain_missing(name: str) -> Any:
    """What Python calls for a name that the package `keras` does not have."""
    try:
        keras_2.refuse_keras_3(f"keras.{name}")
    except keras_2.Keras3Error as error:
        raise AttributeError(str(error)) from None
    raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")


def _add_legacy_optimizers(modules: List[Any], legacy: Any) -> None:
    modules = list({id(module): module for module in modules}.values())
    kinds = {
        name: _legacy_or_stock(name, getattr(legacy, name), getattr(tf.keras.optimizers, name)) for name in _OPTIMIZERS
    }
    for module in modules:
        for name, kind in kinds.items():
            patches.set_attribute(_CLASSES, module, name, kind)
    package = sys.modules[tf.keras.optimizers.get.__module__]
    stock = package.deserialize

    # So that on the device, optimizers by name, as in `compile(optimizer="adam")`, are the legacy ones too.
    @functools.wraps(stock)
    def deserialize(*args: Any, **kwargs: Any) -> Any:
        if getattr(tf.distribute.get_strategy(), "enable_keras_extensions", False):
            kwargs["use_legacy_optimizer"] = True
        return stock(*args, **kwargs)

    for module in (package, *modules, _V1_OPTIMIZERS):
        patches.set_attribute(_CLASSES, module, "deserialize", deserialize)


def _legacy_or_stock(name: str, legacy: Any, stock: Any) -> Any:
    """Returns a class that is the legacy optimizer for the device and to subclasses, and stock Keras' otherwise.

    Programs for the SDK subclass the optimizers of Keras 2.6 and pass arguments that later ones refuse.
    """

    class LegacyOrStock(type(legacy)):  # type: ignore[misc]
        def __new__(cls, own: str, bases: Any, namespace: Any, **arguments: Any) -> Any:
            if made and "update_step" in namespace:  # written for the optimizers of this release
                bases = tuple(stock if base is made[0] else base for base in bases)
                return type(stock)(own, bases, namespace, **arguments)
            return super().__new__(cls, own, bases, namespace, **arguments)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            if cls is not kind:
                return super().__call__(*args, **kwargs)
            on_ipu = getattr(tf.distribute.get_strategy(), "enable_keras_extensions", False)
            return (legacy if on_ipu or set(kwargs) & set(_LEGACY_ARGUMENTS) else stock)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (legacy, stock)) if cls is kind else super().__instancecheck__(instance)

        def __subclasscheck__(cls, other: Any) -> bool:
            return issubclass(other, (legacy, stock)) if cls is kind else super().__subclasscheck__(other)

    made: List[Any] = []
    kind: Any = LegacyOrStock(name, (legacy,), {"__doc__": legacy.__doc__, "__module__": legacy.__module__})
    kind.__signature__ = inspect.signature(stock)
    made.append(kind)
    return kind
