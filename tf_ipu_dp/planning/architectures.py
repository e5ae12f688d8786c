"""The models as blocks of layers: parameters, work, and how they are cut into pipeline stages.

Pure: a plan is made without TensorFlow. A new model is a function that adds its layers, and a row in `_MODELS`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import itertools
import math
from typing import Any, Callable, Dict, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.planning.layers import Layer, LayerBuilder

NORMS = ("batch", "group")
MIN_SIZE = 28
HEAD = "predictions"
# Of normalisations: the value of keras.applications, for all models.
EPSILON = 1.001e-5
# With Keras' 0.99, a short run would validate with moving statistics that are still near their initial values.
NORM_MOMENTUM = 0.9

_MLP_UNITS = (256, 128, 64)
_CNN_FILTERS = (16, 32, 64)
_CNN_UNITS = 128
_CIFAR_FILTERS = (16, 32, 64)
_IMAGENET_FILTERS = (64, 128, 256, 512)
_MAX_GROUPS = 32
_MIN_CHANNELS_PER_GROUP = 4


@dataclasses.dataclass(frozen=True)
class Block:
    """A part of a model with one input and one output tensor: the unit that pipeline stages are made of.

    `macs` are the multiply-adds of one sample's forward pass in convolutions and dense layers. `parameters` are all
    weights, including the moving statistics of batch norm.
    """

    name: str
    layers: Tuple[str, ...]
    macs: int
    parameters: int


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """What is known of a model that a function of the user makes."""

    kind: str  # Sequential, Functional or subclassed
    inputs: str  # shapes and types, for people
    outputs: str
    gradients: Tuple[Tuple[str, int], ...]  # name and elements of each trainable variable
    layers: Tuple[Tuple[str, str], ...]  # name and description of each layer, to compare it with a checkpoint's
    has_norm: bool  # whether it has batch norm, whose moving statistics a pipeline does not keep
    has_own_loss: bool  # whether it comes with a loss, and is not plain classification
    is_compiled: bool = False  # with an optimizer and a loss that are not used

    @property
    def fingerprint(self) -> str:
        """A hash of what the model is: its layers, their settings and the shapes of their weights."""
        return hashlib.sha256(repr((self.kind, self.layers)).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model for one kind of image, or one of the user's own for its kind of data."""

    name: str
    height: int
    width: int
    channels: int
    classes: int
    norm: str
    blocks: Tuple[Block, ...]
    own: Optional[OwnModel] = None

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def macs(self) -> int:
        return sum(block.macs for block in self.blocks)

    def describe_shape(self) -> str:
        """Returns what goes in and what comes out, for people."""
        if self.own:
            return f"{self.own.inputs} to {self.own.outputs}"
        return f"{self.height} x {self.width} x {self.channels} to {self.classes} classes"

    def to_json(self) -> Dict[str, Any]:
        """Returns a model as JSON, to be kept."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Architecture:
        """Returns the model in JSON; KeyError, TypeError or ValueError if it is damaged."""
        blocks = tuple(Block(**{**block, "layers": tuple(block["layers"])}) for block in value["blocks"])
        own = dict(value["own"])
        own["gradients"] = tuple((str(name), int(elements)) for name, elements in own["gradients"])
        own["layers"] = tuple((str(name), str(text)) for name, text in own["layers"])
        return cls(**{**value, "blocks": blocks, "own": OwnModel(**own)})


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The model and how it is cut: one tuple of blocks per pipeline stage."""

    architecture: Architecture
    stages: Tuple[Tuple[Block, ...], ...]

    def share(self, stage: int) -> float:
        """Returns the part of the model's work that a stage does, from 0 to 1."""
        return sum(block.macs for block in self.stages[stage]) / max(self.architecture.macs, 1)


def _build_mlp(model: LayerBuilder) -> None:
    for number, units in enumerate(_MLP_UNITS, 1):
        model.block(f"hidden{number}")
        if number == 1:
            model.flatten("flatten")
        model.dense(f"hidden{number}_dense", units)
        model.relu(f"hidden{number}_relu")
    model.block("head")


def _build_cnn(model: LayerBuilder) -> None:
    for number, filters in enumerate(_CNN_FILTERS, 1):
        model.block(f"conv{number}")
        _add_conv(model, f"conv{number}", filters, 3)
        model.relu(f"conv{number}_relu")
        if number < len(_CNN_FILTERS):
            model.max_pool(f"conv{number}_pool", 2)
    model.block("hidden")
    model.flatten("flatten")
    model.dense("hidden_dense", _CNN_UNITS)
    model.relu("hidden_relu")
    model.block("head")


