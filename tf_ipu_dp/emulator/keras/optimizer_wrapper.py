"""The base class of `keras.ipu.optimizers`: an optimizer that wraps a Keras optimizer.

The wrappers are OptimizerV2, as in Keras 2.6; from 2.11 on, where Keras calls those legacy, they wrap either kind. A
wrapper's hyperparameters, slots and `iterations` are the wrapped optimizer's: an iteration is an update. Gradients are
summed over the replicas first, then accumulated and unscaled, and the wrapped optimizer gets the result.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterable, List, Tuple, Type

import tensorflow as tf

v2: Any = getattr(tf.keras.optimizers, "legacy", tf.keras.optimizers)
Pairs = List[Tuple[Any, Any]]
_serializable: Dict[str, Type[Any]] = {}


def serializable(kind: Type[Any]) -> Type[Any]:
    """Registers an optimizer with Keras, so that it can be saved with a model and loaded again."""
    _serializable[kind.__name__] = kind
    registered: Type[Any] = tf.keras.utils.register_keras_serializable(package="keras.ipu")(kind)
    return registered


def deserialize(config: Dict[str, Any], custom_objects: Any) -> Any:
    """Returns the optimizer that Keras has serialised."""
    # By their plain names too: not every format of a saved model keeps the name that they are registered under.
    return tf.keras.optimizers.deserialize(config, custom_objects={**_serializable, **(custom_objects or {})})


def creator_with_dtype(dtype: Any) -> Callable[..., Any]:
    """Returns a variable creator that replaces the type: Keras gives a slot its variable's."""

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        value = kwargs["initial_value"]
        kwargs["initial_value"] = functools.partial(value, dtype=dtype) if callable(value) else tf.cast(value, dtype)
        return next_creator(**{**kwargs, "dtype": dtype})

    return create


class OptimizerWrapper(v2.Optimizer):  # type: ignore[misc]
    """Behaves like the optimizer that it wraps."""

    def __init__(self, opt: Any, name: str) -> None:
        if not isinstance(opt, (v2.Optimizer, tf.keras.optimizers.Optimizer)):
            raise ValueError(f"{type(self).__name__} wraps an optimizer of Keras, not {type(opt).__name__}.")
        super().__init__(name)
        self._opt = opt
        self._track_trackable(opt, "opt")

    def __getattr__(self, name: str) -> Any:
        # Never for private names: the wrapper must not expose TensorFlow's bookkeeping of the wrapped optimizer.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self._opt, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = vars(self).get("_opt")
        hyper = ("lr", "learning_rate", *getattr(wrapped, "_hyper", ()))
        # Properties too: those of a wrapped ALSOptimizer can be changed, or cannot, through what wraps it.
        is_property = isinstance(getattr(type(wrapped), name, None), property) and not hasattr(type(self), name)
        if wrapped is not None and (name in hyper or is_property):
            setattr(wrapped, name, value)
        else:
            super().__setattr__(name, value)

    @property
    def iterations(self) -> Any:
        """The number of updates so far."""
        return self._opt.iterations

    @iterations.setter
    def iterations(self, variable: Any) -> None:
        self._opt.iterations = variable

    @property
    def weights(self) -> List[Any]:
        """The variables of the wrapped optimizer and of the wrapper, to be saved with a model."""
        return [*(self._opt.weights if self._wraps_v2 else self._opt.variables), *self._wrapper_weights()]

    def get_slot(self, var: Any, slot_name: str) -> Any:
        """Returns a slot of the wrapped optimizer."""
        return self._opt.get_slot(var, slot_name)

    def get_gradients(self, loss: Any, params: Any) -> List[Any]:
        """Returns the gradients, in a graph of TF1."""
        return self._opt.get_gradients(loss, params)

    def preprocess_gradients(self, x: Tuple[Any, Any]) -> Tuple[Any, Any]:
        """Returns a pair of gradient and variable as it goes into the sum over replicas; subclasses may change it."""
        return x

    def get_config(self) -> Dict[str, Any]:
        """Returns the arguments that make the same optimizer."""
        return {"name": self._name, "opt": tf.keras.optimizers.serialize(self._opt)}

    @classmethod
    def from_config(cls, config: Dict[str, Any], custom_objects: Any = None) -> Any:
        """Makes an optimizer from what `get_config` returned."""
        given = dict(config)
        if isinstance(given.get("opt"), dict):
            given["opt"] = deserialize(given["opt"], custom_objects)
        return cls(**given)

    def _wrapper_weights(self) -> List[Any]:
        return []

    @property
    def _wraps_v2(self) -> bool:
        return isinstance(self._opt, v2.Optimizer)

    def _create_all_weights(self, var_list: Any) -> None:
        (self._opt._create_all_weights if self._wraps_v2 else self._opt.build)(var_list)

    def _transform_loss(self, loss: Any) -> Any:
        return self._opt._transform_loss(loss) if self._wraps_v2 else loss

    def _get_gradients(self, tape: Any, loss: Any, var_list: Any, grad_loss: Any = None) -> Pairs:
        owner: Any = self._opt if self._wraps_v2 else super()
        return owner._get_gradients(tape, loss, var_list, grad_loss)

    def _transform_unaggregated_gradients(self, grads_and_vars: Pairs) -> Pairs:
        return self._opt._transform_unaggregated_gradients(grads_and_vars) if self._wraps_v2 else grads_and_vars

    def _aggregate_gradients(self, grads_and_vars: Pairs) -> Any:
        owner: Any = self._opt if self._wraps_v2 else super()
        return owner._aggregate_gradients(grads_and_vars)

    def _sum_over_replicas(self, grads_and_vars: Iterable[Any], aggregate: bool) -> Pairs:
        """Returns the pairs that have a gradient, dense and, if `aggregate` is set, summed over the replicas."""
        pairs = [self.preprocess_gradients(pair) for pair in grads_and_vars if pair[0] is not None]
        if not pairs:
            raise ValueError("No gradients provided for any variable.")
        if tf.distribute.in_cross_replica_context():
            raise RuntimeError("apply_gradients cannot be called in a cross-replica context: use strategy.run.")
        with tf.init_scope():
            self._create_all_weights([variable for _, variable in pairs])
        if aggregate:
            pairs = self._transform_unaggregated_gradients(pairs)
            variables = [variable for _, variable in pairs]
            # Some releases of Keras return the sums, others pairs of sum and variable.
            sums = [entry[0] if isinstance(entry, tuple) else entry for entry in self._aggregate_gradients(pairs)]
            pairs = list(zip(sums, variables))
        return [(tf.convert_to_tensor(gradient), variable) for gradient, variable in pairs]
