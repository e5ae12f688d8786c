"""How replicas share the host's cores.

Two time-sliced micro batches are in flight at a time. Each is fastest on half of the cores: splitting every operation
over all of them costs more than it gains when there is a second one to compute (`benchmarks/emulator.py`). TensorFlow
takes such settings only before it has started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os

_M_ARENA_MAX = -8  # of glibc's malloc.h


def share_between_replicas() -> None:
    """Gives each operation half of the cores, unless the user has chosen or TensorFlow has started."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    if context.context()._context_handle is not None or tf.config.threading.get_intra_op_parallelism_threads():
        return
    chosen = os.environ.get("TF_NUM_INTRAOP_THREADS")
    if chosen and chosen != os.environ.get("IPU_EMULATOR_CORES"):
        return
    cores = of_instance()
    if cores < 2:
        return
    tf.config.threading.set_intra_op_parallelism_threads(cores // 2)
    if not tf.config.threading.get_inter_op_parallelism_threads():
        tf.config.threading.set_inter_op_parallelism_threads(cores)
    # One arena, so that a thread can reuse what another has freed: the second micro batch then needs less memory.
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def of_instance() -> int:
    """Returns the cores of this instance: those that poprun gave it, or its share of the host's."""
    given = os.environ.get("IPU_EMULATOR_CORES", "")
    if given.isdigit():
        return int(given)
    cores = len(os.sched_getaffinity(0))
    neighbours = os.environ.get("HOROVOD_LOCAL_SIZE") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or "1"
    bound = cores < (os.cpu_count() or 1)  # mpirun and srun may do that
    return cores if bound or not neighbours.isdigit() else cores // max(int(neighbours), 1)
