"""`tensorflow.python.ipu.ipu_strategy`: the strategy that puts models on the emulated device."""

from __future__ import annotations

from typing import Any, Callable, Optional

import tensorflow as tf
from tensorflow.python.eager import def_function, function

from tf_ipu_dp.emulator import keras_models

_FUNCTIONS = tuple(
    kind for kind in (def_function.Function, getattr(function, "ConcreteFunction", None)) if isinstance(kind, type)
)


class IPUStrategyV1(tf.distribute.OneDeviceStrategy):  # type: ignore[misc]
    """All IPUs of one device in this process. `num_replicas_in_sync` is 1, however often Keras replicates the model."""

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        cpu_device: str = "/device:CPU:0",
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        super().__init__("/cpu:0")
        self._ipu_device, self._cpu_device = ipu_device, cpu_device
        self._enable_iterators, self.enable_keras_extensions = enable_dataset_iterators, enable_keras_extensions
        if enable_keras_extensions:
            keras_models.extend_keras()

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Optional[Any] = None) -> Any:
        """Runs a function on the device; in eager mode it must be a `tf.function`."""
        if tf.executing_eagerly() and not isinstance(fn, _FUNCTIONS):
            raise ValueError(
                "IPUStrategy.run() needs a tf.function in eager mode: wrap the function with @tf.function."
            )
        return super().run(fn, args=args, kwargs=kwargs, options=options)


IPUStrategy = IPUStrategyV1
