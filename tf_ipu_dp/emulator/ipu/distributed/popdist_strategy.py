"""`tensorflow.python.ipu.distributed.popdist_strategy`: the strategy of one instance of a PopDist job."""

from __future__ import annotations

from typing import Any, Callable, Optional

import tensorflow as tf

from tf_ipu_dp.emulator import instances, popdist
from tf_ipu_dp.emulator.ipu import ipu_strategy
from tf_ipu_dp.emulator.ipu.keras_extensions import KerasExtensions, ordinal_of


class _Extended(ipu_strategy.Extended):
    """Variables begin with instance 0's values, wherever they are made."""

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        with tf.init_scope():
            if instances.count() > 1 and tf.executing_eagerly():
                variable.assign(instances.broadcast(variable.read_value(), "variable"))
        return variable


class PopDistStrategy(tf.compat.v1.distribute.OneDeviceStrategy, KerasExtensions):  # type: ignore[misc]
    """The replicas of all instances. `num_replicas_in_sync` counts them, so Keras' losses are divided by them."""

    supports_loss_scaling = True
    spans_instances = True

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        add_ipu_cross_replica_reductions: bool = True,
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        popdist.init()
        reduces = add_ipu_cross_replica_reductions
        extended = _Extended(self, popdist.getNumTotalReplicas(), reduces)
        tf.compat.v1.distribute.Strategy.__init__(self, extended)
        self.device_ordinal = ordinal_of(ipu_device)
        ipu_strategy.prepare(self, enable_dataset_iterators, enable_keras_extensions)

    def update_ipu_config(self, config: Any) -> None:
        """Writes this instance's place in the job into the configuration."""
        config.experimental.multi_replica_distribution.process_count = popdist.getNumInstances()
        config.experimental.multi_replica_distribution.process_index = popdist.getInstanceIndex()

    def run(self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, options: Optional[Any] = None) -> Any:
        """Runs a function on the device; a plain one is traced first."""
        if not tf.executing_eagerly():
            return ipu_strategy.run_in_graph(self, fn, args, kwargs, options)
        return ipu_strategy.run_on_device(self, ipu_strategy.as_function(fn), args, kwargs or {}, check_types=False)
