"""`tensorflow.python.ipu.ops.grad_util_ops`: captures gradients in the backward pass."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List

import tensorflow as tf

__all__ = ["capture_upstream_gradients", "capturing"]

_captures: List[Dict[str, Any]] = []


def capture_upstream_gradients(args: Any, tag: str = "") -> Any:
    """Returns the tensors of a nest; the capture around them gets their gradients under `tag`.

    Computing gradients outside a capture is a `RuntimeError`.
    """
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(args)]

    @tf.custom_gradient
    def identity(*tensors: tf.Tensor) -> Any:
        def gradient(*upstream: Any) -> Any:
            if not _captures:
                raise RuntimeError(
                    "Gradients are captured here, but there is no capture context around their computation."
                )
            store = _captures[-1]
            store[tag or f"captured_{len(store)}"] = tf.nest.pack_sequence_as(args, upstream)
            return list(upstream)

        return [tf.identity(tensor) for tensor in tensors], gradient

    return tf.nest.pack_sequence_as(args, identity(*flat))


@contextlib.contextmanager
def capturing() -> Iterator[Dict[str, Any]]:
    """Captures gradients while it is open: by tag, in the structure of the tensors. Not a function of the SDK."""
    _captures.append({})
    try:
        yield _captures[-1]
    finally:
        _captures.pop()
