"""First weights from elsewhere (--init_from), by layer, and layers that are not trained (--freeze)."""

from __future__ import annotations

import dataclasses
import fnmatch
from difflib import get_close_matches
from typing import Any, Dict, List, Optional, Set, Tuple

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.training import saved_weights

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
    source = _Source(saved_weights.read(cli.expand_path(path), path, model))
    loaded, missing, unfit = [], [], []
    for layer in saved_weights.layers_of(model):
        found = [source.find(name, place) for _, name, place in layer.variables]
        if all(value is None for value in found):
            missing.append(layer.name)
            continue
        wrong = [(variable, value) for (variable, *_), value in zip(layer.variables, found)
                 if value is None or tuple(value.shape) != tuple(variable.shape)]  # fmt: skip
        if wrong:
            variable, value = wrong[0]
            unfit.append(f"{layer.name} ({_shape(value)} there, {_shape(variable)} here)")
            continue
        for (variable, *_), value in zip(layer.variables, found):
            variable.assign(np.asarray(value).astype(variable.dtype.as_numpy_dtype))
        loaded.append(layer.name)
    unused = source.unused()
    if not loaded:
        raise cli.UsageError(
            f"--init_from={path} has no layer that fits the model: it has "
            f"{cli.alternatives(unused[:_MAX_NAMED]) or 'none'}"
            f"{'; of other shapes are ' + '; '.join(unfit[:_MAX_NAMED]) if unfit else ''}."
        )
    return Loaded(path, tuple(loaded), tuple(missing), tuple(unfit), tuple(unused))


class _Source:
    """Saved weights, of which those that were asked for are remembered."""

    def __init__(self, weights: Dict[str, Any]) -> None:
        self._weights = weights
        self._used: Set[str] = set()
        self._by_end: Dict[str, List[str]] = {}
        for key in weights:
            self._by_end.setdefault(_end(key), []).append(key)

    def find(self, name: str, place: str) -> Optional[Any]:
        """Returns the weights of a variable by its name or its place.

        The scopes around a layer depend on what called it, so a name that no other ends like is found without them.
        """
        alike = self._by_end.get(_end(name), [])
        keys = [key for key in (name, place) if key in self._weights] or (alike if len(alike) == 1 else [])
        self._used.update(keys[:1])
        return self._weights[keys[0]] if keys else None

    def unused(self) -> List[str]:
        """Returns the layers of which nothing was asked for."""
        used = {saved_weights.layer_of(key) for key in self._used}
        return sorted({saved_weights.layer_of(key) for key in self._weights if key not in self._used} - used)


def _end(name: str) -> str:
    """Returns the last two parts of a variable's name: its layer, and what it is there."""
    return "/".join(name.split("/")[-2:])


def _layers(model: Any) -> List[Any]:
    found = []
    for layer in model.layers:
        found += _layers(layer) if isinstance(layer, tf.keras.Model) else [layer]
    return found


def _shape(value: Any) -> str:
    return "missing" if value is None else " x ".join(map(str, value.shape)) or "one number"


def _named(names: Tuple[str, ...]) -> str:
    if not names:
        return ""
    return f" ({', '.join(names[:_MAX_NAMED])}{', ...' if len(names) > _MAX_NAMED else ''})"
