"""Which samples each micro batch takes, and the random numbers that belong to a sample. Pure numpy, no TensorFlow.

The order of the samples depends only on the seed and the epoch; the random numbers depend only on the seed, the epoch
and the sample. So neither depends on the number of instances and replicas.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tf_ipu_dp.planning.plan import RunPlan


def permutation(seed: int, epoch: int, samples: int) -> Any:
    """Returns the epoch's order of the samples; the same on every machine, as numpy has frozen this generator."""
    return np.random.RandomState([seed, epoch]).permutation(samples).astype(np.int32)


def random_numbers(seed: int, epoch: int, samples: Any, count: int) -> Any:
    """Returns `count` numbers in [0, 1) for each sample, [..., count]: a hash of seed, epoch and sample."""
    with np.errstate(over="ignore"):
        key = _splitmix64(_splitmix64(np.array([seed], np.uint64)) + np.array([epoch], np.uint64))
        which = np.asarray(samples).astype(np.uint64)[..., None] * np.uint64(8) + np.arange(count, dtype=np.uint64)
        return ((_splitmix64(which + key) >> np.uint64(40)) * 2.0**-24).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class TrainingShard:
    """The samples of one instance in a range of updates, which are counted from the start of the run."""

    run: RunPlan
    instance: int
    first_update: int
    last_update: int

    @property
    def epochs(self) -> range:
        """The epochs of the updates."""
        per_epoch = self.run.epochs.updates_per_epoch
        return range(self.first_update // per_epoch, -(-self.last_update // per_epoch))

    @property
    def micro_batches(self) -> int:
        """Micro batches of the instance in all updates."""
        return sum(map(self.micro_batches_in, self.epochs))

    def updates_in(self, epoch: int) -> range:
        """Returns the updates within an epoch, counted from its start."""
        per_epoch = self.run.epochs.updates_per_epoch
        before = epoch * per_epoch
        return range(max(self.first_update - before, 0), min(self.last_update - before, per_epoch))

    def micro_batches_in(self, epoch: int) -> int:
        """Returns the instance's micro batches in an epoch."""
        return len(self.updates_in(epoch)) * self.run.batch.accumulation * self.run.topology.local_replicas

    def samples_in(self, seed: int, epoch: int) -> Any:
        """Returns the instance's samples in an epoch, [micro batches, micro batch size].

        They come in the order in which the SDK takes them: for each update and each micro batch of its accumulation,
        one micro batch for each local replica.
        """
        batch, topology = self.run.batch, self.run.topology
        used = self.run.epochs.updates_per_epoch * batch.global_batch_size
        ordered = permutation(seed, epoch, self.run.dataset.train_samples)[:used]
        by_update = ordered.reshape(-1, batch.accumulation, batch.replicas, batch.micro_batch_size)
        updates, first = self.updates_in(epoch), self.instance * topology.local_replicas
        shard = by_update[updates.start : updates.stop, :, first : first + topology.local_replicas]
        return shard.reshape(-1, batch.micro_batch_size)


def _splitmix64(words: Any) -> Any:
    """Returns the output function of the generator SplitMix64."""
    words = words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
