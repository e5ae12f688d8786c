"""LSTM and GRU, with the arithmetic of Keras' layers and the IPU's rules for their arguments.

Gates are ordered as in Keras (LSTM: i, f, c, o; GRU: z, r, h), so the weights of Keras' layers can be used. `options`,
`options_bwd` and `partials_dtype` tune the IPU's kernels and change nothing here. Each replica has its own states of a
stateful layer.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import poplar_options
from tf_ipu_dp.emulator.sdk_api.addons.keras.layers.ipu_layer import IPULayer, input_shapes
from tf_ipu_dp.emulator.sdk_api.ipu.ops import rand_ops

_RECURRENT_ACTIVATIONS = ("tanh", "softmax", "sigmoid", "hard_sigmoid")
_ACTIVATIONS = ("relu", *_RECURRENT_ACTIVATIONS)

Step = Callable[[Any, Sequence[Any]], Any]


class _PopnnRNN(IPULayer):
    """What LSTM and GRU share: arguments, weights, states and the loop over time."""

    gates: int
    state_count: int

    def __init__(self, units: int, arguments: Dict[str, Any], kwargs: Dict[str, Any]) -> None:
        # The layers of SDK 2.6 had these instead of options.
        for name in ("available_memory_proportion_fwd", "available_memory_proportion_bwd"):
            kwargs.pop(name, None)
        super().__init__(**kwargs)
        self._check_arguments(arguments)
        if {self.dtype, self.compute_dtype} - {"float16", "float32"}:
            raise ValueError(f"{type(self).__name__} computes in float16 or float32, not in {self.compute_dtype}.")
        self.units = units
        self.activation = activation_name(arguments["activation"], "activation")
        self.recurrent_activation = activation_name(arguments["recurrent_activation"], "recurrent_activation")
        self.use_bias = True
        seed = arguments["seed"]
        self.kernel_initializer = _seeded(arguments["kernel_initializer"], seed)
        self.recurrent_initializer = _seeded(arguments["recurrent_initializer"], seed)
        self.bias_initializer = _seeded(arguments["bias_initializer"], seed)
        self.dropout = arguments["dropout"]
        self.dropout_seed = arguments["dropout_seed"]
        self.implementation = arguments["implementation"]
        self.return_sequences = arguments["return_sequences"]
        self.return_state = arguments["return_state"]
        self.stateful = arguments["stateful"]
        self.time_major = arguments["time_major"]
        self.seed = seed
        self.partials_dtype = tf.as_dtype(arguments["partials_dtype"])
        self.options, self.options_bwd = arguments["options"], arguments["options_bwd"]
        self._arguments = tuple(arguments)
        self._keep_states(None)

    def _check_arguments(self, arguments: Dict[str, Any]) -> None:
        name = type(self).__name__
        if not arguments["use_bias"]:
            raise ValueError(f"{name} needs its biases: use_bias=False is not supported.")
        for argument, value in arguments.items():
            refused = argument.endswith(("_regularizer", "_constraint")) or argument in (
                "recurrent_dropout",
                "go_backwards",
                "unroll",
            )
            if refused and value:
                raise ValueError(f"{name} does not support {argument} (given: {value!r}).")
        if arguments["implementation"] not in (1, 2):
            raise ValueError(f"{name}: implementation must be 1 or 2, not {arguments['implementation']!r}.")

    def build(self, input_shape: Any) -> None:
        """Makes the weights, and the states of a stateful layer."""
        shape = input_shapes(input_shape)[0]
        if shape.rank != 3:
            raise ValueError(f"{self.name}: the input must have rank 3, but its shape is {shape}.")
        if shape[2] is None:
            raise ValueError(f"{self.name}: the last dimension of the input must be known (input shape {shape}).")
        columns = self.gates * self.units
        self.kernel = self.add_weight("kernel", [shape[2], columns], initializer=self.kernel_initializer)
        self.recurrent_kernel = self.add_weight(
            "recurrent_kernel", [self.units, columns], initializer=_in_float32(self.recurrent_initializer)
        )
        self.biases = self.add_weight("biases", self._bias_shape(), initializer=self._initial_bias())
        if self.stateful:
            self._make_states(shape[1 if self.time_major else 0])
        super().build(input_shape)

    def call(self, inputs: Any, mask: Any = None, training: Any = None, initial_state: Any = None) -> Any:
        """Returns the last output or all of them, followed by the states with `return_state`."""
        if any(entry is not None for entry in tf.nest.flatten(mask)):
            raise NotImplementedError(f"{self.name}: masks are not supported.")
        if isinstance(inputs, (list, tuple)):
            inputs, initial_state = inputs[0], list(inputs[1:]) or initial_state
        if inputs.shape.rank != 3:
            raise ValueError(f"{self.name}: the input must have rank 3, but its shape is {inputs.shape}.")
        check_options(self)
        states = self._first_states(inputs, initial_state)
        if self.dropout and (training is not False):
            same_for_all_steps: Any = [1, None, None] if self.time_major else [None, 1, None]
            inputs = rand_ops.dropout(inputs, self.dropout, same_for_all_steps, self.dropout_seed)
        last, outputs, states = tf.keras.backend.rnn(
            self._step(), self._project(inputs), states, time_major=self.time_major
        )
        result = [outputs if self.return_sequences else last, *states]
        if self.stateful:
            kept = [variable.assign(tf.cast(state, variable.dtype)) for variable, state in zip(self.states, states)]
            with tf.control_dependencies(kept):  # in a graph of TensorFlow 1 nothing else makes it assign them
                result = [tf.identity(tensor) for tensor in result]
        return result if self.return_state else result[0]

    def reset_states(self, states: Any = None) -> None:
        """Sets the states of a stateful layer to zero or to these arrays."""
        if not self.stateful:
            raise AttributeError(f"{self.name} is not stateful.")
        if not self.built:
            raise ValueError(f"{self.name}: the states exist once the layer has been called.")
        if states is None:
            values = [tf.zeros_like(variable) for variable in self.states]
        else:
            values = list(states) if isinstance(states, (list, tuple)) else [states]
        if len(values) != self.state_count:
            raise ValueError(f"{self.name} has {self.state_count} states, but got {len(values)}.")
        for variable, value in zip(self.states, values):
            if tuple(value.shape) != tuple(variable.shape):
                raise ValueError(f"{self.name}: a state has shape {variable.shape}, not {tuple(value.shape)}.")
            variable.assign(tf.cast(value, variable.dtype))

    @property
    def state_size(self) -> Any:
        return self.units if self.state_count == 1 else [self.units] * self.state_count

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the shapes of the output and, if they are returned, the states."""
        shape = input_shapes(input_shape)[0].as_list()
        state = tf.TensorShape([shape[1 if self.time_major else 0], self.units])
        output = tf.TensorShape([*shape[:2], self.units]) if self.return_sequences else state
        return [output, *[state] * self.state_count] if self.return_state else output

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments."""
        # An argument that is not an attribute has been refused unless it had its default.
        config = {name: getattr(self, name, _REFUSED_DEFAULTS.get(name)) for name in self._arguments}
        for name in ("kernel_initializer", "recurrent_initializer", "bias_initializer"):
            config[name] = tf.keras.initializers.serialize(config[name])
        config["partials_dtype"] = self.partials_dtype.name
        config["options"], config["options_bwd"] = _plain(self.options), _plain(self.options_bwd)
        config["dropout_seed"] = None if self.dropout_seed is None else [int(part) for part in self.dropout_seed]
        return {**super().get_config(), "units": self.units, **config}

    def _bias_shape(self) -> List[int]:
        return [self.gates * self.units]

    def _initial_bias(self) -> Any:
        return self.bias_initializer

    def _project(self, inputs: Any) -> Any:
        """Returns the input's contribution to all gates, for all steps together."""
        raise NotImplementedError

    def _step(self) -> Step:
        raise NotImplementedError

    def _first_states(self, inputs: Any, given: Any) -> List[Any]:
        batch = tf.shape(inputs)[1 if self.time_major else 0]
        if given is not None:
            given = list(given) if isinstance(given, (list, tuple)) else [given]
            if len(given) != self.state_count:
                raise ValueError(f"{self.name} has {self.state_count} states, but got {len(given)}.")
            given = [tf.cast(state, inputs.dtype) for state in given]
        if self.stateful:
            current = [tf.cast(state, inputs.dtype) for state in self.states]
            if given is None:
                return current
            # As in Keras: states given to a stateful layer are its initial states only.
            fresh = tf.reduce_all([tf.reduce_all(state == 0) for state in current])
            return [tf.where(fresh, start, state) for start, state in zip(given, current)]
        return given or [tf.zeros([batch, self.units], inputs.dtype) for _ in range(self.state_count)]

    def _make_states(self, batch: Optional[int]) -> None:
        if batch is None:
            raise ValueError(f"{self.name} is stateful: the batch size must be known, e.g. by batch_input_shape.")
        states = []
        with tf.init_scope():
            for index in range(self.state_count):
                zeros = tf.zeros([batch, self.units], self.dtype)
                states.append(tf.Variable(zeros, trainable=False, name=f"{self.name}/state_{index}"))
                self._track_trackable(states[-1], f"state_{index}")
        self._keep_states(states)

    def _keep_states(self, states: Optional[List[Any]]) -> None:
        # Bypasses Keras' tracking, which would count them as weights: `set_weights` must accept those of a Keras layer.
        self.__dict__["states"] = states or [None] * self.state_count


