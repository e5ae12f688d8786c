"""Models that functions of users make: built, checked against the data, and described for the planner.

A function gets what it asks for by name and returns a Keras model or a `Task`. Subclassed models are wrapped into a
functional one, so that all that follows knows one kind of model.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import json
import math
import re
import traceback
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, cast

import tensorflow as tf

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts as dataset_facts
from tf_ipu_dp.datasets import lookup, own_data
from tf_ipu_dp.datasets.info import DatasetInfo, Group, TensorInfo, map_structure
from tf_ipu_dp.planning.architectures import Architecture, Block, OwnModel
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.task import Task
from tf_ipu_dp.training import fine_tuning
from tf_ipu_dp.training.models import Normalise, float32_policy
from tf_ipu_dp.training.task_scores import TaskScorer

_SOFTMAX = (tf.keras.activations.softmax,)
_RECURRENT = (tf.keras.layers.RNN,)
_LAYER_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")  # what TensorFlow takes
_REDUCTIONS = ("auto", "sum_over_batch_size")


@dataclasses.dataclass(frozen=True)
class OwnTask:
    """A user's model, functional, with what it is trained and scored by."""

    model: Any
    kind: str  # as the user made it: Sequential, Functional or subclassed
    task: Task
    gives_probabilities: bool  # of a classification: the output has passed a softmax
    has_masks: bool = False  # layers leave masks on the outputs, like those of sequences of different lengths
    is_compiled: bool = False  # with an optimizer and a loss that are not used

    @property
    def is_classification(self) -> bool:
        return self.task.loss is None


def learn(cfg: TrainConfig) -> DatasetInfo:
    """Returns the facts of the data and of the model that the flags name, with the code of the user run once."""
    if dataset_facts.is_own_path(cfg) or "dataset" in cfg.planned_code:
        found = own_data.load(cfg).facts
    else:
        found = lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)
    if not cfg.has_own_model:
        return found
    made = build(cfg.model, found, cfg.norm_for(cfg.requested_stages or 1))
    if not made.is_classification:
        TaskScorer(made.model, made.task, cfg.model).try_out(found.targets, weighted=found.weighted)
    if cfg.freeze:
        fine_tuning.freeze(made.model, cfg.freeze)
    return dataclasses.replace(found, own_model=describe(made, cfg.model, found, cfg.norm or "batch"))


def build(reference: str, facts: DatasetInfo, norm: str) -> OwnTask:
    """Calls the function of the user; UsageError with one sentence if what it returns cannot be trained on the data.

    The model is made in the strategy and the precision policy that are in force.
    """
    tf.keras.backend.reset_uids()  # so that layers without a name get the same one each time
    function = user_code.load_function(reference)
    returned = _call(function, facts, norm, reference)
    task = returned if isinstance(returned, Task) else Task(returned)
    if not isinstance(task.model, tf.keras.Model):
        what = (
            f"a Task of {own_data.describe_value(task.model)}"
            if task is returned
            else own_data.describe_value(returned)
        )
        raise cli.UsageError(
            f"--model={reference} returned {what}. It returns a Keras model (tf.keras), or tf_ipu_dp.Task(model, "
            "loss=...)."
        )
    model, kind = _as_functional(task.model, reference, facts)
    is_compiled = bool(getattr(task.model, "_is_compiled", False))
    made = OwnTask(model, kind, task, _gives_probabilities(model), _has_masks(model, facts), is_compiled)
    _check_task(made, reference, facts)
    return made


def _call(function: Any, facts: DatasetInfo, norm: str, reference: str) -> Any:
    try:
        return user_code.call_by_name(function, facts.offered_to_model(norm), reference)
    except cli.UsageError as error:
        if _fails_in_adapt(error.__cause__):
            raise cli.UsageError(
                f"{reference} adapts a layer to data, which on a device takes batches of one size. Do that in the "
                "function of --dataset, and make the layer of what it found, given in facts: Normalization(mean=mean, "
                "variance=variance)."
            ) from error
        wants_classes = isinstance(error.__cause__, TypeError) and "classes" in inspect.signature(function).parameters
        if facts.is_classification or not wants_classes:
            raise
        raise cli.UsageError(
            f"{str(error)[:-1]}; classes is None, because the targets of {facts.name} are {facts.targets}, not class "
            "numbers. Of a stream say how many there are: tf_ipu_dp.Data(..., classes=N)."
        ) from error


def _fails_in_adapt(cause: Optional[BaseException]) -> bool:
    frames = traceback.extract_tb(cause.__traceback__) if cause else []
    return any(frame.name == "adapt" and "keras" in frame.filename for frame in frames)


