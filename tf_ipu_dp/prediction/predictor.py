"""The model of a run on its device, ready to predict: from a checkpoint, or from an export, which needs no code.

Uses the SDK's API only, as training does. An export is loaded as a TensorFlow graph: no Python code is in it.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Sequence, Tuple, cast

import numpy as np
import tensorflow as tf

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import augment
from tf_ipu_dp.datasets.info import COLUMNS, DatasetInfo, map_structure
from tf_ipu_dp.datasets.memory import FloatCaster
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.prediction.inputs import PROBABILITIES, InputSpec, array_specs, image_specs, most_samples
from tf_ipu_dp.runs import checkpoints
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import checks, models, own_models, session

# Micro batches of a replica in one execution of an export.
_MAX_STEPS = 64
_SIGNATURE = "serving_default"
_NUMBER = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model on its device. `predict` takes up to `slots` samples and returns an array for each output."""

    model: Any
    specs: Tuple[InputSpec, ...]
    steps: int  # micro batches of this instance in one call
    micro_batch_size: int
    prepare: Callable[[Any], Any]  # from the inputs of a micro batch to what the model takes
    finish: Callable[[Any], Any]  # from the outputs of the model to probabilities, where it has logits
    output_names: Tuple[str, ...]

    @property
    def slots(self) -> int:
        return self.steps * self.micro_batch_size

    def predict(self, arrays: Dict[str, Any]) -> Dict[str, Any]:
        """Returns the outputs for some samples, in their order. Slots beyond them are padding, and left out."""
        count = len(next(iter(arrays.values())))
        padded = {name: _pad(array, self.slots) for name, array in arrays.items()}
        inputs = padded if len(self.specs) > 1 else next(iter(padded.values()))
        dataset = tf.data.Dataset.from_tensor_slices(inputs).batch(self.micro_batch_size, drop_remainder=True)
        prepare = self.prepare
        # In a tuple of one: Keras takes the second of two inputs for targets.
        dataset = dataset.map(lambda each: (prepare(each),), tf.data.AUTOTUNE, deterministic=True)
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        outputs = self.model.predict(dataset.with_options(options), steps=self.steps, verbose=0)
        if not isinstance(outputs, dict):
            listed = outputs if isinstance(outputs, (list, tuple)) else [outputs]
            outputs = dict(zip(self.output_names, listed))
        return {name: self.finish(np.asarray(output)[:count]) for name, output in outputs.items()}


def join(arrays: Sequence[Any]) -> Any:
    """Returns the outputs of all parts as one array."""
    return np.concatenate(list(arrays))


def make_decoder(spec: InputSpec, facts: Optional[DatasetInfo]) -> Callable[[bytes], Any]:
    """Returns what decodes an image file as in a validation: resized, or cut from the middle where sizes differ."""
    height, width, channels = (length or 0 for length in spec.shape)

    def decode(content: bytes) -> Any:
        try:
            image = tf.io.decode_image(content, channels=channels, expand_animations=False)
        except tf.errors.OpError as error:
            raise ValueError(_reason(error)) from None
        if not height or not width:
            return image.numpy()
        if facts is not None and facts.streamed:
            size = tf.cast(tf.shape(image)[:2], tf.float32)
            box = augment.centre_box(size[0], size[1], height, width)
            top, left, rows, columns = (int(each) for each in box)
            image = image[top : top + rows, left : left + columns]
        return augment.resize(image[None], height, width)[0].numpy()

    return decode


def from_checkpoint(cfg: TrainConfig, run: RunPlan, sdk: Sdk, found: checkpoints.Checkpoint) -> Predictor:
    """Returns the model of a run with the weights of a checkpoint, on the replicas of a plan."""
    device = session.attach(cfg, run, sdk, 0)
    made = session.make_session(cfg, run, sdk, device, cast(Any, None))  # predictions need no data set
    checks.require_same_model(found, cfg, run, made.variables())
    made.restore(found, whole=False)
    specs, prepare = _inputs_of(made.model, run.dataset, cfg)
    is_classification = made.own is None or made.own.is_classification
    is_logits = is_classification and not (made.own and made.own.gives_probabilities)
    return Predictor(
        model=made.evaluator,
        specs=specs,
        steps=run.keras.validation_steps,
        micro_batch_size=run.batch.micro_batch_size,
        prepare=prepare,
        finish=softmax if is_logits else lambda outputs: outputs,
        output_names=(PROBABILITIES,) if is_classification else tuple(cast(Any, made.model).output_names),
    )


