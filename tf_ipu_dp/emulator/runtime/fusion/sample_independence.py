"""Whether a layer of a user treats the samples of a batch independently, found from the operations that it is made of.

The layer is traced for a batch of unknown size. It qualifies if every operation on the way from its inputs to its
outputs is known to compute each sample from that sample alone. Anything unknown does not qualify, and neither does
asking for the size of the batch.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Set

import tensorflow as tf
from tensorflow.python.framework import func_graph

_ELEMENTWISE = frozenset(
    [
        "Abs",
        "Add",
        "AddV2",
        "Cast",
        "Ceil",
        "ClipByValue",
        "Cos",
        "Cosh",
        "Div",
        "DivNoNan",
        "Elu",
        "Equal",
        "Erf",
        "Erfc",
        "Exp",
        "Expm1",
        "Floor",
        "Greater",
        "GreaterEqual",
        "Identity",
        "Inv",
        "IsFinite",
        "IsInf",
        "IsNan",
        "LeakyRelu",
        "Less",
        "LessEqual",
        "Log",
        "Log1p",
        "LogicalAnd",
        "LogicalNot",
        "LogicalOr",
        "Maximum",
        "Minimum",
        "Mul",
        "MulNoNan",
        "Neg",
        "NotEqual",
        "OnesLike",
        "Pow",
        "PreventGradient",
        "RealDiv",
        "Reciprocal",
        "Relu",
        "Relu6",
        "Round",
        "Rsqrt",
        "Select",
        "SelectV2",
        "Selu",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Square",
        "SquaredDifference",
        "StopGradient",
        "Sub",
        "Tan",
        "Tanh",
        "Xdivy",
        "Xlogy",
        "ZerosLike",
    ]
)
_REDUCTIONS = frozenset(("All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum"))
# The first input has the samples, and the others, like filters, have none.
_OF_FIRST_INPUT = frozenset(
    [
        "AvgPool",
        "AvgPool3D",
        "BiasAdd",
        "Conv2D",
        "Conv3D",
        "DepthwiseConv2dNative",
        "MaxPool",
        "MaxPool3D",
        "MirrorPad",
        "Pad",
        "PadV2",
    ]
)
_PASSIVE = frozenset(("Const", "ReadVariableOp", "Placeholder", "NoOp"))


def is_independent(call: Callable[..., Any], inputs: Any) -> bool:
    """Whether a layer's `call` computes each sample of its outputs from the same sample of its inputs.

    `inputs` is a nest of tensors or their specs, with the samples along the first axis.
    """
    graph = func_graph.FuncGraph("samples")
    try:
        with graph.as_default():
            given = tf.nest.map_structure(
                lambda each: tf.compat.v1.placeholder(each.dtype, [None, *each.shape[1:]]), inputs
            )
            outputs = tf.nest.flatten(call(given))
    except Exception:  # noqa: BLE001 the user's code may not work with an unknown size: then it depends on it
        return False
    with_samples = {id(each) for each in tf.nest.flatten(given)}
    for operation in graph.get_operations():
        if operation.type in _PASSIVE:
            continue
        own = [id(each) in with_samples for each in operation.inputs]
        if not any(own):
            if operation.op_def.is_stateful:
                return False
            continue
        if not _keeps_samples(operation, own):
            return False
        with_samples.update(id(each) for each in operation.outputs)
    return all(tf.is_tensor(each) and id(each) in with_samples for each in outputs)


def _keeps_samples(operation: Any, with_samples: List[bool]) -> bool:
    kind = operation.type
    if kind in _ELEMENTWISE:
        return _is_broadcast_along_samples(operation, with_samples)
    if not with_samples[0] and kind not in ("ConcatV2", "Einsum", "Pack"):
        return False
    rest_has_none = not any(with_samples[1:])
    if kind in ("Pad", "PadV2", "MirrorPad"):
        paddings = _constant(operation.inputs[1])
        return rest_has_none and paddings is not None and not paddings[0].any()
    if kind in _OF_FIRST_INPUT:
        return rest_has_none
    return kind in _RULES and _RULES[kind](operation, with_samples)


def _is_broadcast_along_samples(operation: Any, with_samples: List[bool]) -> bool:
    rank = operation.outputs[0].shape.rank
    for each, own in zip(operation.inputs, with_samples):
        if rank is None or each.shape.rank is None:
            return False
        # An operand of fewer axes meets the last ones; what has samples must meet the first.
        if own and each.shape.rank != rank:
            return False
        if not own and each.shape.rank == rank and rank and each.shape[0] != 1:
            return False
    return True


def _reduces_other_axes(operation: Any, with_samples: List[bool]) -> bool:
    return not any(with_samples[1:]) and 0 not in _axes(operation.inputs[0], operation.inputs[1])


def _keeps_rows(operation: Any, with_samples: List[bool]) -> bool:
    """Whether a reshape leaves the first axis: the size of a sample must be the same before and after."""
    before, after = operation.inputs[0].shape, operation.outputs[0].shape
    if any(with_samples[1:]) or before.rank in (None, 0) or after.rank in (None, 0):
        return False
    sizes = [shape[1:].num_elements() for shape in (before, after)]
    return None not in sizes and sizes[0] == sizes[1] and _constant(operation.inputs[1]) is not None


def _has_first_constant(value: int) -> Callable[[Any, List[bool]], bool]:
    def rule(operation: Any, with_samples: List[bool]) -> bool:
        constant = _constant(operation.inputs[1])
        return constant is not None and int(constant[0]) == value

    return rule


def _concatenates_other_axes(operation: Any, with_samples: List[bool]) -> bool:
    return all(with_samples[:-1]) and 0 not in _axes(operation.inputs[0], operation.inputs[-1])


def _stacks_other_axes(operation: Any, with_samples: List[bool]) -> bool:
    return all(with_samples) and operation.get_attr("axis") % operation.outputs[0].shape.rank != 0


def _expands_other_axes(operation: Any, with_samples: List[bool]) -> bool:
    return 0 not in _axes(operation.outputs[0], operation.inputs[1])


def _squeezes_other_axes(operation: Any, with_samples: List[bool]) -> bool:
    axes, rank = operation.get_attr("squeeze_dims"), operation.inputs[0].shape.rank
    return bool(axes) and rank is not None and all(axis % rank for axis in axes)


def _multiplies_rows(operation: Any, with_samples: List[bool]) -> bool:
    return not operation.get_attr("transpose_a") and not with_samples[1]


def _multiplies_matrices(operation: Any, with_samples: List[bool]) -> bool:
    ranks = [each.shape.rank for each in operation.inputs]
    if None in ranks or ranks[0] < 3:
        return False
    return ranks[0] == ranks[1] if with_samples[1] else ranks[1] < ranks[0]


def _sums_products_of_samples(operation: Any, with_samples: List[bool]) -> bool:
    equation = operation.get_attr("equation").decode()
    if "." in equation or "->" not in equation:
        return False
    factors, result = equation.split("->")
    label = result[:1]
    for factor, own in zip(factors.split(","), with_samples):
        if own and not (factor[:1] == label and factor.count(label) == 1):
            return False
        if not own and label in factor:
            return False
    return bool(label)


def _has_several_axes(operation: Any, with_samples: List[bool]) -> bool:
    return (operation.inputs[0].shape.rank or 0) > 1


_RULES: Dict[str, Callable[[Any, List[bool]], bool]] = {
    **dict.fromkeys(_REDUCTIONS, _reduces_other_axes),
    "Reshape": _keeps_rows,
    "Tile": _has_first_constant(1),
    "Transpose": _has_first_constant(0),
    "ConcatV2": _concatenates_other_axes,
    "Pack": _stacks_other_axes,
    "ExpandDims": _expands_other_axes,
    "Squeeze": _squeezes_other_axes,
    "MatMul": _multiplies_rows,
    "BatchMatMulV2": _multiplies_matrices,
    "Einsum": _sums_products_of_samples,
    "Softmax": _has_several_axes,
    "LogSoftmax": _has_several_axes,
}


def _axes(tensor: Any, axes: Any) -> Set[int]:
    """Returns the axes of a tensor that a constant names, counted from 0; axis 0 if they are not known."""
    constant, rank = _constant(axes), tensor.shape.rank
    if constant is None or not rank:
        return {0}
    return {int(axis) % rank for axis in constant.ravel()}


def _constant(tensor: Any) -> Any:
    value = tf.get_static_value(tensor)
    return value if value is None or not isinstance(value, bytes) else None
