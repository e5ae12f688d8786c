"""Keras optimizers that update once for several micro batches."""

from __future__ import annotations

from typing import Any, Dict, Iterable, List, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.keras.loss_scaling import ALSOptimizer
from tf_ipu_dp.emulator.keras.optimizer_wrapper import OptimizerWrapper, Pairs, deserialize, serializable
from tf_ipu_dp.emulator.runtime import model_strategy
from tf_ipu_dp.emulator.runtime.accumulation import Window
from tf_ipu_dp.emulator.sdk_api.ipu.gradient_accumulation import GradientAccumulationReductionMethod


@serializable
class GradientAccumulationOptimizer(OptimizerWrapper):
    """Adds up or averages the gradients of `num_mini_batches` calls, and updates with the last of them.

    With 1 the constructor returns `opt` itself. `dtype` is that of the accumulators and of the gradients that `opt`
    gets. Offloading and sharding of the optimizer's state affect memory, not results. A program needs a loop of known
    length around it, divisible by `num_mini_batches`; in `fit` that is the number of steps of an execution.
    """

    def __new__(cls, opt: Any = None, num_mini_batches: Any = None, *_: Any, **__: Any) -> Any:
        return opt if num_mini_batches == 1 else super().__new__(cls)

    def __init__(
        self,
        opt: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Optional[bool] = None,
        replicated_optimizer_state_sharding: Optional[bool] = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "GradientAccumulationOptimizer",
    ) -> None:
        if num_mini_batches == 1:
            return  # __new__ has returned `opt`, and Python calls __init__ on it if it is of this class itself
        sharding = {"replicated_optimizer_state_sharding": replicated_optimizer_state_sharding}
        model_strategy.refuse_tensor_sharding(tf.distribute.get_strategy(), **sharding)
        super().__init__(opt, name)
        self._window = Window(num_mini_batches, reduction_method, dtype)
        self._placement = {
            "offload_weight_update_variables": offload_weight_update_variables,
            "replicated_optimizer_state_sharding": replicated_optimizer_state_sharding,
        }

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], name: Optional[str] = None, experimental_aggregate_gradients: bool = True
    ) -> Any:
        """Accumulates the gradients of a micro batch; with the last one the wrapped optimizer updates."""
        pairs = self._sum_over_replicas(grads_and_vars, experimental_aggregate_gradients)
        return self._accumulate(pairs, name, experimental_aggregate_gradients)

    def _accumulate(self, pairs: Pairs, name: Optional[str], aggregate: bool, global_step: Any = None) -> Any:
        gradients = [gradient for gradient, _ in pairs]
        variables = [variable for _, variable in pairs]
        scaling = self._opt if isinstance(self._opt, ALSOptimizer) else None
        if scaling:
            # Now rather than at the update: the accumulators may be of another type than the gradients.
            scaling._count_gradients(gradients, aggregate)

        def update(reduced: List[Any]) -> Any:
            if scaling:
                return scaling._update(list(zip(reduced, variables)), name, global_step)
            return self._opt.apply_gradients(
                list(zip(reduced, variables)), name=name, experimental_aggregate_gradients=False
            )

        return self._window.add(gradients, variables, update)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments that make the same optimizer."""
        dtype = self._window.dtype
        return {
            **super().get_config(),
            **self._placement,
            "num_mini_batches": self._window.count,
            "dtype": dtype if dtype is None or callable(dtype) else tf.as_dtype(dtype).name,
            "reduction_method": self._window.method.name.lower(),
        }


@serializable
class ALSGradientAccumulationOptimizer(GradientAccumulationOptimizer):
    """Gradient accumulation around an ALS optimizer."""

    def __new__(cls, als_optimizer: Any = None, num_mini_batches: Any = None, *_: Any, **__: Any) -> Any:
        if num_mini_batches is not None and not isinstance(als_optimizer, ALSOptimizer):
            raise ValueError(f"ALSGradientAccumulationOptimizer wraps an ALSOptimizer, not {als_optimizer!r}.")
        return super().__new__(cls, als_optimizer, num_mini_batches)

    def __init__(
        self,
        als_optimizer: Any,
        num_mini_batches: int,
        offload_weight_update_variables: Optional[bool] = None,
        replicated_optimizer_state_sharding: Optional[bool] = False,
        dtype: Any = None,
        reduction_method: Any = GradientAccumulationReductionMethod.SUM,
        name: str = "ALSGradientAccumulationOptimizer",
    ) -> None:
        super().__init__(
            als_optimizer,
            num_mini_batches,
            offload_weight_update_variables,
            replicated_optimizer_state_sharding,
            dtype,
            reduction_method,
            name,
        )

    def apply_gradients(  # type: ignore[override] # the SDK's order of arguments
        self,
        grads_and_vars: Iterable[Any],
        captured_grads: Optional[Dict[str, Any]] = None,
        global_step: Any = None,
        name: Optional[str] = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Accumulates the gradients of a micro batch; with the last one the ALS optimizer updates.

        `captured_grads` are counted with every micro batch; `global_step` counts updates.
        """
        self._opt._count_captured(captured_grads)
        pairs = self._sum_over_replicas(grads_and_vars, experimental_aggregate_gradients)
        return self._accumulate(pairs, name, experimental_aggregate_gradients, global_step)

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> Any:
        """Makes an optimizer from what `get_config` returned."""
        given = dict(config)
        given["als_optimizer"] = deserialize(given.pop("opt"), custom_objects)
        return cls(**given)
