"""Random numbers that differ between replicas, and restart with `reset_ipu_seed`.

TensorFlow's stateful random operations draw from one stream per process. On more than one replica, and after
`reset_ipu_seed`, operations traced for the device draw instead from the seed, their own seed, the replica's number and
how often the replica has executed them: so numbers do not depend on how many replicas a process holds.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Optional

import tensorflow as tf
from tensorflow.python.ops import gen_random_ops, resource_variable_ops

from tf_ipu_dp.emulator import patches
from tf_ipu_dp.emulator.runtime import replicas
from tf_ipu_dp.emulator.sdk_api import popdist

_PATCH = "random numbers"
_STATELESS = {
    "random_uniform": lambda shape, dtype, key: tf.random.stateless_uniform(shape, key, dtype=dtype),
    "random_standard_normal": lambda shape, dtype, key: tf.random.stateless_normal(shape, key, dtype=dtype),
    "truncated_normal": lambda shape, dtype, key: tf.random.stateless_truncated_normal(shape, key, dtype=dtype),
}
_stock: Dict[str, Any] = {}
_base = [int.from_bytes(os.urandom(4), "little") >> 1]
_reset: List[Optional[int]] = [None]
_counters: List[Any] = []
_seed: List[Any] = []


def extend_tensorflow() -> None:
    """Makes random operations depend on the program of the device that runs them. Calling it twice is harmless."""
    if patches.is_applied(_PATCH):
        return
    replacements = {name: _dispatch(name, make) for name, make in _STATELESS.items()}
    replacements["random_uniform_int"] = _dispatch_int
    for name, replacement in replacements.items():
        _stock[name] = getattr(gen_random_ops, name)
        patches.set_attribute(_PATCH, gen_random_ops, name, replacement)


def reset_seed(seed: int, identical: bool) -> None:
    """Restarts all random numbers of the device."""
    _reset[0] = seed
    for counter in _counters:
        counter.assign(0)
    _seed_variable().assign([_as_int32(seed), 0 if identical else 1])


def forget_seed() -> None:
    """Returns to a random seed."""
    _reset[0] = None


def generation() -> int:
    """Returns a number that changes when functions have to be traced again to draw from the right source."""
    return int(_reset[0] is not None)


def is_device_random() -> bool:
    """Whether the program being traced draws its random numbers from this module."""
    program = replicas.current()
    if program is None or tf.executing_eagerly():
        return False
    return program.replicas > 1 or popdist.getNumTotalReplicas() > 1 or _reset[0] is not None


def _dispatch(name: str, make: Any) -> Any:
    def draw(shape: Any, dtype: Any, seed: Optional[int] = 0, seed2: Optional[int] = 0, name: Any = None) -> Any:
        if not is_device_random():
            return _stock[kind](shape, dtype, seed=seed, seed2=seed2, name=name)
        return make(shape, tf.as_dtype(dtype), _key(seed, seed2))

    kind = name
    return draw


def _dispatch_int(
    shape: Any, minval: Any, maxval: Any, seed: Optional[int] = 0, seed2: Optional[int] = 0, name: Any = None
) -> Any:
    if not is_device_random():
        return _stock["random_uniform_int"](shape, minval, maxval, seed=seed, seed2=seed2, name=name)
    dtype = tf.convert_to_tensor(minval).dtype
    return tf.random.stateless_uniform(shape, _key(seed, seed2), minval=minval, maxval=maxval, dtype=dtype)


def _key(seed: Optional[int], seed2: Optional[int]) -> Any:
    """Returns the key of one draw on one replica, and counts it."""
    program = replicas.current()
    assert program is not None
    position, parts = program.random_ops, program.draws_of_parts
    program.random_ops += 1
    if parts is not None and position in parts.made:
        operation_key, before = parts.made[position]
    else:
        # Depends only on the operation: its position in the program, and its own seeds.
        operation_key = (position * 1000003 + (seed or 0) * 7919 + (seed2 or 0) * 104729) % (1 << 31)
        before = _count_executions(parts.count if parts else 1)
        if parts is not None:
            parts.made[position] = operation_key, before
    executions = before + parts.number if parts else before
    shared = program.replicas if not program.concurrent and not program.updating else 1
    number = program.index() + popdist.getReplicaIndexOffset()
    start = tf.constant(0 if seed or seed2 else _base[0])
    if _reset[0] is not None:
        start, differ = tf.unstack(_seed_variable().read_value())
        number *= differ
    first = tf.random.stateless_uniform([2], [start, operation_key], minval=None, maxval=None, dtype=tf.int32)
    return tf.stack([tf.bitwise.bitwise_xor(first[0], number * 40503), first[1] + executions // shared])


def _count_executions(added: int) -> Any:
    """Returns how often the operation being traced has been executed before, and adds to it."""
    with tf.init_scope():
        counter = _variable()
        _counters.append(counter)
    return counter.assign_add(added, read_value=True) - added


def _seed_variable() -> Any:
    if not _seed:
        with tf.init_scope():
            _seed.append(_variable([0, 1]))
    return _seed[0]


def _variable(start: Any = 0) -> Any:
    """Makes an integer variable. TensorFlow may forbid tf.Variable in the function being traced."""
    return resource_variable_ops.ResourceVariable(start, dtype=tf.int32, trainable=False)


def _as_int32(seed: int) -> int:
    return (int(seed) + (1 << 31)) % (1 << 32) - (1 << 31)
