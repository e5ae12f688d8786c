"""The rules that a job must obey, and fixes for those that it breaks. Pure.

The rules are those of the hardware, of poprun, of the pipeline's compiler and of Keras on IPUs. `examine` checks
all of them; `plan.plan_run` makes a plan if none is broken, or tries the suggested fixes and raises PlanError.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Callable, Dict, FrozenSet, Iterable, Iterator, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import SCHEDULES, Duration, Hosts
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning import architectures, errors
from tf_ipu_dp.planning.architectures import Architecture, ModelPlan
from tf_ipu_dp.planning.errors import Fix
from tf_ipu_dp.planning.steps import Batch, Epochs, choose_device_iterations
from tf_ipu_dp.planning.topology import LaunchedTopology, Topology, accumulation_unit, ipus_per_replica

# Cached: every suggested fix is examined, so one model is described many times.
_describe = functools.lru_cache(maxsize=64)(architectures.describe)

_SuggestFixes = Callable[[], Iterable[Fix]]


@dataclasses.dataclass(frozen=True)
class BrokenRule:
    """A rule that the flags break. Its suggested fixes may not help and must be tried."""

    name: str
    sentence: str
    suggest: _SuggestFixes


class Examination:
    """The broken rules, and the parts of a plan that could be made."""

    def __init__(self) -> None:
        self.broken: List[BrokenRule] = []
        self.topology: Optional[Topology] = None
        self.model: Optional[ModelPlan] = None
        self.batch: Optional[Batch] = None
        self.epochs: Optional[Epochs] = None

    def refuse(self, name: str, sentence: str, suggest: _SuggestFixes) -> None:
        """Adds a broken rule."""
        self.broken.append(BrokenRule(name, sentence, suggest))

    def broken_names(self) -> FrozenSet[str]:
        """Returns the names of the broken rules."""
        return frozenset(broken.name for broken in self.broken)


def examine(
    config: TrainConfig, dataset: DatasetInfo, launched: Optional[LaunchedTopology], resumable: Sequence[int] = ()
) -> Examination:
    """Checks the rules from topology to checkpoints; rules that depend on a broken one are skipped.

    `resumable` are the steps that have a checkpoint, from which an execution must be able to begin.
    """
    found = Examination()
    found.topology = _examine_launched(found, config, launched) if launched else _examine_requested(found, config)
    stages = config.requested_stages or (launched.ipus_per_replica if launched else 1)
    found.model = _examine_model(found, config, dataset, stages, launched)
    found.batch = _examine_batch(found, config, stages, found.topology.replicas if found.topology else None)
    if found.topology and found.batch:
        found.epochs = _examine_epochs(found, config, dataset, found.topology, found.batch, resumable)
    _examine_checkpoints(found, config)
    return found


def _examine_launched(found: Examination, config: TrainConfig, launched: LaunchedTopology) -> Optional[Topology]:
    """Examines what a launcher started. Its instances are equal by construction; its IPUs must be a power of two."""
    _examine_conflicts_with_launcher(found, config, launched)
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
        found.refuse(
            "ipus",
            f"{launched.launcher} started {launched.replicas} replicas x {per_replica} IPUs = {ipus}, but IPUs come "
            f"in powers of two. Start it with {option} {cli.alternatives(errors.powers_of_two_around(value))}.",
            list,
        )
        return None
    if launched.instances % hosts.count:
        divisors = [n for n in errors.powers_of_two(1, launched.instances) if launched.instances % n == 0]
        fewer = [_fewer_hosts(hosts, n) for n in errors.nearest(divisors, hosts.count)]
        found.refuse(
            "hosts",
            f"{cli.flag_text('hosts', hosts)} cannot share the {launched.instances} instances evenly.",
            lambda: errors.fixes_for("hosts", [*fewer, None]),
        )
        return None
    if "launched_stages" in found.broken_names():
        return None
    stages = config.requested_stages or per_replica
    return Topology(ipus, stages, config.pipeline_schedule, launched.instances, hosts, launched.launcher)


def _examine_conflicts_with_launcher(found: Examination, config: TrainConfig, launched: LaunchedTopology) -> None:
    """Refuses flags that contradict the launcher, which has already started the job, instead of overriding them."""
    launcher = launched.launcher
    compared: Dict[str, Tuple[Optional[object], object, str]] = {
        "ipus": (
            config.ipus,
            launched.replicas * launched.ipus_per_replica,
            f"{launched.replicas} replicas x {launched.ipus_per_replica} IPUs each",
        ),
        "instances": (config.instances, launched.instances, "instances"),
        "hosts": (config.hosts and config.hosts.count, launched.hosts, "hosts"),
    }
    for name, (requested, started, what) in compared.items():
        if requested is not None and started is not None and requested != started:
            found.refuse(
                f"launched_{name}",
                f"--{name}={getattr(config, name)} disagrees with {launcher}, which started {started} ({what}).",
                _set_or_remove(name, Hosts(launched.hosts or 1) if name == "hosts" else started),
            )
    stages = config.requested_stages
    if stages is not None and ipus_per_replica(stages) != launched.ipus_per_replica:
        least, most = launched.ipus_per_replica // 2 + 1, launched.ipus_per_replica
        # Stages always take a power of two of IPUs: for any other number none fits.
        fitting = sorted({least, most, min(max(stages, least), most)}) if errors.is_power_of_two(most) else []
        found.refuse(
            "launched_stages",
            f"--pipeline_stages={stages} takes {ipus_per_replica(stages)} IPUs per replica, but {launcher} gave "
            f"{launched.ipus_per_replica}.",
            lambda: [*errors.fixes_for("pipeline_stages", fitting), *errors.fixes_for("pipeline_stages", [None])],
        )


def _examine_requested(found: Examination, config: TrainConfig) -> Optional[Topology]:
    """Examines what the flags ask for. IPUs, and with them replicas, instances and hosts, must be powers of two."""
    ipus = config.ipus or 1
    stages = config.requested_stages or 1
    per_replica = ipus_per_replica(stages)
    instances = config.instances or 1
    hosts = config.hosts or Hosts(1)
    powers = "IPUs come in powers of two"
    if not errors.is_power_of_two(ipus):
        near = [n for n in errors.powers_of_two_around(ipus) if n >= per_replica] or [per_replica]
        found.refuse("ipus", f"--ipus={ipus} is not possible: {powers}.", lambda: errors.fixes_for("ipus", near))
    elif ipus < per_replica:
        found.refuse(
            "ipus_per_replica",
            f"--ipus={ipus} cannot hold one replica: {stages} pipeline stages take {per_replica} IPUs, as {powers}.",
            lambda: [*errors.fixes_for("ipus", [per_replica]), *errors.fixes_for("pipeline_stages", [ipus])],
        )
    replicas = ipus // per_replica if errors.is_power_of_two(ipus) else 0
    if not errors.is_power_of_two(instances) or (replicas and instances > replicas):
        least = hosts.count if errors.is_power_of_two(hosts.count) and hosts.count <= (replicas or instances) else 1
        most = max(instances, hosts.count)
        enough = most if errors.is_power_of_two(most) else errors.powers_of_two_around(most)[1]
        count = cli.count(replicas, "replica") if replicas else "a power of two of replicas"
        found.refuse(
            "instances",
            f"--instances={instances} cannot share {count} evenly.",
            lambda: [
                *errors.fixes_for(
                    "instances", errors.nearest(errors.powers_of_two(least, replicas or 2 * instances), instances)
                ),
                *errors.fixes_for("ipus", [instances * per_replica] if errors.is_power_of_two(instances) else []),
                *(
                    [Fix((("ipus", enough * per_replica), ("instances", enough)))]
                    if replicas < enough != instances
                    else []
                ),
            ],
        )
    if not errors.is_power_of_two(hosts.count) or instances % hosts.count:
        fewer = errors.nearest([n for n in errors.powers_of_two(1, instances) if instances % n == 0], hosts.count)
        possible = errors.is_power_of_two(hosts.count)
        found.refuse(
            "hosts",
            f"{cli.flag_text('hosts', hosts)} cannot share {cli.count(instances, 'instance')} evenly "
            f"({cli.count(hosts.count, 'host')}).",
            lambda: [
                *errors.fixes_for("hosts", [_fewer_hosts(hosts, n) for n in fewer]),
                *errors.fixes_for("instances", [hosts.count] if possible else []),
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


def _examine_model(
    found: Examination, config: TrainConfig, dataset: DatasetInfo, stages: int, launched: Optional[LaunchedTopology]
) -> Optional[ModelPlan]:
    architecture = (
        _examine_own(found, config, dataset, stages)
        if config.has_own_model
        else _examine_built_in(found, config, dataset, stages)
    )
    return _examine_stages(found, config, architecture, stages, launched) if architecture else None


def _examine_own(found: Examination, config: TrainConfig, dataset: DatasetInfo, stages: int) -> Optional[Architecture]:
    """Examines a model of the user, as it was built for the data."""
    architecture = dataset.own_model
    assert architecture and architecture.own  # who finds the facts of the data learns the model too
    if config.eight_bit_io:
        found.refuse(
            "own_eight_bit_io",
            f"--eight_bit_io normalises images in the first layer of a built-in model; {config.model} gets them "
            "normalised.",
            lambda: errors.fixes_for("eight_bit_io", [False]),
        )
    if dataset.inputs is not None and config.augment not in ("auto", "none"):
        found.refuse(
            "own_augment",
            f"--augment={config.augment} changes images, but {dataset.name} has {dataset.inputs}.",
            lambda: errors.fixes_for("augment", ["auto", "none"]),
        )
    if stages > 1 and architecture.own.kind == "subclassed":
        found.refuse(
            "own_stages",
            f"{config.model} returns a subclassed model, whose layers are not known before it runs: it cannot be cut "
            f"into {stages} pipeline stages. Return a Sequential or Functional model, tf.keras.Model(inputs, outputs).",
            lambda: errors.fixes_for("pipeline_stages", [1]),
        )
        return None
    return architecture


def _examine_built_in(
    found: Examination, config: TrainConfig, dataset: DatasetInfo, stages: int
) -> Optional[Architecture]:
    least = architectures.MIN_SIZE
    if dataset.inputs is not None or not dataset.is_classification:
        found.refuse(
            "data_for_model",
            f"--model={config.model} takes images with class numbers, but {dataset.name} has "
            f"{dataset.inputs or 'images'} with {dataset.targets or 'class numbers'}. Give a model for it with "
            "--model=FILE.py:function.",
            list,
        )
        return None
    if min(dataset.height, dataset.width) < least:
        found.refuse(
            "image_size",
            f"{dataset.name} has images of {dataset.height} x {dataset.width}; models take {least} x {least} "
            f"or more. Add --image_size={least}.",
            list,  # the data set is already described, so another --image_size cannot be tried here
        )
        return None
    return _describe(
        config.model,
        height=dataset.height,
        width=dataset.width,
        channels=dataset.channels,
        classes=dataset.classes,
        norm=config.norm_for(stages),
    )


def _examine_stages(
    found: Examination,
    config: TrainConfig,
    architecture: Architecture,
    stages: int,
    launched: Optional[LaunchedTopology],
) -> Optional[ModelPlan]:
    blocks = len(architecture.blocks)
    if stages > blocks:
        origin = (
            "" if config.pipeline_stages or not launched else f" ({launched.launcher} gave {stages} IPUs per replica)"
        )
        found.refuse(
            "model_stages",
            f"{config.model} has {cli.count(blocks, 'block')} and cannot be cut into {stages} pipeline stages{origin}.",
            lambda: [
                *errors.fixes_for("pipeline_stages", [blocks]),
                *errors.fixes_for("model", [] if architecture.own else _smallest_model_with(stages, architecture)),
            ],
        )
        return None
    splits = config.pipeline_splits
    if splits is None:
        splits = architectures.balance(architecture, stages)
    elif len(splits) != stages - 1:
        found.refuse(
            "split_count",
            f"--pipeline_splits={','.join(splits)} makes {len(splits) + 1} stages, but --pipeline_stages={stages}.",
            lambda: [
                *errors.fixes_for("pipeline_stages", [len(splits or ()) + 1, None]),
                *errors.fixes_for("pipeline_splits", [architectures.balance(architecture, stages) or None, None]),
            ],
        )
        return None
    try:
        return ModelPlan(architecture, architectures.cut(architecture, splits))
    except ValueError as error:
        found.refuse(
            "splits",
            f"--pipeline_splits={','.join(splits)} does not fit {config.model}: {str(error).rstrip('.')}.",
            lambda: errors.fixes_for("pipeline_splits", [architectures.balance(architecture, stages), None]),
        )
        return None


def _smallest_model_with(stages: int, like: Architecture) -> List[str]:
    """Returns the smallest model that can be cut into this many stages for the same images, if there is one."""
    size = {"height": like.height, "width": like.width, "channels": like.channels, "classes": like.classes}
    blocks = ((name, len(_describe(name, norm=like.norm, **size).blocks)) for name in architectures.MODELS)
    return [name for name, count in blocks if count >= stages][:1]


def _examine_batch(found: Examination, config: TrainConfig, stages: int, replicas: Optional[int]) -> Optional[Batch]:
    micro = config.micro_batch_size
    requested = config.gradient_accumulation
    total = config.global_batch_size
    schedule = config.pipeline_schedule
    unit = accumulation_unit(stages, schedule)
    article = "an" if schedule[0] in "aeiou" else "a"
    rule = f"{article} {schedule} pipeline of {stages} stages takes multiples of {unit}"

    if total is not None and requested is not None:
        found.refuse(
            "batch_twice",
            f"--global_batch_size={total} and --gradient_accumulation={requested} both set the global batch: in "
            "samples and in micro batches per replica.",
            lambda: [
                *errors.fixes_for("global_batch_size", [None]),
                *errors.fixes_for("gradient_accumulation", [None]),
            ],
        )
        return None
    if total is None:
        accumulation = requested or unit
        if accumulation % unit:
            found.refuse(
                "accumulation",
                f"--gradient_accumulation={accumulation} does not fit the pipeline: {rule}.",
                lambda: [
                    *errors.fixes_for("gradient_accumulation", errors.multiples_around(accumulation, unit)),
                    *errors.fixes_for("pipeline_schedule", _schedules_for(accumulation, stages)),
                ],
            )
            return None
        return Batch(micro, accumulation, replicas) if replicas else None
    if not replicas:
        return None

    per_pass = micro * replicas
    if total % (per_pass * unit):
        pipeline = f" x {unit} (because {rule})" if unit > 1 else ""
        found.refuse(
            "global_batch",
            f"--global_batch_size={total} is not a multiple of {per_pass * unit} = micro batch {micro} x "
            f"{cli.count(replicas, 'replica')}{pipeline}.",
            lambda: [
                *errors.fixes_for("global_batch_size", errors.multiples_around(total, per_pass * unit)),
                *errors.fixes_for("micro_batch_size", errors.divisors_around(total // (replicas * unit), micro)),
                *errors.fixes_for("pipeline_schedule", _schedules_for(total // per_pass, stages)),
            ],
        )
        return None
    return Batch(micro, total // per_pass, replicas)


def _schedules_for(accumulation: int, stages: int) -> List[str]:
    return [name for name in SCHEDULES if accumulation % accumulation_unit(stages, name) == 0]


def _examine_epochs(
    found: Examination,
    config: TrainConfig,
    dataset: DatasetInfo,
    topology: Topology,
    batch: Batch,
    resumable: Sequence[int],
) -> Optional[Epochs]:
    size = batch.global_batch_size
    most = dataset.train_samples // size
    if not most:
        found.refuse(
            "epoch",
            f"One weight update would take {size} samples (micro batch {batch.micro_batch_size} x accumulation "
            f"{batch.accumulation} x {cli.count(batch.replicas, 'replica')}), but {dataset.name} has "
            f"{dataset.train_samples}.",
            lambda: _smaller_batches(config, dataset, topology, batch),
        )
        return None

    updates = config.updates_per_epoch or most
    if updates > most:
        found.refuse(
            "updates_per_epoch",
            f"--updates_per_epoch={updates} takes more than {dataset.name} has: {dataset.train_samples} samples fill "
            f"{most} updates of {size}.",
            lambda: errors.fixes_for("updates_per_epoch", [most, None]),
        )
        return None

    duration = config.epochs
    full, last = divmod(duration.count, updates) if duration.unit == "steps" else (duration.count, 0)
    iterations = config.device_iterations
    if iterations is None and config.callbacks:
        iterations = 1  # the user's callbacks are called between executions: after each update
    elif iterations is None:
        periods = (updates if full else 0, last, config.checkpoint_every or 0, config.log_every or 0, *resumable)
        macs = found.model.architecture.macs if found.model else 0
        iterations = choose_device_iterations(macs, size // topology.instances, updates if full else last, periods)
    if full and updates % iterations:
        found.refuse(
            "device_iterations",
            f"--device_iterations={iterations} does not divide the epoch's {updates} weight updates "
            f"({dataset.train_samples} samples / global batch {size}).",
            lambda: [
                *errors.fixes_for("device_iterations", errors.divisors_around(updates, iterations, most=4)),
                *errors.fixes_for("updates_per_epoch", [n for n in [updates // iterations * iterations] if n]),
            ],
        )
        return None
    if last % iterations:
        common = math.gcd(updates, duration.count) if full else duration.count
        found.refuse(
            "duration",
            f"--epochs={duration} is not a multiple of --device_iterations={iterations}: an execution cannot be split.",
            lambda: [
                *errors.fixes_for(
                    "epochs", [Duration(n, "steps") for n in errors.multiples_around(duration.count, iterations)]
                ),
                *errors.fixes_for("device_iterations", errors.divisors_around(common, iterations, most=4)),
            ],
        )
        return None
    return Epochs(updates, dataset.train_samples - updates * size, iterations, full, last)


def _smaller_batches(config: TrainConfig, dataset: DatasetInfo, topology: Topology, batch: Batch) -> Iterator[Fix]:
    """Yields fixes for the largest batch that still fits: of one flag where that is possible, else of several."""
    samples, replicas = dataset.train_samples, topology.replicas
    unit = accumulation_unit(topology.pipeline_stages, topology.pipeline_schedule)
    most = samples // (batch.micro_batch_size * replicas) // unit * unit
    if most and config.global_batch_size is not None:
        yield from errors.fixes_for("global_batch_size", [most * batch.micro_batch_size * replicas])
    elif most:
        yield from errors.fixes_for("gradient_accumulation", [most])
    if config.global_batch_size is None:
        micro = samples // (batch.accumulation * replicas)
        fewer = samples // (batch.accumulation * batch.micro_batch_size)
        yield from errors.fixes_for("micro_batch_size", [micro] if micro else [])
        yield from errors.fixes_for(
            "ipus", [errors.powers_of_two_around(fewer)[0] * topology.ipus_per_replica] if fewer else []
        )
    if samples < unit * replicas:
        # Not even micro batches of one sample fit: suggest as many replicas as there are samples.
        most_replicas = errors.powers_of_two_around(max(samples // unit, 1))[0]
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
        in_total = config.global_batch_size is not None
        micro = samples // (unit * replicas)
        yield Fix(
            (
                ("micro_batch_size", micro),
                ("gradient_accumulation", None),
                ("global_batch_size", micro * unit * replicas if in_total else None),
            )
        )


def _examine_checkpoints(found: Examination, config: TrainConfig) -> None:
    every, iterations = config.checkpoint_every, config.device_iterations
    if every is not None and iterations is not None and every % iterations:
        found.refuse(
            "checkpoint_every",
            f"--checkpoint_every={every} is not a multiple of --device_iterations={iterations}: the weights can be "
            "read between executions only.",
            lambda: errors.fixes_for("checkpoint_every", [*errors.multiples_around(every, iterations), None]),
        )


def _set_or_remove(name: str, value: object) -> _SuggestFixes:
    return lambda: errors.fixes_for(name, [value, None])


def _fewer_hosts(hosts: Hosts, count: int) -> Hosts:
    return Hosts(count, hosts.names[:count]) if count <= len(hosts.names) else Hosts(count)
