"""The models as blocks: names, layers, parameters and work. Pure: a plan is made without TensorFlow."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

MODELS = (
    "mlp", "cnn", "resnet8", "resnet20", "resnet32", "resnet44", "resnet56",
    "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
)  # fmt: skip
NORMS = ("batch", "group")
LEAST_SIZE = 28

INPUT = "image"
HEAD = "predictions"

_MLP_UNITS = (256, 256, 256)
_CNN_FILTERS = (16, 32, 64)
_CNN_UNITS = 128
_CIFAR_FILTERS = (16, 32, 64)
_CIFAR_DEPTHS = {f"resnet{depth}": depth for depth in (8, 20, 32, 44, 56)}
_IMAGENET_FILTERS = (64, 128, 256, 512)
_BASIC_BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
_BOTTLENECK_BLOCKS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}

# Models that keras.applications has: there they are described only, not built.
APPLICATIONS = tuple(_BOTTLENECK_BLOCKS)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One Keras layer: what it is, what it takes and what it costs. `units` are filters, or a dense layer's outputs."""

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


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a model that takes one tensor and gives one: the unit that pipeline stages are made of.

    `macs` are the multiply-adds of one sample's forward pass in convolutions and dense layers. `parameters` are all
    weights, the moving statistics of batch norm too.
    """

    name: str
    layers: Tuple[str, ...]
    macs: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model for one kind of image."""

    name: str
    height: int
    width: int
    channels: int
    classes: int
    norm: str
    blocks: Tuple[Block, ...]

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def macs(self) -> int:
        return sum(block.macs for block in self.blocks)


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The model and how it is cut: one tuple of blocks per pipeline stage."""

    architecture: Architecture
    stages: Tuple[Tuple[Block, ...], ...]

    def share(self, stage: int) -> float:
        """Returns the part of the model's work that a stage does, from 0 to 1."""
        return sum(block.macs for block in self.stages[stage]) / max(self.architecture.macs, 1)


def describe(name: str, *, height: int, width: int, channels: int, classes: int, norm: str) -> Architecture:
    """Returns a model as it will be built; ValueError with one sentence if there is none such."""
    if name not in MODELS:
        raise ValueError(f"There is no model {name!r}; there are {', '.join(MODELS)}.")
    if norm not in NORMS:
        raise ValueError(f"There is no norm {norm!r}; there are {', '.join(NORMS)}.")
    if min(height, width) < LEAST_SIZE:
        raise ValueError(f"{name} takes images from {LEAST_SIZE}x{LEAST_SIZE} up, not {height}x{width}.")
    if channels < 1 or classes < 1:
        raise ValueError(f"{name} cannot have {channels} channels and {classes} classes: both are at least 1.")
    drawing = _draw(name, (height, width, channels), classes, norm)
    blocks = tuple(
        Block(
            block,
            tuple(layer.name for layer in layers),
            sum(layer.macs for layer in layers),
            sum(layer.parameters for layer in layers),
        )
        for block, layers in drawing.blocks.items()
    )
    return Architecture(name, height, width, channels, classes, norm, blocks)


def layers(architecture: Architecture) -> Tuple[Layer, ...]:
    """Returns all layers of a model, each after those that it takes."""
    shape = (architecture.height, architecture.width, architecture.channels)
    drawing = _draw(architecture.name, shape, architecture.classes, architecture.norm)
    return tuple(itertools.chain.from_iterable(drawing.blocks.values()))


def balance(architecture: Architecture, stages: int) -> Tuple[str, ...]:
    """Returns the blocks that stages 1, 2, ... begin with, so that the largest stage has as little work as possible.

    Of several such ways it is the one with the most even stages; ValueError if there are more stages than blocks.
    """
    blocks = architecture.blocks
    if not 1 <= stages <= len(blocks):
        raise ValueError(
            f"{architecture.name} cannot be cut into {stages} stages: it has {len(blocks)} blocks, "
            f"and each stage takes one or more."
        )
    work = [block.macs for block in blocks]
    least, _ = _partition(work, stages, cost=lambda total: total, join=max)
    _, starts = _partition(
        work,
        stages,
        cost=lambda total: total * total if total <= least else math.inf,
        join=lambda left, right: left + right,
    )
    return tuple(blocks[start].name for start in starts[1:])


