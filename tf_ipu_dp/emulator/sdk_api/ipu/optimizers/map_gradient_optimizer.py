"""`tensorflow.python.ipu.optimizers.map_gradient_optimizer`."""

from __future__ import annotations

from typing import Any, Callable, List

from tf_ipu_dp.emulator.sdk_api.ipu.optimizers.ipu_optimizer import IpuOptimizer


class MapGradientOptimizer(IpuOptimizer):
    """Applies a function of the gradient and the variable's value to every gradient."""

    def __init__(
        self,
        wrapped_optimizer: Any,
        gradient_mapping_function: Callable[[Any, Any], Any],
        name: str = "MapGradientOptimizer",
    ) -> None:
        super().__init__(wrapped_optimizer, name)
        self._gradient_mapping_function = gradient_mapping_function

    def compute_gradients(self, loss: Any, var_list: Any = None, **kwargs: Any) -> List[Any]:
        """Returns pairs of mapped gradient and variable."""
        return [
            (None if gradient is None else self._gradient_mapping_function(gradient, variable.value()), variable)
            for gradient, variable in super().compute_gradients(loss, var_list=var_list, **kwargs)
        ]
