"""Functions that `strategy.run` runs on the device: traced for its replicas, then run on all of them."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager import def_function, function

try:
    from tensorflow.python.eager.polymorphic_function import function_context
except ImportError:  # before TensorFlow 2.11
    function_context = None

from tf_ipu_dp.emulator import keras_2, patches
from tf_ipu_dp.emulator.runtime import batch_norm, feeds, instances, random_numbers, replicas
from tf_ipu_dp.emulator.runtime.concurrent_function import ConcurrentFunction
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import ipu_infeed_queue
from tf_ipu_dp.emulator.sdk_api.ipu.keras_extensions import KerasExtensions

_CONCRETE = tuple(kind for kind in [getattr(function, "ConcreteFunction", None)] if kind is not None)
_traced: Any = weakref.WeakKeyDictionary()  # tf.functions by the functions they were made from
# Of a concrete function: the tf.function that it was made from. Not in a dictionary with weak keys: that would keep
# both forever, because each of them refers to the other.
_ORIGIN = "_tf_ipu_dp_origin"
_copies: Any = weakref.WeakKeyDictionary()  # by user's function, then by number of IPUs of the device


def extend_tensorflow() -> None:
    """Makes functions depend on the program of the device that calls them. Calling it twice is harmless."""
    _ignore_jit_compile()
    _cache_functions_by_program()
    _remember_origins()


def is_traced(fn: Any) -> bool:
    """Whether a function is a `tf.function` or a concrete one."""
    return isinstance(fn, (def_function.Function, *_CONCRETE))


def run_in_graph(strategy: Any, fn: Any, args: Any, kwargs: Any, options: Any) -> Any:
    """Runs a function as a part of the graph around it."""
    # It runs a model that was made outside the scope.
    by_keras = getattr(fn, "__module__", "").startswith(f"{keras_2.package_name()}.")
    if replicas.current() is None and not by_keras:
        if strategy.ipus() > 1:
            return _run_concurrently_in_graph(strategy, fn, tuple(args), kwargs or {})
        if tf.compat.v1.executing_eagerly_outside_functions():
            status = ag_ctx.control_status_ctx().status
            return _run_on_one_replica_in_graph(strategy, fn, tuple(args), kwargs or {}, status)
    return tf.compat.v1.distribute.Strategy.run(strategy, fn, args=args, kwargs=kwargs, options=options)


@tf.autograph.experimental.do_not_convert
def _run_on_one_replica_in_graph(strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any], status: Any) -> Any:
    """`status` is autograph's around the call: the user's function is converted as it would be there."""
    system = ipu_config.configured_system()
    system.attach()
    with strategy.scope(), replicas.tracing(replicas.Program(1)):
        if system.only_compiles():
            if isinstance(fn, _CONCRETE):
                return zeros_like(fn.structured_outputs)
            concrete = _as_replica(strategy, as_function(fn)._clone(None).get_concrete_function, args, kwargs)
            return zeros_like(concrete.structured_outputs)
        with ag_ctx.ControlStatusCtx(status):
            return tf.compat.v1.distribute.Strategy.run(strategy, fn, args=args, kwargs=kwargs)


@tf.autograph.experimental.do_not_convert
def _run_concurrently_in_graph(strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    if not tf.compat.v1.executing_eagerly_outside_functions():
        raise NotImplementedError(
            "strategy.run() in a graph of TensorFlow 1 cannot be emulated on more than one replica."
        )
    fn = _origin_of(fn)

    def call(*own_args: Any, **own_kwargs: Any) -> Any:
        results = fn(*own_args, **own_kwargs)
        return None if isinstance(results, tf.Operation) else results

    function = fn if isinstance(fn, def_function.Function) else tf.function(call)
    ipu_config.configured_system().attach()
    with strategy.scope():
        concurrent = _trace_for_fitting_replicas(
            strategy.ipus(), lambda program: _make_concurrent(strategy, function._clone(None), args, kwargs, program)
        )
        if ipu_config.configured_system().only_compiles():
            return zeros_like(concurrent.concrete.structured_outputs)
        return concurrent.call_in_graph(_split(args, kwargs)[0])


def run_on_device(strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any], check_types: bool) -> Any:
    """Runs a traced function on all replicas of the device and returns what replica 0 returns."""
    system = ipu_config.configured_system()
    system.attach()
    with strategy.scope():
        # Tracing does not count as work of the IPUs.
        return _execute(system, _compile(strategy, system, fn, args, kwargs, check_types))


def _execute(system: Any, compiled: _CompiledProgram) -> Any:
    if system.only_compiles():
        return zeros_like(compiled.outputs)
    with system.executing():
        return compiled.run()


def zeros_like(outputs: Any) -> Any:
    """Returns zeros in place of the outputs of a program that is compiled and not executed."""

    def make(output: Any) -> Any:
        is_tensor = isinstance(output, (tf.Tensor, tf.TensorSpec))
        return tf.zeros([size or 0 for size in output.shape], output.dtype) if is_tensor else output

    return tf.nest.map_structure(make, outputs)


@dataclasses.dataclass(frozen=True)
class _CompiledProgram:
    """What runs a traced program, and what the program returns as specs or symbolic tensors."""

    run: Callable[[], Any]
    outputs: Any


def run_computation(computation: Callable[..., Any], tensors: List[Any], ipus: int) -> Any:
    """Runs a function of tensors on all replicas that a device of this many IPUs holds, without a strategy.

    Returns what replica 0 returns.
    """
    if ipus > 1:
        random_numbers.extend_tensorflow()
        feeds.extend_tensorflow()
        batch_norm.extend_tensorflow()
        extend_tensorflow()

    def trace(program: replicas.Program) -> _CompiledProgram:
        function = tf.function(computation)
        if program.replicas > 1:
            concurrent = ConcurrentFunction(function, tensors, program)
            call = concurrent if tf.executing_eagerly() else concurrent.call_in_graph
            return _CompiledProgram(lambda: call(tensors), concurrent.concrete.structured_outputs)
        with replicas.tracing(program):
            concrete = function.get_concrete_function(*tensors)
        return _CompiledProgram(lambda: concrete(*tensors), concrete.structured_outputs)

    compiled: _CompiledProgram = _trace_for_fitting_replicas(ipus, trace)
    if not tf.executing_eagerly():
        return compiled.run()
    return _execute(ipu_config.configured_system(), compiled)


def as_function(fn: Any) -> Any:
    """Returns a traced function for any function, the same each time."""
    if is_traced(fn):
        return fn
    if fn not in _traced:
        _traced[fn] = tf.function(fn)
    return _traced[fn]


def _compile(
    strategy: Any, system: Any, fn: Any, args: Any, kwargs: Dict[str, Any], check_types: bool
) -> _CompiledProgram:
    count = strategy.ipus()
    if isinstance(fn, _CONCRETE) and count > 1:
        fn, check_types = _origin_of(fn), False
    if isinstance(fn, _CONCRETE):
        return _CompiledProgram(lambda: _as_replica(strategy, fn, args, kwargs), fn.structured_outputs)
    # As for any tf.function, an array is data, and not a constant that the program is traced for.
    args, kwargs = tf.nest.map_structure(
        lambda leaf: tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf,
        (tuple(args), kwargs),
    )
    copy = _copy_for_device(fn, system, count)
    replicas_before = copy.replicas or count

    def trace(program: replicas.Program) -> _CompiledProgram:
        own = copy
        if program.replicas != replicas_before:
            own = _copy_for_device(fn, system, count, retrace=True)
            own.replicas = program.replicas
        return _trace(strategy, own.function, args, kwargs, program, check_types)

    return _trace_for_fitting_replicas(replicas_before, trace, tf.nest.flatten((args, kwargs)))


def _trace_for_fitting_replicas(
    count: int, trace: Callable[[replicas.Program], Any], arguments: Sequence[Any] = ()
) -> Any:
    """Traces a program for this many replicas, or for fewer if it has pipelines or shards, which take several IPUs.

    `arguments` may have iterators. Those that it takes elements from otherwise are found while tracing.
    """
    while True:
        program = replicas.Program(count)
        try:
            compiled = trace(program)
            break
        except Exception:
            if not 0 < program.fitting_replicas < count:
                raise
            count = program.fitting_replicas
    for iterator in (*arguments, *program.iterators):
        if isinstance(iterator, ipu_infeed_queue.IPUOwnedIterator):
            iterator.feed(count)
    return compiled


def _trace(
    strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any], program: replicas.Program, check_types: bool
) -> _CompiledProgram:
    if program.replicas > 1:
        return _trace_concurrent(strategy, fn, args, kwargs, program, check_types)
    # With a signature, TensorFlow 2.6 cannot be given plain numbers to trace for.
    like = ((), {}) if fn.input_signature else (args, kwargs)
    with replicas.tracing(program):
        concrete = _as_replica(strategy, fn.get_concrete_function, *like)
    if check_types:
        _check_types(concrete)

    def run() -> Any:
        with replicas.traced_as(program):
            return _as_replica(strategy, fn, args, kwargs)

    return _CompiledProgram(run, concrete.structured_outputs)


def _trace_concurrent(
    strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any], program: replicas.Program, check_types: bool
) -> _CompiledProgram:
    tensors, others, _ = _split(args, kwargs)
    structure = tf.nest.map_structure(lambda leaf: getattr(leaf, "element_spec", 0), (args, kwargs))
    specs = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    values = tuple((type(leaf), leaf) if isinstance(leaf, (int, float, str)) else id(leaf) for leaf in others)
    key = (id(fn), repr(structure), specs, values, instances.members())
    if key not in strategy.concurrent_functions:
        concurrent = _make_concurrent(strategy, fn, args, kwargs, program)
        if check_types:
            _check_types(concurrent.concrete)
        # The objects whose ids are in the key must stay alive as long as the key.
        strategy.concurrent_functions[key] = (concurrent, fn, others)
    compiled = strategy.concurrent_functions[key][0]
    return _CompiledProgram(lambda: compiled(tensors), compiled.concrete.structured_outputs)


def _split(args: Any, kwargs: Dict[str, Any]) -> Tuple[List[Any], List[Any], List[bool]]:
    """Returns the tensors among the arguments, the other arguments, and for each argument whether it is a tensor."""
    leaves = tf.nest.flatten((args, kwargs), expand_composites=True)
    is_tensor = [tf.is_tensor(leaf) and not isinstance(leaf, tf.Variable) for leaf in leaves]
    tensors = [leaf for leaf, given in zip(leaves, is_tensor) if given]
    return tensors, [leaf for leaf, given in zip(leaves, is_tensor) if not given], is_tensor


def _make_concurrent(
    strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any], program: replicas.Program
) -> ConcurrentFunction:
    tensors, others, is_tensor = _split(args, kwargs)

    def call(*inputs: Any) -> Any:
        tensors_in, others_in = iter(inputs), iter(others)
        flat = [next(tensors_in) if is_one else next(others_in) for is_one in is_tensor]
        own_args, own_kwargs = tf.nest.pack_sequence_as((args, kwargs), flat, expand_composites=True)
        results = _as_replica(strategy, fn, own_args, own_kwargs)
        return None if isinstance(results, tf.Operation) else results

    return ConcurrentFunction(call, tensors, program)


def _origin_of(fn: Any) -> Any:
    """Returns the function that a concrete one was made from, to trace it for several replicas; others as they are."""
    if not isinstance(fn, _CONCRETE):
        return fn
    origin = getattr(fn, _ORIGIN, None)
    if origin is None:
        raise NotImplementedError(
            "This ConcreteFunction cannot be emulated on several replicas: it was made before an IPU strategy, or not "
            "by get_concrete_function. Give the tf.function itself to strategy.run()."
        )
    return origin


def _as_replica(strategy: Any, fn: Any, args: Any, kwargs: Dict[str, Any]) -> Any:
    """Calls the function in the strategy's replica context."""
    return strategy.extended.call_for_each_replica(fn, args=tuple(args), kwargs=kwargs)


