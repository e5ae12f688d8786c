"""Weights that are saved elsewhere, as numbers: in a run, a checkpoint, an .h5 or .keras file or a SavedModel.

No code of a file, checkpoint or SavedModel is run. Checkpoints, SavedModels and .h5 files have the names of variables;
the archives that later releases of Keras write number layers by their kind and variables by their place, so both kinds
of keys are made for the variables of a model, too.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_ipu_dp import cli
from tf_ipu_dp.runs import checkpoints
from tf_ipu_dp.runs.run_folder import RunFolder

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_HDF5 = b"\x89HDF\r\n\x1a\n"
_ZIP = b"PK\x03\x04"
# What Keras calls the layers of a model in its archives: up to and from release 2.15 on.
_LAYERS = ("_layer_checkpoint_dependencies", "layers")


@dataclasses.dataclass(frozen=True)
class LayerVariables:
    """A layer of a model with its variables: each with the name and with the place by which sources may know it."""

    name: str
    variables: Tuple[Tuple[Any, str, str], ...]


def read(path: Path, given: str, model: Any) -> Dict[str, Any]:
    """Returns the saved weights of a path by the names or places of variables; UsageError if there are none.

    `given` is the path as the user typed it. The layers of `model` name those of a file that does not name its own.
    """
    if path.is_file():
        with path.open("rb") as file:
            start = file.read(len(_HDF5))
        if start == _HDF5:
            return _read_hdf5(path, given, model)
        if start.startswith(_ZIP):
            return _read_archive(path, given)
    prefix = _checkpoint_of(path)
    if prefix is None:
        raise cli.UsageError(
            f"--init_from={given} is not a run with a checkpoint, a checkpoint, an .h5 or .keras file, or a SavedModel."
        )
    return _read_checkpoint(prefix, given)


def _checkpoint_of(path: Path) -> Optional[Path]:
    """Returns the prefix of the TensorFlow checkpoint that a path has: of a SavedModel, a checkpoint or a run."""
    if (path / "saved_model.pb").is_file():
        return path / "variables" / "variables"
    if (path / "manifest.json").is_file():
        return path / "state"
    if path.is_dir():
        folder = RunFolder(path)
        for store in (folder.best, folder.checkpoints):
            found = checkpoints.Store(store, 1, lambda _: None).newest() if store.is_dir() else None
            if found:
                return found.prefix
        return _checkpoint_of(folder.export) if folder.export.is_dir() else None
    is_plain = path.with_name(f"{path.name}.index").is_file()  # what tf.train.Checkpoint and save_weights write
    return path if is_plain else None


def layers_of(model: Any) -> List[LayerVariables]:
    """Returns the layers of a model, and of the models in it, that have variables; each layer once."""
    found: Dict[int, LayerVariables] = {}
    for layer in _flatten(model):
        if id(layer) in found:
            continue
        own_only = isinstance(layer, tf.keras.Model)  # its layers come by themselves
        places = dict(_places(layer, layer.name, own_only=own_only))
        weights = _own(layer) if own_only else layer.weights
        if weights:
            variables = ((each, _plain(each.name), places.get(id(each), "")) for each in weights)
            found[id(layer)] = LayerVariables(layer.name, tuple(variables))
    return list(found.values())


def layer_of(key: str) -> str:
    """Returns the layer that a name or place of a saved variable belongs to."""
    return key.rpartition("/")[0] or key


def _read_checkpoint(prefix: Path, given: str) -> Dict[str, Any]:
    """Returns the variables of a TensorFlow checkpoint by the names that they had when it was written."""
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor(_GRAPH))
        found = {}
        for node in graph.nodes:
            for attribute in node.attributes:
                key, name = attribute.checkpoint_key, attribute.full_name
                is_weight = ".OPTIMIZER_SLOT" not in key and not key.startswith(("optimizer/", "keras_api/"))
                if name and is_weight and name != "save_counter":
                    found[_plain(name)] = reader.get_tensor(key)
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        _refuse(given, error)
    return found


def _read_hdf5(path: Path, given: str, model: Any) -> Dict[str, Any]:
    import h5py

    found: Dict[str, Any] = {}
    try:
        with h5py.File(path, "r") as file:
            root = file.get("model_weights", file)
            if "layer_names" not in root.attrs:  # of save_weights("FILE.weights.h5"): no layer has its name there
                _collect_model(root, _config_of(model), found)
                return found
            for layer in _texts(root.attrs["layer_names"]):
                for name in _texts(root[layer].attrs["weight_names"]):
                    found[_plain(name)] = np.asarray(root[layer][name])
    except (OSError, KeyError, ValueError) as error:
        _refuse(given, error)
    return found


def _read_archive(path: Path, given: str) -> Dict[str, Any]:
    """Returns the weights of a .keras file by the names of layers, and by their places within them."""
    import h5py

    found: Dict[str, Any] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            config = json.loads(archive.read("config.json"))
            weights = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(weights, "r") as file:
            _collect_model(file, config.get("config") or {}, found)
    except (OSError, KeyError, ValueError, AttributeError, zipfile.BadZipFile) as error:
        _refuse(given, error)
    return found


def _collect_model(group: Any, config: Mapping[str, Any], found: Dict[str, Any]) -> None:
    """Adds the variables of a saved model whose configuration names its layers; models in it are collected, too."""
    layers = next((group[name] for name in _LAYERS if name in group), None)
    if layers is None or "layers" not in config:
        _collect(group, str(config.get("name", "model")), found)
        return
    numbers: Dict[str, int] = {}
    for layer in config["layers"]:
        part = layers.get(_numbered(layer["class_name"], numbers))
        if part is None:
            continue
        inner = layer.get("config") or {}
        if isinstance(inner.get("layers"), list):
            _collect_model(part, inner, found)
        else:
            _collect(part, str(inner.get("name") or layer.get("name")), found)


def _collect(group: Any, prefix: str, found: Dict[str, Any]) -> None:
    for name, part in group.items():
        if name == "vars":
            found.update({f"{prefix}/{place}": np.asarray(part[place]) for place in part})
        elif hasattr(part, "items"):
            _collect(part, f"{prefix}/{name}", found)


def _config_of(model: Any) -> Dict[str, Any]:
    """Returns the names and kinds of a model's layers in the form of its configuration."""
    listed = []
    for layer in model.layers:
        inner = _config_of(layer) if isinstance(layer, tf.keras.Model) else {"name": layer.name}
        listed.append({"class_name": type(layer).__name__, "config": inner})
    return {"name": model.name, "layers": listed}


