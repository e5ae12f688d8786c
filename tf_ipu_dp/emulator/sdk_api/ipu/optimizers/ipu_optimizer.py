"""`tensorflow.python.ipu.optimizers.ipu_optimizer`: the base class of the other wrappers."""

from __future__ import annotations

from typing import Any, Iterable, List, Optional

import tensorflow as tf


class IpuOptimizer(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """Delegates everything to the TF1 optimizer that it wraps."""

    def __init__(self, opt: Any, name: Optional[str] = None) -> None:
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            raise ValueError(
                f"{type(self).__name__} wraps a tf.compat.v1.train.Optimizer, not {type(opt).__name__}; "
                "for Keras optimizers there is keras.ipu.optimizers."
            )
        super().__init__(False, name or type(self).__name__)
        self._optimizer = opt

    def compute_gradients(self, loss: Any, var_list: Any = None, **kwargs: Any) -> List[Any]:
        """Returns pairs of gradient and variable."""
        return self._optimizer.compute_gradients(loss, var_list=var_list, **kwargs)

    def apply_gradients(
        self, grads_and_vars: Iterable[Any], global_step: Any = None, name: Optional[str] = None
    ) -> Any:
        """Returns the operation that updates the variables."""
        return self._optimizer.apply_gradients(grads_and_vars, global_step, name)

    def get_slot(self, var: Any, name: str) -> Any:
        """Returns a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(var, name)

    def get_slot_names(self) -> List[str]:
        """Returns the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names()

    def variables(self) -> List[Any]:
        """Returns the wrapped optimizer's variables."""
        return self._optimizer.variables()
