"""`tensorflow.python.ipu.distributed.popdist_strategy`: the strategy of one instance of a PopDist job."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator import instances, popdist, replicas
from tf_ipu_dp.emulator.ipu import ipu_strategy
from tf_ipu_dp.emulator.ipu.keras_extensions import KerasExtensions, ordinal_of


class _Extended(ipu_strategy.Extended):
    """Variables begin with instance 0's values, wherever they are made. Reductions are over all instances' replicas."""

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        variable = super()._create_variable(next_creator, **kwargs)
        with tf.init_scope():
            if instances.count() > 1 and tf.executing_eagerly():
                variable.assign(instances.broadcast(variable.read_value(), "variable"))
        return variable

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any = None) -> List[Any]:
        program = replicas.current()
        done_already = program is not None and (program.updating or not self._reduces)
        if instances.count() == 1 or done_already:
            return super()._batch_reduce_to(reduce_op, value_destination_pairs, options)
        values = [tf.convert_to_tensor(value) for value, _ in value_destination_pairs]
        count = instances.count() * (program.replicas if program is not None else 1)
        results: Dict[int, Any] = {}
        for dtype in dict.fromkeys(value.dtype for value in values):
            places = [place for place, value in enumerate(values) if value.dtype == dtype]
            total = _sum_as_one([values[place] for place in places])
            if reduce_op == tf.distribute.ReduceOp.MEAN:
                total = [value / tf.cast(count, dtype) for value in total]
            results.update(zip(places, total))
        return [results[place] for place in range(len(values))]


def _sum_as_one(values: Sequence[Any]) -> List[Any]:
    """Returns the sums over all replicas of all instances, which meet only once for all of the values."""
    shapes = [tf.shape(value) for value in values]
    flat = [tf.reshape(value, [-1]) for value in values]
    (total,) = replicas.meet([tf.concat(flat, axis=0)], _total_of_instances)
    parts = tf.split(total, tf.stack([tf.size(value) for value in flat]), num=len(flat))
    sums = [tf.reshape(part, shape) for part, shape in zip(parts, shapes)]
    for one, value in zip(sums, values):
        one.set_shape(value.shape)
    return sums


def _total_of_instances(values: List[Any]) -> Any:
    return instances.sum_over_instances([replicas.total(values)], "reduction")[0]


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
