"""Which layers a Keras model calls, in which pipeline stage, and the objects that say so.

A functional model's calls are Keras' nodes. A `Model` subclass has none: it is traced once, in a graph that is thrown
away, and its calls of layers are taken down. `PipelineStage` marks the layers and nodes that are made while it is open.
For both, Keras' `Layer` is listened to for as long as it takes, and is afterwards as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import numbers
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence

import tensorflow as tf

_STAGE = "_ipu_emulator_stage"
_open = threading.local()


class LayerAssignment:
    """The stage of a layer."""

    def __init__(self, layer: Any, pipeline_stage: Optional[int]) -> None:
        self._layer = layer
        self._pipeline_stage = pipeline_stage

    @property
    def layer(self) -> Any:
        return self._layer

    @property
    def pipeline_stage(self) -> Optional[int]:
        """The stage; None if there is none."""
        return self._pipeline_stage

    @pipeline_stage.setter
    def pipeline_stage(self, value: Optional[int]) -> None:
        self._pipeline_stage = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {title_of(self)}: {self.pipeline_stage}>"


class SequentialLayerPipelineStageAssignment(LayerAssignment):
    """The stage of a layer of a `Sequential` model."""

    def __init__(self, layer: Any, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)


class _OfOneCall:
    """The part of an assignment that says which call of a layer it is about. A layer can be called several times."""

    layer: Any
    _node_index: int
    _inbound: Optional[List[Any]] = None  # of a subclass; a functional model's nodes know it

    @property
    def node_index(self) -> int:
        """Which of the layer's calls it is."""
        return self._node_index

    @property
    def inbound_layers(self) -> List[Any]:
        """The layers whose outputs the call gets."""
        if self._inbound is not None:
            return list(self._inbound)
        return inbound_layers(self.layer, self._node_index)


class FunctionalLayerPipelineStageAssignment(LayerAssignment, _OfOneCall):
    """The stage of one call of a layer of a functional model."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index = node_index


class ModelLayerPipelineStageAssignment(LayerAssignment, _OfOneCall):
    """The stage of one call of a layer of a `Model` subclass."""

    def __init__(self, layer: Any, node_index: int, pipeline_stage: Optional[int] = None) -> None:
        super().__init__(layer, pipeline_stage)
        self._node_index = node_index


class NestedAssignment:
    """The stages of the layers of a model that is a layer of another one."""

    def __init__(self, nested_model: Any, assignments: Optional[List[Any]]) -> None:
        from tf_ipu_dp.emulator.keras import pipelines

        self._nested_model = nested_model
        self._assignments = pipelines.assignments_of(nested_model) if assignments is None else assignments

    @property
    def nested_model(self) -> Any:
        return self._nested_model

    @property
    def layer(self) -> Any:
        """The nested model, which is a layer too."""
        return self._nested_model

    @property
    def pipeline_stage_assignments(self) -> List[Any]:
        """The assignments of the nested model's layers."""
        return self._assignments

    @property
    def pipeline_stage(self) -> Optional[int]:
        """The stage that all layers of the nested model have in common; None if there is none. Setting it sets all."""
        stages = set(stages_in(self._assignments))
        return stages.pop() if len(stages) == 1 else None

    @pipeline_stage.setter
    def pipeline_stage(self, value: Optional[int]) -> None:
        for assignment in self._assignments:
            assignment.pipeline_stage = value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {title_of(self)}: {self._assignments}>"


class SequentialNestedModelPipelineStageAssignment(NestedAssignment):
    """The stages of a model inside a `Sequential` model."""

    def __init__(self, nested_model: Any, pipeline_stage_assignments: Optional[List[Any]] = None) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)


class FunctionalNestedModelPipelineStageAssignment(NestedAssignment, _OfOneCall):
    """The stages of one call of a model inside a functional model. Each call has stages of its own."""

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Optional[List[Any]] = None
    ) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index


class NestedModelPipelineStageAssignment(NestedAssignment, _OfOneCall):
    """The stages of one call of a model inside a `Model` subclass. Each call has stages of its own."""

    def __init__(
        self, nested_model: Any, node_index: int, pipeline_stage_assignments: Optional[List[Any]] = None
    ) -> None:
        super().__init__(nested_model, pipeline_stage_assignments)
        self._node_index = node_index


def title_of(entry: Any) -> str:
    """Returns how an assignment's layer is called in tables and messages."""
    title = f"{entry.layer.name} ({type(entry.layer).__name__})"
    return f"{title} ({entry.node_index})" if hasattr(entry, "node_index") else title


