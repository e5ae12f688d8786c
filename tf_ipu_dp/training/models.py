"""Keras models of the architectures, their pipeline stages, and the model that is exported."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, Sequence

import tensorflow as tf

from tf_ipu_dp.planning import architectures
from tf_ipu_dp.planning.architectures import Architecture, Block
from tf_ipu_dp.planning.layers import INPUT, Layer

NORMALISE = "normalise"

_EPSILON = architectures.EPSILON
_MOMENTUM = architectures.NORM_MOMENTUM
_HE = "he_normal"


def make_model(
    architecture: Architecture, *, eight_bit_input: bool, mean: Sequence[float], deviation: Sequence[float]
) -> tf.keras.Model:
    """Returns a functional model with float32 logits, in the global precision policy and the strategy in scope.

    It takes raw uint8 images and normalises them in its first layer, or normalised images in the compute precision of
    the policy.
    """
    shape = (architecture.height, architecture.width, architecture.channels)
    compute = tf.keras.mixed_precision.global_policy().compute_dtype
    image = tf.keras.Input(shape, name=INPUT, dtype="uint8" if eight_bit_input else compute)
    pixels = Normalise(mean, deviation, name=NORMALISE)(image) if eight_bit_input else image
    if architecture.name not in architectures.KERAS_APPLICATIONS:
        return tf.keras.Model(image, _make_layers(architecture, pixels), name=architecture.name)
    model = tf.keras.Model(image, _apply_application(architecture, pixels), name=architecture.name)
    if architecture.norm == "group":
        return tf.keras.models.clone_model(model, clone_function=_clone_with_group_norm)
    for layer in model.layers:
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            layer.momentum = _MOMENTUM
    return model


def assign_stages(model: tf.keras.Model, stages: Sequence[Sequence[Block]]) -> None:
    """Puts each layer on the pipeline stage of its block. A single stage is no pipeline: nothing is assigned."""
    if len(stages) < 2:
        return
    places = {name: stage for stage, blocks in enumerate(stages) for block in blocks for name in block.layers}
    assignments = model.get_pipeline_stage_assignment()
    for assignment in assignments:
        # Only layers that prepare the input belong to no block.
        assignment.pipeline_stage = places.get(assignment.layer.name, 0)
    model.set_pipeline_stage_assignment(assignments)


def make_export_model(
    model: tf.keras.Model, architecture: Architecture, mean: Sequence[float], deviation: Sequence[float]
) -> tf.keras.Model:
    """Returns a float32 model with the same weights that takes raw uint8 images and returns probabilities.

    It is plain Keras, for use outside any strategy: the call must be outside the scope too.
    """
    assert not tf.distribute.has_strategy()
    with float32_policy():
        logits = make_model(architecture, eight_bit_input=True, mean=mean, deviation=deviation)
        for layer in model.layers:
            if layer.weights:
                logits.get_layer(layer.name).set_weights([weight.astype("float32") for weight in layer.get_weights()])
        probabilities = tf.keras.layers.Softmax(name="probabilities")(logits.output)
        return tf.keras.Model(logits.input, probabilities, name=architecture.name)


class Normalise(tf.keras.layers.Layer):  # type: ignore[misc]
    """Turns pixels from 0 to 255 into numbers of mean 0 and deviation 1, per channel, in the compute precision."""

    def __init__(self, mean: Sequence[float], deviation: Sequence[float], **options: Any) -> None:
        super().__init__(**options)
        self.mean = [float(one) for one in mean]
        self.deviation = [float(one) for one in deviation]

    def call(self, inputs: Any) -> Any:
        pixels = tf.cast(inputs, self.compute_dtype) / 255
        return (pixels - tf.constant(self.mean, pixels.dtype)) / tf.constant(self.deviation, pixels.dtype)

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "mean": list(self.mean), "deviation": list(self.deviation)}


class GroupNormalization(tf.keras.layers.Layer):  # type: ignore[misc]
    """Normalises groups of channels of each sample. The statistics are float32 regardless of the policy."""

    def __init__(self, groups: int, epsilon: float = _EPSILON, **options: Any) -> None:
        super().__init__(**options)
        self.groups = groups
        self.epsilon = epsilon

    def build(self, input_shape: Any) -> None:
        channels = input_shape[-1]
        self.gamma = self.add_weight(
            "gamma", (channels,), dtype="float32", initializer="ones", experimental_autocast=False
        )
        self.beta = self.add_weight(
            "beta", (channels,), dtype="float32", initializer="zeros", experimental_autocast=False
        )
        super().build(input_shape)

    def call(self, inputs: Any) -> Any:
        values = tf.cast(inputs, tf.float32)
        # Pixels are averaged per channel first, in their memory layout, then channels per group. Moments of a
        # five-dimensional view give the same result, but make whole models up to 50 % slower.
        centred = values - self._mean(values)
        scale = self.gamma * tf.math.rsqrt(self._mean(tf.square(centred)) + self.epsilon)
        return tf.cast(centred * scale + self.beta, self.compute_dtype)

    def _mean(self, values: Any) -> Any:
        """Returns the mean of each sample's groups, repeated for their channels."""
        channels = values.shape[-1]
        size = channels // self.groups
        means = tf.reshape(tf.reduce_mean(values, [1, 2]), [-1, self.groups, size])
        means = tf.tile(tf.reduce_mean(means, 2, keepdims=True), [1, 1, size])
        return tf.reshape(means, [-1, 1, 1, channels])

    def get_config(self) -> Dict[str, Any]:
        return {**super().get_config(), "groups": self.groups, "epsilon": self.epsilon}