def plain_model(cfg: TrainConfig, run: RunPlan, found: checkpoints.Checkpoint) -> Any:
    """Returns the model of a checkpoint as plain Keras, without a device.

    It takes and returns what its export does: of images, 8-bit numbers in and probabilities out.
    """
    own = session.make_own(cfg, run) if cfg.has_own_model else None
    model: Any = own.model if own else session.make_plain_model(cfg, run)
    variables = tuple((v.name, tuple(v.shape), v.dtype.name) for v in model.weights)
    checks.require_same_model(found, cfg, run, variables)
    status = tf.train.Checkpoint(model=model).read(str(found.prefix))
    status.assert_existing_objects_matched()
    status.expect_partial()
    if own:
        return own_models.make_export_model(own, cfg.model, run)
    facts = run.dataset
    return models.make_export_model(model, run.model.architecture, facts.mean, facts.deviation)


def load_export(path: Path) -> Any:
    """Returns an export as a Keras model of one layer. Its graph is loaded, and no Python code."""
    try:
        loaded = tf.saved_model.load(str(path))
        function = loaded.signatures[_SIGNATURE]
    except (OSError, ValueError, KeyError, AttributeError, tf.errors.OpError) as error:
        raise cli.UsageError(f"{path} is not an export that can be loaded ({cli.first_line(str(error))}).") from error
    signature = function.structured_input_signature[1]
    # In the order of their numbers: earlier releases of TensorFlow return them in any.
    names = sorted(signature, key=lambda name: [int(part) if part.isdigit() else part for part in _NUMBER.split(name)])
    inputs = {name: tf.keras.Input(signature[name].shape[1:], dtype=signature[name].dtype, name=name) for name in names}
    outputs = _Exported(loaded, function, tuple(inputs))(list(inputs.values()))
    return tf.keras.Model(list(inputs.values()), outputs)


def specs_of(model: Any) -> Tuple[InputSpec, ...]:
    """Returns the inputs of a model; UsageError for a subclassed one, which does not know them."""
    if not getattr(model, "inputs", None):
        raise cli.UsageError(
            "The model is subclassed and does not know its inputs. Train with --export, and predict from the export."
        )
    return tuple(
        InputSpec(tensor.name.split(":")[0], tuple(tensor.shape[1:]), tensor.dtype.name) for tensor in model.inputs
    )


def from_export(
    path: Path, sdk: Sdk, *, replicas: int, micro_batch_size: int, count: Callable[[Sequence[InputSpec]], int]
) -> Predictor:
    """Returns an export on so many replicas of one IPU each; `count` returns the number of samples for its inputs."""
    session.configure_replicas(sdk, replicas)
    with sdk.make_strategy(distributed=False).scope():
        model = load_export(path)
        specs = specs_of(model)
        samples = min(count(specs), most_samples(specs))
        per_execution = min(-(-samples // (micro_batch_size * replicas)), _MAX_STEPS)
        model.compile(steps_per_execution=per_execution)
    return Predictor(
        model=model,
        specs=specs,
        steps=per_execution * replicas,
        micro_batch_size=micro_batch_size,
        prepare=lambda inputs: inputs,
        finish=lambda outputs: outputs,
        output_names=tuple(model.output_names),
    )


def softmax(logits: Any) -> Any:
    """Returns the probabilities of logits."""
    values: Any = np.asarray(logits, np.float64)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


class _Exported(tf.keras.layers.Layer):  # type: ignore[misc]
    """The function of a SavedModel as a layer, so that Keras and the SDK can run it on replicas."""

    def __init__(self, loaded: Any, function: Any, names: Sequence[str]) -> None:
        super().__init__(name="exported", trainable=False)
        self._names = list(names)
        self._kept = [loaded]  # its variables live as long as it does
        self._function = function

    def call(self, inputs: Any) -> Any:
        return self._function(**dict(zip(self._names, inputs)))


def _inputs_of(model: Any, facts: DatasetInfo, cfg: TrainConfig) -> Tuple[Tuple[InputSpec, ...], Callable[[Any], Any]]:
    """Returns what a model takes from files, and how it is prepared: as in the validation."""
    dtype = model.inputs[0].dtype.name
    if facts.inputs is None:
        return image_specs(facts), augment.Normaliser(facts, cfg.eight_bit_io, dtype)
    columns = tuple(map(str, dict(facts.given).get(COLUMNS, ())))
    specs = array_specs(facts.inputs, columns)
    structure = map_structure(lambda each: tf.TensorSpec(each.shape, each.dtype), facts.inputs)
    cast_floats = FloatCaster(facts.inputs, session.input_dtype(cfg.precision))

    def prepare(arrays: Any) -> Any:
        listed = [arrays[spec.name] for spec in specs] if len(specs) > 1 else [arrays]
        return cast_floats(tf.nest.pack_sequence_as(structure, listed))

    return specs, prepare


def _pad(array: Any, slots: int) -> Any:
    if len(array) == slots:
        return array
    return np.concatenate([array, np.zeros((slots - len(array), *array.shape[1:]), array.dtype)])


def _reason(error: Any) -> str:
    """Returns what TensorFlow says of an image, without the names of its operations."""
    text = cli.first_line(error.message).split("[Op:")[0]
    return text.rpartition("}} ")[2].strip().rstrip(".") or "not an image"
