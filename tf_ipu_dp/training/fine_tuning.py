"""First weights from elsewhere (--init_from), and layers that are not trained (--freeze).

Weights are read as numbers, by the names of their layers: no code of a file, checkpoint or SavedModel is run.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import io
import json
import re
import zipfile
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tf_ipu_dp import cli
from tf_ipu_dp.runs import checkpoints
from tf_ipu_dp.runs.run_folder import RunFolder

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_MAX_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Loaded:
    """What became of the weights of --init_from, by layer."""

    source: str
    loaded: Tuple[str, ...]
    missing: Tuple[str, ...]  # layers of the model that the source does not have: they keep their first weights
    unfit: Tuple[str, ...]  # layers whose weights have other shapes in the source, with both
    unused: Tuple[str, ...]  # layers of the source that the model does not have

    def render(self) -> str:
        """Returns a line for each kind."""
        lines = [f"Weights from {self.source}: {cli.count(len(self.loaded), 'layer')} loaded{_named(self.loaded)}"]
        if self.missing:
            lines.append(f"  not in the source, drawn from the seed: {', '.join(self.missing)}")
        if self.unfit:
            lines.append(f"  other shapes, drawn from the seed: {'; '.join(self.unfit)}")
        if self.unused:
            lines.append(f"  left out, not in the model: {', '.join(self.unused)}")
        return "\n".join(lines)


def freeze(model: Any, patterns: Tuple[str, ...]) -> List[str]:
    """Makes layers whose names match not trainable, and returns their names; UsageError if a pattern matches none."""
    layers = [layer for layer in _layers(model) if layer.weights]
    frozen = []
    for pattern in patterns:
        found = [layer for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]
        if not found:
            names = [layer.name for layer in layers]
            near = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:_MAX_NAMED]
            raise cli.UsageError(
                f"--freeze={pattern} matches no layer with weights. The nearest are {cli.alternatives(near)}."
            )
        for layer in found:
            layer.trainable = False
            frozen.append(layer.name)
    if not model.trainable_weights:
        raise cli.UsageError(f"--freeze={','.join(patterns)} leaves no weights to train. Freeze fewer layers.")
    return frozen


def load(model: Any, path: str) -> Loaded:
    """Sets the weights of layers that a run, checkpoint, file or SavedModel has, too; UsageError if none fits."""
    weights = {_key(name): value for name, value in read_weights(Path(path).expanduser(), path).items()}
    by_layer: Dict[str, List[Tuple[Any, str]]] = {}
    for variable in model.weights:
        key = _key(variable.name)
        by_layer.setdefault(key.rpartition("/")[0], []).append((variable, key))
    loaded, missing, unfit = [], [], []
    for layer, variables in by_layer.items():
        # In a .keras file variables have their place in the layer for a name.
        found = [weights.get(key, weights.get(f"{layer}/{place}")) for place, (_, key) in enumerate(variables)]
        if all(value is None for value in found):
            missing.append(layer)
            continue
        wrong = [(variable, value) for (variable, _), value in zip(variables, found)
                 if value is None or tuple(value.shape) != tuple(variable.shape)]  # fmt: skip
        if wrong:
            variable, value = wrong[0]
            unfit.append(f"{layer} ({_shape(value)} there, {_shape(variable)} here)")
            continue
        for (variable, _), value in zip(variables, found):
            variable.assign(np.asarray(value).astype(variable.dtype.as_numpy_dtype))
        loaded.append(layer)
    ours = {key for variables in by_layer.values() for _, key in variables}
    unused = sorted({key.rpartition("/")[0] for key in weights if key not in ours} - set(by_layer))
    if not loaded:
        raise cli.UsageError(
            f"--init_from={path} has no layer that fits the model: it has "
            f"{cli.alternatives(unused[:_MAX_NAMED]) or 'none'}"
            f"{'; of other shapes are ' + '; '.join(unfit[:_MAX_NAMED]) if unfit else ''}."
        )
    return Loaded(path, tuple(loaded), tuple(missing), tuple(unfit), tuple(unused))


def read_weights(path: Path, given: str) -> Dict[str, Any]:  # noqa: PLR0911
    """Returns the weights of a run, a checkpoint, an .h5 or .keras file or a SavedModel, by the names of variables."""
    if path.suffix == ".h5" and path.is_file():
        return _read_h5(path, given)
    if path.suffix == ".keras" and path.is_file():
        return _read_keras(path, given)
    if (path / "saved_model.pb").is_file():
        return _read_checkpoint(path / "variables" / "variables", given)
    if (path / "manifest.json").is_file():
        return _read_checkpoint(path / "state", given)
    if path.is_dir():
        folder = RunFolder(path)
        for store in (folder.best, folder.checkpoints):
            found = checkpoints.Store(store, 1, lambda _: None).newest() if store.is_dir() else None
            if found:
                return _read_checkpoint(found.prefix, given)
        if (folder.export / "saved_model.pb").is_file():
            return _read_checkpoint(folder.export / "variables" / "variables", given)
    if path.with_name(f"{path.name}.index").is_file():  # what tf.train.Checkpoint and save_weights write
        return _read_checkpoint(path, given)
    raise cli.UsageError(
        f"--init_from={given} is not a run with a checkpoint, a checkpoint, an .h5 or .keras file, or a SavedModel."
    )


def _read_checkpoint(prefix: Path, given: str) -> Dict[str, Any]:
    """Returns the variables of a TensorFlow checkpoint by the names that they had when it was written."""
    try:
        reader = tf.train.load_checkpoint(str(prefix))
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        graph.ParseFromString(reader.get_tensor(_GRAPH))
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise cli.UsageError(f"--init_from={given} cannot be read ({cli.first_line(str(error))}).") from error
    found = {}
    for node in graph.nodes:
        for attribute in node.attributes:
            key = attribute.checkpoint_key
            is_weight = ".OPTIMIZER_SLOT" not in key and not key.startswith(("optimizer/", "keras_api/"))
            if attribute.full_name and is_weight:
                found[attribute.full_name] = reader.get_tensor(key)
    return found


def _read_h5(path: Path, given: str) -> Dict[str, Any]:
    import h5py

    found = {}
    try:
        with h5py.File(path, "r") as file:
            root = file.get("model_weights", file)
            for layer in _texts(root.attrs["layer_names"]):
                for name in _texts(root[layer].attrs["weight_names"]):
                    found[name] = np.asarray(root[layer][name])
    except (OSError, KeyError) as error:
        raise cli.UsageError(f"--init_from={given} cannot be read ({cli.first_line(str(error))}).") from error
    return found


def _read_keras(path: Path, given: str) -> Dict[str, Any]:
    """Returns the weights of a .keras file, in which layers are numbered by their kind and variables by their place."""
    import h5py

    found = {}
    try:
        with zipfile.ZipFile(path) as archive:
            layers = json.loads(archive.read("config.json"))["config"]["layers"]
            weights = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(weights, "r") as file:
            root = file["_layer_checkpoint_dependencies" if "_layer_checkpoint_dependencies" in file else "layers"]
            counts: Dict[str, int] = {}
            for layer in layers:
                kind = _snake_case(layer["class_name"])
                number = counts.get(kind, 0)
                counts[kind] = number + 1
                group = root.get(f"{kind}_{number}" if number else kind, {}).get("vars", {})
                for place in sorted(group, key=int):
                    found[f"{layer['config']['name']}/{place}"] = np.asarray(group[place])
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise cli.UsageError(f"--init_from={given} cannot be read ({cli.first_line(str(error))}).") from error
    return found


def _snake_case(name: str) -> str:
    name = re.sub(r"\W+", "", name)
    name = re.sub("(.)([A-Z][a-z]+)", r"\1_\2", name)
    return re.sub("([a-z])([A-Z])", r"\1_\2", name).lower()


def _texts(values: Any) -> List[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


def _layers(model: Any) -> List[Any]:
    found = []
    for layer in model.layers:
        found += _layers(layer) if isinstance(layer, tf.keras.Model) else [layer]
    return found


def _key(name: str) -> str:
    return name.partition(":")[0]


def _shape(value: Any) -> str:
    return "missing" if value is None else " x ".join(map(str, value.shape)) or "one number"


def _named(names: Tuple[str, ...]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > _MAX_NAMED else ''})"
