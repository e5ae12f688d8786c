"""The models in PyTorch: the same layers as the Keras ones, which torchvision's ResNets are not.

Keras' ResNet-50 has the stride in the first convolution of a block and biases in all; our smaller ResNets pad as
TensorFlow does. PyTorch is imported in the functions.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Tuple

from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.architectures import Architecture
from tf_ipu_dp.planning.layers import INPUT, Layer

Size = Tuple[int, int, int]  # height, width, channels


def make_network(architecture: Architecture) -> Any:
    """Returns the module; it takes images [n, c, h, w] and returns logits. Best with channels_last memory."""
    from torch import nn

    class Network(nn.Module):  # type: ignore[misc]
        """Applies the layers in their order."""

        def __init__(self) -> None:
            super().__init__()
            self.steps: List[Tuple[str, Tuple[str, ...], Tuple[str, ...]]] = []  # layer, inputs, what is over after it
            self.layers = nn.ModuleDict()
            last_use = {name: layer.name for layer in _layers(architecture) for name in layer.inputs}
            for layer, module in _make_modules(architecture):
                self.layers[layer.name] = module
                over = tuple(name for name in layer.inputs if last_use[name] == layer.name)
                self.steps.append((layer.name, layer.inputs, over))

        def forward(self, images: Any) -> Any:
            tensors = {INPUT: images}
            for name, inputs, over in self.steps:
                tensors[name] = self.layers[name](*(tensors[each] for each in inputs))
                for each in over:
                    tensors.pop(each, None)
            return tensors[architectures.HEAD]

    return Network()


def load_weights(network: Any, arrays: Mapping[str, Any]) -> None:
    """Sets the weights from arrays that have the names and the shapes of the Keras model's variables."""
    import torch

    names = {
        "weight": ("kernel", "gamma"),
        "bias": ("bias", "beta"),
        "running_mean": ("moving_mean",),
        "running_var": ("moving_variance",),
    }
    used = set()
    with torch.no_grad():
        for name, tensor in network.state_dict(keep_vars=True).items():
            _, layer, *_, kind = name.split(".")
            if kind not in names:
                continue  # how many batches a norm has seen
            found = next(f"{layer}/{each}" for each in names[kind] if f"{layer}/{each}" in arrays)
            used.add(found)
            tensor.copy_(torch.from_numpy(_as_torch(arrays[found])))
    assert used == set(arrays), f"no layer takes {sorted(set(arrays) - used)}"


def initialise(network: Any) -> None:
    """Draws the weights from the distributions that the Keras models have."""
    from torch import nn

    for name, module in network.layers.items():
        for part in module.modules():
            if not isinstance(part, (nn.Conv2d, nn.Linear)):
                continue
            if name == architectures.HEAD:
                nn.init.xavier_uniform_(part.weight)
            else:
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
            if part.bias is not None:
                nn.init.zeros_(part.bias)


def _as_torch(array: Any) -> Any:
    """Returns a Keras kernel [h, w, in, out] or [in, out] as PyTorch has it; other weights are the same."""
    import numpy as np

    axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim)
    return np.ascontiguousarray(array if axes is None else array.transpose(axes))


def _layers(architecture: Architecture) -> List[Layer]:
    return list(architectures.layers(architecture))


def _make_modules(architecture: Architecture) -> List[Tuple[Layer, Any]]:
    """Returns the layers with their modules. Padding that is a layer of its own becomes an option of the next one."""
    from torch import nn

    sizes: Dict[str, Size] = {INPUT: (architecture.height, architecture.width, architecture.channels)}
    margins: Dict[str, int] = {}
    made = []
    for layer in _layers(architecture):
        size = sizes[layer.inputs[0]]
        if layer.kind == "pad":
            margins[layer.name] = layer.kernel
            sizes[layer.name] = size
            made.append((layer, nn.Identity()))
            continue
        margin = margins.get(layer.inputs[0], 0)
        sizes[layer.name] = _output_size(layer, size, margin)
        made.append((layer, _make_module(layer, size, margin, architecture.norm)))
    return made


def _make_module(layer: Layer, size: Size, margin: int, norm: str) -> Any:
    import torch
    from torch import nn

    class Flatten(nn.Module):  # type: ignore[misc]
        """In Keras' order: pixels, then channels. That is the order in memory of channels_last."""

        def forward(self, images: Any) -> Any:
            return images.permute(0, 2, 3, 1).flatten(1)

    class Add(nn.Module):  # type: ignore[misc]
        def forward(self, one: Any, other: Any) -> Any:
            return torch.add(one, other)

    channels, epsilon = size[-1], architectures.EPSILON
    make: Dict[str, Callable[[], Any]] = {
        "conv": lambda: _make_conv(layer, size, margin),
        "norm": lambda: (
            nn.GroupNorm(architectures.groups_of(channels), channels, epsilon)
            if norm == "group"
            else nn.BatchNorm2d(channels, epsilon, momentum=1 - architectures.NORM_MOMENTUM)
        ),
        "relu": lambda: nn.ReLU(inplace=True),
        # Rounding up adds what TensorFlow pads at the end.
        "max_pool": lambda: nn.MaxPool2d(
            layer.kernel, layer.stride, _padding(size[0], layer)[0] if layer.same else margin, ceil_mode=layer.same
        ),
        "mean_pool": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1)),
        "flatten": Flatten,
        "dense": lambda: nn.Linear(size[0] * size[1] * channels, layer.units),
        "add": Add,
    }
    return make[layer.kind]()


def _make_conv(layer: Layer, size: Size, margin: int) -> Any:
    from torch import nn

    (top, bottom), (left, right) = (
        _padding(each, layer) if layer.same else (margin, margin) for each in (size[0], size[1])
    )
    even = top == bottom and left == right
    conv = nn.Conv2d(size[2], layer.units, layer.kernel, layer.stride, (top, left) if even else 0, bias=layer.bias)
    return conv if even else nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), conv)


def _padding(length: int, layer: Layer) -> Tuple[int, int]:
    """Returns what TensorFlow's padding "same" adds before and after so many pixels."""
    total = max((-(-length // layer.stride) - 1) * layer.stride + layer.kernel - length, 0)
    return total // 2, total - total // 2


def _output_size(layer: Layer, size: Size, margin: int) -> Size:
    height, width, channels = size
    if layer.kind in ("conv", "max_pool"):
        added = layer.stride - 1 if layer.same else 2 * margin + layer.stride - layer.kernel
        height, width = (height + added) // layer.stride, (width + added) // layer.stride
        return height, width, layer.units or channels
    if layer.kind == "mean_pool":
        return 1, 1, channels
    return (1, 1, layer.units) if layer.kind == "dense" else size
