"""IPU devices as scopes: `tf.device("/device:IPU:0")` in graphs and in eager mode.

TensorFlow on this host has no IPU, so operations in such a scope are placed on its CPU. The scope itself is remembered,
because `ipu_compiler.compile` asks for it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from typing import Any, Iterator, Optional

from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from tf_ipu_dp.emulator import patches

_PATCH = "device scopes"
_HOST = "/device:CPU:0"
_IPU = re.compile(r"(?:^|[/:])ipu(?::(\d+|\*))?$", re.IGNORECASE)
_OTHER_KIND = re.compile(r"(?:^|[/:])(?:cpu|gpu|tpu|xla_cpu|xla_gpu)(?::(?:\d+|\*))?$", re.IGNORECASE)
_current = threading.local()


def current_ordinal() -> Optional[int]:
    """Returns the number of the IPU device whose scope this is, or None outside of such a scope."""
    return getattr(_current, "ordinal", None)


def add_to_tensorflow() -> None:
    """Makes TensorFlow accept IPU devices as scopes. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    for owner in (ops.Graph, context.Context):
        patches.set_attribute(_PATCH, owner, "device", _accepting_ipus(owner.device))


def _accepting_ipus(stock: Any) -> Any:
    @functools.wraps(stock)
    def device(self: Any, name: Any) -> Any:
        text = name if isinstance(name, str) else name.to_string() if hasattr(name, "to_string") else ""
        found = _IPU.search(text)
        if found:
            digits = found[1] or "0"
            return _scope(stock(self, _HOST), int(digits) if digits.isdigit() else 0)
        if current_ordinal() is not None and (name is None or _OTHER_KIND.search(text)):
            return _scope(stock(self, name), None)
        return stock(self, name)

    return device


@contextlib.contextmanager
def _scope(placement: Any, ordinal: Optional[int]) -> Iterator[None]:
    before = current_ordinal()
    _current.ordinal = ordinal
    try:
        with placement:
            yield
    finally:
        _current.ordinal = before
