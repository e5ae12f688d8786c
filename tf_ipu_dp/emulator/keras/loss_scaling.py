"""Automatic loss scaling (ALS) around Keras optimizers: the factor follows the size of the float16 gradients."""

from __future__ import annotations

import numbers
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.keras.optimizer_wrapper import OptimizerWrapper, Pairs, serializable
from tf_ipu_dp.emulator.keras.scaled_rules import ScaledAdam, ScaledRMSprop, ScaledSGD
from tf_ipu_dp.emulator.runtime import floating_point
from tf_ipu_dp.emulator.runtime.gradient_capture import GradientCaptureContext

_SETTINGS = (
    "initial_loss_scaling_factor",
    "update_frequency",
    "increase_factor",
    "max_loss_scaling_factor",
    "accumulate_statistics_over_update_period",
    "ratio_threshold",
    "captured_grads_only",
    "lpf_alpha",
    "histogram_bin_edge",
)


def _setting(name: str) -> property:
    """An argument of ALSOptimizer that can be changed later, before the program is traced."""

    def change(self: Any, value: Any) -> None:
        settings = {**self._settings, name: value}
        _check(settings)
        self._settings = settings

    return property(lambda self: self._settings[name], change)


def _read_only(name: str, read: Callable[[Any], Any]) -> property:
    def refuse(self: Any, value: Any) -> None:
        raise ValueError(f"{name} cannot be set.")

    return property(read, refuse)


class _CountingContext(GradientCaptureContext):
    """Counts captured gradients where they are computed, which may be in a graph within the optimizer's."""

    def __init__(self, count: Callable[[List[Any]], None]) -> None:
        super().__init__()
        self._count = count

    def capture(self, tag: str, gradients: Any) -> None:
        """Counts gradients."""
        self._count(tf.nest.flatten(gradients))


