"""`tensorflow.python.ipu.ops.nn_ops`: activations, sampled losses and CTC on stock TensorFlow.

Hints to the compiler (`stable`, options of `multi_conv`) change nothing here. Losses of float16 tensors are computed
in float32 and rounded once. The candidate samplers are TensorFlow's own random ops.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.ipu.ops.embedding_ops import with_dense_gradient
from tf_ipu_dp.emulator.sdk_api.ipu.ops.functional_ops import outlined_function

__all__ = [
    "ctc_beam_search_decoder",
    "ctc_beam_search_decoder_with_log_probs",
    "ctc_loss_v2",
    "ctc_loss_with_log_probs",
    "gelu",
    "hard_sigmoid",
    "multi_conv",
    "nce_loss",
    "sampled_softmax_loss",
    "softmax",
    "swish",
]


def gelu(x: Any, approximate: bool = True, name: Optional[str] = None) -> tf.Tensor:
    """Returns the Gaussian error linear unit; by default in its tanh form, unlike `tf.nn.gelu`."""
    return tf.nn.gelu(x, approximate=approximate, name=name)


def swish(x: Any, name: Optional[str] = None) -> tf.Tensor:
    """Returns `x * sigmoid(x)`."""
    with tf.name_scope(name or "swish"):
        return tf.nn.swish(x)


def hard_sigmoid(x: Any, name: Optional[str] = None) -> tf.Tensor:
    """Returns `0.2 x + 0.5`, clipped to 0 and 1."""
    with tf.name_scope(name or "hard_sigmoid"):
        x = tf.convert_to_tensor(x)
        return tf.clip_by_value(x * tf.cast(0.2, x.dtype) + tf.cast(0.5, x.dtype), 0.0, 1.0)


def softmax(x: Any, stable: bool = False, name: Optional[str] = None) -> tf.Tensor:
    """Returns the softmax over the last dimension, always in its stable form."""
    del stable
    return tf.nn.softmax(x, axis=-1, name=name)


def multi_conv(func: Optional[Callable[..., Any]] = None, options: Optional[Dict[str, str]] = None) -> Any:
    """Decorates a function whose convolutions the IPU would run at the same time; here it is simply called."""
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"multi_conv: options must be a dict, not {type(options).__name__}.")
    return outlined_function(func)


def sampled_softmax_loss(  # noqa: PLR0913, PLR0917 the SDK's signature
    weights: Any,
    biases: Any,
    labels: Any,
    inputs: Any,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Any = None,
    name: str = "sampled_softmax_loss",
    seed: Optional[int] = None,
) -> tf.Tensor:
    """Returns the sampled softmax loss of each row of `inputs`; the gradients are dense."""
    weights, biases, labels, inputs, dtype = _sampled_loss_arguments(weights, biases, labels, inputs)
    losses = tf.nn.sampled_softmax_loss(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, seed=seed, name=name
    )
    return tf.cast(losses, dtype)


def nce_loss(  # noqa: PLR0913, PLR0917 the SDK's signature
    weights: Any,
    biases: Any,
    labels: Any,
    inputs: Any,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: Any = None,
    name: str = "nce_loss",
) -> tf.Tensor:
    """Returns the noise-contrastive loss of each row of `inputs`; the gradients are dense."""
    weights, biases, labels, inputs, dtype = _sampled_loss_arguments(weights, biases, labels, inputs)
    losses = tf.nn.nce_loss(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, name=name
    )
    return tf.cast(losses, dtype)


def ctc_loss_v2(
    labels: Any,
    logits: Any,
    label_length: Any,
    logit_length: Any,
    blank_index: int,
    out_dtype: Any = None,
    name: Optional[str] = None,
) -> tf.Tensor:
    """Returns the CTC loss `[batch]` of labels `[batch, length]` and logits `[time, batch, classes]`."""
    logits = tf.convert_to_tensor(logits)
    dtype = _ctc_loss_dtype(logits.dtype, out_dtype)
    with tf.name_scope(name or "ctc_loss_v2"):
        loss = _ctc_loss(labels, tf.cast(logits, tf.float32), label_length, logit_length, blank_index)
        return tf.cast(loss, dtype)


def ctc_loss_with_log_probs(
    labels: Any,
    data: Any,
    label_length: Any,
    data_length: Any,
    blank_index: int,
    out_dtype: Any = None,
    name: Optional[str] = None,
) -> tf.Tensor:
    """Returns the CTC loss `[batch]` of labels and of log probabilities, as `tf.nn.log_softmax` gives them."""
    data = tf.convert_to_tensor(data)
    dtype = _ctc_loss_dtype(data.dtype, out_dtype)
    with tf.name_scope(name or "ctc_loss_with_log_probs"):
        data = tf.cast(data, tf.float32)
        loss = _ctc_loss(labels, data, label_length, data_length, blank_index)
        # Stock TensorFlow normalises again. This is undone, so that the loss and its gradient are those of the log
        # probabilities.
        return tf.cast(loss - _normaliser(data, data_length), dtype)


def ctc_beam_search_decoder(
    logits: Any,
    logits_lengths: Any,
    beam_width: int = 100,
    top_paths: int = 1,
    blank_index: int = -1,
    name: Optional[str] = None,
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the log probabilities and lengths `[batch, paths]` and the labels `[batch, paths, time]` of the best.

    Labels after a path's length are the blank.
    """
    with tf.name_scope(name or "ctc_beam_search_decoder"):
        logits = tf.convert_to_tensor(logits)
        found = _decode(tf.cast(logits, tf.float32), logits_lengths, beam_width, top_paths, blank_index)
        return (tf.cast(found[0], logits.dtype), *found[1:])


