"""`tensorflow.python.ipu.ipu_strategy`: the strategy that puts models and functions on the emulated device."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import tensorflow as tf
from tensorflow.python.distribute import one_device_strategy

from tf_ipu_dp.emulator.keras import models
from tf_ipu_dp.emulator.runtime import device_functions, feeds, half_batch_norm, random_numbers, replicas
from tf_ipu_dp.emulator.sdk_api import on_import
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue
from tf_ipu_dp.emulator.sdk_api.ipu.keras_extensions import KerasExtensions, ordinal_of


class Extended(one_device_strategy.OneDeviceExtended):  # type: ignore[misc]
    """Everything is on the host's CPU. Reductions are over the replicas of the traced program."""

    def __init__(self, container: Any, replicas_in_sync: int = 1, reduces: bool = True) -> None:
        super().__init__(container, "/cpu:0")
        self._replicas_in_sync, self._reduces = replicas_in_sync, reduces

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._replicas_in_sync

    def _experimental_distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        del options
        return dataset

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        return self._batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> List[Any]:
        del options
        values = [value for value, _ in value_destination_pairs]
        program = replicas.current()
        if reduce_op not in (tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN):
            raise ValueError(f"{reduce_op} is not a reduction over replicas; it is SUM or MEAN.")
        if program is None or program.updating or program.replicas == 1 or not self._reduces:
            return values
        dense = [tf.convert_to_tensor(value) for value in values]
        totals = replicas.all_reduce(dense, replicas.sum_values)
        if reduce_op == tf.distribute.ReduceOp.MEAN:
            return [total / tf.cast(program.replicas, total.dtype) for total in totals]
        return totals


class IPUStrategyV1(tf.compat.v1.distribute.OneDeviceStrategy, KerasExtensions):  # type: ignore[misc]
    """All IPUs of one device in this process. `num_replicas_in_sync` is 1, however often Keras replicates the model."""

    supports_loss_scaling = True
    has_pipeline_stages = True

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        cpu_device: str = "/device:CPU:0",
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        tf.compat.v1.distribute.Strategy.__init__(self, Extended(self))
        self.device_ordinal = ordinal_of(ipu_device)
        self._ipu_device, self._cpu_device = ipu_device, cpu_device
        prepare(self, enable_dataset_iterators, enable_keras_extensions)

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Optional[Any] = None) -> Any:
        """Runs a function on the device; in eager mode it must be a `tf.function`."""
        if not tf.executing_eagerly():
            return device_functions.run_in_graph(self, fn, args, kwargs, options)
        if not device_functions.is_traced(fn):
            raise ValueError(
                "IPUStrategy.run() needs a tf.function in eager mode: wrap the function with @tf.function."
            )
        return device_functions.run_on_device(self, fn, args, kwargs or {}, check_types=True)

    def experimental_run_v2(self, *unused: Any, **unused_too: Any) -> Any:
        """Refused, as in the SDK, which has only `run`."""
        raise RuntimeError("experimental_run_v2 is not part of IPUStrategy: use run().")

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Returns the value itself: a device has only one."""
        del reduce_op, axis
        return value


IPUStrategy = IPUStrategyV1


def prepare(strategy: Any, enable_dataset_iterators: bool, enable_keras_extensions: bool) -> None:
    """Applies the patches that programs on the device need. For the constructors of strategies."""
    strategy.enable_dataset_iterators = enable_dataset_iterators
    strategy.enable_keras_extensions = enable_keras_extensions
    strategy.concurrent_functions = {}
    on_import.apply_patches()
    random_numbers.extend_tensorflow()
    half_batch_norm.extend_tensorflow()
    feeds.extend_tensorflow()
    device_functions.extend_tensorflow()
    if enable_dataset_iterators:
        ipu_infeed_queue.extend_datasets()
    if enable_keras_extensions:
        models.extend_keras()


__all__: Tuple[str, ...] = ("IPUStrategy", "IPUStrategyV1")