class PopnnLSTM(_PopnnRNN):
    """Keras' LSTM. States, in and out, are h and c."""

    gates = 4
    state_count = 2

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        units: int,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        unit_forget_bias: bool = True,
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        dropout_seed: Any = None,
        recurrent_dropout: float = 0.0,
        implementation: int = 2,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        seed: Any = None,
        partials_dtype: Any = tf.float32,
        time_major: bool = False,
        options: Optional[Dict[str, str]] = None,
        options_bwd: Optional[Dict[str, str]] = None,
        **kwargs: Any,
    ) -> None:
        arguments = _layer_arguments(locals())
        super().__init__(units, arguments, kwargs)
        self.unit_forget_bias = unit_forget_bias

    def _initial_bias(self) -> Any:
        if not self.unit_forget_bias:
            return self.bias_initializer

        def initial(shape: Any, dtype: Any = None, **unused: Any) -> Any:
            del shape
            part = [self.units]
            ones = tf.ones(part, dtype)
            return tf.concat(
                [self.bias_initializer(part, dtype), ones, self.bias_initializer([2 * self.units], dtype)], axis=0
            )

        return initial

    def _project(self, inputs: Any) -> Any:
        return tf.tensordot(inputs, self.kernel, 1) + self.biases

    def _step(self) -> Step:
        return lstm_step(tf.convert_to_tensor(self.recurrent_kernel), self.activation, self.recurrent_activation)