def _make_layers(architecture: Architecture, pixels: Any) -> Any:
    """Applies the layers of one of our own models to a tensor and returns the logits."""
    tensors = {INPUT: pixels}
    layers = architectures.layers(architecture)
    for layer in layers:
        inputs = [tensors[name] for name in layer.inputs]
        if layer.name == architectures.HEAD:
            made = _make_head(architecture)
        else:
            made = _make_layer(layer, architecture.norm, inputs[0].shape[-1])
        tensors[layer.name] = made(inputs if layer.kind == "add" else inputs[0])
    return tensors[layers[-1].name]


def _make_layer(layer: Layer, norm: str, channels: int) -> Any:
    """Makes one layer of our own models; `channels` are those of its input."""
    keras = tf.keras.layers
    padding = "same" if layer.same else "valid"
    name = layer.name
    make: Dict[str, Callable[[], Any]] = {
        "conv": lambda: keras.Conv2D(
            layer.units, layer.kernel, layer.stride, padding, use_bias=layer.bias, kernel_initializer=_HE, name=name
        ),
        "norm": lambda: (
            GroupNormalization(architectures.groups_of(channels), name=name)
            if norm == "group"
            else keras.BatchNormalization(momentum=_MOMENTUM, epsilon=_EPSILON, name=name)
        ),
        "relu": lambda: keras.ReLU(name=name),
        "max_pool": lambda: keras.MaxPooling2D(layer.kernel, layer.stride, padding, name=name),
        "mean_pool": lambda: keras.GlobalAveragePooling2D(name=name),
        "flatten": lambda: keras.Flatten(name=name),
        "dense": lambda: keras.Dense(layer.units, kernel_initializer=_HE, name=name),
        "add": lambda: keras.Add(name=name),
    }
    return make[layer.kind]()


def _make_head(architecture: Architecture) -> Any:
    return tf.keras.layers.Dense(architecture.classes, dtype="float32", name=architectures.HEAD)


def _apply_application(architecture: Architecture, pixels: Any) -> Any:
    make = getattr(tf.keras.applications, architectures.KERAS_APPLICATIONS[architecture.name])
    # Given a tensor, keras.applications requires neither 32 pixels or more nor 3 channels.
    body = make(include_top=False, weights=None, input_tensor=pixels, pooling="avg")
    return _make_head(architecture)(body.output)


def _clone_with_group_norm(layer: Any) -> Any:
    if isinstance(layer, tf.keras.layers.BatchNormalization):
        return GroupNormalization(architectures.groups_of(layer.input_shape[-1]), name=layer.name)
    return type(layer).from_config(layer.get_config())


@contextmanager
def float32_policy() -> Iterator[None]:
    """Makes models in 32 bits, whatever the policy of the run is."""
    policy = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy("float32")
    try:
        yield
    finally:
        tf.keras.mixed_precision.set_global_policy(policy)
