"""The IPU devices in TensorFlow's own lists of devices, where programs look for them."""

from __future__ import annotations

import functools
from typing import Any, List, Optional

from tensorflow.python.eager import context

from tf_ipu_dp.emulator.sdk_api.ipu import config

_KIND = "IPU"


def add_to_tensorflow() -> None:
    """Lets `tf.config` list them. Doing it twice is harmless."""
    for name, kind, prefix in (
        ("list_physical_devices", context.PhysicalDevice, "/physical_device:"),
        ("list_logical_devices", context.LogicalDevice, "/device:"),
    ):
        stock = getattr(context.Context, name)
        if not hasattr(stock, "_ipu_emulator"):
            setattr(context.Context, name, _with_ipus(stock, kind, prefix))


def _with_ipus(stock: Any, kind: Any, prefix: str) -> Any:
    @functools.wraps(stock)
    def list_devices(self: Any, device_type: Optional[str] = None) -> List[Any]:
        # Only to those who ask for IPUs: TensorFlow itself knows none in what it is given a list of all devices for.
        if device_type != _KIND:
            return list(stock(self, device_type))
        return [kind(f"{prefix}{_KIND}:{index}", _KIND) for index in range(config.count_devices())]

    list_devices._ipu_emulator = True  # type: ignore[attr-defined]
    return list_devices