def masks_of(outputs: Any) -> List[Optional[Any]]:
    """Returns the mask that the layers have left on each output of a model; None where there is none."""
    return [getattr(each, "_keras_mask", None) for each in tf.nest.flatten(outputs)]


def _has_masks(model: Any, facts: DatasetInfo) -> bool:
    found: List[Any] = []
    trace = tf.function(lambda inputs: found.extend(masks_of(model(inputs, training=False))))
    trace.get_concrete_function(_specs(facts))
    return any(mask is not None for mask in found)


def describe(made: OwnTask, name: str, facts: DatasetInfo, norm: str) -> Architecture:
    """Returns what the planner needs of a model: blocks to cut it at, their work and parameters."""
    model = made.model
    own = OwnModel(
        kind=made.kind,
        inputs=_shapes(model.inputs),
        outputs=f"{facts.classes} classes" if made.is_classification else _shapes(model.outputs),
        gradients=tuple((_plain_name(each.name), math.prod(each.shape)) for each in model.trainable_weights),
        layers=tuple((layer.name, _describe_layer(layer)) for layer in _flatten(model)),
        has_norm=any(isinstance(layer, tf.keras.layers.BatchNormalization) for layer in _flatten(model)),
        has_own_loss=not made.is_classification,
        is_compiled=made.is_compiled,
    )
    blocks = _whole(model) if made.kind == "subclassed" else _blocks(model)
    return Architecture(name, facts.height, facts.width, facts.channels, facts.classes, norm, blocks, own)


def make_export_model(made: OwnTask, reference: str, plan: RunPlan) -> Any:
    """Returns a float32 model with the same weights for use outside any strategy.

    Of images it takes raw 8-bit ones, and of a classification it returns probabilities; else it is the model itself.
    """
    assert not tf.distribute.has_strategy()
    facts, weights = plan.dataset, made.model.get_weights()
    with float32_policy():
        fresh = build(reference, facts, plan.model.architecture.norm)
        fresh.model.set_weights(
            [weight.astype("float32") if weight.dtype.kind == "f" else weight for weight in weights]
        )
        inputs, outputs = fresh.model.input, fresh.model.outputs
        if facts.inputs is None:
            inputs = tf.keras.Input((facts.height, facts.width, facts.channels), name="image", dtype="uint8")
            found = fresh.model(Normalise(facts.mean, facts.deviation, name="normalise")(inputs))
            outputs = found if isinstance(found, (list, tuple)) else [found]
        elif not made.is_classification:
            return fresh.model
        if made.is_classification:
            activation = "linear" if made.gives_probabilities else "softmax"
            outputs = [tf.keras.layers.Activation(activation, name="probabilities")(outputs[0])]
        elif inputs is not fresh.model.input:  # the names of the task's outputs
            outputs = [
                tf.keras.layers.Activation("linear", name=name)(each)
                for name, each in zip(fresh.model.output_names, outputs)
            ]
        return tf.keras.Model(inputs, outputs[0] if len(outputs) == 1 else outputs, name=fresh.model.name)


def make_inputs(facts: DatasetInfo) -> Any:
    """Returns symbolic inputs for the data, in the precision of the policy; those of a dictionary have its names."""
    compute = tf.keras.mixed_precision.global_policy().compute_dtype
    if facts.inputs is None:
        return tf.keras.Input((facts.height, facts.width, facts.channels), dtype=compute)

    def make(each: TensorInfo, name: Optional[str] = None) -> Any:
        dtype = compute if each.dtype.startswith("float") else each.dtype
        return tf.keras.Input(each.shape, dtype=dtype, name=name)

    if isinstance(facts.inputs, Group) and all(isinstance(item, TensorInfo) for item in facts.inputs.items):
        names = [name if _LAYER_NAME.fullmatch(name) else None for name in facts.inputs.names]
        made = [make(cast(TensorInfo, item), name) for item, name in itertools.zip_longest(facts.inputs.items, names)]
        return dict(zip(facts.inputs.names, made)) if names else tuple(made)
    return map_structure(make, facts.inputs)


def _as_functional(model: Any, reference: str, facts: DatasetInfo) -> Tuple[Any, str]:
    """Returns a model with known inputs and outputs, and what kind the user's is."""
    kind = "subclassed"
    if isinstance(model, tf.keras.Sequential):
        kind = "Sequential"
    elif getattr(model, "_is_graph_network", False):
        kind = "Functional"
    if type(model).train_step is not tf.keras.Model.train_step:
        raise cli.UsageError(
            f"--model={reference} returned a model with a train_step of its own, which is not used here. Give its loss "
            "to tf_ipu_dp.Task(model, loss=...)."
        )
    with _refusing(f"--model={reference} does not fit the data ({_data_shapes(facts)})", reference):
        if kind == "subclassed":
            inputs = make_inputs(facts)
            return tf.keras.Model(inputs, _named_outputs(model(inputs)), name=model.name), kind
        if not model.built or not getattr(model, "inputs", None):
            model(make_inputs(facts))
        tf.function(lambda each: model(each, training=False)).get_concrete_function(_specs(facts))
        if isinstance(model.output, dict):
            model = tf.keras.Model(model.input, _named_outputs(model.output), name=model.name)
    return model, kind


