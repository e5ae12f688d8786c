"""`tensorflow.python.ipu.ops.control_flow_ops`: the barrier, which orders work on an IPU and changes no value."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

__all__ = ["barrier"]


def barrier(tensors: Any, insert_barrier_for_gradients: bool = False, name: Optional[str] = None) -> Any:
    """Returns the tensors of a nest, each available only when all of them are."""
    del insert_barrier_for_gradients
    with tf.name_scope(name or "barrier"):
        tensors = tf.nest.map_structure(tf.convert_to_tensor, tensors)
        with tf.control_dependencies(tf.nest.flatten(tensors)):
            return tf.nest.map_structure(tf.identity, tensors)
