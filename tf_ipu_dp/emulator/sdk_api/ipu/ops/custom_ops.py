"""`tensorflow.python.ipu.ops.custom_ops`: operations from Poplar libraries, replaced by Python.

A compiled Poplar library cannot be run here. `register_replacement` names a Python function that does the same with
TensorFlow; without one the operation is refused. Gradients are those of the replacement: of its TensorFlow ops, or of
a `tf.custom_gradient` within it.
"""

from __future__ import annotations

import pathlib
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

__all__ = ["codelet_expression_op", "cpu_user_operation", "precompiled_user_op", "register_replacement"]

Replacement = Callable[[List[tf.Tensor], Optional[str]], Any]
_replacements: Dict[Tuple[str, Optional[str]], Replacement] = {}


def register_replacement(library_path: Any, function: Replacement, op_name: Optional[str] = None) -> None:
    """Makes `function(inputs, attributes)` replace an operation of a library, or all of them. Not part of the SDK.

    The path is the program's, or just the file's name. The function gets a list of tensors and the op's string of
    attributes or None, and returns a tensor or a sequence of them, as the op's `outs` specify. The last call
    counts.
    """
    _replacements[str(library_path), op_name] = function


def precompiled_user_op(  # noqa: PLR0913, PLR0917 the SDK's signature
    inputs: Sequence[Any],
    library_path: str,
    gp_path: str = "",
    outs: Optional[Dict[str, Any]] = None,
    name: str = "UserOp",
    op_name: str = "Build",
    separate_gradients: bool = False,
    inputs_with_gradients: Optional[Sequence[int]] = None,
    attributes: Optional[str] = None,
    gradient_attributes: Optional[str] = None,
) -> List[tf.Tensor]:
    """Returns the outputs of a library's operation for the device, by its registered replacement."""
    del gp_path, separate_gradients
    _check_attributes(attributes, gradient_attributes)
    return _run(inputs, library_path, outs, name, op_name, inputs_with_gradients, attributes)


def cpu_user_operation(  # noqa: PLR0913, PLR0917 the SDK's signature
    inputs: Sequence[Any],
    library_path: str,
    outs: Optional[Dict[str, Any]] = None,
    name: str = "UserOp",
    op_name: str = "Callback",
    separate_gradients: bool = False,
    inputs_with_gradients: Optional[Sequence[int]] = None,
    attributes: Optional[str] = None,
    gradient_attributes: Optional[str] = None,
) -> List[tf.Tensor]:
    """Returns the outputs of a library's operation for the host, by its registered replacement."""
    del separate_gradients
    _check_attributes(attributes, gradient_attributes)
    return _run(inputs, library_path, outs, name, op_name, inputs_with_gradients, attributes)


def codelet_expression_op(vertex_expression: Callable[..., Any], *args: Any) -> tf.Tensor:
    """Returns the value of an expression of Python operators on tensors. It has no gradient."""
    return tf.stop_gradient(vertex_expression(*[tf.convert_to_tensor(tensor) for tensor in args]))


def _run(
    inputs: Sequence[Any],
    library_path: str,
    outs: Optional[Dict[str, Any]],
    name: str,
    op_name: str,
    inputs_with_gradients: Optional[Sequence[int]],
    attributes: Optional[str],
) -> List[tf.Tensor]:
    function = _replacement(library_path, op_name)
    tensors = [tf.convert_to_tensor(tensor) for tensor in inputs]
    if inputs_with_gradients is not None:
        tensors = [
            tensor if index in inputs_with_gradients else tf.stop_gradient(tensor)
            for index, tensor in enumerate(tensors)
        ]
    with tf.name_scope(name):
        result = function(tensors, attributes)
        outputs = list(result) if isinstance(result, (list, tuple)) else [result]
        outputs = [tf.convert_to_tensor(output) for output in outputs]
    types = [tf.as_dtype(dtype) for dtype in (outs or {}).get("output_types", [])]
    shapes = [tf.TensorShape(shape) for shape in (outs or {}).get("output_shapes", [])]
    if [output.dtype for output in outputs] != types or len(shapes) != len(outputs):
        raise ValueError(
            f"The replacement of {library_path} ({op_name}) returned {[output.dtype.name for output in outputs]}, "
            f"but outs specifies {[dtype.name for dtype in types]} with {len(shapes)} shapes."
        )
    return [tf.ensure_shape(output, shape) for output, shape in zip(outputs, shapes)]


def _replacement(library_path: str, op_name: str) -> Replacement:
    path = str(library_path)
    for library in (path, pathlib.PurePath(path).name):
        for op in (op_name, None):
            if (library, op) in _replacements:
                return _replacements[library, op]
    raise NotImplementedError(
        f"The Poplar library {path} with its operation {op_name!r} cannot be run on emulated IPUs: give a Python "
        f"function that does the same to {__name__}.register_replacement(library_path, function, op_name)."
    )


def _check_attributes(*attributes: Any) -> None:
    for value in attributes:
        if value is not None and not isinstance(value, str):
            raise ValueError(f"Attributes of a user op must be one str, not {type(value).__name__}.")
