"""plan.json: a run's plan as a typed record, also part of checkpoints. Units are in the keys."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Dict, Mapping, Optional, Tuple

from tf_ipu_dp import __version__
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning.plan import Batch, RunPlan
from tf_ipu_dp.planning.recipe import Recipe
from tf_ipu_dp.runs.records import Record


@dataclasses.dataclass(frozen=True)
class DatasetPart(Record):
    """The data set."""

    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("inputs", "targets", "class_names")

    name: str
    train_samples: int
    validation_samples: int
    inputs: str = ""  # shapes and types of an own set's arrays; empty: images
    targets: str = ""  # empty: class numbers
    class_names: Tuple[str, ...] = ()  # in the order of the labels; empty: not known


@dataclasses.dataclass(frozen=True)
class TopologyPart(Record):
    """IPUs, replicas, instances and hosts."""

    ipus: int
    pipeline_stages: int
    pipeline_schedule: Optional[str]
    ipus_per_replica: int
    idle_ipus: int
    replicas: int
    instances: int
    replicas_per_instance: int
    ipus_per_instance: int
    hosts: int
    host_names: Optional[Tuple[str, ...]]
    instances_per_host: int
    launcher: Optional[str]


@dataclasses.dataclass(frozen=True)
class StagePart(Record):
    """One pipeline stage of the model."""

    first_block: str
    blocks: Tuple[str, ...]
    parameters: int
    share_of_work: float


@dataclasses.dataclass(frozen=True)
class ModelPart(Record):
    """The model and its pipeline stages."""

    LEFT_OUT_IF_EMPTY: ClassVar[Tuple[str, ...]] = ("fingerprint",)

    name: str
    norm: str
    parameters: int
    multiply_adds_per_sample: int
    image: Tuple[int, int, int]  # height, width, channels
    classes: int
    stages: Tuple[StagePart, ...]
    fingerprint: str = ""  # of an own model: a hash of its layers, their settings and the shapes of their weights


@dataclasses.dataclass(frozen=True)
class BatchPart(Record):
    """How one weight update is divided."""

    micro_batch_samples: int
    accumulation_micro_batches: int
    global_batch_samples: int


@dataclasses.dataclass(frozen=True)
class TrainingPart(Record):
    """Weight updates, executions and epochs."""

    updates_per_epoch: int
    dropped_samples_per_epoch: int
    updates_per_execution: int
    executions_per_epoch: int
    micro_batches_per_epoch_per_instance: int
    epochs: int
    last_epoch_updates: int
    updates: int


@dataclasses.dataclass(frozen=True)
class ValidationPart(Record):
    """How the validation set is divided."""

    samples: int
    samples_per_instance_most: int
    samples_per_instance_least: int
    micro_batches_per_instance: int
    padded_samples: int


@dataclasses.dataclass(frozen=True)
class KerasPart(Record):
    """Arguments for Keras, in which steps are micro batches."""

    steps_per_execution: int
    steps_per_epoch: int
    last_epoch_steps: int
    validation_steps: int
    validation_steps_per_execution: int


@dataclasses.dataclass(frozen=True)
class ReplicaPart(Record):
    """Where one replica runs."""

    replica: int
    instance: int
    host: int  # counted from 0
    stage_ipu_ids: Tuple[int, ...]
    idle_ipu_ids: Tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PlanRecord(Record):
    """A plan, resolved. `--dry_run --json` prints it, a run's folder and its checkpoints contain it."""

    SCHEMA: ClassVar[int] = 1

    version: str
    dataset: DatasetPart
    topology: TopologyPart
    model: ModelPart
    recipe: Recipe
    notes: Tuple[str, ...]
    batch: BatchPart
    training: TrainingPart
    validation: ValidationPart
    keras: KerasPart
    replicas: Tuple[ReplicaPart, ...]

    @property
    def job_batch(self) -> Batch:
        """Returns the batch as the planner takes it, to plan the same global batch on another topology."""
        return Batch(self.batch.micro_batch_samples, self.batch.accumulation_micro_batches, self.topology.replicas)

    @classmethod
    def _upgrade(cls, value: Dict[str, Any], schema: int) -> Dict[str, Any]:
        """Adds recipe flags that the release of this plan did not have."""
        if isinstance(value.get("recipe"), Mapping):
            value["recipe"] = {**train_flags.recipe_defaults(), **value["recipe"]}
        return super()._upgrade(value, schema)

    @classmethod
    def of(cls, plan: RunPlan) -> PlanRecord:
        """Returns the record of a plan."""
        topology, batch, epochs, validation, keras = plan.topology, plan.batch, plan.epochs, plan.validation, plan.keras
        architecture = plan.model.architecture
        shards = {len(validation.shard(instance)) for instance in (0, topology.instances - 1)}
        stages = topology.pipeline_stages
        return cls(
            version=__version__,
            dataset=DatasetPart(
                plan.dataset.name,
                plan.dataset.train_samples,
                plan.dataset.validation_samples,
                inputs=str(plan.dataset.inputs or ""),
                targets=str(plan.dataset.targets or ""),
                class_names=plan.dataset.class_names,
            ),
            topology=TopologyPart(
                ipus=topology.ipus,
                pipeline_stages=stages,
                pipeline_schedule=topology.pipeline_schedule if stages > 1 else None,
                ipus_per_replica=topology.ipus_per_replica,
                idle_ipus=topology.idle_ipus,
                replicas=topology.replicas,
                instances=topology.instances,
                replicas_per_instance=topology.local_replicas,
                ipus_per_instance=topology.ipus_per_instance,
                hosts=topology.hosts.count,
                host_names=topology.hosts.names or None,
                instances_per_host=topology.instances_per_host,
                launcher=topology.launcher,
            ),
            model=ModelPart(
                name=architecture.name,
                norm=architecture.norm,
                parameters=architecture.parameters,
                multiply_adds_per_sample=architecture.macs,
                image=(architecture.height, architecture.width, architecture.channels),
                classes=architecture.classes,
                stages=tuple(
                    StagePart(
                        first_block=blocks[0].name,
                        blocks=tuple(block.name for block in blocks),
                        parameters=sum(block.parameters for block in blocks),
                        share_of_work=plan.model.share(stage),
                    )
                    for stage, blocks in enumerate(plan.model.stages)
                ),
                fingerprint=architecture.own.fingerprint if architecture.own else "",
            ),
            recipe=plan.recipe,
            notes=tuple(plan.notes),
            batch=BatchPart(batch.micro_batch_size, batch.accumulation, batch.global_batch_size),
            training=TrainingPart(
                updates_per_epoch=epochs.updates_per_epoch,
                dropped_samples_per_epoch=epochs.dropped_samples_per_epoch,
                updates_per_execution=epochs.device_iterations,
                executions_per_epoch=epochs.executions_per_epoch,
                micro_batches_per_epoch_per_instance=keras.steps_per_epoch,
                epochs=epochs.epochs,
                last_epoch_updates=epochs.last_epoch_updates or epochs.updates_per_epoch,
                updates=epochs.updates,
            ),
            validation=ValidationPart(
                samples=validation.samples,
                samples_per_instance_most=max(shards),
                samples_per_instance_least=min(shards),
                micro_batches_per_instance=keras.validation_steps,
                padded_samples=validation.padded_samples,
            ),
            keras=KerasPart(
                steps_per_execution=keras.steps_per_execution,
                steps_per_epoch=keras.steps_per_epoch,
                last_epoch_steps=keras.last_epoch_steps,
                validation_steps=keras.validation_steps,
                validation_steps_per_execution=keras.validation_steps_per_execution,
            ),
            replicas=tuple(
                ReplicaPart(
                    replica=replica.index,
                    instance=replica.instance,
                    host=replica.host,
                    stage_ipu_ids=tuple(replica.ipu_ids[:stages]),
                    idle_ipu_ids=tuple(replica.ipu_ids[stages:]),
                )
                for replica in topology.all_replicas()
            ),
        )
