"""Variables that forward passes change besides weights and metrics, like the moving averages of batch normalisation.

Every replica starts a micro batch with the same values. Afterwards floats get the mean over the replicas, and other
types replica 0's value. Between instances the mean is taken once per execution.
"""

from __future__ import annotations

from typing import Any, List, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import instances, replicas
from tf_ipu_dp.emulator.runtime.gradient_reduction import Contribution, Packing


class MovingStatistics:
    """These variables of a model during one micro batch of all replicas of an instance."""

    def __init__(self, model: Any, groups: int, concurrent: bool) -> None:
        """`groups`: how many groups of replicas, equally many in each, have values of their own after a micro batch."""
        self._variables = _moving_variables(model) if groups > 1 else []
        self._packing = Packing(self._variables)
        self._groups, self._concurrent = groups, concurrent

    def begin(self) -> List[Any]:
        """Returns the values that time-sliced replicas start with; an empty list for concurrent ones."""
        return self._read() if self._groups > 1 and not self._concurrent else []

    def zeros(self) -> List[Any]:
        """Returns what a loop over the replicas carries before the first one."""
        return self._packing.zeros()

    def restore(self, start: List[Any]) -> None:
        """Assigns the variables the values that every replica starts with."""
        if start:
            self._assign(start)

    def collect(self, carried: Sequence[Any], start: List[Any], replica: Any) -> List[Any]:
        """Returns what the loop carries with the values of one more replica."""
        values = self._read() if start else []
        return [_collect_one(collected, value, replica) for collected, value in zip(carried, values)]

    def finish(self, carried: Sequence[Any]) -> None:
        """Assigns the variables the mean over the replicas."""
        if self._concurrent:
            carried = replicas.all_reduce(self._read(), _sum_or_first)
        count = self._groups
        self._assign([each / tf.cast(count, each.dtype) if each.dtype.is_floating else each for each in carried])

    def _read(self) -> List[Any]:
        return self._packing.pack([variable.value() for variable in self._variables])

    def _assign(self, packed: Sequence[Any]) -> None:
        for variable, value in zip(self._variables, self._packing.unpack(packed)):
            variable.assign(value)


class InstanceStatistics:
    """The same variables, averaged over the instances at the end of an execution.

    They are linear in what the forward passes add, so averaging once per execution is enough.
    """

    def __init__(self, model: Any) -> None:
        self._variables = [variable for variable in _moving_variables(model) if variable.dtype.is_floating]
        self._packing = Packing(self._variables)

    def contribution(self) -> Contribution:
        """Returns this instance's values, which all its replicas have in common."""
        return Contribution(self._packing.pack([each.value() for each in self._variables]), lambda values: values[0])

    def assign_mean(self, totals: Sequence[Any]) -> None:
        """Assigns the variables the mean, from the sums over all instances."""
        means = [total / tf.cast(instances.count(), total.dtype) for total in totals]
        for variable, mean in zip(self._variables, self._packing.unpack(means)):
            variable.assign(mean)


def _moving_variables(model: Any) -> List[Any]:
    metrics = {id(variable) for metric in model.metrics for variable in metric.variables}
    return [each for each in model.non_trainable_variables if not each.trainable and id(each) not in metrics]


def _collect_one(collected: Any, value: Any, replica: Any) -> Any:
    return collected + value if value.dtype.is_floating else tf.where(tf.equal(replica, 0), value, collected)


def _sum_or_first(values: List[Any]) -> Any:
    return replicas.sum_values(values) if values[0].dtype.is_floating else values[0]