def _build_cifar_resnet(model: LayerBuilder, depth: int) -> None:
    model.block("stem")
    _add_conv(model, "conv1", _CIFAR_FILTERS[0], 3)
    model.relu("conv1_relu")
    _add_stacks(model, _CIFAR_FILTERS, [(depth - 2) // 6] * len(_CIFAR_FILTERS))


def _build_basic_resnet(model: LayerBuilder, blocks: Sequence[int]) -> None:
    model.block("stem")
    _add_conv(model, "conv1", _IMAGENET_FILTERS[0], 7, stride=2)
    model.relu("conv1_relu")
    model.max_pool("conv1_pool", 3, stride=2)
    _add_stacks(model, _IMAGENET_FILTERS, blocks)


def _build_bottleneck_resnet(model: LayerBuilder, blocks: Sequence[int]) -> None:
    """Adds the layers of a ResNet of keras.applications, with the same names and padding."""
    model.block("stem")
    model.pad("conv1_pad", 3)
    model.conv("conv1_conv", 64, 7, 2, same=False, bias=True)
    model.norm("conv1_bn")
    model.relu("conv1_relu")
    model.pad("pool1_pad", 1)
    model.max_pool("pool1_pool", 3, stride=2, same=False)
    for stack, (width, count) in enumerate(zip(_IMAGENET_FILTERS, blocks), 2):
        for number in range(1, count + 1):
            name = f"conv{stack}_block{number}"
            stride = 2 if stack > 2 and number == 1 else 1
            entry = model.block(name)
            shortcut = entry
            if number == 1:
                model.conv(f"{name}_0_conv", 4 * width, 1, stride, bias=True)
                shortcut = model.norm(f"{name}_0_bn")
            model.conv(f"{name}_1_conv", width, 1, stride, entry, bias=True)
            model.norm(f"{name}_1_bn")
            model.relu(f"{name}_1_relu")
            model.conv(f"{name}_2_conv", width, 3, bias=True)
            model.norm(f"{name}_2_bn")
            model.relu(f"{name}_2_relu")
            model.conv(f"{name}_3_conv", 4 * width, 1, bias=True)
            model.norm(f"{name}_3_bn")
            model.add(f"{name}_add", shortcut)
            model.relu(f"{name}_out")
    model.block("head")
    model.mean_pool("avg_pool")


def _add_stacks(model: LayerBuilder, filters: Sequence[int], blocks: Sequence[int]) -> None:
    """Adds stacks of basic blocks, each at half the image size of the previous one, and the head."""
    for stack, (width, count) in enumerate(zip(filters, blocks), 2):
        for number in range(1, count + 1):
            name = f"conv{stack}_block{number}"
            stride = 2 if stack > 2 and number == 1 else 1
            entry = model.block(name)
            shortcut = entry
            if stride > 1:
                shortcut = _add_conv(model, f"{name}_0", width, 1, stride)
            _add_conv(model, f"{name}_1", width, 3, stride, entry)
            model.relu(f"{name}_1_relu")
            _add_conv(model, f"{name}_2", width, 3)
            model.add(f"{name}_add", shortcut)
            model.relu(f"{name}_out")
    model.block("head")
    model.mean_pool("avg_pool")


def _add_conv(
    model: LayerBuilder, name: str, filters: int, kernel: int, stride: int = 1, source: Optional[str] = None
) -> str:
    model.conv(f"{name}_conv", filters, kernel, stride, source)
    return model.norm(f"{name}_norm")


@dataclasses.dataclass(frozen=True)
class _Model:
    """One row of the table of models."""

    build: Callable[[LayerBuilder], None]  # adds all layers except the last, which all models share
    keras_application: Optional[str] = None  # function of keras.applications; None: `training.models` makes it


_MODELS: Dict[str, _Model] = {
    "mlp": _Model(_build_mlp),
    "cnn": _Model(_build_cnn),
    **{f"resnet{depth}": _Model(functools.partial(_build_cifar_resnet, depth=depth)) for depth in (8, 20, 32, 44, 56)},
    "resnet18": _Model(functools.partial(_build_basic_resnet, blocks=(2, 2, 2, 2))),
    "resnet34": _Model(functools.partial(_build_basic_resnet, blocks=(3, 4, 6, 3))),
    "resnet50": _Model(functools.partial(_build_bottleneck_resnet, blocks=(3, 4, 6, 3)), "ResNet50"),
    "resnet101": _Model(functools.partial(_build_bottleneck_resnet, blocks=(3, 4, 23, 3)), "ResNet101"),
    "resnet152": _Model(functools.partial(_build_bottleneck_resnet, blocks=(3, 8, 36, 3)), "ResNet152"),
}
MODELS = tuple(_MODELS)
KERAS_APPLICATIONS = {name: model.keras_application for name, model in _MODELS.items() if model.keras_application}


def describe(name: str, *, height: int, width: int, channels: int, classes: int, norm: str) -> Architecture:
    """Returns a model's blocks for some images; ValueError with one sentence if the arguments are impossible."""
    if name not in MODELS:
        raise ValueError(f"{name!r} is not a model; use one of {', '.join(MODELS)}.")
    if norm not in NORMS:
        raise ValueError(f"{norm!r} is not a norm; use one of {', '.join(NORMS)}.")
    if min(height, width) < MIN_SIZE:
        raise ValueError(f"{name} takes images from {MIN_SIZE}x{MIN_SIZE} up, not {height}x{width}.")
    if channels < 1 or classes < 1:
        raise ValueError(f"{name} cannot have {channels} channels and {classes} classes: both are at least 1.")
    built = _build(name, (height, width, channels), classes, norm)
    blocks = tuple(
        Block(
            block,
            tuple(layer.name for layer in layers),
            sum(layer.macs for layer in layers),
            sum(layer.parameters for layer in layers),
        )
        for block, layers in built.blocks.items()
    )
    return Architecture(name, height, width, channels, classes, norm, blocks)


def layers(architecture: Architecture) -> Tuple[Layer, ...]:
    """Returns all layers of a model; inputs of a layer come before it."""
    shape = (architecture.height, architecture.width, architecture.channels)
    built = _build(architecture.name, shape, architecture.classes, architecture.norm)
    return tuple(itertools.chain.from_iterable(built.blocks.values()))


def has_norm(architecture: Architecture) -> bool:
    """Whether a model normalises anywhere, so that --norm matters to it."""
    if architecture.own:
        return architecture.own.has_norm
    return any(layer.kind == "norm" for layer in layers(architecture))


def groups_of(channels: int) -> int:
    """Returns the number of groups that group norm has for some channels: at most 32, of at least 4 channels each."""
    most = max(min(_MAX_GROUPS, channels // _MIN_CHANNELS_PER_GROUP), 1)
    return next(groups for groups in range(most, 0, -1) if channels % groups == 0)


def balance(architecture: Architecture, stages: int) -> Tuple[str, ...]:
    """Returns the blocks that stages 1, 2, ... begin with, so that the largest stage has as little work as possible.

    Among equally good splits it chooses the most even one; ValueError if there are more stages than blocks.
    """
    blocks = architecture.blocks
    if not 1 <= stages <= len(blocks):
        raise ValueError(
            f"{architecture.name} cannot be cut into {stages} stages: it has {len(blocks)} blocks, "
            f"and each stage takes one or more."
        )
    starts = _balanced_starts(tuple(block.macs for block in blocks), stages)
    return tuple(blocks[start].name for start in starts[1:])


def cut(architecture: Architecture, splits: Sequence[str]) -> Tuple[Tuple[Block, ...], ...]:
    """Returns the stages that begin with the first block and with each of these; ValueError if that is impossible."""
    blocks = architecture.blocks
    places = {block.name: place for place, block in enumerate(blocks)}
    starts = [0]
    for split in splits:
        if split not in places:
            near = difflib.get_close_matches(split, places, n=3, cutoff=0.5)
            known = f"the nearest are {', '.join(near)}" if near else f"there are {_join_names(blocks[1:])}"
            raise ValueError(f"{architecture.name} has no block {split!r}: {known}.")
        place = places[split]
        if place == 0:
            raise ValueError(
                f"{split} is the first block of {architecture.name}, with which stage 0 begins: "
                f"a further stage begins with one of {_join_names(blocks[1:])}."
            )
        if place in starts:
            raise ValueError(f"Two stages of {architecture.name} cannot both begin with {split}.")
        if place < starts[-1]:
            after = blocks[starts[-1]].name
            order = [block.name for block in blocks if block.name in splits]
            raise ValueError(f"{split} comes before {after} in {architecture.name}: the order is {', '.join(order)}.")
        starts.append(place)
    return tuple(tuple(blocks[start:end]) for start, end in zip(starts, [*starts[1:], len(blocks)]))


def _build(name: str, shape: Tuple[int, int, int], classes: int, norm: str) -> LayerBuilder:
    model = LayerBuilder(shape, norm)
    _MODELS[name].build(model)
    model.dense(HEAD, classes)
    return model


@functools.lru_cache(maxsize=256)  # suggestions for flags are tried, many with the same model
def _balanced_starts(work: Tuple[int, ...], stages: int) -> Tuple[int, ...]:
    least, _ = _partition(work, stages, cost=lambda total: total, join=max)
    _, starts = _partition(
        work,
        stages,
        cost=lambda total: total * total if total <= least else math.inf,
        join=lambda left, right: left + right,
    )
    return starts


def _partition(
    work: Sequence[int], stages: int, cost: Callable[[int], float], join: Callable[[float, float], float]
) -> Tuple[float, Tuple[int, ...]]:
    """Returns the lowest combined cost of `stages` consecutive stages, and the first block of each."""
    sums = [0, *itertools.accumulate(work)]
    best: Dict[int, Tuple[float, Tuple[int, ...]]] = {0: (0, ())}  # by the number of blocks in the stages so far
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


def _join_names(blocks: Sequence[Block]) -> str:
    return ", ".join(block.name for block in blocks)