def _named_outputs(outputs: Any) -> Any:
    """Returns a dictionary or several outputs as a list of tensors whose layers have their names."""
    if not isinstance(outputs, (dict, list, tuple)):
        return outputs
    named = (
        sorted(outputs.items())
        if isinstance(outputs, dict)
        else [(f"output_{i}", each) for i, each in enumerate(outputs, 1)]
    )
    return [
        each
        if each._keras_history.layer.name == name
        else tf.keras.layers.Activation("linear", dtype=each.dtype, name=name)(each)
        for name, each in named
    ]


def _check_task(made: OwnTask, reference: str, facts: DatasetInfo) -> None:
    task, model = made.task, made.model
    if not model.trainable_weights:
        raise cli.UsageError(f"--model={reference} returned a model without weights to train.")
    if made.is_classification:
        if task.metrics or task.weighted_metrics or task.loss_weights:
            raise cli.UsageError(
                f"--model={reference} returned a Task with metrics and without a loss. Give both: "
                "tf_ipu_dp.Task(model, loss=..., metrics=...)."
            )
        if not facts.is_classification:
            raise cli.UsageError(
                f"--model={reference} returned a model without a loss, but the targets of {facts.name} are "
                f"{facts.targets}, not class numbers. Return tf_ipu_dp.Task(model, loss=...)."
            )
        shapes = [tuple(each.shape) for each in model.outputs]
        if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][1] != facts.classes:
            raise cli.UsageError(
                f"--model={reference} returned a model with the output {_shapes(model.outputs)}, but "
                f"{facts.name} has {facts.classes} classes: its one output needs a number for each class. For another "
                "task return tf_ipu_dp.Task(model, loss=...)."
            )
        return
    for loss in tf.nest.flatten(task.loss):
        reduction = str(getattr(loss, "reduction", "auto"))
        if reduction not in _REDUCTIONS:
            raise cli.UsageError(
                f"--model={reference} has a loss with the reduction {reduction!r}, which would depend on how the batch "
                "is divided. Leave the reduction out: a loss is a mean over the samples."
            )


def _gives_probabilities(model: Any) -> bool:
    """Whether the last layer is a softmax; of a model within a layer that is not looked for."""
    layer = model.layers[-1] if model.layers else None
    while isinstance(layer, tf.keras.Model) and layer.layers:
        layer = layer.layers[-1]
    if isinstance(layer, tf.keras.layers.Softmax):
        return True
    return getattr(layer, "activation", None) in _SOFTMAX


@contextlib.contextmanager
def _refusing(what: str, reference: str) -> Iterator[None]:
    try:
        yield
    except cli.UsageError:
        raise
    except Exception as error:  # any: the layers of the user raise what they like
        raise cli.UsageError(f"{what}: {user_code.describe_error(error, reference)}") from error


def _blocks(model: Any) -> Tuple[Block, ...]:
    """Returns the parts of a functional model between which one tensor passes, in the order of its layers.

    A pipeline stage may begin with any of them. A layer that is used twice keeps its uses in one part.
    """
    nodes = _nodes(model)
    if not nodes:
        return _whole(model)
    places = {id(node): place for place, node in enumerate(nodes)}
    last_use = list(range(len(nodes)))
    first_of_layer: Dict[int, int] = {}
    for place, node in enumerate(nodes):
        first = first_of_layer.setdefault(id(node.layer), place)
        last_use[first] = max(last_use[first], place)
        for parent in _parents(node):
            if id(parent) in places:
                made = places[id(parent)]
                last_use[made] = max(last_use[made], place)
    outputs = {id(tensor) for tensor in model.outputs}
    starts = [0]
    for place in range(1, len(nodes)):
        crossing = {made for made in range(place) if last_use[made] >= place}
        early_output = any(id(each) in outputs for node in nodes[:place] for each in tf.nest.flatten(node.outputs))
        if crossing <= {place - 1} and not early_output and not _is_light(nodes[place].layer):
            starts.append(place)
    found = []
    for start, end in zip(starts, [*starts[1:], len(nodes)]):
        layers: List[Any] = []
        for node in nodes[start:end]:
            if all(node.layer is not each for each in layers):
                layers.append(node.layer)
        names = tuple(name for layer in layers for name in _names(layer))
        work = sum(_macs(layer) for layer in layers)
        parameters = sum(layer.count_params() for layer in layers if layer.weights)
        found.append(Block(layers[0].name, names, work, parameters))
    return tuple(found)


