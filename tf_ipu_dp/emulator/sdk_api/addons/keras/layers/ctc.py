"""CTC loss and decoding as layers. Data are time-major, `[time, batch, classes]`."""

from __future__ import annotations

from typing import Any, Dict

import tensorflow as tf

from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer
from tf_ipu_dp.emulator.sdk_api.ipu.ops import nn_ops


class CTCLoss(IPULayer):
    """Returns the mean loss over the batch, as a tensor of shape `[1]`. Data are log probabilities or logits."""

    def __init__(self, blank_index: int = 0, from_logits: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.blank_index = blank_index
        self.from_logits = from_logits

    def call(self, labels: Any, data: Any, label_length: Any, data_length: Any) -> Any:
        """Returns the loss of labels `[batch, length]` under the data."""
        loss = nn_ops.ctc_loss_v2 if self.from_logits else nn_ops.ctc_loss_with_log_probs
        losses = loss(
            tf.cast(labels, tf.int32),
            data,
            tf.cast(tf.reshape(label_length, [-1]), tf.int32),
            tf.cast(tf.reshape(data_length, [-1]), tf.int32),
            self.blank_index,
        )
        return tf.reshape(tf.reduce_mean(losses), [1])

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "blank_index": self.blank_index, "from_logits": self.from_logits}


class CTCInferenceLayer(IPULayer):
    """Decodes by beam search. Returns log probabilities and lengths `[batch, paths]`, labels `[batch, paths, time]`."""

    def __init__(
        self,
        blank_index: int = 0,
        beam_width: int = 100,
        top_paths: int = 1,
        from_logits: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.blank_index = blank_index
        self.beam_width = beam_width
        self.top_paths = top_paths
        self.from_logits = from_logits

    def call(self, data: Any, data_length: Any) -> Any:
        """Returns the best paths of the data."""
        return self._decode(data, data_length)

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        return {
            **super().get_config(),
            "blank_index": self.blank_index,
            "beam_width": self.beam_width,
            "top_paths": self.top_paths,
            "from_logits": self.from_logits,
        }

    def _decode(self, data: Any, data_length: Any) -> Any:
        decode = nn_ops.ctc_beam_search_decoder if self.from_logits else nn_ops.ctc_beam_search_decoder_with_log_probs
        length = tf.cast(tf.reshape(data_length, [-1]), tf.int32)
        return decode(data, length, self.beam_width, self.top_paths, self.blank_index)


class CTCPredictionsLayer(CTCInferenceLayer):
    """Decodes by beam search. Returns the labels of the best path, `[batch, time]`, with blanks after its end."""

    def call(self, data: Any, data_length: Any) -> Any:
        """Returns the most likely labels."""
        _, _, labels = self._decode(data, data_length)
        return labels[:, 0]