@dataclasses.dataclass
class _FunctionCopy:
    """A copy of a user's function, traced for one configuration of the device."""

    function: Any
    key: Any
    replicas: int = 0


def _copy_for_device(fn: Any, system: Any, ipus: int, retrace: bool = False) -> _FunctionCopy:
    key = (weakref.ref(system), random_numbers.generation(), instances.members())
    of_sizes = _copies.setdefault(fn, {})
    cached: Optional[_FunctionCopy] = of_sizes.get(ipus)
    if retrace or cached is None or cached.key != key:
        cached = of_sizes[ipus] = _FunctionCopy(fn._clone(None), key)
    return cached


def _check_types(concrete: Any) -> None:
    for tensor in (*concrete.inputs, *concrete.outputs):
        if tensor.dtype == tf.float64:
            raise TypeError("float64 is not supported on the device: the function has it among its inputs or outputs.")


def _ignore_jit_compile() -> None:
    """Makes `jit_compile=True` have no effect on the device: a compiled function cannot reach the host."""
    if patches.is_applied("jit compilation"):
        return

    def get(self: Any) -> Any:
        on_device = isinstance(tf.distribute.get_strategy(), KerasExtensions) or replicas.current() is not None
        return None if on_device else vars(self).get("_jit_compile")

    def set_(self: Any, value: Any) -> None:
        vars(self)["_jit_compile"] = value

    patches.set_attribute("jit compilation", def_function.Function, "_jit_compile", property(get, set_))


def _remember_origins() -> None:
    """Makes concrete functions known by the functions that they were made from."""
    if patches.is_applied("concrete functions"):
        return
    stock = def_function.Function.get_concrete_function

    @functools.wraps(stock)
    def get_concrete_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        concrete = stock(self, *args, **kwargs)
        if replicas.current() is None:
            setattr(concrete, _ORIGIN, self)
        return concrete

    patches.set_attribute("concrete functions", def_function.Function, "get_concrete_function", get_concrete_function)


def _cache_functions_by_program() -> None:
    """Makes TensorFlow trace a function again for a program with other replicas or another configuration."""
    if patches.is_applied("function cache"):
        return
    owner: Any = function_context or function.Function
    name = "make_function_context" if function_context else "_cache_key_context"
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def make(*args: Any, **kwargs: Any) -> Any:
        found, program = stock(*args, **kwargs), replicas.current()
        if program is None or tf.executing_eagerly():
            return found
        added = (program.replicas, instances.members(), ipu_config.configured_system().number)
        if not function_context:
            return (*found[:-1], (found[-1], *added))
        context = found.context
        return found._replace(context=context._replace(xla_context_id=(context.xla_context_id, *added)))

    patches.set_attribute("function cache", owner, name, make)
