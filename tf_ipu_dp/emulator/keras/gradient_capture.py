"""Gradients that pass certain tensors in the backward pass, recorded for automatic loss scaling."""

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
    """Returns the tensor; its gradient is recorded if somebody is recording."""

    def upstream(gradient: Any) -> Any:
        record = getattr(_recording, "record", None)
        if record is not None:
            record(gradient)
        return gradient

    return tf.identity(value), upstream