@serializable
class ALSOptimizer(OptimizerWrapper):
    """Scales the loss by a factor that follows the size of the gradients, and undoes it before `opt` updates.

    The factor is halved (by `increase_factor`) when too large a share of the float16 gradients is above
    `histogram_bin_edge`, and doubled otherwise, once in `update_frequency` + 1 updates (each time if that is 1). Other
    gradients than float16 are not counted. `minimize` scales the loss; with your own tape, compute the gradients of
    `get_scaled_loss(loss)`. Overflows of the backward pass count as the largest number, which the device has there, or
    are NaN with `floating_point_behaviour.nanoo`. Gradients that are captured (`keras.ipu.layers`) are counted too:
    `minimize` finds them, to `apply_gradients` they are given as `captured_grads`.
    """

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's arguments
        self,
        opt: Any,
        initial_loss_scaling_factor: int = 1,
        update_frequency: int = 8,
        increase_factor: int = 2,
        max_loss_scaling_factor: int = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 1e-5,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizer",
    ) -> None:
        given = locals()
        settings = {key: given[key] for key in _SETTINGS}
        _check(settings)
        super().__init__(opt, name)
        self._settings = settings
        self._captures = captured_grads_only
        with tf.init_scope():
            self._factor = self._variable("loss_scaling_factor", float(initial_loss_scaling_factor))
            self._previous = self._variable("previous_loss_scaling_factor", float(initial_loss_scaling_factor))
            self._histogram = self._variable("histogram", [0.0, 0.0])
            self._smoothed = self._variable("smoothed", [0.0, 0.0])
            self._captured = self._variable("captured", [0.0, 0.0])
            self._counter = self._variable("update_counter", 0)

    initial_loss_scaling_factor = _setting("initial_loss_scaling_factor")
    update_frequency = _setting("update_frequency")
    increase_factor = _setting("increase_factor")
    max_loss_scaling_factor = _setting("max_loss_scaling_factor")
    accumulate_statistics_over_update_period = _setting("accumulate_statistics_over_update_period")
    ratio_threshold = _setting("ratio_threshold")
    captured_grads_only = _setting("captured_grads_only")
    lpf_alpha = _setting("lpf_alpha")
    histogram_bin_edge = _setting("histogram_bin_edge")

    loss_scaling_factor = _read_only("loss_scaling_factor", lambda self: tf.identity(self._factor))
    previous_loss_scaling_factor = _read_only("previous_loss_scaling_factor", lambda self: tf.identity(self._previous))
    histogram = _read_only("histogram", lambda self: tf.identity(self._histogram))
    normalized_histogram = _read_only(
        "normalized_histogram", lambda self: self._histogram / tf.reduce_sum(self._histogram)
    )
    update_counter = _read_only("update_counter", lambda self: tf.identity(self._counter))
    decrease_factor = _read_only("decrease_factor", lambda self: 1.0 / self.increase_factor)

    def get_scaled_loss(self, loss: Any) -> Any:
        """Returns the loss times the current factor. For a function that returns a loss, returns such a function."""
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return loss * tf.cast(self._factor, loss.dtype)

    def get_gradients(self, loss: Any, params: Any) -> List[Any]:
        """Returns the gradients of the scaled loss, in a graph of TF1."""
        with floating_point.saturating():
            return super().get_gradients(self.get_scaled_loss(loss), params)

    def apply_gradients(
        self,
        grads_and_vars: Iterable[Any],
        captured_grads: Optional[Dict[str, Any]] = None,
        global_step: Any = None,
        name: Optional[str] = None,
        experimental_aggregate_gradients: bool = True,
    ) -> Any:
        """Updates with the gradients of a scaled loss, and adjusts the factor when that is due.

        `captured_grads` are counted like the gradients, or in place of them with `captured_grads_only`. `global_step`
        is a variable to which each update adds one.
        """
        self._count_captured(captured_grads)
        pairs = self._sum_over_replicas(grads_and_vars, experimental_aggregate_gradients)
        self._count_gradients([gradient for gradient, _ in pairs], experimental_aggregate_gradients)
        return self._update(pairs, name, global_step)

    def reset(self) -> None:
        """Resets the factor and the statistics."""
        for factor in (self._factor, self._previous):
            factor.assign(float(self.initial_loss_scaling_factor))
        for counts in (self._histogram, self._smoothed, self._captured, self._counter):
            counts.assign(tf.zeros_like(counts))

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments that make the same optimizer."""
        return {**super().get_config(), **self._settings}

    def _wrapper_weights(self) -> List[Any]:
        return [self._factor, self._previous, self._histogram, self._smoothed, self._captured, self._counter]

    def _variable(self, name: str, value: Any) -> Any:
        variable = tf.Variable(value, trainable=False, name=f"{self._name}/{name}")
        self._track_trackable(variable, name)
        return variable

    def _transform_loss(self, loss: Any) -> Any:
        return self.get_scaled_loss(super()._transform_loss(loss))

    def _get_gradients(self, tape: Any, loss: Any, var_list: Any, grad_loss: Any = None) -> Pairs:
        with _CountingContext(self._capture), floating_point.saturating():
            return super()._get_gradients(tape, loss, var_list, grad_loss)

    def _count_captured(self, captured_grads: Optional[Dict[str, Any]]) -> None:
        if captured_grads:
            self._capture(tf.nest.flatten(captured_grads))

    def _capture(self, gradients: List[Any]) -> None:
        """Counts gradients that were captured."""
        self._captures = True
        self._captured.assign_add(self._count(gradients))

    def _count(self, gradients: List[Any]) -> Any:
        """Returns how many entries of the float16 gradients are below and above the edge. NaN is above."""
        below, above = tf.constant(0.0), tf.constant(0.0)
        for gradient in gradients:
            if gradient.dtype == tf.float16:
                is_below = tf.abs(gradient) < tf.cast(self.histogram_bin_edge, tf.float16)
                below += tf.reduce_sum(tf.cast(is_below, tf.float32))
                above += tf.reduce_sum(tf.cast(tf.logical_not(is_below), tf.float32))
        return tf.stack([below, above])

    def _count_gradients(self, gradients: List[Any], aggregate: bool) -> None:
        """Adds the gradients of one call to the statistics."""
        counts = self._count([] if self.captured_grads_only else gradients)
        if self._captures:
            captured = self._captured.read_value()
            if aggregate:
                # Unlike the gradients, captured values differ between replicas, but the factors must be equal.
                captured = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, captured)
            counts += captured
            with tf.control_dependencies([counts]):
                self._captured.assign(tf.zeros_like(captured))
        if self.lpf_alpha:
            counts = self._smoothed.assign(self.lpf_alpha * self._smoothed + (1 - self.lpf_alpha) * counts)
        if self.accumulate_statistics_over_update_period:
            self._histogram.assign_add(counts)
        else:
            self._histogram.assign(counts)

    def _update(self, pairs: Pairs, name: Optional[str], global_step: Any = None) -> Any:
        """Updates through the wrapped optimizer, and adjusts the factor when that is due."""
        pairs = [
            (floating_point.saturate(gradient) if _is_from_float16(gradient, variable) else gradient, variable)
            for gradient, variable in pairs
        ]
        updated = self._opt.apply_gradients(self._unscaled(pairs), name=name, experimental_aggregate_gradients=False)
        variables = [variable for _, variable in pairs]
        with tf.control_dependencies([] if updated is None else [updated]):
            counter = self._counter.read_value()
            is_due = tf.logical_or(self.update_frequency == 1, tf.equal(counter, self.update_frequency))
            adjusted = tf.cond(is_due, lambda: self._adjust_factor(variables), lambda: tf.constant(0))
            with tf.control_dependencies([adjusted]):
                next_counter = tf.where(is_due, tf.zeros_like(counter), counter + 1)
                operations = [self._counter.assign(next_counter, read_value=False)]
                if global_step is not None:
                    operations.append(global_step.assign_add(1, read_value=False))
                return tf.group(*operations)

    def _unscaled(self, pairs: Pairs) -> Pairs:
        return [(gradient / tf.cast(self._factor, gradient.dtype), variable) for gradient, variable in pairs]

    def _adjust_factor(self, variables: List[Any]) -> Any:
        factor = self._factor.read_value()
        # Nothing counted is 0/0, which is not above the threshold.
        too_large = self.normalized_histogram[1] > self.ratio_threshold
        wanted = tf.where(too_large, factor / self.increase_factor, factor * self.increase_factor)
        allowed = tf.logical_and(wanted >= 1.0, wanted < self.max_loss_scaling_factor)
        new = tf.where(allowed, wanted, factor)
        operations = [self._previous.assign(factor), self._factor.assign(new)]
        operations += self._rescale_slots(variables, new / factor)
        if self.accumulate_statistics_over_update_period:
            with tf.control_dependencies([new]):
                operations.append(self._histogram.assign(tf.zeros_like(self._histogram)))
        with tf.control_dependencies(operations):
            return tf.constant(0)

    def _rescale_slots(self, variables: List[Any], ratio: Any) -> List[Any]:
        del variables, ratio
        return []


class _FusedALSOptimizer(ALSOptimizer):
    """Does not unscale the gradients: the update rule has the factor in its hyperparameters and slots."""

    _arguments: Tuple[str, ...] = ()

    def __init__(self, opt: Any, given: Dict[str, Any]) -> None:
        super().__init__(opt, name=given["name"], **{key: given[key] for key in _SETTINGS})
        opt.scale = lambda dtype: tf.cast(self._factor, dtype)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments that make the same optimizer."""
        rule = self._opt.get_config()
        return {"name": self._name, **{key: rule[key] for key in self._arguments}, **self._settings}

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> Any:
        """Makes an optimizer from what `get_config` returned."""
        given = dict(config)
        if isinstance(given["learning_rate"], dict):
            given["learning_rate"] = tf.keras.optimizers.schedules.deserialize(
                given["learning_rate"], custom_objects=custom_objects
            )
        return cls(**given)

    def _unscaled(self, pairs: Pairs) -> Pairs:
        return pairs

    def _rescale(self, variables: List[Any], ratio: Any, **powers: int) -> List[Any]:
        """Multiplies slots by powers of the ratio."""
        slots = [
            (self._opt.get_slot(variable, name), power) for variable in variables for name, power in powers.items()
        ]
        return [slot.assign(slot * tf.cast(ratio, slot.dtype) ** power) for slot, power in slots]