class PopnnGRU(_PopnnRNN):
    """Keras' GRU. The state, in and out, is h."""

    gates = 3
    state_count = 1

    def __init__(  # noqa: PLR0913, PLR0917 the SDK's signature
        self,
        units: int,
        activation: Any = "tanh",
        recurrent_activation: Any = "sigmoid",
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        recurrent_initializer: Any = "orthogonal",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        recurrent_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        recurrent_constraint: Any = None,
        bias_constraint: Any = None,
        dropout: float = 0.0,
        dropout_seed: Any = None,
        recurrent_dropout: float = 0.0,
        implementation: int = 2,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        unroll: bool = False,
        reset_after: bool = True,
        seed: Any = None,
        partials_dtype: Any = tf.float32,
        time_major: bool = False,
        options: Optional[Dict[str, str]] = None,
        options_bwd: Optional[Dict[str, str]] = None,
        **kwargs: Any,
    ) -> None:
        arguments = _layer_arguments(locals())
        super().__init__(units, arguments, kwargs)
        self.reset_after = reset_after

    def _bias_shape(self) -> List[int]:
        return [2, 3 * self.units] if self.reset_after else [3 * self.units]

    def _project(self, inputs: Any) -> Any:
        return tf.tensordot(inputs, self.kernel, 1) + (self.biases[0] if self.reset_after else self.biases)

    def _step(self) -> Step:
        recurrent_bias = self.biases[1] if self.reset_after else None
        return gru_step(
            tf.convert_to_tensor(self.recurrent_kernel), recurrent_bias, self.activation, self.recurrent_activation
        )


