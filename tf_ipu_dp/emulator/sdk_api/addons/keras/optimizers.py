"""`ipu_tensorflow_addons.keras.optimizers`: Adam, SGD and LAMB with slots and arithmetic of chosen precision.

They are OptimizerV2 in every release of Keras. Sparse gradients are refused, as on the IPU. `outline_apply_gradients`
and its arguments save code memory on the IPU and change nothing here. Slots of another type than their variable go into
checkpoints and HDF5 files; stock TensorFlow cannot load a SavedModel with them: save without the optimizer.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.keras.optimizer_wrapper import creator_with_dtype

__all__ = ["AdamIpuOptimizer", "IpuOptimizerBase", "LAMBIpuOptimizer", "SGDIpuOptimizer"]

_OptimizerV2: Any = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers).Optimizer


class IpuOptimizerBase(_OptimizerV2):  # type: ignore[misc]
    """An OptimizerV2 whose slots may have another type than their variables."""

    def __init__(
        self,
        name: str,
        optimizer_compute_precisions: Sequence[Any] = (tf.float32,),
        outline_apply_gradients: bool = False,
        outline_apply_gradients_kwargs: Optional[Dict[str, Any]] = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name, **kwargs)
        self.optimizer_compute_precisions = tuple(tf.as_dtype(dtype) for dtype in optimizer_compute_precisions)
        self.outline_apply_gradients = outline_apply_gradients
        self.outline_apply_gradients_kwargs = outline_apply_gradients_kwargs
        self._slot_dtypes: Dict[str, Any] = {}

    def add_slot(
        self, var: Any, slot_name: str, initializer: Any = "zeros", shape: Any = None, dtype: Any = None
    ) -> Any:
        """Returns a slot, and makes it if it does not exist. Without a type it is of the type of its kind of slot."""
        if dtype is not None:
            self._set_slot_dtype(slot_name, dtype)
        dtype = self._slot_dtypes.get(slot_name)
        if dtype is None or dtype == var.dtype.base_dtype:
            return super().add_slot(var, slot_name, initializer, shape)
        # Keras gives a slot its variable's type. Restoring a checkpoint makes slots too, and comes through here.
        with tf.variable_creator_scope(creator_with_dtype(dtype)):
            return super().add_slot(var, slot_name, initializer, shape)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "optimizer_compute_precisions": [dtype.name for dtype in self.optimizer_compute_precisions],
            "outline_apply_gradients": self.outline_apply_gradients,
            "outline_apply_gradients_kwargs": self.outline_apply_gradients_kwargs,
        }

    def _set_slot_dtype(self, slot_name: str, dtype: Any) -> None:
        """Fixes the type of a kind of slot; None is the variable's."""
        self._slot_dtypes[slot_name] = None if dtype is None else tf.as_dtype(dtype)

    def _slot_dtype_name(self, slot_name: str) -> Optional[str]:
        dtype = self._slot_dtypes[slot_name]
        return None if dtype is None else dtype.name

    def _coefficients(self, var: Any, apply_state: Any) -> Dict[str, Any]:
        """The numbers that an update shares between the variables of one type on one device."""
        key = (var.device, var.dtype.base_dtype)
        return (apply_state or {}).get(key) or self._fallback_apply_state(*key)

    def _prepare_local(self, var_device: str, var_dtype: Any, apply_state: Any) -> None:
        if "learning_rate" in self._hyper:  # as in Keras, an optimizer need not have one
            # In the precision of the computation: a learning rate may vanish in float16.
            rate = self._decayed_lr(self.optimizer_compute_precisions[0])
            apply_state[(var_device, var_dtype)]["lr_t"] = tf.identity(rate)

    def _resource_apply_sparse(self, grad: Any, var: Any, indices: Any, apply_state: Any = None) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} does not support sparse gradients, as that of {var.name}. "
            "ipu_tensorflow_addons.keras.layers.Embedding has a dense one."
        )


