"""Captures the gradients of chosen tensors while a backward pass computes them."""

from __future__ import annotations

import threading
from typing import Any, Dict, List

import tensorflow as tf


class _Open(threading.local):
    """The contexts that this thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.contexts: List[GradientCaptureContext] = []


_open = _Open()


class GradientCaptureContext:
    """Gradients that are computed inside it, by a tape or by `tf.gradients`, are captured at the chosen tensors."""

    def __init__(self) -> None:
        self._captured: Dict[str, Any] = {}

    def __enter__(self) -> GradientCaptureContext:
        _open.contexts.append(self)
        return self

    def __exit__(self, *raised: Any) -> None:
        _open.contexts.remove(self)

    @property
    def captured_gradients(self) -> Dict[str, Any]:
        """The gradients by tag, in the structure of the tensors that were captured."""
        return self._captured

    def capture(self, tag: str, gradients: Any) -> None:
        """Adds gradients. A tag that is in use, or empty, gets a number, so that nothing is lost."""
        name, number = tag or "captured_0", 0
        while name in self._captured:
            number += 1
            name = f"{tag or 'captured'}_{number}"
        self._captured[name] = gradients


class GradientCaptureTape(tf.GradientTape):  # type: ignore[misc]
    """A tape whose `gradient` captures."""

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        self._context = GradientCaptureContext()

    @property
    def captured_gradients(self) -> Dict[str, Any]:
        """What the last call of `gradient` has captured, by tag."""
        return self._context.captured_gradients

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """Returns the gradients, as `tf.GradientTape.gradient` does."""
        self._context = GradientCaptureContext()
        with self._context:
            return super().gradient(target, sources, output_gradients, unconnected_gradients)

    def reset(self) -> None:
        """Drops what the tape has recorded and captured."""
        super().reset()
        self._context = GradientCaptureContext()


def capture_upstream_gradients(args: Any, tag: str = "") -> Any:
    """Returns the tensors of a nest; every context around the backward pass captures their gradients under `tag`.

    Computing gradients outside a context is a `RuntimeError`.
    """
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(args)]

    @tf.custom_gradient
    def identity(*tensors: tf.Tensor) -> Any:
        def capture(*upstream: Any) -> Any:
            if not _open.contexts:
                raise RuntimeError(
                    f"Gradients are captured here (tag {tag!r}), but there is no GradientCaptureContext around their "
                    "computation: use one, or a GradientCaptureTape."
                )
            for context in _open.contexts:
                context.capture(tag, tf.nest.pack_sequence_as(args, upstream))
            return list(upstream)

        return [tf.identity(tensor) for tensor in tensors], capture

    return tf.nest.pack_sequence_as(args, identity(*flat))
