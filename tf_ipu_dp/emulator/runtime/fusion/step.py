"""One fused pass of a Keras model: a forward pass over all its micro batches, with the losses and metrics of each."""

from __future__ import annotations

import contextlib
import itertools
import sys
from typing import Any, Callable, Dict, Iterator, List, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import cores, gradient_reduction, graph_loops
from tf_ipu_dp.emulator.runtime.execution_shape import Shape
from tf_ipu_dp.emulator.runtime.fusion import layers
from tf_ipu_dp.emulator.runtime.fusion.parts import CannotBeFusedError, Parts
from tf_ipu_dp.emulator.runtime.fusion.passes import SLICED, Passes, plan_passes
from tf_ipu_dp.emulator.runtime.optimizer_meter import replaced

# More samples in a pass gain little, and cost memory.
_MOST_SAMPLES = 128
_METHODS_OF_MODEL = ("train_step", "compute_loss", "compute_metrics")
_METHODS_OF_OPTIMIZER = ("minimize", "_compute_gradients", "compute_gradients", "_get_gradients", "get_gradients")
# What a metric may not do with its variables in a fused pass, where they have no value of one replica.
_METHODS_OF_VARIABLE = ("assign", "assign_sub", "read_value", "value", "_read_variable_op", "_dense_var_to_tensor")

# Adds to a metric's variable what each micro batch of a pass adds to it.
AddToMetric = Callable[[Any, Any], None]


def plan(model: Any, shape: Shape, spec: Any) -> Passes:
    """Returns the passes of an update: one micro batch each for a model that does not qualify.

    `spec` is that of the dataset's elements.
    """
    rows = {each.shape[0] if each.shape.rank else None for each in tf.nest.flatten(spec)}
    size = rows.pop() if len(rows) == 1 else None
    if size is None or shape.each_step or gradient_reduction.is_deterministic() or not _qualifies(model):
        return SLICED
    if not layers.pays(model, size):
        return SLICED
    return plan_passes(
        micro_batch_size=size,
        replicas=shape.replicas,
        accumulation=shape.accumulation,
        most_samples=_MOST_SAMPLES,
        fewest_passes=min(cores.of_instance(), graph_loops.IN_FLIGHT),
    )


def train_step(model: Any, micro_batches: List[Any], parts: Parts, add: AddToMetric) -> None:
    """Does what the model's own training step does, for all micro batches of a pass.

    The optimizer gets the sum of their losses, whose gradient is the sum of their gradients.
    """
    data = tf.nest.map_structure(lambda *rows: tf.concat(rows, axis=0), *micro_batches)
    x, y, sample_weight = sys.modules[tf.keras.Model.__module__].data_adapter.unpack_x_y_sample_weight(data)
    with tf.GradientTape() as tape:
        with layers.fused(model, parts):
            y_pred = model(x, training=True)
        loss, added = _losses_and_metrics(model, y, y_pred, sample_weight, parts)
        total = tf.reduce_sum(loss)
    model.optimizer.minimize(total, model.trainable_variables, tape=tape)
    for variable, values in added:
        add(variable, values)


def _qualifies(model: Any) -> bool:
    if getattr(model, "stateful", False) or not layers.qualify(model):
        return False
    stock = tf.keras.Model
    if any(getattr(type(model), name, None) is not getattr(stock, name, None) for name in _METHODS_OF_MODEL):
        return False
    methods = [getattr(type(model.optimizer), name, None) for name in _METHODS_OF_OPTIMIZER]
    if not all(method is None or layers.is_of_keras(method) for method in methods):
        return False
    inputs = [each.dtype for each in tf.nest.flatten(getattr(model, "outputs", None) or [])]
    return all(dtype == tf.float32 or not dtype.is_floating for dtype in inputs)


def _losses_and_metrics(
    model: Any, y: Any, y_pred: Any, sample_weight: Any, parts: Parts
) -> Tuple[Any, List[Tuple[Any, Any]]]:
    """Returns each micro batch's loss, and what each adds to the variables of the metrics, stacked."""
    if any(getattr(each, "_keras_mask", None) is not None for each in tf.nest.flatten(y_pred)):
        raise CannotBeFusedError("An output has a mask.")
    variables = [variable for metric in model.metrics for variable in metric.variables]
    regularization = model.losses
    given = (y, y_pred, sample_weight)
    leaves = tf.nest.flatten(given)
    places = [place for place, leaf in enumerate(leaves) if leaf is not None]
    changed: List[Any] = []

    def of_one(tensors: List[Any]) -> List[Any]:
        own = dict(zip(places, tensors))
        y, y_pred, sample_weight = tf.nest.pack_sequence_as(given, [own.get(place) for place in range(len(leaves))])
        with _recording(variables) as recorded:
            loss = model.compiled_loss(y, y_pred, sample_weight, regularization_losses=regularization)
            model.compiled_metrics.update_state(y, y_pred, sample_weight)
        changed[:] = [variable for variable in variables if id(variable) in recorded]
        return [loss, *(recorded[id(variable)] for variable in changed)]

    separate = [parts.separate(leaves[place]) for place in places]
    loss, *added = tf.vectorized_map(of_one, separate, fallback_to_while_loop=False)
    if loss.shape != [parts.count]:
        raise CannotBeFusedError("The loss is not a number.")
    return loss, list(zip(changed, added))


@contextlib.contextmanager
def _recording(variables: List[Any]) -> Iterator[Dict[int, Any]]:
    """Inside, what is added to the variables is recorded instead, by the variable's id."""
    recorded: Dict[int, Any] = {}

    def recorder(variable: Any) -> Callable[..., Any]:
        def assign_add(value: Any, *unused: Any, **unused_by_name: Any) -> Any:
            added = tf.broadcast_to(tf.cast(value, variable.dtype), variable.shape)
            recorded[id(variable)] = recorded[id(variable)] + added if id(variable) in recorded else added
            return added

        return assign_add

    def refuse(*unused: Any, **unused_by_name: Any) -> Any:
        raise CannotBeFusedError("A metric does more with its variables than adding to them.")

    with contextlib.ExitStack() as stack:
        for variable in variables:
            stack.enter_context(replaced(variable, "assign_add", recorder(variable)))
        for variable, name in itertools.product(variables, _METHODS_OF_VARIABLE):
            if hasattr(type(variable), name):
                stack.enter_context(replaced(variable, name, refuse))
        yield recorded
