"""Topology, batch and step arithmetic.

Pure: a config, facts about the data and what poprun gave in; a RunPlan or a refusal out. Nobody else calculates any of
this. A refusal lists all problems at once, and every value that it suggests has been planned before it is suggested.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.schema import SCHEDULES, Duration, Hosts, LossScaling, TrainConfig
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning import architectures, errors
from tf_ipu_dp.planning.architectures import Architecture, Block
from tf_ipu_dp.planning.errors import Fix, PlanError, Problem

_LEARNING_RATES = {"sgd": 0.05, "adam": 0.001, "lars": 1.0}
_STATIC_LOSS_SCALE = 128.0
_WARMUP_EPOCHS = 0.5
_MOST_WARMUP = 0.1
# Micro batches of a replica in one execution of the validation: their outputs are kept until its end.
_MOST_VALIDATION_STEPS = 64
_DROPS = (0.5, 0.75)


@dataclasses.dataclass(frozen=True)
class LaunchedTopology:
    """What a launcher has already decided: the job that this process is one instance of."""

    launcher: str
    replicas: int
    ipus_per_replica: int
    instances: int
    instance: int
    hosts: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Replica:
    """Where one copy of the model lives. Stage s runs on `ipu_ids[s]`; IPUs beyond the stages are idle."""

    index: int
    instance: int
    host: int
    ipu_ids: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Topology:
    """IPUs, replicas, instances and hosts of the whole job."""

    ipus: int
    pipeline_stages: int
    pipeline_schedule: str
    instances: int
    hosts: Hosts
    launcher: Optional[str]

    @property
    def ipus_per_replica(self) -> int:
        return ipus_per_replica(self.pipeline_stages)

    @property
    def replicas(self) -> int:
        return self.ipus // self.ipus_per_replica

    @property
    def local_replicas(self) -> int:
        """Replicas that one instance drives."""
        return self.replicas // self.instances

    @property
    def ipus_per_instance(self) -> int:
        return self.ipus // self.instances

    @property
    def instances_per_host(self) -> int:
        return self.instances // self.hosts.count

    @property
    def idle_ipus(self) -> int:
        """IPUs that a replica holds because they come in powers of two, and that run no stage."""
        return self.replicas * (self.ipus_per_replica - self.pipeline_stages)

    def host_name(self, host: int) -> str:
        """Returns the name given for a host, or its number."""
        return self.hosts.names[host] if self.hosts.names else f"host {host}"

    def replica(self, index: int) -> Replica:
        """Returns where a replica lives. Replicas are dealt to instances, and instances to hosts, in blocks."""
        instance = index // self.local_replicas
        first = index * self.ipus_per_replica
        ids = range(first, first + self.ipus_per_replica)
        return Replica(index, instance, instance // self.instances_per_host, ids)

    def all_replicas(self) -> Iterator[Replica]:
        """Goes through the replicas in order."""
        return map(self.replica, range(self.replicas))


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
class Layout:
    """One way to divide a global batch over a job."""

    ipus: int
    instances: int
    micro_batch_size: int
    accumulation: int

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Returns the config with this layout in the place of its own."""
        return dataclasses.replace(
            config,
            ipus=self.ipus,
            instances=self.instances,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation=self.accumulation,
            global_batch_size=None,
        )


