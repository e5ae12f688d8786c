"""What one weight update all-reduces between instances: tensors as they are sent, fused into buckets. Pure.

Small gradients are sent as one vector, large ones on their own. Horovod fuses what it is given at the same time, in
that order, into buffers of at most HOROVOD_FUSION_THRESHOLD bytes, and all-reduces each buffer as a whole.
"""

from __future__ import annotations

import dataclasses
from typing import List, Sequence, Tuple

from tf_ipu_dp.planning import gradients
from tf_ipu_dp.planning.gradients import Gradient
from tf_ipu_dp.planning.plan import RunPlan

FUSION_THRESHOLD_VARIABLE = "HOROVOD_FUSION_THRESHOLD"
FUSION_THRESHOLD = 128 << 20  # Horovod's default
# Elements from which on a gradient is sent on its own. A test compares it with what the emulator sends.
SENT_ALONE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients that are all-reduced together."""

    variables: Tuple[str, ...]
    bytes: int


@dataclasses.dataclass(frozen=True)
class JobSize:
    """What the weight updates of a job all-reduce between its instances."""

    instances: int
    updates_per_epoch: int
    updates: int
    bytes_per_element: int
    gradients: Tuple[Gradient, ...]
    tensors: Tuple[Bucket, ...]  # as they are handed to the engine, all at once
    buckets: Tuple[Bucket, ...]  # as the engine fuses them

    @property
    def bytes(self) -> int:
        return sum(bucket.bytes for bucket in self.buckets)

    @property
    def sent_bytes(self) -> float:
        """What each instance sends in one update if a ring sums the gradients."""
        return 2 * (self.instances - 1) / self.instances * self.bytes


def job_size(run: RunPlan, *, precision: str, deterministic: bool, threshold: int) -> JobSize:
    """Returns the sizes of a planned job."""
    size = gradients.bytes_per_element(precision, deterministic)
    found = gradients.gradients(run.model.architecture)
    return JobSize(
        run.topology.instances,
        run.epochs.updates_per_epoch,
        run.epochs.updates,
        size,
        found,
        sent_tensors(found, size),
        fuse(sent_tensors(found, size), threshold),
    )


def sent_tensors(found: Sequence[Gradient], bytes_per_element: int) -> Tuple[Bucket, ...]:
    """Returns the tensors in which a model's gradients are sent: small ones together, then large ones."""
    small = tuple(each for each in found if each.elements < SENT_ALONE)
    groups = [small] if small else []
    groups += [(each,) for each in found if each.elements >= SENT_ALONE]
    return tuple(
        Bucket(tuple(each.variable for each in group), sum(each.elements for each in group) * bytes_per_element)
        for group in groups
    )


def fuse(tensors: Sequence[Bucket], threshold: int) -> Tuple[Bucket, ...]:
    """Returns the buckets that Horovod makes of tensors, given at the same time."""
    buckets: List[Bucket] = []
    for tensor in tensors:
        if buckets and buckets[-1].bytes + tensor.bytes <= threshold:
            last = buckets.pop()
            buckets.append(Bucket(last.variables + tensor.variables, last.bytes + tensor.bytes))
        else:
            buckets.append(tensor)
    return tuple(buckets)
