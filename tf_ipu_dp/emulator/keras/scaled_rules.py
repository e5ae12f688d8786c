"""Update rules for gradients that are multiplied by a loss scaling factor: the factor is in their numbers instead.

They compute in float32, and so do the slots of float16 variables: there the square of a scaled gradient overflows, and
a learning rate that is divided by the factor vanishes. Stock TensorFlow cannot load a SavedModel with such slots: save
a float16 model without its optimizer.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

import tensorflow as tf

from tf_ipu_dp.emulator.keras.optimizer_wrapper import creator_with_dtype, v2


class _ScaledRule:
    """What the rules share, for optimizers of Keras. `scale` returns the factor in a type."""

    scale: Callable[[Any], Any]

    def add_slot(self, var: Any, slot_name: str, initializer: Any = "zeros", shape: Any = None) -> Any:
        """Returns a slot, and makes it if it does not exist."""
        with tf.variable_creator_scope(creator_with_dtype(_computation_dtype(var))):
            return super().add_slot(var, slot_name, initializer, shape)  # type: ignore[misc]

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        del apply_state  # in the variable's type
        dtype = _computation_dtype(var)
        coefficients = self._fallback_apply_state(var.device, dtype)  # type: ignore[attr-defined]
        step = self._step(tf.cast(grad, dtype), var, coefficients)
        return var.assign_sub(tf.cast(step, var.dtype), use_locking=self._use_locking)  # type: ignore[attr-defined]

    def _step(self, grad: Any, var: Any, coefficients: Dict[str, Any]) -> Any:
        """Updates the slots, and returns what is subtracted from the variable."""
        raise NotImplementedError

    def _average(self, var: Any, slot_name: str, rate: Any, value: Any) -> Any:
        """Moves a slot towards the value, and returns it."""
        slot = self.get_slot(var, slot_name)  # type: ignore[attr-defined]
        return slot.assign(rate * slot + (1 - rate) * value)


class ScaledSGD(_ScaledRule, v2.SGD):  # type: ignore[misc]
    """The velocity is rate times gradient, so dividing the rate by the factor is enough."""

    def _step(self, grad: Any, var: Any, coefficients: Dict[str, Any]) -> Any:
        step = coefficients["lr_t"] / self.scale(grad.dtype) * grad
        if not self._momentum:
            return step
        velocity = self.get_slot(var, "momentum")
        return -velocity.assign(coefficients["momentum"] * velocity - step)


class ScaledAdam(_ScaledRule, v2.Adam):  # type: ignore[misc]
    """The moments contain the factor and its square. Epsilon is added outside the root, so it is scaled too."""

    def _step(self, grad: Any, var: Any, coefficients: Dict[str, Any]) -> Any:
        m = self._average(var, "m", coefficients["beta_1_t"], grad)
        v = self._average(var, "v", coefficients["beta_2_t"], tf.square(grad))
        return coefficients["lr"] * m / (tf.sqrt(v) + coefficients["epsilon"] * self.scale(grad.dtype))


class ScaledRMSprop(_ScaledRule, v2.RMSprop):  # type: ignore[misc]
    """The mean square contains the factor's square. Keras adds epsilon under the root if there is momentum."""

    def _step(self, grad: Any, var: Any, coefficients: Dict[str, Any]) -> Any:
        rate, scale = coefficients["rho"], self.scale(grad.dtype)
        variance = self._average(var, "rms", rate, tf.square(grad))
        if self.centered:
            # Rounding can make the difference negative.
            variance = tf.nn.relu(variance - tf.square(self._average(var, "mg", rate, grad)))
        if not self._momentum:
            return coefficients["lr_t"] * grad / (tf.sqrt(variance) + coefficients["epsilon"] * scale)
        step = coefficients["lr_t"] * grad / tf.sqrt(variance + coefficients["epsilon"] * scale**2)
        velocity = self.get_slot(var, "momentum")
        return velocity.assign(coefficients["momentum"] * velocity + step)


def _computation_dtype(var: Any) -> Any:
    return tf.float32 if var.dtype.base_dtype == tf.float16 else var.dtype.base_dtype