def cut(architecture: Architecture, splits: Sequence[str]) -> Tuple[Tuple[Block, ...], ...]:
    """Returns the stages that begin with the first block and with each of these; ValueError if that cannot be."""
    blocks = architecture.blocks
    places = {block.name: place for place, block in enumerate(blocks)}
    starts = [0]
    for split in splits:
        if split not in places:
            near = difflib.get_close_matches(split, places, n=3, cutoff=0.5)
            known = f"the nearest are {', '.join(near)}" if near else f"there are {_names(blocks[1:])}"
            raise ValueError(f"{architecture.name} has no block {split!r}: {known}.")
        place = places[split]
        if place == 0:
            raise ValueError(
                f"{split} is the first block of {architecture.name}, with which stage 0 begins: "
                f"a further stage begins with one of {_names(blocks[1:])}."
            )
        if place in starts:
            raise ValueError(f"Two stages of {architecture.name} cannot both begin with {split}.")
        if place < starts[-1]:
            after = blocks[starts[-1]].name
            order = [block.name for block in blocks if block.name in splits]
            raise ValueError(f"{split} comes before {after} in {architecture.name}: the order is {', '.join(order)}.")
        starts.append(place)
    return tuple(tuple(blocks[start:end]) for start, end in zip(starts, [*starts[1:], len(blocks)]))


def _partition(
    work: Sequence[int], stages: int, cost: Callable[[int], float], join: Callable[[float, float], float]
) -> Tuple[float, Tuple[int, ...]]:
    """Returns the least joint cost of so many consecutive stages, and where each of them starts."""
    sums = [0, *itertools.accumulate(work)]
    best: Dict[int, Tuple[float, Tuple[int, ...]]] = {0: (0, ())}  # by the number of blocks that the stages so far have
    for stage in range(stages):
        best = {
            end: min(
                (join(value, cost(sums[end] - sums[start])), (*starts, start))
                for start, (value, starts) in best.items()
                if start < end
            )
            for end in range(stage + 1, len(work) + 1)
        }
    return best[len(work)]


def _names(blocks: Sequence[Block]) -> str:
    return ", ".join(block.name for block in blocks)


