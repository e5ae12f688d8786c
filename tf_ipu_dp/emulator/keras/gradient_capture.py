"""Records the gradients of chosen tensors in the backward pass, for automatic loss scaling."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Callable, Iterator

import tensorflow as tf

_recording = threading.local()


@contextlib.contextmanager
def recording(record: Callable[[Any], None]) -> Iterator[None]:
    """Inside, the gradients of captured tensors are passed to the function as they are computed."""
    before = getattr(_recording, "record", None)
    _recording.record = record
    try:
        yield
    finally:
        _recording.record = before


@tf.custom_gradient
def captured(value: Any) -> Any:
    """Returns the tensor; inside `recording`, its gradient is recorded."""

    def upstream(gradient: Any) -> Any:
        record = getattr(_recording, "record", None)
        if record is not None:
            record(gradient)
        return gradient

    return tf.identity(value), upstream
