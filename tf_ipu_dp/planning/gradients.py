"""The gradients of a model: how many numbers each variable's has, and how many bytes are all-reduced. Pure."""

from __future__ import annotations

import dataclasses
from typing import Dict, Tuple

from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.architectures import Architecture

# Gradients have the type of the weights, so the second number of the precision decides.
_BYTES_OF_WEIGHTS = {"32": 4, "16": 2}


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradient of one trainable variable."""

    variable: str
    elements: int


def gradients(architecture: Architecture) -> Tuple[Gradient, ...]:
    """Returns the gradients of a model, in the order of its layers. Moving statistics have none."""
    if architecture.own:
        return tuple(Gradient(name, elements) for name, elements in architecture.own.gradients)
    found = []
    for layer in architectures.layers(architecture):
        parts: Dict[str, int] = {}
        if layer.kind == "norm":
            channels = layer.parameters // (4 if architecture.norm == "batch" else 2)
            parts = {"gamma": channels, "beta": channels}
        elif layer.parameters:
            bias = layer.units if layer.bias else 0
            parts = {"kernel": layer.parameters - bias, "bias": bias}
        found += [Gradient(f"{layer.name}/{part}", elements) for part, elements in parts.items() if elements]
    return tuple(found)


def bytes_per_element(precision: str, deterministic: bool) -> int:
    """Returns the bytes of one number of a gradient as it is all-reduced.

    Deterministic runs add 32-bit gradients up in 64 bits, so that the order of the sum makes no difference.
    """
    size = _BYTES_OF_WEIGHTS[precision.partition(".")[2]]
    return 2 * size if deterministic and size == 4 else size