def stages_in(entries: Sequence[Any]) -> List[Any]:
    """Returns all stages in order, those of nested models in their place."""
    stages: List[Any] = []
    for entry in entries:
        nested = isinstance(entry, NestedAssignment)
        stages += stages_in(entry.pipeline_stage_assignments) if nested else [entry.pipeline_stage]
    return stages


class PipelineStage:
    """Layers that are called, or made, inside belong to a stage."""

    def __init__(self, stage: int) -> None:
        if isinstance(stage, bool) or not isinstance(stage, numbers.Integral):
            raise TypeError(f"A pipeline stage is an int, not {stage!r}.")
        if stage < 0:
            raise ValueError(f"A pipeline stage is 0 or more, not {stage}.")
        self._stage: int = int(stage)

    def __enter__(self) -> PipelineStage:
        from tf_ipu_dp.emulator.sdk_api.ipu import ipu_strategy

        if _open_stage() is not None:
            raise RuntimeError(f"PipelineStage({self._stage}) stands inside PipelineStage({_open_stage()}).")
        if not isinstance(tf.distribute.get_strategy(), ipu_strategy.IPUStrategyV1):
            raise RuntimeError("PipelineStage can be used in the scope of an IPUStrategy only.")
        _hooks.hold()
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
    """Returns a functional model's calls in post-order: each after those that it depends on. Inputs are left out."""
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
    for node in (*ends, *inside):  # the second for what no output needs, like losses
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
    makers: Dict[int, Call] = dataclasses.field(default_factory=dict)  # of tensors, by id


def trace(model: Any, specs: Any) -> Call:
    """Calls a `Model` subclass in a graph and returns its call, with the calls that it makes."""
    recorder = _Recorder(model)
    with model.distribute_strategy.scope(), _recording(recorder):
        tf.function(model.__call__, autograph=False).get_concrete_function(specs)
    return recorder.root


class _Recorder:
    """Takes down which layers a model calls while it is traced."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stack: List[Call] = []
        self.root = Call(model)

    def call(self, layer: Any, stock: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a layer and notes it below the one that is being called."""
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
            self._stack[-1].makers.update({id(tensor): call for tensor in _tensors(outputs)})
        return outputs


def _sources(tensors: Sequence[Any], parent: Call) -> List[Call]:
    """Returns the calls that the tensors come from, through whatever operations stand between."""
    ends = {id(tensor) for tensor in parent.inputs}
    found: List[Call] = []
    seen = set()
    queue = list(tensors)
    while queue:
        tensor = queue.pop(0)
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        maker = parent.makers.get(id(tensor))
        if maker is not None:
            found += [maker] if maker not in found else []
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
    _hooks.hold()
    _open.recorder, _open.stage = recorder, None
    try:
        yield
    finally:
        _open.recorder, _open.stage = before, stage
        _hooks.release()


class _Hooks:
    """Keras' `Layer`, listened to while somebody holds on. Afterwards it is as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._stock: Dict[str, Any] = {}
        self._ours: Dict[str, Any] = {}

    def hold(self) -> None:
        """Starts to listen, if nobody does."""
        with self._lock:
            self._holders += 1
            if self._holders == 1:
                layer = tf.keras.layers.Layer
                self._stock = {name: vars(layer)[name] for name in ("__init__", "__call__")}
                self._ours = {"__init__": _made(self._stock["__init__"]), "__call__": _called(self._stock["__call__"])}
                for name, hook in self._ours.items():
                    setattr(layer, name, hook)

    def release(self) -> None:
        """Stops listening, if nobody else does."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                for name, hook in self._ours.items():
                    if vars(tf.keras.layers.Layer)[name] is hook:
                        setattr(tf.keras.layers.Layer, name, self._stock[name])


_hooks = _Hooks()


def _made(stock: Callable[..., Any]) -> Callable[..., Any]:
    # With the names of the stock constructor: Keras reads them to guess a layer's configuration.
    @functools.wraps(stock)
    def __init__(  # noqa: N807
        self: Any, trainable: Any = True, name: Any = None, dtype: Any = None, dynamic: Any = False, **kwargs: Any
    ) -> None:
        stock(self, trainable=trainable, name=name, dtype=dtype, dynamic=dynamic, **kwargs)
        if _open_stage() is not None:
            vars(self)[_STAGE] = _open_stage()

    return __init__


def _called(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        recorder = getattr(_open, "recorder", None)
        if recorder is not None:
            return recorder.call(self, stock, args, kwargs)
        stage = _open_stage()
        if stage is None:
            return stock(self, *args, **kwargs)
        known = len(self._inbound_nodes)
        outputs = stock(self, *args, **kwargs)
        for node in self._inbound_nodes[known:]:
            vars(node)[_STAGE] = stage
        return outputs

    return __call__