def _nodes(model: Any) -> List[Any]:
    """Returns the calls of layers in the order in which they compute, without inputs."""
    found = []
    for depth in sorted(model._nodes_by_depth, reverse=True):
        found += [
            node for node in model._nodes_by_depth[depth] if not isinstance(node.layer, tf.keras.layers.InputLayer)
        ]
    return found


def _parents(node: Any) -> List[Any]:
    return [parent for parent in node.parent_nodes if not isinstance(parent.layer, tf.keras.layers.InputLayer)]


def _is_light(layer: Any) -> bool:
    """Whether a layer belongs to the one before it: it has no weights, and is no model."""
    return not layer.weights and not isinstance(layer, tf.keras.Model)


def _names(layer: Any) -> Tuple[str, ...]:
    if isinstance(layer, tf.keras.Model):
        return (layer.name, *(name for each in layer.layers for name in _names(each)))
    return (layer.name,)


def _whole(model: Any) -> Tuple[Block, ...]:
    work = sum(_macs(layer) for layer in model.layers)
    return (Block("model", tuple(layer.name for layer in model.layers), work, model.count_params()),)


def _macs(layer: Any) -> int:
    """Returns the multiply-adds of a layer for one sample, from its weights and how often they are used."""
    if isinstance(layer, tf.keras.layers.Embedding):
        return 0
    if isinstance(layer, tf.keras.Model):
        return sum(_macs(each) for each in layer.layers)
    kernels = sum(math.prod(each.shape) for each in layer.trainable_weights if len(each.shape) > 1)
    if not kernels:
        return 0
    shape = _first_shape(layer, "input_shape" if isinstance(layer, _RECURRENT) else "output_shape")
    positions = shape[1:2] if isinstance(layer, _RECURRENT) else shape[1:-1]
    return int(kernels * math.prod([size or 1 for size in positions] or [1]))


def _first_shape(layer: Any, name: str) -> Tuple[Optional[int], ...]:
    with contextlib.suppress(AttributeError, RuntimeError, ValueError, TypeError):
        shape = getattr(layer, name)
        if isinstance(shape, dict):
            shape = next(iter(shape.values()))
        while isinstance(shape, (list, tuple)) and shape and isinstance(shape[0], (list, tuple)):
            shape = shape[0]
        return tuple(shape)
    return (None, None)


def _flatten(model: Any) -> List[Any]:
    """Returns the layers of a model and of the models in it."""
    found = []
    for layer in model.layers:
        if isinstance(layer, tf.keras.Model):
            inner = _flatten(layer)
            found += inner or [layer]
        elif not isinstance(layer, tf.keras.layers.InputLayer):
            found.append(layer)
    return found


def _describe_layer(layer: Any) -> str:
    """Returns the kind of a layer, its settings, and the shapes of its weights, the same each time it is made."""
    config: Dict[str, Any] = {}
    with contextlib.suppress(Exception):  # a layer of the user without get_config is described by its weights
        config = {name: value for name, value in layer.get_config().items() if name != "name"}
    settings = json.loads(json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__))
    words = [f"{name}={_short(value)}" for name, value in sorted(settings.items()) if _is_told(name, value)]
    words += [f"{_plain_name(each.name).split('/')[-1]}: {tuple(each.shape)}" for each in layer.weights]
    return f"{type(layer).__name__}({', '.join(words)})"


def _is_told(name: str, value: Any) -> bool:
    return value is not None and not name.endswith(("_initializer", "dtype")) and name not in ("batch_input_shape",)


def _short(value: Any) -> str:
    return json.dumps(value)[:80]


def _plain_name(name: str) -> str:
    return name.split(":", maxsplit=1)[0]


def _shapes(tensors: Sequence[Any]) -> str:
    found = [" x ".join(str(size) for size in each.shape[1:]) or "one number" for each in tensors]
    return ", ".join(found)


def _data_shapes(facts: DatasetInfo) -> str:
    return str(facts.inputs) if facts.inputs is not None else " x ".join(map(str, facts.input_shape))


def _specs(facts: DatasetInfo) -> Any:
    if facts.inputs is None:
        return tf.TensorSpec([None, facts.height, facts.width, facts.channels], tf.float32)
    return map_structure(
        lambda each: tf.TensorSpec([None, *each.shape], tf.float32 if each.dtype.startswith("float") else each.dtype),
        facts.inputs,
    )
