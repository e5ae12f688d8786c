"""Which layers a Keras model calls, and in which pipeline stage it calls them.

A functional model's calls are Keras' nodes. A `Model` subclass has none: it is traced once, in a temporary graph, and
its calls of layers are recorded. `PipelineStage` marks the layers and nodes that are made while it is open. Both patch
Keras' `Layer` only while they are active.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import tensorflow as tf

from tf_ipu_dp.emulator import patches

_PATCH = "layer calls"
_STAGE = "_ipu_emulator_stage"
_open = threading.local()


class PipelineStage:
    """Layers that are called, or made, inside belong to a stage."""

    def __init__(self, stage: int) -> None:
        if isinstance(stage, bool) or not isinstance(stage, numbers.Integral):
            raise TypeError(f"A pipeline stage is an int, not {stage!r}.")
        if stage < 0:
            raise ValueError(f"A pipeline stage is 0 or more, not {stage}.")
        self._stage: int = int(stage)

    def __enter__(self) -> PipelineStage:
        if _open_stage() is not None:
            raise RuntimeError(f"PipelineStage({self._stage}) cannot be nested in PipelineStage({_open_stage()}).")
        if not getattr(tf.distribute.get_strategy(), "has_pipeline_stages", False):
            raise RuntimeError("PipelineStage can only be used in the scope of an IPUStrategy.")
        _hooks.acquire()
        _open.stage = self._stage
        return self

    def __exit__(self, *_: Any) -> None:
        _open.stage = None
        _hooks.release()


def stage_of(layer_or_node: Any) -> Optional[int]:
    """Returns the stage that was open when a layer, or the node of a call, was made."""
    stage: Optional[int] = vars(layer_or_node).get(_STAGE)
    return stage


def nodes_of(model: Any) -> List[Any]:
    """Returns a functional model's calls in post-order: each after those that it depends on. Inputs are excluded."""
    by_depth = model._nodes_by_depth
    inside = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    unseen = {id(node) for node in inside}
    order: List[Any] = []

    def visit(root: Any) -> None:
        stack = [(root, iter(root.parent_nodes))]
        unseen.discard(id(root))
        while stack:
            node, parents = stack[-1]
            parent = next((one for one in parents if id(one) in unseen), None)
            if parent is None:
                order.append(node)
                stack.pop()
            else:
                unseen.discard(id(parent))
                stack.append((parent, iter(parent.parent_nodes)))

    ends = [_node_of(tensor) for tensor in tf.nest.flatten(model.outputs)]
    for node in (*ends, *inside):  # `inside` adds calls that no output depends on, like losses
        if id(node) in unseen:
            visit(node)
    return [node for node in order if not node.is_input]


def _node_of(tensor: Any) -> Any:
    layer, index, _ = tensor._keras_history
    return layer._inbound_nodes[index]


def inbound_layers(layer: Any, node_index: int) -> List[Any]:
    """Returns the layers that one call of a layer gets its inputs from."""
    return [tensor._keras_history.layer for tensor in layer._inbound_nodes[node_index].keras_inputs]


@dataclasses.dataclass(eq=False)
class Call:
    """One call of a layer in a traced `Model` subclass, and the calls that it made itself."""

    layer: Any
    index: int = 0
    stage: Optional[int] = None
    inputs: List[Any] = dataclasses.field(default_factory=list)
    sources: List[Call] = dataclasses.field(default_factory=list)
    calls: List[Call] = dataclasses.field(default_factory=list)
    producers: Dict[int, Call] = dataclasses.field(default_factory=dict)  # of tensors, by their ids


def trace(model: Any, specs: Any) -> Call:
    """Calls a `Model` subclass in a graph and returns its call, with the calls that it makes."""
    recorder = _Recorder(model)
    with model.distribute_strategy.scope(), _recording(recorder):
        tf.function(model.__call__, autograph=False).get_concrete_function(specs)
    return recorder.root


class _Recorder:
    """Records which layers a model calls while it is traced."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stack: List[Call] = []
        self.root = Call(model)

    def call(self, layer: Any, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a layer and records it as a call of the layer that is being called."""
        inputs = _tensors((args, kwargs))
        if not self._stack and layer is not self._model:
            return stock(layer, *args, **kwargs)
        if not self._stack:
            call = self.root = Call(layer, inputs=inputs)
        else:
            parent = self._stack[-1]
            earlier = sum(one.layer is layer for one in parent.calls)
            call = Call(layer, earlier, _open_stage(), inputs, _sources(inputs, parent))
            parent.calls.append(call)
        self._stack.append(call)
        try:
            outputs = stock(layer, *args, **kwargs)
        finally:
            self._stack.pop()
        if self._stack:
            self._stack[-1].producers.update({id(tensor): call for tensor in _tensors(outputs)})
        return outputs


def _sources(tensors: Sequence[Any], parent: Call) -> List[Call]:
    """Returns the calls that the tensors come from, directly or through other operations."""
    ends = {id(tensor) for tensor in parent.inputs}
    found: List[Call] = []
    seen = set()
    queue = list(tensors)
    while queue:
        tensor = queue.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        producer = parent.producers.get(id(tensor))
        if producer is not None:
            found += [producer] if producer not in found else []
        elif id(tensor) not in ends:
            queue += tensor.op.inputs
    return found


def _tensors(nest: Any) -> List[Any]:
    """Returns the tensors of a graph in a nest."""
    flat = tf.nest.flatten(nest, expand_composites=True)
    return [one for one in flat if isinstance(one, tf.Tensor) and hasattr(one, "graph") and not hasattr(one, "numpy")]


def _open_stage() -> Optional[int]:
    stage: Optional[int] = getattr(_open, "stage", None)
    return stage


@contextlib.contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    before, stage = getattr(_open, "recorder", None), _open_stage()
    _hooks.acquire()
    _open.recorder, _open.stage = recorder, None
    try:
        yield
    finally:
        _open.recorder, _open.stage = before, stage
        _hooks.release()


class _LayerHooks:
    """Patches constructors and calls of Keras' layers while at least one user needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def acquire(self) -> None:
        """Adds a user, and applies the patch for the first one."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                layer = tf.keras.layers.Layer
                patches.set_attribute(_PATCH, layer, "__init__", _observed_init(vars(layer)["__init__"]))
                patches.set_attribute(_PATCH, layer, "__call__", _observed_call(vars(layer)["__call__"]))

    def release(self) -> None:
        """Removes a user, and undoes the patch after the last one."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                patches.undo(_PATCH)


_hooks = _LayerHooks()


def _observed_init(stock: Callable[..., Any]) -> Callable[..., Any]:
    # With the names of the stock constructor: Keras reads them to guess a layer's configuration.
    @functools.wraps(stock)
    def __init__(  # noqa: N807
        self: Any, trainable: Any = True, name: Any = None, dtype: Any = None, dynamic: Any = False, **kwargs: Any
    ) -> None:
        stock(self, trainable=trainable, name=name, dtype=dtype, dynamic=dynamic, **kwargs)
        if _open_stage() is not None:
            vars(self)[_STAGE] = _open_stage()

    return __init__


def _observed_call(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        recorder = getattr(_open, "recorder", None)
        if recorder is not None:
            return recorder.call(self, stock, args, kwargs)
        stage = _open_stage()
        if stage is None:
            return stock(self, *args, **kwargs)
        count_before = len(self._inbound_nodes)
        outputs = stock(self, *args, **kwargs)
        for node in self._inbound_nodes[count_before:]:
            vars(node)[_STAGE] = stage
        return outputs

    return __call__