@serializable
class ALSOptimizerSGD(_FusedALSOptimizer):
    """Gradient descent with optional momentum, and automatic loss scaling."""

    _arguments = ("learning_rate", "momentum")

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's arguments
        self,
        learning_rate: Any = 0.01,
        momentum: Any = 0.0,
        initial_loss_scaling_factor: int = 1,
        update_frequency: int = 8,
        increase_factor: int = 2,
        max_loss_scaling_factor: int = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 1e-5,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizerSGD",
    ) -> None:
        super().__init__(ScaledSGD(learning_rate, momentum), locals())


@serializable
class ALSOptimizerAdam(_FusedALSOptimizer):
    """Adam with automatic loss scaling."""

    _arguments = ("learning_rate", "beta_1", "beta_2", "epsilon")

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's arguments
        self,
        learning_rate: Any = 0.001,
        beta_1: Any = 0.9,
        beta_2: Any = 0.999,
        epsilon: float = 1e-7,
        initial_loss_scaling_factor: int = 1,
        update_frequency: int = 8,
        increase_factor: int = 2,
        max_loss_scaling_factor: int = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 1e-5,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizerAdam",
    ) -> None:
        super().__init__(ScaledAdam(learning_rate, beta_1, beta_2, epsilon), locals())

    def _rescale_slots(self, variables: List[Any], ratio: Any) -> List[Any]:
        return self._rescale(variables, ratio, m=1, v=2)


