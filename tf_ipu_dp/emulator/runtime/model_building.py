"""Makes the variables of a Keras model before an execution is traced, where Keras would make them while tracing."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import model_strategy


def build(model: Any, iterator: Any, step: str) -> None:
    """Makes the variables of model, losses, metrics and optimizer, which must exist before the loops are traced.

    `step` is the name of the method to be run. For prediction only the model's own variables are made: it may have no
    loss, and its metrics have no labels.
    """
    predicts = step == "predict_step"
    if not model.built or not (predicts or _build_metrics(model, iterator.element_spec)):
        # A step that is traced and never run makes all of them. Evaluation has all but the optimizer's.
        trial_step = model.predict_step if predicts else model.test_step
        trial = tf.function(lambda data: model_strategy.call_as_replica(model, trial_step, data))
        trial.get_concrete_function(iterator.element_spec)
    if step == "train_step":
        build_optimizer(model)
        _make_slots(model)


def _build_metrics(model: Any, spec: Any) -> bool:
    """Makes the metrics from the model's outputs, without tracing; returns whether that was possible."""
    outputs = getattr(model, "outputs", None)
    if not outputs or not isinstance(spec, tuple) or len(spec) < 2:
        return False
    batch = tf.nest.flatten(spec[0])[0].shape[0]
    try:
        predicted = [tf.TensorSpec([batch, *output.shape[1:]], output.dtype) for output in outputs]
        # As the model returns them: losses and metrics are kept in that order.
        y_pred = tf.nest.pack_sequence_as(model._nested_outputs, predicted)
        if model.compiled_loss is not None and not model.compiled_loss._built:
            model.compiled_loss.build(y_pred)
        metrics = model.compiled_metrics
        if metrics is not None and not metrics._built:
            metrics.build(y_pred, metrics._conform_to_outputs(y_pred, spec[1]))
    except Exception:
        return False
    return True


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables outside the traced loop where Keras would make them inside."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    is_built = getattr(optimizer, "_built", getattr(optimizer, "built", False))
    if model.built and hasattr(optimizer, "build") and not is_built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)


def _make_slots(model: Any) -> None:
    """Makes the variables of a legacy optimizer. Made while tracing, they would cost a second tracing."""
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    legacy = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
    if model.built and isinstance(optimizer, legacy.Optimizer):  # not for a TF1 optimizer, which Keras wraps
        with model.distribute_strategy.scope(), tf.name_scope(optimizer._name):
            optimizer._create_all_weights(model.trainable_variables)