@dataclasses.dataclass(frozen=True)
class Epochs:
    """How the training is divided into epochs, executions and steps. A step is one weight update.

    A run of fewer steps than an epoch has no full epoch; its only one is the last, a part.
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
        """Epochs, the last of which may be a part of one."""
        return self.full_epochs + bool(self.last_epoch_updates)

    @property
    def executions_per_epoch(self) -> int:
        """Of a full epoch; where there is none, of the part that is trained."""
        return (self.updates_per_epoch if self.full_epochs else self.last_epoch_updates) // self.device_iterations


@dataclasses.dataclass(frozen=True)
class Validation:
    """How the validation samples are covered exactly once; slots beyond them are padding, to be masked."""

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
    """The arguments for Keras on IPUs. A step is a micro batch: of one replica in an execution, else of an instance."""

    steps_per_execution: int
    steps_per_epoch: int
    last_epoch_steps: int
    validation_steps: int
    validation_steps_per_execution: int


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the weights change, with every number resolved. Lengths are in weight updates of the whole job."""

    optimizer: str  # sgd, adam or lars
    learning_rate: float  # the highest, after scaling
    schedule: str  # constant, step, cosine or polynomial
    warmup_updates: int  # rises from 0 to the highest rate in so many updates
    updates: int  # where cosine and polynomial reach 0
    drops: Tuple[int, ...]  # updates at which step goes down to a tenth
    momentum: float
    weight_decay: float
    l2: float
    label_smoothing: float
    loss_scale: Optional[float]  # 1: none; None: dynamic
    reduction: str  # mean or sum
    precision: str  # 32.32, 16.32 or 16.16


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """The model and how it is cut: one tuple of blocks per pipeline stage."""

    architecture: Architecture
    stages: Tuple[Tuple[Block, ...], ...]

    def share(self, stage: int) -> float:
        """Returns the part of the model's work that a stage does, from 0 to 1."""
        return sum(block.macs for block in self.stages[stage]) / max(self.architecture.macs, 1)


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """One run, laid out. It is the same on every instance."""

    dataset: DatasetInfo
    model: ModelPlan
    topology: Topology
    batch: Batch
    epochs: Epochs
    validation: Validation
    keras: KerasSteps
    recipe: Recipe
    checkpoint_every: int  # updates
    log_every: int  # updates
    augment: str
    notes: Tuple[str, ...]  # what works but will surprise


def plan_run(config: TrainConfig, dataset: DatasetInfo, launched: Optional[LaunchedTopology] = None) -> RunPlan:
    """Lays a run out, or raises PlanError with every problem that it has."""
    draft = _examine(config, dataset, launched)
    if draft.plan:
        return draft.plan

    def rules_after(fix: Fix) -> Tuple[str, ...]:
        return _examine(fix.apply(config), dataset, launched).rules()

    before = set(draft.rules())
    problems = []
    for rule, sentence, candidates in draft.broken:
        outcomes = [(fix, rules_after(fix)) for fix in errors.without_repeats(candidates(), config)]
        helpful = [(fix, after) for fix, after in outcomes if rule not in after]
        clean = [fix for fix, after in helpful if before.issuperset(after)]
        problems.append(Problem(rule, sentence, tuple(clean or [fix for fix, _ in helpful])))
    raise PlanError(problems)