@serializable
class ALSOptimizerRMSProp(_FusedALSOptimizer):
    """RMSProp with automatic loss scaling."""

    _arguments = ("learning_rate", "rho", "momentum", "epsilon", "centered")

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's arguments
        self,
        learning_rate: Any = 0.001,
        rho: Any = 0.9,
        momentum: Any = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        initial_loss_scaling_factor: int = 1,
        update_frequency: int = 8,
        increase_factor: int = 2,
        max_loss_scaling_factor: int = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 1e-5,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizerRMSProp",
    ) -> None:
        super().__init__(ScaledRMSprop(learning_rate, rho, momentum, epsilon, centered), locals())

    def _rescale_slots(self, variables: List[Any], ratio: Any) -> List[Any]:
        means = {"rms": 2, "mg": 1} if self._opt.centered else {"rms": 2}
        return self._rescale(variables, ratio, **means)


def _is_from_float16(gradient: Any, variable: Any) -> bool:
    """Whether a gradient was computed in float16. With mixed precision the variable is float32, but not the layer."""
    return tf.float16 in (gradient.dtype, variable.dtype) or hasattr(variable, "true_dtype")


def _check(settings: Dict[str, Any]) -> None:
    for name in ("initial_loss_scaling_factor", "increase_factor", "max_loss_scaling_factor"):
        factor = _check_int(name, settings[name])
        if factor < 1 or factor & (factor - 1):
            raise ValueError(f"{name}={factor} is not a power of two.")
    initial, largest = settings["initial_loss_scaling_factor"], settings["max_loss_scaling_factor"]
    if initial * settings["increase_factor"] >= largest:
        raise ValueError(
            f"initial_loss_scaling_factor={initial} times increase_factor={settings['increase_factor']} is not below "
            f"max_loss_scaling_factor={largest}."
        )
    if _check_int("update_frequency", settings["update_frequency"]) < 1:
        raise ValueError(f"update_frequency={settings['update_frequency']} must be 1 or more.")
    if not 0 < settings["ratio_threshold"] < 1:
        raise ValueError(f"ratio_threshold={settings['ratio_threshold']} must be between 0 and 1.")
    if not 0 <= settings["lpf_alpha"] <= 1:
        raise ValueError(f"lpf_alpha={settings['lpf_alpha']} must be from 0 to 1.")
    if not 0 < settings["histogram_bin_edge"] <= tf.float16.max:
        raise ValueError(f"histogram_bin_edge={settings['histogram_bin_edge']} is not a positive float16.")


def _check_int(name: str, value: Any) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}.")
    return int(value)
