"""Saves a model's pipeline stages and IPU options in Keras' configuration of the model, and restores them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.keras import pipelines
from tf_ipu_dp.emulator.keras.model_options import (
    Options,
    is_on_ipu,
    options_of,
    pipeline_state_of,
    pipelining_of,
    replace_options,
)
from tf_ipu_dp.emulator.keras.stage_assignments import (
    FUNCTIONAL,
    SEQUENTIAL,
    NestedAssignment,
    current_assignments,
    default_assignments,
    is_subclass,
)

_PATCH = "saved options"
_CONFIG = "ipu_options"


def extend_keras() -> None:
    """Makes Keras save and load the options of models on an IPU. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    _store_build_shapes(tf.keras.Model)
    for kind in (SEQUENTIAL, FUNCTIONAL, tf.keras.Model):
        if kind is not tf.keras.Model:
            _save_in_config(kind)
        if "from_config" in vars(kind):
            _restore_from_config(kind)
    _restore_from_saved_model()


def config_of(model: Any) -> Optional[Dict[str, Any]]:
    """Returns what is saved with a model: its stages and the options that the SDK saves. None if nothing is saved."""
    if not is_on_ipu(model):
        return None
    general = options_of(model)
    saved: Dict[str, Any] = {} if general == Options() else {"general": general.as_config()}
    if pipeline_state_of(model).options_set or pipelines.is_pipelined(model):
        saved["pipelining"] = _pipelining_config(model)
    return saved or None


def restore_config(model: Any, config: Optional[Dict[str, Any]]) -> None:
    """Sets the saved stages and options of a loaded model, if it is on an IPU."""
    if not config or not is_on_ipu(model):
        return
    if "general" in config:
        replace_options(model, Options.from_config(config["general"]))
    if "pipelining" in config:
        _restore_pipelining(model, config["pipelining"])


def _pipelining_config(model: Any) -> Dict[str, Any]:
    options = pipelining_of(model)
    return {
        "stages": _nested_stages(current_assignments(model)) if pipelines.is_pipelined(model) else None,
        "gradient_accumulation_steps_per_replica": options.accumulation,
        "gradient_accumulation_reduction_method": options.method.name,
        "device_mapping": options.device_mapping,
        "accumulate_outfeed": options.accumulate_outfeed,
    }


def _restore_pipelining(model: Any, config: Dict[str, Any]) -> None:
    pipelines.set_pipelining_options(
        model,
        config["gradient_accumulation_steps_per_replica"],
        config["device_mapping"],
        config["accumulate_outfeed"],
        config["gradient_accumulation_reduction_method"],
    )
    if config["stages"] is not None:
        entries = default_assignments(model, scopes=False)
        _assign_stages(entries, config["stages"])
        pipeline_state_of(model).assignment = entries


def _nested_stages(entries: Sequence[Any]) -> List[Any]:
    return [
        _nested_stages(one.pipeline_stage_assignments) if isinstance(one, NestedAssignment) else one.pipeline_stage
        for one in entries
    ]


def _assign_stages(entries: Sequence[Any], stages: Sequence[Any]) -> None:
    for entry, stage in zip(entries, stages):
        if isinstance(entry, NestedAssignment):
            _assign_stages(entry.pipeline_stage_assignments, stage)
        else:
            entry.pipeline_stage = stage


def _store_build_shapes(model_class: Any) -> None:
    """Stores the shape that a subclass is built with: not every release of Keras does."""
    stock = model_class.build

    @functools.wraps(stock)
    def build(self: Any, input_shape: Any) -> Any:
        result = stock(self, input_shape)
        if is_subclass(self):
            pipeline_state_of(self).build_shape = input_shape
        return result

    patches.set_attribute(_PATCH, model_class, "build", build)


def _save_in_config(kind: Any) -> None:
    stock = vars(kind)["get_config"]

    @functools.wraps(stock)
    def get_config(self: Any) -> Any:
        config = stock(self)
        # Keras ignores unknown keys beside the layers; other configurations are arguments of a class.
        saved = config_of(self) if "layers" in config and not is_subclass(self) else None
        if saved is not None:
            config[_CONFIG] = saved
        return config

    patches.set_attribute(_PATCH, kind, "get_config", get_config)


def _restore_from_config(kind: Any) -> None:
    stock = vars(kind)["from_config"].__func__

    @functools.wraps(stock)
    def from_config(cls: Any, config: Any, custom_objects: Any = None) -> Any:
        saved = None
        if isinstance(config, dict) and _CONFIG in config:
            config = dict(config)
            saved = config.pop(_CONFIG)
        model = stock(cls, config, custom_objects=custom_objects)
        restore_config(model, saved)
        return model

    patches.set_attribute(_PATCH, kind, "from_config", classmethod(from_config))


def _restore_from_saved_model() -> None:
    """Restores options where Keras loads a SavedModel, which it does not do through `from_config`."""
    loader = _saved_model_loader()
    stock = loader._reconstruct_model

    @functools.wraps(stock)
    def _reconstruct_model(self: Any, model_id: Any, model: Any, layers: Any) -> Any:
        result = stock(self, model_id, model, layers)
        config = json.loads(self._metadata[model_id].metadata)["config"]
        restore_config(model, config.get(_CONFIG))
        return result

    patches.set_attribute(_PATCH, loader, "_reconstruct_model", _reconstruct_model)


def _saved_model_loader() -> Any:
    """Returns the class of the loader. Its place depends on the release."""
    root = tf.keras.Model.__module__.split(".engine", 1)[0]
    for place in ("saving.saved_model.load", "saving.legacy.saved_model.load"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{root}.{place}").KerasObjectLoader
    raise ImportError("Keras' loader of SavedModels was not found.")
