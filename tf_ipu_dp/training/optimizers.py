"""Learning rate schedules, optimizers and the loss, made from a recipe.

The optimizers are Keras' OptimizerV2 ones, which the SDK works with. They receive gradients summed over the replicas
and scale them, so that the learning rate has the same meaning on any topology.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.config.recipe import OPTIMIZERS
from tf_ipu_dp.planning import plan

_legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
_KerasOptimizer: Any = _legacy.Optimizer
_KerasSgd: Any = _legacy.SGD
_KerasAdam: Any = _legacy.Adam
_register = tf.keras.utils.register_keras_serializable("tf_ipu_dp")

# Below it the logarithm of a probability is not taken: as in Keras.
LEAST_PROBABILITY = 1e-7
_DROP = 0.1
_POWER = 2
_TRUST = 0.001


@_register
class Schedule(tf.keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The learning rate of every weight update, counted from 0."""

    def __init__(self, recipe: plan.Recipe) -> None:
        super().__init__()
        self._recipe = recipe

    def __call__(self, step: Any) -> Any:
        """Returns the rate of an update as a float32 scalar."""
        recipe, update = self._recipe, tf.cast(step, tf.float32)
        warmup, length = recipe.warmup_updates, max(1, recipe.updates - recipe.warmup_updates)
        done = tf.clip_by_value((update - warmup) / length, 0.0, 1.0)
        share = tf.ones([])
        if recipe.schedule == "cosine":
            share = 0.5 * (1.0 + tf.cos(math.pi * done))
        elif recipe.schedule == "polynomial":
            share = (1.0 - done) ** _POWER
        elif recipe.schedule == "step":
            for drop in recipe.drops:
                share *= tf.where(update < drop, 1.0, _DROP)
        if warmup:
            share = tf.where(update < warmup, (update + 1.0) / warmup, share)
        return recipe.learning_rate * share

    def get_config(self) -> Dict[str, Any]:
        """Returns the recipe as a dictionary."""
        return {**dataclasses.asdict(self._recipe), "drops": list(self._recipe.drops)}

    @classmethod
    def from_config(cls, config: Dict[str, Any]) -> Schedule:
        """Returns the schedule of a recipe in a dictionary."""
        return cls(plan.Recipe(**{**config, "drops": tuple(config["drops"])}))


def gradient_scale(reduction: str, *, replicas: int, local_replicas: int, distributed: bool) -> Tuple[float, str]:
    """Returns what gradients are multiplied by, and how the SDK is to reduce those of an accumulation.

    Both strategies sum gradients over replicas. Under PopDistStrategy (`distributed`) Keras has divided the losses by
    all replicas, under IPUStrategy it has not. A sum is that of the micro batches' mean gradients. The SDK
    itself divides by the accumulated micro batches where the method is mean.
    """
    if reduction == "sum":
        return (float(replicas) if distributed else 1.0), "sum"
    return (1.0 if distributed else 1.0 / local_replicas), "mean"


def make_optimizer(recipe: plan.Recipe, *, gradient_scale: float) -> Any:
    """Returns the optimizer of a recipe, with loss scaling where the recipe has it."""
    common: Dict[str, Any] = {
        "learning_rate": Schedule(recipe),
        "gradient_scale": gradient_scale,
        "l2": recipe.l2,
        "weight_decay": recipe.weight_decay,
    }
    if OPTIMIZERS[recipe.optimizer].has_momentum:
        common["momentum"] = recipe.momentum
    optimizer: Any = {"sgd": Sgd, "adam": Adam, "lars": Lars}[recipe.optimizer](**common)
    if recipe.loss_scale is None:
        return tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
    # Keras scales the loss of a mixed_float16 model dynamically unless the optimizer already scales it.
    if recipe.loss_scale != 1 or recipe.precision == "16.32":
        return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, dynamic=False, initial_scale=recipe.loss_scale)
    return optimizer