def _places(layer: Any, prefix: str, *, own_only: bool = False) -> Iterator[Tuple[int, str]]:
    """Returns the places of a layer's variables, by id: as Keras saves them, by attributes and numbers."""
    for place, variable in enumerate(_own(layer)):
        yield id(variable), f"{prefix}/{place}"
    for name, value in () if own_only else sorted(vars(layer).items()):
        if name.startswith("_self_"):  # of TensorFlow, which lists the same layers again
            continue
        if isinstance(value, tf.keras.layers.Layer):
            yield from _places(value, f"{prefix}/{name}")
        elif isinstance(value, (list, tuple, dict)):
            numbers: Dict[str, int] = {}
            for each in list(value.values()) if isinstance(value, dict) else list(value):
                if isinstance(each, tf.keras.layers.Layer):
                    yield from _places(each, f"{prefix}/{name}/{_numbered(type(each).__name__, numbers)}")


def _own(layer: Any) -> List[Any]:
    """Returns the variables that belong to a layer itself, in the order in which Keras saves them."""
    return [*layer._trainable_weights, *layer._non_trainable_weights]


def _flatten(model: Any) -> List[Any]:
    found = [model] if _own(model) else []
    for layer in model.layers:
        found += _flatten(layer) if isinstance(layer, tf.keras.Model) else [layer]
    return found


def _numbered(kind: str, numbers: Dict[str, int]) -> str:
    """Returns what Keras calls one of several layers of a kind: dense, dense_1, and so on."""
    name = _snake_case(kind.rpartition(">")[2])
    number = numbers.get(name, 0)
    numbers[name] = number + 1
    return f"{name}_{number}" if number else name


def _snake_case(name: str) -> str:
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _texts(values: Any) -> List[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def _plain(name: str) -> str:
    return name.partition(":")[0]


def _refuse(given: str, error: Exception) -> Any:
    raise cli.UsageError(f"--init_from={given} cannot be read ({cli.first_line(str(error)).rstrip('.')}).") from error
