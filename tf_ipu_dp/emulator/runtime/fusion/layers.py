"""Which layers a fused pass can have, and how each is computed in it.

- On the whole pass: layers that treat the samples of a batch independently. Keras' own are known by name; others are
  examined (`sample_independence`).
- Per micro batch: batch normalisation, whose moving averages get the mean over the replicas, and random layers like
  dropout, which draw from the stream of each replica.

All else disqualifies a model. So do losses that layers add, since they would be computed once for all replicas.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.runtime.fusion import sample_independence
from tf_ipu_dp.emulator.runtime.fusion.parts import CannotBeFusedError, Parts
from tf_ipu_dp.emulator.runtime.optimizer_meter import replaced

_ON_THE_WHOLE = [
    "Activation",
    "Add",
    "Average",
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "Bidirectional",
    "Conv1D",
    "Conv1DTranspose",
    "Conv2D",
    "Conv2DTranspose",
    "Conv3D",
    "Conv3DTranspose",
    "Cropping1D",
    "Cropping2D",
    "Cropping3D",
    "Dense",
    "DepthwiseConv1D",
    "DepthwiseConv2D",
    "ELU",
    "Embedding",
    "Flatten",
    "GRU",
    "GlobalAveragePooling1D",
    "GlobalAveragePooling2D",
    "GlobalAveragePooling3D",
    "GlobalMaxPooling1D",
    "GlobalMaxPooling2D",
    "GlobalMaxPooling3D",
    "GroupNormalization",
    "InputLayer",
    "LSTM",
    "LayerNormalization",
    "LeakyReLU",
    "LocallyConnected1D",
    "LocallyConnected2D",
    "Masking",
    "MaxPooling1D",
    "MaxPooling2D",
    "MaxPooling3D",
    "Maximum",
    "Minimum",
    "Multiply",
    "PReLU",
    "Permute",
    "ReLU",
    "RepeatVector",
    "Rescaling",
    "Reshape",
    "SeparableConv1D",
    "SeparableConv2D",
    "SimpleRNN",
    "Subtract",
    "ThresholdedReLU",
    "TimeDistributed",
    "UpSampling1D",
    "UpSampling2D",
    "UpSampling3D",
    "ZeroPadding1D",
    "ZeroPadding2D",
    "ZeroPadding3D",
]
_PER_MICRO_BATCH = [
    "BatchNormalization",
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
]
_COPIED_PER_WEIGHT, _COPIED_AT_LEAST = 4, 1 << 20  # elements
_REFUSED_TYPES = ("float16", "bfloat16", "float64")
_WITH_OPTIONS_OFF = ("dropout", "recurrent_dropout", "stateful", "renorm", "virtual_batch_size")


def qualify(model: Any) -> bool:
    """Whether the layers of a model can be computed in fused passes, as far as that is known before tracing."""
    return _is_graph_of_layers(model) and all(_layer_qualifies(layer) for layer in _layers(model))


def pays(model: Any, micro_batch_size: int) -> bool:
    """Whether a model that qualifies is so much faster in fused passes that their memory is worth it.

    They save the sums of gradients per micro batch, and the time between small operations. They cost the memory of more
    samples, and copies of what batch normalisation takes and returns per micro batch. So they do not pay for a model
    with few weights and large images: ResNet-20 would be 2 % faster with 1.6 times the memory.
    """
    normalised = [layer for layer in _layers(model) if _is_one_of(layer, ["BatchNormalization"])]
    copied = sum(_elements_per_sample(layer) for layer in normalised) * micro_batch_size
    weights = sum(variable.shape.num_elements() for variable in model.trainable_variables)
    return copied <= _COPIED_PER_WEIGHT * weights + _COPIED_AT_LEAST


def _elements_per_sample(layer: Any) -> int:
    """Returns how many numbers a layer gets per sample, in all its calls."""
    nodes = layer._inbound_nodes
    return sum(tf.TensorShape(shape)[1:].num_elements() or 0 for node in nodes for shape in _shapes(node))


def _shapes(node: Any) -> List[Any]:
    return [each.shape for each in tf.nest.flatten(node.input_tensors)]


@contextlib.contextmanager
def fused(model: Any, parts: Parts) -> Iterator[None]:
    """Inside, a call of the model with the samples of a pass computes it as its replicas would."""
    with contextlib.ExitStack() as stack:
        for layer in _layers(model):
            if _is_one_of(layer, _PER_MICRO_BATCH):
                stack.enter_context(replaced(layer, "call", _per_micro_batch(layer, parts)))
            elif not _is_known(layer):
                stack.enter_context(replaced(layer, "call", _examined(layer, parts)))
            if _is_one_of(layer, ["BatchNormalization"]):
                stack.enter_context(replaced(layer, "_assign_new_value", parts.average_over_replicas))
                stack.enter_context(replaced(layer, "_assign_moving_average", _advanced(parts)))
        yield


def _per_micro_batch(layer: Any, parts: Parts) -> Callable[..., Any]:
    original = layer.call

    @tf.autograph.experimental.do_not_convert
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("training", True):  # frozen, or in inference: nothing mixes samples then
            return original(*args, **kwargs)
        return parts.call_each(lambda own, named: original(*own, **named), (args, kwargs))

    return call


def _examined(layer: Any, parts: Parts) -> Callable[..., Any]:
    original = layer.call

    @tf.autograph.experimental.do_not_convert
    def call(*args: Any, **kwargs: Any) -> Any:
        run = tf.__internal__.autograph.tf_convert(original, tf.__internal__.autograph.control_status_ctx())
        leaves = tf.nest.flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if _is_computed(leaf)]

        def call_with(tensors: Sequence[Any]) -> Any:
            given = dict(zip(places, tensors))
            own, named = tf.nest.pack_sequence_as(
                (args, kwargs), [given.get(place, leaf) for place, leaf in enumerate(leaves)]
            )
            return run(*own, **named)

        tensors = [leaves[place] for place in places]
        if not all(each.shape.rank and each.shape[0] == parts.samples for each in tensors):
            raise CannotBeFusedError(f"The layer {layer.name} has inputs that are not a batch of samples.")
        if not sample_independence.is_independent(call_with, tensors):
            raise CannotBeFusedError(f"The layer {layer.name} is not known to treat samples independently.")
        return run(*args, **kwargs)

    return call


def _is_computed(leaf: Any) -> bool:
    """Whether an argument is a tensor that the program computes, and no constant."""
    return tf.is_tensor(leaf) and not hasattr(leaf, "numpy")


def _advanced(parts: Parts) -> Callable[..., Any]:
    def assign_moving_average(variable: Any, value: Any, momentum: Any, inputs_size: Any) -> Any:
        kept = tf.cast(momentum, variable.dtype)
        return parts.average_over_replicas(variable, variable * kept + tf.cast(value, variable.dtype) * (1 - kept))

    return assign_moving_average


def _layer_qualifies(layer: Any) -> bool:
    # 16-bit gradients of many micro batches would overflow before they are added up in 32 bits.
    if getattr(layer, "activity_regularizer", None) is not None or layer.compute_dtype in _REFUSED_TYPES:
        return False
    if getattr(layer, "stateful", False):
        return False
    if _is_graph_of_layers(layer) or _is_known(layer):
        return True
    if _is_one_of(layer, _PER_MICRO_BATCH):
        return not any(getattr(layer, name, None) for name in _WITH_OPTIONS_OFF)
    # It is examined when the model is traced. What has state of its own is not even tried.
    return not layer.non_trainable_weights and not isinstance(layer, tf.keras.Model)


def _is_known(layer: Any) -> bool:
    """Whether a layer is one of Keras' own that treat samples independently, with the options that it has."""
    if _is_graph_of_layers(layer):
        return True
    if not _is_one_of(layer, _ON_THE_WHOLE) or any(getattr(layer, name, None) for name in _WITH_OPTIONS_OFF):
        return False
    functions = [getattr(layer, name, None) for name in ("activation", "recurrent_activation")]
    if not all(each is None or is_of_keras(each) for each in functions):
        return False
    axis = getattr(layer, "axis", None)
    if axis is not None and 0 in (axis if isinstance(axis, (list, tuple)) else [axis]):
        return False
    inner = [getattr(layer, name, None) for name in ("layer", "forward_layer", "backward_layer")]
    return all(each is None or (_is_known(each) and not _is_graph_of_layers(each)) for each in inner)


def _is_graph_of_layers(model: Any) -> bool:
    """Whether calling a model only calls its layers: a Functional or Sequential one without a `call` of its own."""
    functional = tf.keras.Sequential.__mro__[1]
    return isinstance(model, functional) and type(model).call in (functional.call, tf.keras.Sequential.call)


def _layers(model: Any) -> List[Any]:
    """Returns the layers that a call of the model calls, those of nested models too, but not those of other layers."""
    found: List[Any] = []
    for layer in model.layers:
        if not any(each is layer for each in found):
            found += _layers(layer) if _is_graph_of_layers(layer) else [layer]
    return found


def _is_one_of(layer: Any, names: List[str]) -> bool:
    return type(layer) in _kinds(tuple(names))


def _kinds(names: Tuple[str, ...]) -> Tuple[Any, ...]:
    return tuple(getattr(tf.keras.layers, name) for name in names if hasattr(tf.keras.layers, name))


def is_of_keras(function: Any) -> bool:
    """Whether a function is one of Keras or TensorFlow themselves."""
    module = getattr(function, "__module__", "")
    return module.split(".")[0] in ("keras", "tf_keras", "tensorflow")