class _Scaling(_KerasOptimizer):  # type: ignore[misc]
    """Scales gradients; for kernels also adds L2 to the gradients and applies decoupled weight decay."""

    _HAS_AGGREGATE_GRAD = True

    def __init__(
        self, *, gradient_scale: float = 1.0, l2: float = 0.0, weight_decay: float = 0.0, **kwargs: Any
    ) -> None:
        super().__init__(gradient_transformers=[self._scale], **kwargs)
        self.gradient_scale, self.l2, self.weight_decay = gradient_scale, l2, weight_decay

    def _scale(self, pairs: Sequence[Tuple[Any, Any]]) -> List[Tuple[Any, Any]]:
        scaled = []
        for gradient, variable in pairs:
            total = tf.cast(tf.convert_to_tensor(gradient), tf.float32) * self.gradient_scale
            if self.l2 and _is_kernel(variable):
                total += self.l2 * tf.cast(variable, tf.float32)
            scaled.append((tf.cast(total, gradient.dtype), variable))
        return scaled

    def _decayed_lr(self, var_dtype: Any) -> Any:
        # Keras would count updates in the variables' type, but half precision overflows above 65504.
        rate = self._get_hyper("learning_rate")
        return tf.cast(rate(self.iterations) if callable(rate) else rate, var_dtype)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        if not self.weight_decay or not _is_kernel(var):
            return super()._resource_apply_dense(grad, var, apply_state)
        decay = self._rate(var, apply_state) * self.weight_decay * tf.cast(var, tf.float32)
        with tf.control_dependencies([var.assign_sub(tf.cast(decay, var.dtype), read_value=False)]):
            return super()._resource_apply_dense(grad, var, apply_state)

    def _rate(self, var: Any, apply_state: Any) -> Any:
        device, dtype = var.device, var.dtype.base_dtype
        known = (apply_state or {}).get((device, dtype)) or self._fallback_apply_state(device, dtype)
        return tf.cast(known["lr_t"], tf.float32)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments of the constructor."""
        added = {"gradient_scale": self.gradient_scale, "l2": self.l2, "weight_decay": self.weight_decay}
        return {**super().get_config(), **added}


@_register
class Sgd(_Scaling, _KerasSgd):  # type: ignore[misc]
    """SGD with momentum."""


class _HalfAdam(_KerasAdam):  # type: ignore[misc]
    """Adam that can update weights in half precision, in which the squares of most gradients round to 0.

    For those it stores the root of the second moment, which is as large as the gradients, and computes in float32.
    """

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        if var.dtype.base_dtype != tf.float16:
            return super()._resource_apply_dense(grad, var, apply_state)
        m, root = self.get_slot(var, "m"), self.get_slot(var, "v")
        beta_1, beta_2 = (self._get_hyper(name, tf.float32) for name in ("beta_1", "beta_2"))
        update, gradient = tf.cast(self.iterations + 1, tf.float32), tf.cast(grad, tf.float32)
        first = beta_1 * tf.cast(m, tf.float32) + (1.0 - beta_1) * gradient
        second = tf.sqrt(beta_2 * tf.cast(root, tf.float32) ** 2 + (1.0 - beta_2) * gradient**2)
        rate = self._decayed_lr(tf.float32) * tf.sqrt(1.0 - beta_2**update) / (1.0 - beta_1**update)
        return _assign(var, rate * first / (second + self.epsilon), [(m, first), (root, second)])


@_register
class Adam(_Scaling, _HalfAdam):
    """Adam; with weight decay it is AdamW."""


@_register
class Lars(_Scaling):
    """SGD with momentum whose steps are, layer by layer, in proportion to the weights' norm.

    Weight decay is a part of the step and of the norm that it is divided by. Other variables get plain steps.
    """

    def __init__(self, *, learning_rate: Any, momentum: float = 0.9, name: str = "Lars", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._set_hyper("learning_rate", learning_rate)
        self.momentum = momentum

    def _create_slots(self, var_list: Sequence[Any]) -> None:
        for variable in var_list:
            self.add_slot(variable, "momentum")

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        momentum = self.get_slot(var, "momentum")
        # Norms are sums of squares, which overflow or underflow in half precision.
        gradient, weights = tf.cast(grad, tf.float32), tf.cast(var, tf.float32)
        step = gradient
        if _is_kernel(var):
            weights_norm = tf.norm(weights)
            total_norm = tf.norm(gradient) + self.weight_decay * weights_norm
            has_ratio = tf.logical_and(weights_norm > 0, total_norm > 0)
            ratio = tf.where(has_ratio, tf.math.divide_no_nan(_TRUST * weights_norm, total_norm), 1.0)
            step = ratio * (gradient + self.weight_decay * weights)
        moved = self.momentum * tf.cast(momentum, tf.float32) + self._rate(var, apply_state) * step
        return _assign(var, moved, [(momentum, moved)])

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments of the constructor."""
        rate = self._serialize_hyperparameter("learning_rate")
        return {**super().get_config(), "learning_rate": rate, "momentum": self.momentum}


@_register
class Crossentropy(tf.keras.losses.Loss):  # type: ignore[misc]
    """Cross-entropy of class numbers and logits, computed in float32 regardless of the model's precision.

    With `probabilities` the model returns those in place of logits.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        reduction: str = "auto",
        name: Optional[str] = None,
        probabilities: bool = False,
    ) -> None:
        super().__init__(reduction=reduction, name=name or "crossentropy")
        self.label_smoothing, self.probabilities = label_smoothing, probabilities

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns one loss per sample."""
        labels, logits = tf.reshape(tf.cast(y_true, tf.int32), [-1]), tf.cast(y_pred, tf.float32)
        if self.probabilities:
            logits = tf.math.log(tf.maximum(logits, LEAST_PROBABILITY))
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        if not self.label_smoothing:
            return losses
        uniform = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
        return (1.0 - self.label_smoothing) * losses + self.label_smoothing * uniform

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments of the constructor."""
        added = {"label_smoothing": self.label_smoothing, "probabilities": self.probabilities}
        return {**super().get_config(), **added}


def _is_kernel(variable: Any) -> bool:
    """Whether a variable is neither a bias nor a parameter of a normalisation."""
    return len(variable.shape) > 1


def _assign(variable: Any, step: Any, slots: Sequence[Tuple[Any, Any]]) -> Any:
    """Subtracts a step from a variable and assigns its slots, all rounded to their types."""
    done = [slot.assign(tf.cast(value, slot.dtype), read_value=False) for slot, value in slots]
    done.append(variable.assign_sub(tf.cast(step, variable.dtype), read_value=False))
    return tf.group(*[operation for operation in done if operation is not None])  # in eager mode there are none
