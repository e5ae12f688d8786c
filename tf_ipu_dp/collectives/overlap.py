"""How much of the all-reduces the backward pass hides: bucket after bucket, as gradients become ready. Pure, numpy."""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import numpy as np

from tf_ipu_dp import cli

Array = Any  # numpy has no types that hold for both releases


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Seconds of each trial: the whole training step, and the part of it that waits for collectives alone."""

    step_s: Array
    exposed_s: Array


def even_ready_times(forward_s: float, backward_s: float, bucket_bytes: Sequence[float]) -> Array:
    """Returns when each bucket is ready, if the backward pass makes gradients at an even rate."""
    sizes: Array = np.asarray(bucket_bytes, dtype=float)
    return forward_s + backward_s * np.cumsum(sizes) / sizes.sum()


def step_times(ready_s: Array, bucket_s: Array, compute_s: Array, optimizer_s: float = 0.0) -> Step:
    """Returns the time of training steps.

    `ready_s` and `bucket_s` have a row per trial, or one for all, and a column per bucket in the order of the backward
    pass; `compute_s` is the forward and backward pass of the slowest replica. Buckets are reduced one after the other.
    """
    ready, seconds = np.broadcast_arrays(np.atleast_2d(ready_s), np.atleast_2d(bucket_s))
    if ready.shape[1] == 0 or optimizer_s < 0 or (seconds < 0).any():
        raise cli.UsageError("A step needs at least one bucket and no negative times.")
    finish = np.zeros(len(ready))
    for bucket in range(ready.shape[1]):
        finish = np.maximum(ready[:, bucket], finish) + seconds[:, bucket]
    compute: Array = np.broadcast_to(np.asarray(compute_s, dtype=float), finish.shape)
    return Step(np.maximum(compute, finish) + optimizer_s, np.maximum(finish - compute, 0.0))
