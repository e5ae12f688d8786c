"""What an execution needs from the strategy of a Keras model."""

from __future__ import annotations

from typing import Any, Callable

from tf_ipu_dp.emulator.runtime import instances


def spans_instances(model: Any) -> bool:
    """Whether the model is trained by several instances."""
    return instances.count() > 1 and getattr(model.distribute_strategy, "spans_instances", False)


def refuse_tensor_sharding(strategy: Any, **options: Any) -> None:
    """Refuses options that divide tensors between replicas under PopDistStrategy, which does not support them."""
    for name, value in options.items():
        if value and getattr(strategy, "spans_instances", False):
            raise NotImplementedError(f"{name} is not supported with PopDistStrategy.")


def call_as_replica(model: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls the function in the replica context of the model's strategy."""
    strategy = model.distribute_strategy
    with strategy.scope():
        return strategy.extended.call_for_each_replica(function, args=arguments)