def ctc_beam_search_decoder_with_log_probs(
    log_probs: Any,
    input_lengths: Any,
    beam_width: int = 100,
    top_paths: int = 1,
    blank_index: int = -1,
    name: Optional[str] = None,
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """As `ctc_beam_search_decoder`, for log probabilities."""
    with tf.name_scope(name or "ctc_beam_search_decoder_with_log_probs"):
        log_probs = tf.convert_to_tensor(log_probs)
        data = tf.cast(log_probs, tf.float32)
        found = _decode(data, input_lengths, beam_width, top_paths, blank_index)
        probabilities = found[0] + _normaliser(data, input_lengths)[:, tf.newaxis]
        return (tf.cast(probabilities, log_probs.dtype), *found[1:])


def _sampled_loss_arguments(weights: Any, biases: Any, labels: Any, inputs: Any) -> Tuple[Any, Any, Any, Any, Any]:
    """Returns the tensors in float32, and the type of the result."""
    inputs = tf.convert_to_tensor(inputs)
    weights, biases = (tf.cast(with_dense_gradient(parameter), tf.float32) for parameter in (weights, biases))
    return weights, biases, tf.convert_to_tensor(labels), tf.cast(inputs, tf.float32), inputs.dtype


def _ctc_loss_dtype(given: Any, requested: Any) -> Any:
    dtype = given if requested is None else tf.as_dtype(requested)
    if given == tf.float32 and dtype == tf.float16:
        raise ValueError("CTC loss: out_dtype cannot be float16 for float32 data.")
    return dtype


def _ctc_loss(labels: Any, logits: tf.Tensor, label_length: Any, logit_length: Any, blank_index: int) -> tf.Tensor:
    return tf.compat.v1.nn.ctc_loss_v2(
        tf.convert_to_tensor(labels),
        logits,
        tf.convert_to_tensor(label_length),
        tf.convert_to_tensor(logit_length),
        logits_time_major=True,
        blank_index=_class_index(logits, blank_index),
    )


def _normaliser(data: tf.Tensor, length: Any) -> tf.Tensor:
    """Returns the logarithm of what softmax divides by, added up over each sequence `[batch]`."""
    of_frames = tf.reduce_logsumexp(data, axis=2)
    in_sequence = tf.transpose(tf.sequence_mask(length, tf.shape(data)[0]))
    return tf.reduce_sum(tf.where(in_sequence, of_frames, tf.zeros_like(of_frames)), axis=0)


def _decode(
    logits: tf.Tensor, lengths: Any, beam_width: int, top_paths: int, blank_index: int
) -> Tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    blank = _class_index(logits, blank_index)
    # The stock decoder uses the last class as the blank.
    blank_last = tf.concat([logits[:, :, :blank], logits[:, :, blank + 1 :], logits[:, :, blank : blank + 1]], axis=2)
    paths, log_probabilities = tf.nn.ctc_beam_search_decoder(
        blank_last, tf.cast(lengths, tf.int32), beam_width=beam_width, top_paths=top_paths
    )
    time, batch = tf.unstack(tf.shape(logits, out_type=tf.int64)[:2])
    all_labels, all_lengths = [], []
    for path in paths:
        values = tf.cast(path.values, tf.int32)
        values = tf.where(values >= blank, values + 1, values)
        full = tf.sparse.SparseTensor(path.indices, values, tf.stack([batch, time]))
        all_labels.append(tf.sparse.to_dense(full, default_value=blank))
        all_lengths.append(tf.math.unsorted_segment_sum(tf.ones_like(values), path.indices[:, 0], batch))
    labels = tf.stack(all_labels, axis=1)
    labels.set_shape([logits.shape[1], top_paths, logits.shape[0]])
    return log_probabilities, tf.stack(all_lengths, axis=1), labels


def _class_index(logits: tf.Tensor, blank_index: int) -> int:
    """Returns the blank's class, counted from the front."""
    classes = logits.shape[-1]
    if classes is None or logits.shape.rank != 3:
        raise ValueError(f"CTC needs data of shape [time, batch, classes] with known classes, not {logits.shape}.")
    if not -classes <= blank_index < classes:
        raise ValueError(f"CTC: blank_index={blank_index} is not one of {classes} classes.")
    return int(blank_index % classes)
