"""The IPU devices in TensorFlow's own lists of devices, where programs look for them."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, Optional

from tensorflow.python.eager import context

from tf_ipu_dp.emulator import patches

_KIND = "IPU"
_PATCH = "device lists"


def add_to_tensorflow(count_devices: Callable[[], int]) -> None:
    """Makes `tf.config` list as many IPU devices as the function returns. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    for name, kind, prefix in (
        ("list_physical_devices", context.PhysicalDevice, "/physical_device:"),
        ("list_logical_devices", context.LogicalDevice, "/device:"),
    ):
        stock = getattr(context.Context, name)
        patches.set_attribute(_PATCH, context.Context, name, _with_ipus(stock, kind, prefix, count_devices))


def _with_ipus(stock: Any, kind: Any, prefix: str, count_devices: Callable[[], int]) -> Any:
    @functools.wraps(stock)
    def list_devices(self: Any, device_type: Optional[str] = None) -> List[Any]:
        # Only if IPUs are requested: TensorFlow itself lists all devices to place operations on them.
        if device_type != _KIND:
            return list(stock(self, device_type))
        return [kind(f"{prefix}{_KIND}:{index}", _KIND) for index in range(count_devices())]

    return list_devices
