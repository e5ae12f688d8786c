"""`tensorflow.python.ipu.ipu_compiler`: a computation as one program of the device."""

from __future__ import annotations

from typing import Any, Callable, List

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import replicas
from tf_ipu_dp.emulator.sdk_api.ipu import config as ipu_config
from tf_ipu_dp.emulator.sdk_api.ipu import loops, scopes


def compile(computation: Callable[..., Any], inputs: Any = None) -> Any:
    """Runs a computation as one program; returns its tensors as a list, or an operation if it returns none."""
    if not scopes.is_in_ipu_scope() and not getattr(tf.distribute.get_strategy(), "enable_keras_extensions", False):
        raise Exception("The computation is not placed on an IPU device: use ipu.scopes.ipu_scope().")
    given = [] if inputs is None else list(inputs)
    count = ipu_config.configured_system().ipus_per_device[0]
    if count > 1:
        raise NotImplementedError(
            f"ipu_compiler.compile cannot be emulated on {count} replicas: use strategy.run() with a tf.function."
        )
    ipu_config.configured_system().attach()
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return _in_graph(computation, given)
    made: List[Any] = []

    def program(*arguments: Any) -> Any:
        with replicas.traced_as(replicas.Program(1)):
            outputs = computation(*arguments)
        tensors, operations = loops.split_outputs(outputs)
        with tf.control_dependencies(operations):
            made[:] = tensors
            return [tf.identity(tensor) for tensor in tensors] or [tf.constant(0)]

    results = tf.function(program)(*(tf.convert_to_tensor(value) for value in given))
    if made:
        return list(results)
    return results[0] if tf.executing_eagerly() else results[0].op


def _in_graph(computation: Callable[..., Any], inputs: List[Any]) -> Any:
    """Adds the computation to a graph of TensorFlow 1. A session runs it and owns its variables."""
    scope = tf.compat.v1.get_variable_scope()
    before = scope.use_resource
    scope.set_use_resource(True)  # other variables cannot be made within a loop
    try:
        with replicas.traced_as(replicas.Program(1)):
            outputs = computation(*(tf.convert_to_tensor(value) for value in inputs))
        tensors, operations = loops.split_outputs(outputs)
        with tf.control_dependencies(operations):
            return [tf.identity(tensor) for tensor in tensors] or tf.no_op()
    finally:
        scope.set_use_resource(before)