def layouts(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology] = None
) -> Tuple[Layout, ...]:
    """Returns the layouts that keep a global batch on the config's IPUs, the nearest to the config first.

    Every one has been planned. Of many micro batch sizes those nearest to the config's are tried. What a launcher has
    started is not changed.
    """
    stages = _stages_asked(config) or (launched.ipus_per_replica if launched else 1)
    ipus = launched.replicas * launched.ipus_per_replica if launched else config.ipus or 1
    replicas = ipus // ipus_per_replica(stages)
    unit = accumulation_unit(stages, config.pipeline_schedule)
    if not replicas or global_batch % (replicas * unit):
        return ()
    near = config.micro_batch_size
    asked = launched.instances if launched else config.instances or 1
    sizes = [
        near,
        *sorted(errors.divisors_around(global_batch // (replicas * unit), near), key=lambda n: abs(n - near)),
    ]
    counts = [asked] if launched else sorted(errors.powers(1, replicas), key=lambda n: abs(n - asked))
    possible = (
        Layout(ipus, instances, size, global_batch // (replicas * size))
        for size in sizes
        if global_batch % (replicas * size) == 0
        for instances in counts
    )
    return tuple(each for each in possible if _keeps(each.apply(config), dataset, global_batch, launched))


def keep_global_batch(
    config: TrainConfig, dataset: DatasetInfo, was: Batch, launched: Optional[LaunchedTopology] = None
) -> TrainConfig:
    """Returns the config with which a run goes on with its global batch: as it is, or with the accumulation left open.

    An accumulation that is the run's own is no wish for another batch: it came with the run's flags. What cannot keep
    the global batch is a PlanError with what can.
    """
    total = was.global_batch_size
    solved = _open_accumulation(config, was)
    for candidate in (config, solved):
        if _keeps(candidate, dataset, total, launched):
            return candidate

    def works(fix: Fix) -> bool:
        return _keeps(_open_accumulation(fix.apply(config), was), dataset, total, launched)

    trained = f"the run was trained with global batch {total}"
    draft = _examine(solved, dataset, launched)
    problems = []
    for rule, sentence, candidates in draft.broken:
        if rule == "global_batch":
            said = _cannot_keep(config, dataset, total, launched)
        else:
            said = f"{sentence.rstrip('.')}; {trained}."
        ways = errors.without_repeats(candidates(), config), _ways_to_keep(config, dataset, total, launched)
        own, others = (tuple(filter(works, each)) for each in ways)
        problems.append(Problem(rule, said, others if rule == "global_batch" else own or others))
    if draft.plan:
        names = ("global_batch_size", "gradient_accumulation")
        said = f"{_given(config, *names)} makes a global batch of {draft.plan.batch.global_batch_size}, but {trained}."
        left_out = errors.without_repeats([Fix(tuple((name, None) for name in names))], config)
        problems.append(Problem("kept_batch", said, tuple(filter(works, left_out))))
    raise PlanError(problems)


def ipus_per_replica(stages: int) -> int:
    """Returns the IPUs that a model of so many pipeline stages occupies: devices come in powers of two."""
    return 1 << (stages - 1).bit_length()


def accumulation_unit(stages: int, schedule: str) -> int:
    """Returns what the accumulation must be a multiple of, so that the pipeline's compiler takes it."""
    if stages == 1:
        return 1
    return {"grouped": 2 * stages, "interleaved": stages, "sequential": 1}[schedule]


# Every suggestion is planned, so that one model is described many times.
_describe = functools.lru_cache(maxsize=64)(architectures.describe)

_Candidates = Callable[[], Iterable[Fix]]


class _Draft:
    """The rules broken so far, and the plan when there are none."""

    def __init__(self) -> None:
        self.broken: List[Tuple[str, str, _Candidates]] = []
        self.plan: Optional[RunPlan] = None

    def refuse(self, rule: str, sentence: str, candidates: _Candidates) -> None:
        self.broken.append((rule, sentence, candidates))

    def rules(self) -> Tuple[str, ...]:
        return tuple(rule for rule, _, _ in self.broken)


def _examine(config: TrainConfig, dataset: DatasetInfo, launched: Optional[LaunchedTopology]) -> _Draft:
    """Goes through the rules in a reader's order; those without a meaning after an earlier one broke are left out."""
    draft = _Draft()
    topology = _examine_topology(draft, config, launched)
    stages = _stages_asked(config) or (launched.ipus_per_replica if launched else 1)
    model = _examine_model(draft, config, dataset, stages, launched)
    batch = _examine_batch(draft, config, stages, topology.replicas if topology else None)
    epochs = _examine_epochs(draft, config, dataset, topology, batch) if topology and batch else None
    _examine_checkpoints(draft, config)
    if topology and model and batch and epochs and not draft.broken:
        steps_per_execution = batch.accumulation * epochs.device_iterations
        validation_steps, validation_steps_per_execution = _plan_validation(dataset, topology, batch)
        steps_per_update = batch.accumulation * topology.local_replicas
        keras = KerasSteps(
            steps_per_execution=steps_per_execution,
            steps_per_epoch=epochs.executions_per_epoch * epochs.device_iterations * steps_per_update,
            last_epoch_steps=(epochs.last_epoch_updates or epochs.updates_per_epoch) * steps_per_update,
            validation_steps=validation_steps,
            validation_steps_per_execution=validation_steps_per_execution,
        )
        a_tenth = max(epochs.updates_per_epoch // 10, 1)
        draft.plan = RunPlan(
            dataset=dataset,
            model=model,
            topology=topology,
            batch=batch,
            epochs=epochs,
            validation=Validation(
                dataset.validation_samples, topology.instances, validation_steps * batch.micro_batch_size
            ),
            keras=keras,
            recipe=_plan_recipe(config, batch, epochs),
            checkpoint_every=config.checkpoint_every or epochs.updates_per_epoch,
            log_every=config.log_every or a_tenth,
            augment=dataset.augment if config.augment == "auto" else config.augment,
            notes=_notes(config, model, epochs),
        )
    return draft


def _stages_asked(config: TrainConfig) -> Optional[int]:
    """Split points say how many stages there are."""
    return config.pipeline_stages or (len(config.pipeline_splits) + 1 if config.pipeline_splits else None)


def _examine_model(
    draft: _Draft, config: TrainConfig, dataset: DatasetInfo, stages: int, launched: Optional[LaunchedTopology]
) -> Optional[ModelPlan]:
    least = architectures.LEAST_SIZE
    if min(dataset.height, dataset.width) < least:
        draft.refuse(
            "image_size",
            f"{dataset.name} has images of {dataset.height} x {dataset.width}; models take {least} x {least} "
            f"or more. Add --image_size={least}.",
            list,  # the facts of the data set come from outside, so that no change of a flag can be tried here
        )
        return None
    architecture = _describe(
        config.model,
        height=dataset.height,
        width=dataset.width,
        channels=dataset.channels,
        classes=dataset.classes,
        norm=config.norm or ("group" if stages > 1 else "batch"),
    )
    blocks = len(architecture.blocks)
    if stages > blocks:
        who = "" if config.pipeline_stages or not launched else f" ({launched.launcher} gave {stages} IPUs per replica)"
        draft.refuse(
            "model_stages",
            f"{config.model} has {blocks} blocks and cannot be cut into {stages} pipeline stages{who}.",
            lambda: [
                *errors.sets("pipeline_stages", [blocks]),
                *errors.sets("model", _models_with(stages, architecture)),
            ],
        )
        return None
    splits = config.pipeline_splits
    if splits is None:
        splits = architectures.balance(architecture, stages)
    elif len(splits) != stages - 1:
        draft.refuse(
            "split_count",
            f"--pipeline_splits={','.join(splits)} makes {len(splits) + 1} stages, but --pipeline_stages={stages}.",
            lambda: [
                *errors.sets("pipeline_stages", [len(splits or ()) + 1, None]),
                *errors.sets("pipeline_splits", [architectures.balance(architecture, stages) or None, None]),
            ],
        )
        return None
    try:
        return ModelPlan(architecture, architectures.cut(architecture, splits))
    except ValueError as error:
        draft.refuse(
            "splits",
            f"--pipeline_splits={','.join(splits)} does not fit {config.model}: {str(error).rstrip('.')}.",
            lambda: errors.sets("pipeline_splits", [architectures.balance(architecture, stages), None]),
        )
        return None


def _models_with(stages: int, unlike: Architecture) -> List[str]:
    """Returns the smallest model that can be cut into so many stages, if there is one."""
    size = {"height": unlike.height, "width": unlike.width, "channels": unlike.channels, "classes": unlike.classes}
    blocks = ((name, len(_describe(name, norm=unlike.norm, **size).blocks)) for name in architectures.MODELS)
    return [name for name, count in blocks if count >= stages][:1]


def _examine_checkpoints(draft: _Draft, config: TrainConfig) -> None:
    every, iterations = config.checkpoint_every, config.device_iterations
    if every is not None and every % iterations:
        draft.refuse(
            "checkpoint_every",
            f"--checkpoint_every={every} is not a multiple of --device_iterations={iterations}: the weights can be "
            "read between executions only.",
            lambda: errors.sets("checkpoint_every", [*errors.multiples_around(every, iterations), None]),
        )


def _plan_recipe(config: TrainConfig, batch: Batch, epochs: Epochs) -> Recipe:
    ratio = batch.global_batch_size / config.lr_base_batch
    factor = {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.lr_scaling]
    rate = _LEARNING_RATES[config.optimizer] if config.learning_rate is None else config.learning_rate
    per_epoch, updates = epochs.updates_per_epoch, epochs.updates
    if config.warmup_epochs is None:
        warmup = min(round(_WARMUP_EPOCHS * per_epoch), int(_MOST_WARMUP * updates))
    else:
        warmup = min(round(config.warmup_epochs * per_epoch), updates)
    if config.lr_drop_epochs is None:
        drops = tuple(round(part * updates) for part in _DROPS)
    else:
        drops = tuple(round(epoch * per_epoch) for epoch in config.lr_drop_epochs)
    scaling = config.loss_scaling or LossScaling(1.0 if config.precision == "32.32" else _STATIC_LOSS_SCALE)
    return Recipe(
        optimizer=config.optimizer,
        learning_rate=rate * factor,
        schedule=config.lr_schedule,
        warmup_updates=warmup,
        updates=updates,
        drops=drops if config.lr_schedule == "step" else (),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        l2=config.l2,
        label_smoothing=config.label_smoothing,
        loss_scale=scaling.factor,
        reduction=config.reduction,
        precision=config.precision,
    )


def _notes(config: TrainConfig, model: ModelPlan, epochs: Epochs) -> Tuple[str, ...]:
    notes = []
    if len(model.stages) > 1 and config.norm == "batch":
        notes.append(
            "--norm=batch: in a pipeline the SDK does not keep batch norm's moving statistics, so that validation "
            "suffers. Use --norm=group."
        )
    if config.lr_drop_epochs is not None and config.lr_schedule != "step":
        notes.append(f"--lr_drop_epochs has no effect with --lr_schedule={config.lr_schedule}. Use --lr_schedule=step.")
    if config.warmup_epochs and config.warmup_epochs * epochs.updates_per_epoch > epochs.updates:
        notes.append(
            f"--warmup_epochs={config.warmup_epochs:g} is longer than the run: the learning rate never gets to its top."
        )
    return tuple(notes)


def _examine_topology(draft: _Draft, config: TrainConfig, launched: Optional[LaunchedTopology]) -> Optional[Topology]:
    return _examine_launched(draft, config, launched) if launched else _examine_asked(draft, config)


def _examine_launched(draft: _Draft, config: TrainConfig, launched: LaunchedTopology) -> Optional[Topology]:
    """What poprun started. Its instances are equal by construction; the IPUs are still to be powers of two."""
    _examine_agreement(draft, config, launched)
    per_replica = launched.ipus_per_replica
    ipus = launched.replicas * per_replica
    hosts = Hosts(launched.hosts) if launched.hosts else config.hosts or Hosts(1)
    if config.hosts and config.hosts.count == hosts.count:
        hosts = config.hosts
    if not errors.is_power_of_two(ipus):
        option, value = (
            ("--num-replicas", launched.replicas)
            if errors.is_power_of_two(per_replica)
            else ("--ipus-per-replica", per_replica)
        )
        draft.refuse(
            "ipus",
            f"{launched.launcher} started {launched.replicas} replicas x {per_replica} IPUs = {ipus}, but IPUs come "
            f"in powers of two. Start it with {option} {cli.alternatives(errors.powers_around(value))}.",
            list,
        )
        return None
    if launched.instances % hosts.count:
        divisors = [n for n in errors.powers(1, launched.instances) if launched.instances % n == 0]
        fewer = [_fewer_hosts(hosts, n) for n in errors.nearest(divisors, hosts.count)]
        draft.refuse(
            "hosts",
            f"{cli.flag_text('hosts', hosts)} cannot share the {launched.instances} instances evenly.",
            lambda: errors.sets("hosts", [*fewer, None]),
        )
        return None
    if "launched_stages" in draft.rules():
        return None
    stages = _stages_asked(config) or per_replica
    return Topology(ipus, stages, config.pipeline_schedule, launched.instances, hosts, launched.launcher)


def _examine_asked(draft: _Draft, config: TrainConfig) -> Optional[Topology]:
    """What the flags ask for. IPUs, and with them replicas, instances and hosts, can only be powers of two."""
    ipus = config.ipus or 1
    stages = _stages_asked(config) or 1
    per_replica = ipus_per_replica(stages)
    instances = config.instances or 1
    hosts = config.hosts or Hosts(1)
    powers = "IPUs come in powers of two"
    if not errors.is_power_of_two(ipus):
        near = [n for n in errors.powers_around(ipus) if n >= per_replica] or [per_replica]
        draft.refuse("ipus", f"--ipus={ipus} is not possible: {powers}.", lambda: errors.sets("ipus", near))
    elif ipus < per_replica:
        draft.refuse(
            "ipus_per_replica",
            f"--ipus={ipus} cannot hold one replica: {stages} pipeline stages take {per_replica} IPUs, as {powers}.",
            lambda: [*errors.sets("ipus", [per_replica]), *errors.sets("pipeline_stages", [ipus])],
        )
    replicas = ipus // per_replica if errors.is_power_of_two(ipus) else 0
    if not errors.is_power_of_two(instances) or (replicas and instances > replicas):
        least = hosts.count if errors.is_power_of_two(hosts.count) and hosts.count <= (replicas or instances) else 1
        most = max(instances, hosts.count)
        enough = most if errors.is_power_of_two(most) else errors.powers_around(most)[1]
        count = cli.count(replicas, "replica") if replicas else "a power of two of replicas"
        draft.refuse(
            "instances",
            f"--instances={instances} cannot share {count} evenly.",
            lambda: [
                *errors.sets("instances", errors.nearest(errors.powers(least, replicas or 2 * instances), instances)),
                *errors.sets("ipus", [instances * per_replica] if errors.is_power_of_two(instances) else []),
                *(
                    [Fix((("ipus", enough * per_replica), ("instances", enough)))]
                    if replicas < enough != instances
                    else []
                ),
            ],
        )
    if not errors.is_power_of_two(hosts.count) or instances % hosts.count:
        fewer = errors.nearest([n for n in errors.powers(1, instances) if instances % n == 0], hosts.count)
        possible = errors.is_power_of_two(hosts.count)
        draft.refuse(
            "hosts",
            f"{cli.flag_text('hosts', hosts)} cannot share {cli.count(instances, 'instance')} evenly "
            f"({cli.count(hosts.count, 'host')}).",
            lambda: [
                *errors.sets("hosts", [_fewer_hosts(hosts, n) for n in fewer]),
                *errors.sets("instances", [hosts.count] if possible else []),
                *(
                    [Fix((("ipus", hosts.count * per_replica), ("instances", hosts.count)))]
                    if possible and replicas < hosts.count
                    else []
                ),
            ],
        )
    if not replicas or replicas % instances:
        return None
    return Topology(ipus, stages, config.pipeline_schedule, instances, hosts, None)


def _examine_agreement(draft: _Draft, config: TrainConfig, launched: LaunchedTopology) -> None:
    """The launcher's word counts; flags that say something else are refused rather than overridden."""
    who = launched.launcher
    given: Dict[str, Tuple[Optional[object], object, str]] = {
        "ipus": (
            config.ipus,
            launched.replicas * launched.ipus_per_replica,
            f"{launched.replicas} replicas x {launched.ipus_per_replica} IPUs each",
        ),
        "instances": (config.instances, launched.instances, "instances"),
        "hosts": (config.hosts and config.hosts.count, launched.hosts, "hosts"),
    }
    for name, (asked, real, what) in given.items():
        if asked is not None and real is not None and asked != real:
            draft.refuse(
                f"launched_{name}",
                f"--{name}={getattr(config, name)} disagrees with {who}, which started {real} ({what}).",
                _both(name, Hosts(launched.hosts or 1) if name == "hosts" else real),
            )
    stages = _stages_asked(config)
    if stages is not None and ipus_per_replica(stages) != launched.ipus_per_replica:
        least, most = launched.ipus_per_replica // 2 + 1, launched.ipus_per_replica
        # With a number of IPUs that is no power of two, no number of stages fits.
        fitting = sorted({least, most, min(max(stages, least), most)}) if errors.is_power_of_two(most) else []
        draft.refuse(
            "launched_stages",
            f"--pipeline_stages={stages} takes {ipus_per_replica(stages)} IPUs per replica, but {who} gave "
            f"{launched.ipus_per_replica}.",
            lambda: [*errors.sets("pipeline_stages", fitting), *errors.sets("pipeline_stages", [None])],
        )


def _examine_batch(draft: _Draft, config: TrainConfig, stages: int, replicas: Optional[int]) -> Optional[Batch]:
    micro = config.micro_batch_size
    asked = config.gradient_accumulation
    total = config.global_batch_size
    schedule = config.pipeline_schedule
    unit = accumulation_unit(stages, schedule)
    article = "an" if schedule[0] in "aeiou" else "a"
    rule = f"{article} {schedule} pipeline of {stages} stages takes multiples of {unit}"

    if total is not None and asked is not None:
        draft.refuse(
            "batch_twice",
            f"--global_batch_size={total} and --gradient_accumulation={asked} set the same thing twice.",
            lambda: [*errors.sets("global_batch_size", [None]), *errors.sets("gradient_accumulation", [None])],
        )
        return None
    if total is None:
        accumulation = asked or unit
        if accumulation % unit:
            draft.refuse(
                "accumulation",
                f"--gradient_accumulation={accumulation} does not fit the pipeline: {rule}.",
                lambda: [
                    *errors.sets("gradient_accumulation", errors.multiples_around(accumulation, unit)),
                    *errors.sets("pipeline_schedule", _schedules_for(accumulation, stages)),
                ],
            )
            return None
        return Batch(micro, accumulation, replicas) if replicas else None
    if not replicas:
        return None

    per_pass = micro * replicas
    if total % (per_pass * unit):
        pipeline = f" x {unit} (because {rule})" if unit > 1 else ""
        draft.refuse(
            "global_batch",
            f"--global_batch_size={total} is not a multiple of {per_pass * unit} = micro batch {micro} x "
            f"{cli.count(replicas, 'replica')}{pipeline}.",
            lambda: [
                *errors.sets("global_batch_size", errors.multiples_around(total, per_pass * unit)),
                *errors.sets("micro_batch_size", errors.divisors_around(total // (replicas * unit), micro)),
                *errors.sets("pipeline_schedule", _schedules_for(total // per_pass, stages)),
            ],
        )
        return None
    return Batch(micro, total // per_pass, replicas)


def _keeps(config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology]) -> bool:
    made = _examine(config, dataset, launched).plan
    return made is not None and made.batch.global_batch_size == global_batch


def _open_accumulation(config: TrainConfig, was: Batch) -> TrainConfig:
    """Leaves the accumulation to be solved, unless the config asks for another batch than the run's."""
    total = was.global_batch_size
    if config.global_batch_size not in (None, total) or config.gradient_accumulation not in (None, was.accumulation):
        return config
    return dataclasses.replace(config, global_batch_size=total, gradient_accumulation=None)


def _cannot_keep(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology]
) -> str:
    if not launched:
        given = _given(config, "ipus", "pipeline_stages", "micro_batch_size")
        return f"{given} cannot keep the global batch of {global_batch} that the run was trained with."
    stages = _stages_asked(config) or launched.ipus_per_replica
    asked = dataclasses.replace(config, ipus=launched.replicas * launched.ipus_per_replica, pipeline_stages=stages)
    free = dataclasses.replace(asked, instances=launched.instances)
    counts = [each.ipus // launched.ipus_per_replica for each in _on_other_ipus(free, dataset, global_batch)]
    others = f"; {cli.alternatives(counts)} would do" if counts else ""
    return (
        f"{cli.count(launched.replicas, 'replica')} (started by {launched.launcher}{others}) with "
        f"--micro_batch_size={config.micro_batch_size} cannot keep the global batch of {global_batch} that the run was "
        "trained with."
    )


def _ways_to_keep(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology]
) -> List[Fix]:
    """Other IPUs, other micro batches on the same IPUs, another schedule."""
    instances = launched.instances if launched else config.instances or 1
    here = [each for each in layouts(config, dataset, global_batch, launched) if each.instances == instances]
    ways = [] if launched else [_as_fix(each, config) for each in _on_other_ipus(config, dataset, global_batch)]
    ways += errors.sets("micro_batch_size", sorted(each.micro_batch_size for each in here[:3]))
    return errors.without_repeats([*ways, *errors.sets("pipeline_schedule", SCHEDULES)], config)


def _on_other_ipus(config: TrainConfig, dataset: DatasetInfo, global_batch: int) -> List[Layout]:
    """The few layouts with the same micro batch on the nearest numbers of IPUs."""
    asked = config.ipus or 1
    found = []
    for ipus in errors.powers(1, 4 * asked):
        there = layouts(dataclasses.replace(config, ipus=ipus), dataset, global_batch)
        found += [each for each in there[:1] if each.micro_batch_size == config.micro_batch_size and ipus != asked]
    return sorted(sorted(found, key=lambda each: abs(each.ipus - asked))[:3], key=lambda each: each.ipus)


def _as_fix(layout: Layout, config: TrainConfig) -> Fix:
    instances = layout.instances if layout.instances != (config.instances or 1) else config.instances
    return Fix((("ipus", layout.ipus), ("instances", instances)))


def _given(config: TrainConfig, *names: str) -> str:
    """Returns the flags as one would type them, without those that were not given."""
    values = ((name, getattr(config, name)) for name in names)
    return " ".join(cli.flag_text(name, value) for name, value in values if value is not None)


def _examine_epochs(
    draft: _Draft, config: TrainConfig, dataset: DatasetInfo, topology: Topology, batch: Batch
) -> Optional[Epochs]:
    size = batch.global_batch_size
    most = dataset.train_samples // size
    if not most:
        draft.refuse(
            "epoch",
            f"One weight update would take {size} samples (micro batch {batch.micro_batch_size} x accumulation "
            f"{batch.accumulation} x {cli.count(batch.replicas, 'replica')}), but {dataset.name} has "
            f"{dataset.train_samples}.",
            lambda: _smaller_batches(config, dataset, topology, batch),
        )
        return None

    updates = config.updates_per_epoch or most
    if updates > most:
        draft.refuse(
            "updates_per_epoch",
            f"--updates_per_epoch={updates} takes more than {dataset.name} has: {dataset.train_samples} samples fill "
            f"{most} updates of {size}.",
            lambda: errors.sets("updates_per_epoch", [most, None]),
        )
        return None

    iterations = config.device_iterations
    duration = config.epochs
    full, last = divmod(duration.count, updates) if duration.unit == "steps" else (duration.count, 0)
    if full and updates % iterations:
        draft.refuse(
            "device_iterations",
            f"--device_iterations={iterations} does not divide the epoch's {updates} weight updates "
            f"({dataset.train_samples} samples / global batch {size}).",
            lambda: [
                *errors.sets("device_iterations", errors.divisors_around(updates, iterations, most=4)),
                *errors.sets("updates_per_epoch", [n for n in [updates // iterations * iterations] if n]),
            ],
        )
        return None
    if last % iterations:
        common = math.gcd(updates, duration.count) if full else duration.count
        draft.refuse(
            "duration",
            f"--epochs={duration} is not a multiple of --device_iterations={iterations}: an execution cannot be cut.",
            lambda: [
                *errors.sets(
                    "epochs", [Duration(n, "steps") for n in errors.multiples_around(duration.count, iterations)]
                ),
                *errors.sets("device_iterations", errors.divisors_around(common, iterations, most=4)),
            ],
        )
        return None
    return Epochs(updates, dataset.train_samples - updates * size, iterations, full, last)


def _plan_validation(dataset: DatasetInfo, topology: Topology, batch: Batch) -> Tuple[int, int]:
    """Returns an instance's steps, and a replica's steps per execution, that pad as little as the rules allow.

    Validation has executions of its own length: those of the training can be longer than the whole validation.
    """
    pipelined = topology.pipeline_stages > 1 and topology.pipeline_schedule != "sequential"
    unit = topology.pipeline_stages if pipelined else 1
    largest_shard = -(-dataset.validation_samples // topology.instances)
    needed = max(-(-largest_shard // (topology.local_replicas * batch.micro_batch_size)), 1)
    executions = -(-needed // _MOST_VALIDATION_STEPS)
    per_execution = -(-needed // (executions * unit)) * unit
    return executions * per_execution * topology.local_replicas, per_execution


def _smaller_batches(config: TrainConfig, dataset: DatasetInfo, topology: Topology, batch: Batch) -> Iterator[Fix]:
    """The largest batch that still fits, by one flag alone where that is possible, else by several."""
    samples, replicas = dataset.train_samples, topology.replicas
    unit = accumulation_unit(topology.pipeline_stages, topology.pipeline_schedule)
    most = samples // (batch.micro_batch_size * replicas) // unit * unit
    if most and config.global_batch_size is not None:
        yield from errors.sets("global_batch_size", [most * batch.micro_batch_size * replicas])
    elif most:
        yield from errors.sets("gradient_accumulation", [most])
    if config.global_batch_size is None:
        micro = samples // (batch.accumulation * replicas)
        fewer = samples // (batch.accumulation * batch.micro_batch_size)
        yield from errors.sets("micro_batch_size", [micro] if micro else [])
        yield from errors.sets("ipus", [errors.powers_around(fewer)[0] * topology.ipus_per_replica] if fewer else [])
    if samples < unit * replicas:
        # Not even micro batches of one sample fit: as many replicas as take one each.
        most_replicas = errors.powers_around(max(samples // unit, 1))[0]
        yield Fix(
            (
                ("ipus", None if topology.launcher else most_replicas * topology.ipus_per_replica),
                ("instances", None),
                ("hosts", None),
                ("pipeline_schedule", config.pipeline_schedule if unit <= samples else "sequential"),
                ("micro_batch_size", 1),
                ("gradient_accumulation", None),
                ("global_batch_size", None),
            )
        )
    elif not most:
        whole = config.global_batch_size is not None
        micro = samples // (unit * replicas)
        yield Fix(
            (
                ("micro_batch_size", micro),
                ("gradient_accumulation", None),
                ("global_batch_size", micro * unit * replicas if whole else None),
            )
        )


def _both(name: str, value: object) -> _Candidates:
    return lambda: errors.sets(name, [value, None])


def _schedules_for(accumulation: int, stages: int) -> List[str]:
    return [name for name in SCHEDULES if accumulation % accumulation_unit(stages, name) == 0]


def _fewer_hosts(hosts: Hosts, count: int) -> Hosts:
    return Hosts(count, hosts.names[:count]) if count <= len(hosts.names) else Hosts(count)