class _AdamMoments(IpuOptimizerBase):
    """What Adam and LAMB share: the moments of the gradients."""

    def __init__(
        self,
        learning_rate: Any,
        beta_1: Any,
        beta_2: Any,
        epsilon: Optional[float],
        debiasing: bool,
        m_dtype: Any,
        v_dtype: Any,
        name: str,
        **kwargs: Any,
    ) -> None:
        rate = kwargs.pop("lr", learning_rate)
        super().__init__(name, **kwargs)
        self._set_hyper("learning_rate", rate)
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("beta_1", beta_1)
        self._set_hyper("beta_2", beta_2)
        self.epsilon = epsilon or tf.keras.backend.epsilon()
        self.debiasing = debiasing
        self._set_slot_dtype("m", m_dtype)
        self._set_slot_dtype("v", v_dtype)

    def _create_slots(self, var_list: List[Any]) -> None:
        for slot_name in self._slot_dtypes:
            for var in var_list:
                self.add_slot(var, slot_name)

    def _prepare_local(self, var_device: str, var_dtype: Any, apply_state: Any) -> None:
        super()._prepare_local(var_device, var_dtype, apply_state)
        dtype = self.optimizer_compute_precisions[0]
        step = tf.cast(self.iterations + 1, dtype)
        beta_1, beta_2 = (tf.identity(self._get_hyper(name, dtype)) for name in ("beta_1", "beta_2"))
        apply_state[(var_device, var_dtype)].update(
            beta_1=beta_1,
            beta_2=beta_2,
            m_correction=1 - tf.pow(beta_1, step),
            v_correction=1 - tf.pow(beta_2, step),
        )

    def _update_moments(self, grad: Any, var: Any, coefficients: Dict[str, Any]) -> Any:
        """Updates the slots m and v, and returns them, corrected if there is debiasing, in float32 by default."""
        dtype = self.optimizer_compute_precisions[0]
        grad = tf.cast(grad, dtype)
        m_slot, v_slot = self.get_slot(var, "m"), self.get_slot(var, "v")
        beta_1, beta_2 = coefficients["beta_1"], coefficients["beta_2"]
        m = beta_1 * tf.cast(m_slot, dtype) + (1 - beta_1) * grad
        v = beta_2 * tf.cast(v_slot, dtype) + (1 - beta_2) * tf.square(grad)
        assigned = [_assign(m_slot, m), _assign(v_slot, v)]
        if self.debiasing:
            m, v = m / coefficients["m_correction"], v / coefficients["v_correction"]
        return m, v, assigned

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "decay": self._initial_decay,
            "beta_1": self._serialize_hyperparameter("beta_1"),
            "beta_2": self._serialize_hyperparameter("beta_2"),
            "epsilon": self.epsilon,
            "debiasing": self.debiasing,
            "m_dtype": self._slot_dtype_name("m"),
            "v_dtype": self._slot_dtype_name("v"),
        }


class AdamIpuOptimizer(_AdamMoments):
    """Adam that adds epsilon after the correction of the bias; Keras' Adam adds it before."""

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        name: str = "Adam",
        m_dtype: Any = None,
        v_dtype: Any = None,
        vhat_dtype: Any = None,
        debiasing: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, debiasing, m_dtype, v_dtype, name, **kwargs)
        self.amsgrad = amsgrad
        self._vhat_dtype = None if vhat_dtype is None else tf.as_dtype(vhat_dtype)
        if amsgrad:
            self._set_slot_dtype("vhat", vhat_dtype)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        coefficients = self._coefficients(var, apply_state)
        m, v, assigned = self._update_moments(grad, var, coefficients)
        if self.amsgrad:
            largest = self.get_slot(var, "vhat")
            v = tf.maximum(tf.cast(largest, v.dtype), v)
            assigned.append(_assign(largest, v))
        update = coefficients["lr_t"] * m / (tf.sqrt(v) + self.epsilon)
        return tf.group(_subtract(var, update), *assigned)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        vhat_dtype = None if self._vhat_dtype is None else self._vhat_dtype.name
        return {**super().get_config(), "amsgrad": self.amsgrad, "vhat_dtype": vhat_dtype}


class SGDIpuOptimizer(IpuOptimizerBase):
    """Keras' SGD: the learning rate is inside the velocity."""

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: Any = 0.0,
        nesterov: bool = False,
        name: str = "SGD",
        momentum_accum_dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        rate = kwargs.pop("lr", learning_rate)
        super().__init__(name, **kwargs)
        if isinstance(momentum, (int, float)) and not 0 <= momentum <= 1:
            raise ValueError(f"momentum={momentum} is not in [0, 1].")
        self._set_hyper("learning_rate", rate)
        self._set_hyper("decay", self._initial_decay)
        self._set_hyper("momentum", momentum)
        self._momentum = tf.is_tensor(momentum) or callable(momentum) or momentum > 0
        self.nesterov = nesterov
        self._set_slot_dtype("momentum", momentum_accum_dtype)

    def _create_slots(self, var_list: List[Any]) -> None:
        if self._momentum:
            for var in var_list:
                self.add_slot(var, "momentum")

    def _prepare_local(self, var_device: str, var_dtype: Any, apply_state: Any) -> None:
        super()._prepare_local(var_device, var_dtype, apply_state)
        momentum = self._get_hyper("momentum", self.optimizer_compute_precisions[0])
        apply_state[(var_device, var_dtype)]["momentum"] = tf.identity(momentum)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        coefficients = self._coefficients(var, apply_state)
        scaled = coefficients["lr_t"] * tf.cast(grad, self.optimizer_compute_precisions[0])
        if not self._momentum:
            return _subtract(var, scaled)
        slot = self.get_slot(var, "momentum")
        momentum = coefficients["momentum"]
        velocity = momentum * tf.cast(slot, scaled.dtype) - scaled
        update = momentum * velocity - scaled if self.nesterov else velocity
        return tf.group(_subtract(var, -update), _assign(slot, velocity))

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter("learning_rate"),
            "decay": self._initial_decay,
            "momentum": self._serialize_hyperparameter("momentum"),
            "nesterov": self.nesterov,
            "momentum_accum_dtype": self._slot_dtype_name("momentum"),
        }


