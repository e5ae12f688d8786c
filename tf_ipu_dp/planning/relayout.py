"""Other ways to lay out a job with the same global batch: to resume a run on other IPUs, or after the loss of a host.

Pure. Every layout that is returned or suggested has been examined by the planner's rules.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import SCHEDULES
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning import errors, rules
from tf_ipu_dp.planning.errors import Fix, PlanError, Problem
from tf_ipu_dp.planning.steps import Batch
from tf_ipu_dp.planning.topology import LaunchedTopology, accumulation_unit, ipus_per_replica


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to divide a global batch over a job."""

    ipus: int
    instances: int
    micro_batch_size: int
    accumulation: int

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Returns the config with this layout."""
        return dataclasses.replace(
            config,
            ipus=self.ipus,
            instances=self.instances,
            micro_batch_size=self.micro_batch_size,
            gradient_accumulation=self.accumulation,
            global_batch_size=None,
        )


def layouts(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology] = None
) -> Tuple[Layout, ...]:
    """Returns the layouts that keep a global batch on the config's IPUs, the nearest to the config first.

    Only the micro batch sizes nearest to the config's are tried. What a launcher has started is not changed.
    """
    stages = config.requested_stages or (launched.ipus_per_replica if launched else 1)
    ipus = launched.replicas * launched.ipus_per_replica if launched else config.ipus or 1
    replicas = ipus // ipus_per_replica(stages)
    unit = accumulation_unit(stages, config.pipeline_schedule)
    if not replicas or global_batch % (replicas * unit):
        return ()
    near = config.micro_batch_size
    requested = launched.instances if launched else config.instances or 1
    sizes = [
        near,
        *sorted(errors.divisors_around(global_batch // (replicas * unit), near), key=lambda n: abs(n - near)),
    ]
    counts = [requested] if launched else sorted(errors.powers_of_two(1, replicas), key=lambda n: abs(n - requested))
    possible = (
        Layout(ipus, instances, size, global_batch // (replicas * size))
        for size in sizes
        if global_batch % (replicas * size) == 0
        for instances in counts
    )
    return tuple(each for each in possible if _has_global_batch(each.apply(config), dataset, global_batch, launched))


def keep_global_batch(
    config: TrainConfig, dataset: DatasetInfo, saved: Batch, launched: Optional[LaunchedTopology] = None
) -> TrainConfig:
    """Returns the config with which a run resumes with its saved global batch: unchanged, or with other accumulation.

    An accumulation equal to the saved one does not request another global batch: it comes from the run's saved flags.
    Raises PlanError, with layouts that work, if the global batch cannot be kept.
    """
    total = saved.global_batch_size
    solved = _solve_accumulation(config, saved)
    for candidate in (config, solved):
        if _has_global_batch(candidate, dataset, total, launched):
            return candidate

    def works(fix: Fix) -> bool:
        return _has_global_batch(_solve_accumulation(fix.apply(config), saved), dataset, total, launched)

    trained = f"the run was trained with global batch {total}"
    examined = rules.examine(solved, dataset, launched)
    problems = []
    for broken in examined.broken:
        layouts_that_keep_it = tuple(filter(works, _suggest_layouts(config, dataset, total, launched)))
        if broken.name == "global_batch":
            sentence = _explain_lost_batch(config, dataset, total, launched)
            problems.append(Problem(broken.name, sentence, layouts_that_keep_it))
        else:
            suggested = tuple(filter(works, errors.distinct_fixes(broken.suggest(), config)))
            sentence = f"{broken.sentence.rstrip('.')}; {trained}."
            problems.append(Problem(broken.name, sentence, suggested or layouts_that_keep_it))
    if not problems and examined.batch:
        names = ("global_batch_size", "gradient_accumulation")
        global_batch = examined.batch.global_batch_size
        sentence = f"{_flags_text(config, *names)} makes a global batch of {global_batch}, but {trained}."
        removals = errors.distinct_fixes([Fix(tuple((name, None) for name in names))], config)
        problems.append(Problem("kept_batch", sentence, tuple(filter(works, removals))))
    raise PlanError(problems)


def _has_global_batch(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology]
) -> bool:
    examined = rules.examine(config, dataset, launched)
    return not examined.broken and examined.batch is not None and examined.batch.global_batch_size == global_batch


def _solve_accumulation(config: TrainConfig, saved: Batch) -> TrainConfig:
    """Returns the config with the saved global batch and no accumulation, unless it requests another batch."""
    total = saved.global_batch_size
    if config.global_batch_size not in (None, total) or config.gradient_accumulation not in (None, saved.accumulation):
        return config
    return dataclasses.replace(config, global_batch_size=total, gradient_accumulation=None)


def _explain_lost_batch(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology]
) -> str:
    """Returns the sentence for a job that cannot divide the global batch."""
    if not launched:
        given = _flags_text(config, "ipus", "pipeline_stages", "micro_batch_size")
        return f"{given} cannot keep the global batch of {global_batch} that the run was trained with."
    stages = config.requested_stages or launched.ipus_per_replica
    ipus = launched.replicas * launched.ipus_per_replica
    as_flags = dataclasses.replace(config, ipus=ipus, pipeline_stages=stages, instances=launched.instances)
    counts = [
        each.ipus // launched.ipus_per_replica for each in _layouts_on_other_ipus(as_flags, dataset, global_batch)
    ]
    others = f"; {cli.alternatives(counts)} would work" if counts else ""
    return (
        f"{cli.count(launched.replicas, 'replica')} (started by {launched.launcher}{others}) with "
        f"--micro_batch_size={config.micro_batch_size} cannot keep the global batch of {global_batch} that the run was "
        "trained with."
    )


def _suggest_layouts(
    config: TrainConfig, dataset: DatasetInfo, global_batch: int, launched: Optional[LaunchedTopology]
) -> List[Fix]:
    """Returns fixes that may keep a global batch: other IPUs, other micro batches on the same IPUs, other schedules."""
    instances = launched.instances if launched else config.instances or 1
    same_ipus = [each for each in layouts(config, dataset, global_batch, launched) if each.instances == instances]
    others = [] if launched else _layouts_on_other_ipus(config, dataset, global_batch)
    fixes = [_as_fix(each, config) for each in others]
    fixes += errors.fixes_for("micro_batch_size", sorted(each.micro_batch_size for each in same_ipus[:3]))
    return errors.distinct_fixes([*fixes, *errors.fixes_for("pipeline_schedule", SCHEDULES)], config)


def _layouts_on_other_ipus(config: TrainConfig, dataset: DatasetInfo, global_batch: int) -> List[Layout]:
    """Returns the few layouts with the same micro batch on the nearest numbers of IPUs."""
    requested = config.ipus or 1
    found = []
    for ipus in errors.powers_of_two(1, 4 * requested):
        possible = layouts(dataclasses.replace(config, ipus=ipus), dataset, global_batch)
        same_size = [each for each in possible[:1] if each.micro_batch_size == config.micro_batch_size]
        found += same_size if ipus != requested else []
    return sorted(sorted(found, key=lambda each: abs(each.ipus - requested))[:3], key=lambda each: each.ipus)


def _as_fix(layout: Layout, config: TrainConfig) -> Fix:
    instances = layout.instances if layout.instances != (config.instances or 1) else config.instances
    return Fix((("ipus", layout.ipus), ("instances", instances)))


def _flags_text(config: TrainConfig, *names: str) -> str:
    """Returns the flags as one would type them, without those that were not given."""
    values = ((name, getattr(config, name)) for name in names)
    return " ".join(cli.flag_text(name, value) for name, value in values if value is not None)
