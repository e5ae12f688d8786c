"""`tensorflow.python.ipu.ipu_compiler`: a computation as one program of the device."""

from __future__ import annotations

from typing import Any, Callable, List

import numpy as np
import tensorflow as tf

from tf_ipu_dp.emulator.devices import device_scopes
from tf_ipu_dp.emulator.runtime import device_functions, graph_loops, pipeline_layout, replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import loops


@tf.autograph.experimental.do_not_convert
def compile(computation: Callable[..., Any], inputs: Any = None) -> Any:
    """Runs a computation as one program; returns its tensors as a list, or an operation if it returns none.

    It runs on as many replicas as the device holds, and what replica 0 returns is returned.
    """
    strategy = tf.distribute.get_strategy()
    ordinal = device_scopes.current_ordinal()
    if ordinal is None:
        if not getattr(strategy, "enable_keras_extensions", False):
            raise Exception("The computation is not placed on an IPU device: use ipu.scopes.ipu_scope().")
        ordinal = strategy.device_ordinal
    given = [] if inputs is None else list(inputs)
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return _in_graph(computation, given, ordinal)
    ipus = ipu_config.ipus_of_device(ordinal)
    ipu_config.configured_system().attach()
    made: List[Any] = []

    def program(*arguments: Any) -> Any:
        tensors, operations = loops.split_outputs(computation(*arguments))
        with tf.control_dependencies(operations):
            made[:] = tensors
            return [tf.identity(tensor) for tensor in tensors] or [tf.constant(0)]

    results = device_functions.run_computation(program, [tf.convert_to_tensor(value) for value in given], ipus)
    if made:
        return list(results)
    return results[0] if tf.executing_eagerly() else results[0].op


def _in_graph(computation: Callable[..., Any], inputs: List[Any], ordinal: int) -> Any:
    """Adds the computation to a graph of TensorFlow 1. A session runs it and owns its variables.

    Floating point exceptions, and zeros in place of results (PRE_COMPILE), need IPUs that are configured before.
    """
    scope = tf.compat.v1.get_variable_scope()
    before = scope.use_resource
    scope.set_use_resource(True)  # other variables cannot be made within a loop
    program = replicas.Program(1, in_session=True)
    only_compiled = ipu_config.is_pre_compiled()

    def check() -> Any:
        _check_device(ordinal, program.ipus_per_replica, only_compiled)
        return np.int32(0)

    try:
        # Programs may configure their IPUs after the graph is made, so the device is checked when a session runs it.
        checked = tf.numpy_function(check, [], tf.int32)
        with tf.control_dependencies([checked]), replicas.tracing(program), graph_loops.fitting_control_flow():
            outputs = computation(*(tf.identity(value) for value in inputs))
        tensors, operations = loops.split_outputs(outputs)
        if only_compiled:
            tensors, operations = device_functions.zeros_like(tensors), []
        with tf.control_dependencies([checked, *operations]):
            return [tf.identity(tensor) for tensor in tensors] or tf.no_op()
    finally:
        scope.set_use_resource(before)


def _check_device(ordinal: int, needed: int, only_compiled: bool) -> None:
    """Attaches the device, and refuses one that does not fit what is in the graph."""
    ipus = ipu_config.ipus_of_device(ordinal)
    count = pipeline_layout.replicas_for(ipus, needed)
    if count > 1:
        raise NotImplementedError(
            f"A session cannot be emulated on {count} replicas: the device has {ipus} IPUs, and the program takes "
            f"{needed} for each replica. Configure {needed}, or call ipu_compiler.compile in eager mode."
        )
    try:
        compiles = ipu_config.configured_system().only_compiles()
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(error.message) from error  # which a session reports as InvalidArgumentError
    if compiles is not only_compiled:
        raise NotImplementedError(
            "The connection type PRE_COMPILE was set or reset after the graph was made; configure the IPUs before it."
        )
    ipu_config.configured_system().attach()
