"""The layers of a model, with their shapes, parameters and work, added in order. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Optional, Tuple

INPUT = "image"


@dataclasses.dataclass(frozen=True)
class Layer:
    """One Keras layer: its kind, its inputs and its cost. `units` are filters, or the outputs of a dense layer."""

    kind: str  # pad, conv, norm, relu, max_pool, mean_pool, flatten, dense or add
    name: str
    inputs: Tuple[str, ...]
    units: int = 0
    kernel: int = 1
    stride: int = 1
    same: bool = True  # whether the layer pads by itself
    bias: bool = False
    macs: int = 0
    parameters: int = 0


class LayerBuilder:
    """Collects the layers of a model by block. A layer takes the output of the one before it, or of a named source."""

    def __init__(self, shape: Tuple[int, int, int], norm: str) -> None:
        self.blocks: Dict[str, List[Layer]] = {}
        self._norm = norm
        self._last = INPUT
        self._shapes: Dict[str, Tuple[int, ...]] = {INPUT: shape}

    def block(self, name: str) -> str:
        """Begins a block and returns the name of its input."""
        self.blocks[name] = []
        return self._last

    def pad(self, name: str, margin: int) -> None:
        height, width, channels = self._shape()
        layer = Layer("pad", name, (self._last,), kernel=margin)
        self._append(layer, (height + 2 * margin, width + 2 * margin, channels))

    def conv(
        self, name: str, filters: int, kernel: int, stride: int = 1, source: Optional[str] = None,
        *, same: bool = True, bias: bool = False,
    ) -> None:  # fmt: skip
        source = source or self._last
        channels = self._shapes[source][2]
        height, width = self._output_size(source, kernel, stride, same)
        weights = kernel * kernel * channels * filters
        layer = Layer(
            "conv", name, (source,), filters, kernel, stride, same, bias,
            macs=weights * height * width, parameters=weights + filters * bias,
        )  # fmt: skip
        self._append(layer, (height, width, filters))

    def norm(self, name: str) -> str:
        weights = 4 if self._norm == "batch" else 2
        shape = self._shape()
        self._append(Layer("norm", name, (self._last,), parameters=weights * shape[-1]), shape)
        return name

    def relu(self, name: str) -> None:
        self._append(Layer("relu", name, (self._last,)), self._shape())

    def max_pool(self, name: str, kernel: int, stride: int = 2, same: bool = True) -> None:
        layer = Layer("max_pool", name, (self._last,), kernel=kernel, stride=stride, same=same)
        self._append(layer, (*self._output_size(self._last, kernel, stride, same), self._shape()[2]))

    def mean_pool(self, name: str) -> None:
        self._append(Layer("mean_pool", name, (self._last,)), self._shape()[2:])

    def flatten(self, name: str) -> None:
        self._append(Layer("flatten", name, (self._last,)), (math.prod(self._shape()),))

    def dense(self, name: str, units: int) -> None:
        weights = self._shape()[0] * units
        layer = Layer("dense", name, (self._last,), units, bias=True, macs=weights, parameters=weights + units)
        self._append(layer, (units,))

    def add(self, name: str, shortcut: str) -> None:
        self._append(Layer("add", name, (shortcut, self._last)), self._shape())

    def _append(self, layer: Layer, shape: Tuple[int, ...]) -> None:
        self.blocks[next(reversed(self.blocks))].append(layer)
        self._shapes[layer.name] = shape
        self._last = layer.name

    def _shape(self) -> Tuple[int, ...]:
        return self._shapes[self._last]

    def _output_size(self, source: str, kernel: int, stride: int, same: bool) -> Tuple[int, int]:
        height, width = self._shapes[source][:2]
        margin = stride - 1 if same else stride - kernel
        return (height + margin) // stride, (width + margin) // stride
