"""`tensorflow.python.ipu.optimizers.gradient_accumulation_optimizer`: one update for several micro batches.

The SDK's compiler needs a loop of known length around the optimizer, divisible by the micro batches of an update, and
refuses the program otherwise. Here a program without a loop is refused too, and one whose `ipu.loops.repeat` does not
fit; the lengths of other loops are not checked. Every A-th call updates, and the count continues from one run to the
next.
"""

from __future__ import annotations

from typing import Any, Iterable, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import model_strategy
from tf_ipu_dp.emulator.runtime.accumulation import Window
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.cross_replica_optimizer import CrossReplicaOptimizer
from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.ipu_optimizer import IpuOptimizer

_OLD_FORM_OPTIMIZERS = (tf.compat.v1.train.GradientDescentOptimizer, tf.compat.v1.train.MomentumOptimizer)


class GradientAccumulationOptimizerV2(IpuOptimizer):
    """Adds up or averages the gradients of `num_mini_batches` calls, and updates with the last of them.

    `dtype` is that of the accumulators, and of the gradients that `opt` gets. Offloading and sharding of the
    optimizer's state affect memory on an IPU, not results; here they do nothing.
    """

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Optional[bool] = None,
        replicated_optimizer_state_sharding: Optional[bool] = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "GradientAccumulationOptimizerV2",
    ) -> None:
        del offload_weight_update_variables
        sharding = {"replicated_optimizer_state_sharding": replicated_optimizer_state_sharding}
        model_strategy.refuse_tensor_sharding(tf.distribute.get_strategy(), **sharding)
        super().__init__(opt, name)
        self._window = Window(num_mini_batches, reduction_method, dtype)

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Accumulates the gradients of a micro batch; with the last one the wrapped optimizer updates."""
        pairs = [(gradient, variable) for gradient, variable in grads_and_vars if gradient is not None]
        if not pairs:
            raise ValueError("No gradients provided for any variable.")
        variables = [variable for _, variable in pairs]
        return self._window.add(
            [gradient for gradient, _ in pairs],
            variables,
            lambda gradients: self._optimizer.apply_gradients(list(zip(gradients, variables)), global_step, name),
        )


class CrossReplicaGradientAccumulationOptimizerV2(GradientAccumulationOptimizerV2):
    """Updates with the mean over the replicas of what `GradientAccumulationOptimizerV2` has accumulated."""

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Optional[bool] = None,
        replicated_optimizer_state_sharding: Optional[bool] = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "CrossReplicaGradientAccumulationOptimizerV2",
    ) -> None:
        super().__init__(
            CrossReplicaOptimizer(opt),
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )


class GradientAccumulationOptimizer(GradientAccumulationOptimizerV2):
    """The old form: adds up, and wraps gradient descent or momentum only."""

    def __init__(
        self, opt: Any, num_mini_batches: int, verify_usage: bool = True, name: str = "GradientAccumulationOptimizer"
    ) -> None:
        del verify_usage
        wrapped = opt
        while isinstance(wrapped, IpuOptimizer):
            wrapped = wrapped._optimizer
        if not isinstance(wrapped, _OLD_FORM_OPTIMIZERS):
            raise ValueError(
                f"{type(self).__name__} wraps a GradientDescentOptimizer or MomentumOptimizer, not "
                f"{type(wrapped).__name__}; use {type(self).__name__}V2."
            )
        super().__init__(opt, num_mini_batches, name=name)


class CrossReplicaGradientAccumulationOptimizer(GradientAccumulationOptimizer):
    """The old form, with the mean over the replicas."""

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        verify_usage: bool = True,
        name: str = "CrossReplicaGradientAccumulationOptimizer",
    ) -> None:
        super().__init__(CrossReplicaOptimizer(opt), num_mini_batches, verify_usage, name)
