"""`ipu_tensorflow_addons.v1.layers`: LSTM and GRU as TF1 layers.

Inputs and outputs are time-major. One kernel `[inputs + units, gates x units]` holds the input's rows above the
recurrent ones; gates are in Keras' order. Outputs of the dynamic forms are zero after a sequence's end, and the state
is that at its end. `PopnnAUGRU` is refused.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.refusal import refused
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers import rnn

__all__ = ["PopnnAUGRU", "PopnnDynamicGRU", "PopnnDynamicLSTM", "PopnnGRU", "PopnnLSTM"]


class _PopnnRNN(tf.compat.v1.layers.Layer):  # type: ignore[misc]
    """What LSTM and GRU share."""

    gates: int

    def __init__(self, num_units: int, dtype: Any, name: Optional[str], arguments: Dict[str, Any]) -> None:
        dtype = tf.as_dtype(dtype)
        if dtype not in (tf.float16, tf.float32):
            raise ValueError(f"{type(self).__name__} computes in float16 or float32, not in {dtype.name}.")
        super().__init__(dtype=dtype, name=name)
        self._num_units = num_units
        seed = arguments["seed"]
        self._weights_initializer = arguments["weights_initializer"] or tf.keras.initializers.GlorotUniform(seed)
        self._bias_initializer = arguments["bias_initializer"] or tf.zeros_initializer()
        self._activation = rnn.activation_name(arguments["activation"], "activation")
        self._recurrent_activation = rnn.activation_name(arguments["recurrent_activation"], "recurrent_activation")
        self._return_state = arguments["return_state"]
        self.options, self.options_bwd = arguments["options"], arguments["options_bwd"]

    @property
    def num_units(self) -> int:
        return self._num_units

    def build(self, input_shape: Any) -> None:
        """Makes the kernel and the biases."""
        shape = tf.TensorShape(input_shape)
        if shape.rank != 3 or shape[2] is None:
            raise ValueError(f"{self.name}: the input must be [time, batch, size] with a known size, not {shape}.")
        self._input_size = shape[2]
        self.kernel = self.add_weight(
            "kernel",
            [self._input_size + self._num_units, self.gates * self._num_units],
            initializer=self._weights_initializer,
        )
        self.biases = self.add_weight("biases", self._bias_shape(), initializer=self._bias_initializer)
        super().build(input_shape)

    def _bias_shape(self) -> List[int]:
        return [self.gates * self._num_units]

    def _zeros(self, inputs: Any) -> Any:
        return tf.zeros([tf.shape(inputs)[1], self._num_units], inputs.dtype)

    def _run(self, step: rnn.Step, inputs: Any, bias: Any, states: List[Any], seq_len: Any) -> Any:
        rnn.check_options(self)
        projected = tf.tensordot(inputs, self.kernel[: self._input_size], 1) + bias
        mask = None
        if seq_len is not None:
            mask = tf.transpose(tf.sequence_mask(tf.reshape(seq_len, [-1]), tf.shape(inputs)[0]))
        _, outputs, states = tf.keras.backend.rnn(
            step, projected, states, mask=mask, time_major=True, zero_output_for_mask=True
        )
        outputs.set_shape([*inputs.shape[:2], self._num_units])
        return outputs, states

    def _recurrent_kernel(self) -> Any:
        return self.kernel[self._input_size :]


class PopnnLSTM(_PopnnRNN):
    """LSTM over `[time, batch, size]`. Its state is an `LSTMStateTuple(c, h)`."""

    gates = 4

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        num_units: int,
        dtype: Any = tf.float32,
        partials_dtype: Any = tf.float32,
        seed: Optional[int] = None,
        weights_initializer: Any = None,
        bias_initializer: Any = None,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        return_state: bool = True,
        name: Optional[str] = None,
        options: Optional[Dict[str, str]] = None,
        options_bwd: Optional[Dict[str, str]] = None,
    ) -> None:
        super().__init__(num_units, dtype, name, locals())

    def call(self, inputs: Any, initial_state: Any = None, training: bool = True) -> Any:
        """Returns the outputs `[time, batch, units]` and, with `return_state`, the last state."""
        del training
        return self._call(inputs, None, initial_state)

    def _call(self, inputs: Any, seq_len: Any, initial_state: Any) -> Any:
        state_tuple = tf.compat.v1.nn.rnn_cell.LSTMStateTuple
        if initial_state is None:
            initial_state = state_tuple(self._zeros(inputs), self._zeros(inputs))
        elif not isinstance(initial_state, state_tuple):
            raise ValueError(f"{self.name}: initial_state must be an LSTMStateTuple, not {initial_state!r}.")
        step = rnn.lstm_step(self._recurrent_kernel(), self._activation, self._recurrent_activation)
        outputs, (h, c) = self._run(step, inputs, self.biases, [initial_state.h, initial_state.c], seq_len)
        return (outputs, state_tuple(c, h)) if self._return_state else outputs


class PopnnDynamicLSTM(PopnnLSTM):
    """LSTM over sequences of different lengths."""

    def call(  # type: ignore[override]
        self, inputs: Any, seq_len: Any, initial_state: Any = None, training: bool = True
    ) -> Any:
        """Returns the outputs and the state at the end of each sequence; `seq_len` is `[batch]`."""
        del training
        return self._call(inputs, seq_len, initial_state)


class PopnnGRU(_PopnnRNN):
    """GRU over `[time, batch, size]`. Its state is a tensor."""

    gates = 3

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        num_units: int,
        dtype: Any = tf.float32,
        partials_dtype: Any = tf.float32,
        seed: Optional[int] = None,
        weights_initializer: Any = None,
        bias_initializer: Any = None,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        return_state: bool = True,
        name: Optional[str] = None,
        reset_after: bool = False,
        options: Optional[Dict[str, str]] = None,
        options_bwd: Optional[Dict[str, str]] = None,
    ) -> None:
        super().__init__(num_units, dtype, name, locals())
        self._reset_after = reset_after

    def call(self, inputs: Any, initial_state: Any = None, training: bool = True) -> Any:
        """Returns the outputs `[time, batch, units]` and, with `return_state`, the last state."""
        del training
        return self._call(inputs, None, initial_state)

    def _bias_shape(self) -> List[int]:
        columns = self.gates * self._num_units
        return [2, columns] if self._reset_after else [columns]

    def _call(self, inputs: Any, seq_len: Any, initial_state: Any) -> Any:
        state = self._zeros(inputs) if initial_state is None else initial_state
        bias, recurrent_bias = (self.biases[0], self.biases[1]) if self._reset_after else (self.biases, None)
        step = rnn.gru_step(self._recurrent_kernel(), recurrent_bias, self._activation, self._recurrent_activation)
        outputs, (h,) = self._run(step, inputs, bias, [state], seq_len)
        return (outputs, h) if self._return_state else outputs


class PopnnDynamicGRU(PopnnGRU):
    """GRU over sequences of different lengths."""

    def call(  # type: ignore[override]
        self, inputs: Any, seq_len: Any, initial_state: Any = None, training: bool = True
    ) -> Any:
        """Returns the outputs and the state at the end of each sequence; `seq_len` is `[batch]`."""
        del training
        return self._call(inputs, seq_len, initial_state)


PopnnAUGRU = refused(
    "ipu_tensorflow_addons.v1.layers.PopnnAUGRU", "how its attention score enters the update gate is not documented"
)