def _draw(name: str, shape: Tuple[int, int, int], classes: int, norm: str) -> _Drawing:
    drawing = _Drawing(shape, norm)
    if name == "mlp":
        _draw_mlp(drawing)
    elif name == "cnn":
        _draw_cnn(drawing)
    elif name in _CIFAR_DEPTHS:
        _draw_cifar_resnet(drawing, (_CIFAR_DEPTHS[name] - 2) // 6)
    elif name in _BASIC_BLOCKS:
        _draw_basic_resnet(drawing, _BASIC_BLOCKS[name])
    else:
        _draw_bottleneck_resnet(drawing, _BOTTLENECK_BLOCKS[name])
    drawing.dense(HEAD, classes)
    return drawing


def _draw_mlp(drawing: _Drawing) -> None:
    for number, units in enumerate(_MLP_UNITS, 1):
        drawing.block(f"hidden{number}")
        if number == 1:
            drawing.flatten("flatten")
        drawing.dense(f"hidden{number}_dense", units)
        drawing.relu(f"hidden{number}_relu")
    drawing.block("head")


def _draw_cnn(drawing: _Drawing) -> None:
    for number, filters in enumerate(_CNN_FILTERS, 1):
        drawing.block(f"conv{number}")
        _draw_conv(drawing, f"conv{number}", filters, 3)
        drawing.relu(f"conv{number}_relu")
        if number < len(_CNN_FILTERS):
            drawing.max_pool(f"conv{number}_pool", 2)
    drawing.block("hidden")
    drawing.flatten("flatten")
    drawing.dense("hidden_dense", _CNN_UNITS)
    drawing.relu("hidden_relu")
    drawing.block("head")


def _draw_cifar_resnet(drawing: _Drawing, blocks: int) -> None:
    drawing.block("stem")
    _draw_conv(drawing, "conv1", _CIFAR_FILTERS[0], 3)
    drawing.relu("conv1_relu")
    _draw_stacks(drawing, _CIFAR_FILTERS, [blocks] * len(_CIFAR_FILTERS))


def _draw_basic_resnet(drawing: _Drawing, blocks: Sequence[int]) -> None:
    drawing.block("stem")
    _draw_conv(drawing, "conv1", _IMAGENET_FILTERS[0], 7, stride=2)
    drawing.relu("conv1_relu")
    drawing.max_pool("conv1_pool", 3, stride=2)
    _draw_stacks(drawing, _IMAGENET_FILTERS, blocks)


def _draw_stacks(drawing: _Drawing, filters: Sequence[int], blocks: Sequence[int]) -> None:
    """Stacks of basic blocks, each but the first at half the size of the one before, and the head."""
    for stack, (width, count) in enumerate(zip(filters, blocks), 2):
        for number in range(1, count + 1):
            name = f"conv{stack}_block{number}"
            stride = 2 if stack > 2 and number == 1 else 1
            entry = drawing.block(name)
            shortcut = entry
            if stride > 1:
                shortcut = _draw_conv(drawing, f"{name}_0", width, 1, stride)
            _draw_conv(drawing, f"{name}_1", width, 3, stride, entry)
            drawing.relu(f"{name}_1_relu")
            _draw_conv(drawing, f"{name}_2", width, 3)
            drawing.add(f"{name}_add", shortcut)
            drawing.relu(f"{name}_out")
    drawing.block("head")
    drawing.mean_pool("avg_pool")


def _draw_conv(
    drawing: _Drawing, name: str, filters: int, kernel: int, stride: int = 1, source: Optional[str] = None
) -> str:
    drawing.conv(f"{name}_conv", filters, kernel, stride, source)
    return drawing.norm(f"{name}_norm")


def _draw_bottleneck_resnet(drawing: _Drawing, blocks: Sequence[int]) -> None:
    """ResNets with the names and the padding of keras.applications."""
    drawing.block("stem")
    drawing.pad("conv1_pad", 3)
    drawing.conv("conv1_conv", 64, 7, 2, same=False, bias=True)
    drawing.norm("conv1_bn")
    drawing.relu("conv1_relu")
    drawing.pad("pool1_pad", 1)
    drawing.max_pool("pool1_pool", 3, stride=2, same=False)
    for stack, (width, count) in enumerate(zip(_IMAGENET_FILTERS, blocks), 2):
        for number in range(1, count + 1):
            name = f"conv{stack}_block{number}"
            stride = 2 if stack > 2 and number == 1 else 1
            entry = drawing.block(name)
            shortcut = entry
            if number == 1:
                drawing.conv(f"{name}_0_conv", 4 * width, 1, stride, bias=True)
                shortcut = drawing.norm(f"{name}_0_bn")
            drawing.conv(f"{name}_1_conv", width, 1, stride, entry, bias=True)
            drawing.norm(f"{name}_1_bn")
            drawing.relu(f"{name}_1_relu")
            drawing.conv(f"{name}_2_conv", width, 3, bias=True)
            drawing.norm(f"{name}_2_bn")
            drawing.relu(f"{name}_2_relu")
            drawing.conv(f"{name}_3_conv", 4 * width, 1, bias=True)
            drawing.norm(f"{name}_3_bn")
            drawing.add(f"{name}_add", shortcut)
            drawing.relu(f"{name}_out")
    drawing.block("head")
    drawing.mean_pool("avg_pool")


class _Drawing:
    """A model as it is drawn up layer by layer. A layer takes the one before it, or the source that is named."""

    def __init__(self, shape: Tuple[int, int, int], norm: str) -> None:
        self.blocks: Dict[str, List[Layer]] = {}
        self._norm = norm
        self._last = INPUT
        self._shapes: Dict[str, Tuple[int, ...]] = {INPUT: shape}

    def block(self, name: str) -> str:
        """Begins a block and returns the tensor that it takes."""
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
        height, width = self._slide(source, kernel, stride, same)
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
        self._append(layer, (*self._slide(self._last, kernel, stride, same), self._shape()[2]))

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

    def _slide(self, source: str, kernel: int, stride: int, same: bool) -> Tuple[int, int]:
        height, width = self._shapes[source][:2]
        margin = stride - 1 if same else stride - kernel
        return (height + margin) // stride, (width + margin) // stride
