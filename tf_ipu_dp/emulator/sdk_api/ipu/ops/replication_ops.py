"""`tensorflow.python.ipu.ops.replication_ops`."""

from __future__ import annotations

from typing import Any, Optional

import tensorflow as tf

from tf_ipu_dp.emulator.runtime import replicas


def replication_index(name: Optional[str] = None) -> Any:
    """Returns the number of the replica that executes this, an int32 scalar."""
    return tf.identity(replicas.index(), name=name)
