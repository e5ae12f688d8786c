"""How the work of a run is counted: batches, epochs, executions, validation, and the steps that Keras takes. Pure."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Iterable

from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning.topology import Topology

# Micro batches of a replica in one validation execution, whose outputs are kept until its end.
_MAX_VALIDATION_STEPS = 64
# Multiply-adds of an execution that is long enough for what the host does between two: tens of milliseconds on a few
# cores of a host, where that is about a millisecond.
_ENOUGH_WORK = 2 * 10**9
# Three times those of the forward pass: the backward pass has two products for each of the forward pass.
_PASSES = 3
# A run makes at least so many executions in an epoch, so that it can be watched and stopped.
_FEWEST_EXECUTIONS = 8
# So many updates are enough whatever they compute: each of them takes at least some tenths of a millisecond.
_MOST_UPDATES = 32


@dataclasses.dataclass(frozen=True)
class Batch:
    """How one weight update is divided over the job."""

    micro_batch_size: int
    accumulation: int
    replicas: int

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation * self.replicas


@dataclasses.dataclass(frozen=True)
class Epochs:
    """How the training is divided into epochs, executions and steps. A step is one weight update.

    A run of fewer steps than an epoch has no full epoch, only the last one, which is partial.
    """

    updates_per_epoch: int
    dropped_samples_per_epoch: int
    device_iterations: int
    full_epochs: int
    last_epoch_updates: int

    @property
    def updates(self) -> int:
        """Weight updates of the whole run."""
        return self.full_epochs * self.updates_per_epoch + self.last_epoch_updates

    @property
    def epochs(self) -> int:
        """Number of epochs, the last of which may be partial."""
        return self.full_epochs + bool(self.last_epoch_updates)

    def end_of_fit(self, first_update: int, most_epochs: int) -> int:
        """Returns the update before which a call of `fit` ends that begins with one.

        It makes the rest of an epoch, whole epochs or the partial last one: all its epochs have the same length.
        """
        begun = first_update % self.updates_per_epoch
        if begun:
            return min(first_update - begun + self.updates_per_epoch, self.updates)
        whole = min((self.updates - first_update) // self.updates_per_epoch, most_epochs)
        return first_update + whole * self.updates_per_epoch if whole else self.updates

    @property
    def executions_per_epoch(self) -> int:
        """Executions of a full epoch; where there is none, of the partial one."""
        return (self.updates_per_epoch if self.full_epochs else self.last_epoch_updates) // self.device_iterations


@dataclasses.dataclass(frozen=True)
class Validation:
    """How every validation sample is covered exactly once; slots beyond the samples are padding, to be masked."""

    samples: int
    instances: int
    slots_per_instance: int

    @property
    def padded_samples(self) -> int:
        return self.slots_per_instance * self.instances - self.samples

    def shard(self, instance: int) -> range:
        """Returns the samples of one instance: disjoint, complete, and even up to one sample."""
        return range(self.samples * instance // self.instances, self.samples * (instance + 1) // self.instances)


@dataclasses.dataclass(frozen=True)
class KerasSteps:
    """The arguments for Keras on IPUs, where a step is a micro batch of an instance; per execution, of a replica."""

    steps_per_execution: int
    steps_per_epoch: int
    last_epoch_steps: int
    validation_steps: int
    validation_steps_per_execution: int


def choose_device_iterations(macs: int, samples: int, updates: int, multiples: Iterable[int]) -> int:
    """Returns how many weight updates make an execution that is long enough, where nobody has said.

    `macs` are the multiply-adds of a sample's forward pass, `samples` those of an instance in an update. All of
    `multiples` (the updates of an epoch, between checkpoints, ...) are multiples of what is returned; `updates` are
    those of the shortest part that should have several executions.
    """
    if not macs:
        return 1
    wanted = _ceil_divide(_ENOUGH_WORK, _PASSES * macs * samples)
    common = functools.reduce(math.gcd, multiples, 0)
    most = max(min(updates // _FEWEST_EXECUTIONS, common, _MOST_UPDATES), 1)
    fitting = [number for number in range(1, most + 1) if common % number == 0]
    return next((number for number in fitting if number >= wanted), fitting[-1])


def plan_validation(dataset: DatasetInfo, topology: Topology, batch: Batch, keras: KerasSteps) -> Validation:
    """Returns how the validation samples are divided over the instances."""
    return Validation(dataset.validation_samples, topology.instances, keras.validation_steps * batch.micro_batch_size)


def plan_keras_steps(dataset: DatasetInfo, topology: Topology, batch: Batch, epochs: Epochs) -> KerasSteps:
    """Returns the steps of training, and those of a validation that is padded as little as the rules allow.

    Validation executions have another length: those of training can be longer than the whole validation.
    """
    steps_per_update = batch.accumulation * topology.local_replicas
    pipelined = topology.pipeline_stages > 1 and topology.pipeline_schedule != "sequential"
    unit = topology.pipeline_stages if pipelined else 1
    largest_shard = _ceil_divide(dataset.validation_samples, topology.instances)
    steps_per_replica = max(_ceil_divide(largest_shard, topology.local_replicas * batch.micro_batch_size), 1)
    executions = _ceil_divide(steps_per_replica, _MAX_VALIDATION_STEPS)
    per_execution = _ceil_divide(steps_per_replica, executions * unit) * unit
    return KerasSteps(
        steps_per_execution=batch.accumulation * epochs.device_iterations,
        steps_per_epoch=epochs.executions_per_epoch * epochs.device_iterations * steps_per_update,
        last_epoch_steps=(epochs.last_epoch_updates or epochs.updates_per_epoch) * steps_per_update,
        validation_steps=executions * per_execution * topology.local_replicas,
        validation_steps_per_execution=per_execution,
    )


def _ceil_divide(number: int, divisor: int) -> int:
    return -(-number // divisor)