LSTM = PopnnLSTM
GRU = PopnnGRU

_REFUSED_DEFAULTS: Dict[str, Any] = {"recurrent_dropout": 0.0, "go_backwards": False, "unroll": False}


def lstm_step(recurrent_kernel: Any, activation: str, recurrent_activation: str) -> Step:
    """Returns one step of an LSTM whose input has been multiplied by the kernel; states are h and c."""
    activate, gate = getattr(tf.keras.activations, activation), getattr(tf.keras.activations, recurrent_activation)

    def step(projected: Any, states: Sequence[Any]) -> Any:
        h, c = states
        i, f, candidate, o = tf.split(projected + tf.matmul(h, recurrent_kernel), 4, axis=-1)
        c = gate(f) * c + gate(i) * activate(candidate)
        h = gate(o) * activate(c)
        return h, [h, c]

    return step


def gru_step(recurrent_kernel: Any, recurrent_bias: Optional[Any], activation: str, recurrent_activation: str) -> Step:
    """Returns one step of a GRU whose input has been multiplied by the kernel; the state is h.

    With a recurrent bias the reset gate acts after the matrix product.
    """
    activate, gate = getattr(tf.keras.activations, activation), getattr(tf.keras.activations, recurrent_activation)
    units = recurrent_kernel.shape[0]

    def step(projected: Any, states: Sequence[Any]) -> Any:
        (h,) = states
        input_z, input_r, input_h = tf.split(projected, 3, axis=-1)
        if recurrent_bias is not None:
            z, r, recurrent_h = tf.split(tf.matmul(h, recurrent_kernel) + recurrent_bias, 3, axis=-1)
            z, r = gate(input_z + z), gate(input_r + r)
            candidate = activate(input_h + r * recurrent_h)
        else:
            z, r = tf.split(tf.matmul(h, recurrent_kernel[:, : 2 * units]), 2, axis=-1)
            z, r = gate(input_z + z), gate(input_r + r)
            candidate = activate(input_h + tf.matmul(r * h, recurrent_kernel[:, 2 * units :]))
        h = z * h + (1 - z) * candidate
        return h, [h]

    return step


def check_options(layer: Any) -> None:
    """Raises for options that Poplar would refuse when it compiles the layer."""
    for name in ("options", "options_bwd"):
        poplar_options.check(f"{name} of {layer.name}", getattr(layer, name))


def activation_name(given: Any, argument: str) -> str:
    """Returns the name of an activation that the IPU's RNNs have.

    Like the SDK, it accepts callables of TensorFlow's internal Keras and of `tf.math`, but not those of `tf.keras`.
    """
    name = given
    if given is tf.math.tanh or given is tf.math.sigmoid:
        name = "tanh" if given is tf.math.tanh else "sigmoid"
    elif getattr(given, "__module__", None) == "tensorflow.python.keras.activations":
        name = given.__name__
    if not isinstance(name, str):
        raise TypeError(f"{argument} must be the name of an activation, not {given!r}.")
    allowed = _ACTIVATIONS if argument == "activation" else _RECURRENT_ACTIVATIONS
    if name not in allowed:
        raise ValueError(f"{argument}={name!r} is not one of {', '.join(allowed)}.")
    return name


def _layer_arguments(given: Dict[str, Any]) -> Dict[str, Any]:
    """A constructor's arguments without `self`, `units` and the keywords for Keras' base class."""
    return {name: value for name, value in given.items() if name not in ("self", "units", "kwargs", "__class__")}


def _seeded(given: Any, seed: Any) -> Any:
    """Returns the initializer; one that takes a seed and has none gets the layer's."""
    initializer = tf.keras.initializers.get(given)
    if seed is None or getattr(initializer, "seed", 0) is not None:
        return initializer
    return type(initializer).from_config({**initializer.get_config(), "seed": seed})


def _in_float32(initializer: Any) -> Any:
    """Stock TensorFlow cannot make an orthogonal matrix in float16."""
    return lambda shape, dtype=None, **unused: tf.cast(initializer(shape, tf.float32), dtype)


def _plain(options: Optional[Dict[str, str]]) -> Optional[Dict[str, str]]:
    return None if options is None else dict(options)