class LAMBIpuOptimizer(_AdamMoments):
    """LAMB: Adam's step plus weight decay, scaled for each variable by the norm of its weights over that of the step.

    Patterns in the exclusions are searched in variables' names. `exclude_from_layer_adaptation=None` is the same as
    `exclude_from_weight_decay`. The first precision is that of the moments, the second that of step and norms.
    """

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: float = 1e-6,
        weight_decay_rate: float = 0.0,
        exclude_from_weight_decay: Optional[Sequence[str]] = None,
        exclude_from_layer_adaptation: Optional[Sequence[str]] = None,
        name: str = "LAMB",
        debiasing: bool = True,
        m_dtype: Any = None,
        v_dtype: Any = None,
        weight_norm_clip: Optional[float] = None,
        optimizer_compute_precisions: Sequence[Any] = (tf.float32, tf.float32),
        **kwargs: Any,
    ) -> None:
        if len(optimizer_compute_precisions) != 2:
            raise ValueError(
                f"{name}: optimizer_compute_precisions must have 2 entries, not {len(optimizer_compute_precisions)}."
            )
        kwargs["optimizer_compute_precisions"] = optimizer_compute_precisions
        super().__init__(learning_rate, beta_1, beta_2, epsilon, debiasing, m_dtype, v_dtype, name, **kwargs)
        self._set_hyper("weight_decay_rate", weight_decay_rate)
        self.exclude_from_weight_decay = exclude_from_weight_decay
        self.exclude_from_layer_adaptation = exclude_from_layer_adaptation
        self.weight_norm_clip = weight_norm_clip

    def _prepare_local(self, var_device: str, var_dtype: Any, apply_state: Any) -> None:
        super()._prepare_local(var_device, var_dtype, apply_state)
        decay = self._get_hyper("weight_decay_rate", self.optimizer_compute_precisions[1])
        apply_state[(var_device, var_dtype)]["weight_decay_rate"] = tf.identity(decay)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        coefficients = self._coefficients(var, apply_state)
        dtype = self.optimizer_compute_precisions[1]
        m, v, assigned = self._update_moments(grad, var, coefficients)
        m, v, weights = tf.cast(m, dtype), tf.cast(v, dtype), tf.cast(var, dtype)
        step = m / (tf.sqrt(v) + self.epsilon)
        adaptation = self.exclude_from_layer_adaptation
        if adaptation is None:
            adaptation = self.exclude_from_weight_decay
        if not _matches_any(self.exclude_from_weight_decay, var):
            step += coefficients["weight_decay_rate"] * weights
        ratio = tf.ones([], dtype) if _matches_any(adaptation, var) else self._trust_ratio(weights, step)
        update = tf.cast(coefficients["lr_t"], dtype) * ratio * step
        return tf.group(_subtract(var, update), *assigned)

    def _trust_ratio(self, weights: Any, step: Any) -> Any:
        of_weights, of_step = tf.norm(weights), tf.norm(step)
        if self.weight_norm_clip is not None:
            of_weights = tf.minimum(of_weights, tf.cast(self.weight_norm_clip, of_weights.dtype))
        both = tf.logical_and(of_weights > 0, of_step > 0)
        return tf.where(both, of_weights / tf.where(both, of_step, 1), 1)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "weight_decay_rate": self._serialize_hyperparameter("weight_decay_rate"),
            "exclude_from_weight_decay": self.exclude_from_weight_decay,
            "exclude_from_layer_adaptation": self.exclude_from_layer_adaptation,
            "weight_norm_clip": self.weight_norm_clip,
        }


def _assign(variable: Any, value: Any) -> Any:
    return variable.assign(tf.cast(value, variable.dtype.base_dtype))


def _subtract(variable: Any, update: Any) -> Any:
    """Subtracts the update in the update's precision, so that the result is rounded once."""
    return _assign(variable, tf.cast(variable, update.dtype) - update)


def _matches_any(patterns: Optional[Sequence[str]], variable: Any) -> bool:
    return any(re.search(pattern, variable.name.split(":")[0]) for pattern in patterns or ())
