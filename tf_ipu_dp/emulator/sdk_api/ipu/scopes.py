"""`tensorflow.python.ipu.scopes`: context managers that place operations. On a host they have no effect on results."""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator, List, Union

import numpy as np
import tensorflow as tf

from tf_ipu_dp.emulator.runtime import pipeline_layout, replicas

_outside = threading.local()


@contextlib.contextmanager
def ipu_scope(device: str) -> Iterator[None]:
    """Operations inside are for this device: the same as `tf.device`."""
    if "IPU" not in device.upper():
        raise ValueError(f"{device!r} does not name an IPU device; it is like /device:IPU:0.")
    with tf.device(device):
        yield


@contextlib.contextmanager
def ipu_jit_scope(ipu_scope: str) -> Iterator[None]:
    """Operations inside are compiled together, as the program of this name."""
    del ipu_scope
    yield


@contextlib.contextmanager
def ipu_shard(index: Union[int, List[int]]) -> Iterator[None]:
    """Operations inside belong to this IPU of a replica. Replicas of several IPUs are fewer than IPUs."""
    indices = index if isinstance(index, (list, tuple)) else [index]
    if any(int(one) < 0 for one in indices):
        raise ValueError(f"A shard is a number of 0 or more, not {index!r}.")
    pipeline_layout.check_shards_fit([int(one) for one in indices])
    yield


@contextlib.contextmanager
def outside_compilation_scope(name: str = "outside") -> Iterator[None]:
    """Operations inside run on the host."""
    del name
    if replicas.current() is None:
        raise ValueError("outside_compilation_scope is for functions of the device, and none is being traced.")
    if getattr(_outside, "is_open", False):
        raise ValueError("outside_compilation_scope cannot be nested.")
    _outside.is_open = True
    try:
        yield
    finally:
        _outside.is_open = False


@contextlib.contextmanager
def frontend_attribute(attribute_name: str, attribute_value: str, restore_to: Any = None) -> Iterator[None]:
    """Operations inside carry an attribute for the compiler."""
    del attribute_name, attribute_value, restore_to
    yield


@contextlib.contextmanager
def stochastic_rounding(override: bool) -> Iterator[None]:
    """Operations inside round stochastically, or not; a host rounds to the nearest."""
    del override
    yield


@contextlib.contextmanager
def partials_type(override_type: Any) -> Iterator[None]:
    """Operations inside have partial sums of this type; a host's are float32."""
    if np.dtype(getattr(override_type, "as_numpy_dtype", override_type)) not in (np.float16, np.float32):
        raise ValueError(f"Partials are float16 or float32, not {override_type!r}.")
    yield
