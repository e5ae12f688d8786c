"""The cells of a study: mode, sizes and flags of train in, planned cells out. Pure.

Every cell is planned by the planner that training uses. A size that cannot be planned is refused with the nearest ones
that can.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import Hosts
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning import plan, rules
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, STRONG, WEAK, Cell

SAMPLES, REPLICAS, INSTANCE_UNIT = "samples", "replicas", "instances"
UNITS = (INSTANCE_UNIT, REPLICAS)
MAX_SIZE = 1 << 20
ONE_PROCESS_ENGINES = ("keras",)
# The sizes of a mode, where none are given.
DEFAULT_SIZES = {BATCH: "8..128", WEAK: "1,2,4", STRONG: "1,2,4", COMPARE: "4", INSTANCES: "1,2,4"}
# Flags of train that the study sets in every cell: the layout, how long a cell is, and where it is kept.
SET_BY_THE_STUDY = (
    "ipus", "instances", "hosts", "micro_batch_size", "gradient_accumulation", "global_batch_size", "epochs", "run_dir",
    "resume", "checkpoint_every", "keep_checkpoints", "log_every", "validate", "early_stop", "export", "json",
    "dry_run", "format", "evaluate", "input_only",
)  # fmt: skip
# What the programs of other engines do not do: they all take SGD with momentum in 32 bits, one device to a replica.
_OURS_ONLY = (
    "optimizer", "precision", "reduction", "loss_scaling", "recompute", "pipeline_stages", "pipeline_splits",
)  # fmt: skip
_TIMED_UPDATES = (3, 20_000)
_SLOW_UPDATE_S = 1.0
_MAX_TRIED = 256


@dataclasses.dataclass(frozen=True)
class Request:
    """What a study is asked to measure."""

    mode: str
    sizes: Tuple[int, ...]
    unit: str  # what sizes count in weak and strong: replicas or instances
    replicas_per_instance: int
    engines: Tuple[str, ...]
    config: TrainConfig
    dataset: DatasetInfo
    hosts: int = 1  # machines that instances can be spread over

    @property
    def axis(self) -> str:
        """What the sizes count."""
        return {BATCH: SAMPLES, COMPARE: REPLICAS, INSTANCES: INSTANCE_UNIT}.get(self.mode, self.unit)


@dataclasses.dataclass(frozen=True)
class Length:
    """How many updates a run of a cell has. The warm-up is not timed."""

    warmup: int
    updates: int

    @property
    def total(self) -> int:
        return self.warmup + self.updates


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Replicas and instances of one size. The processes of other engines are replicas of one instance each."""

    size: int
    replicas: int
    instances: int
    processes: Optional[int]  # of other engines; None: they have no such layout
    suffix: str = ""  # of the key, where a size has more than one layout


def parse_sizes(text: str, flag: str = "sizes") -> Tuple[int, ...]:
    """Returns the sizes of a list like `1,2,4` or a range like `16..512`, which doubles; ascending, each once."""
    found: List[int] = []
    for part in text.split(","):
        first, dots, last = (each.strip() for each in part.partition(".."))
        bounds = [first, last] if dots else [first]
        if not all(each.isdigit() and 1 <= int(each) <= MAX_SIZE for each in bounds):
            raise cli.UsageError(
                f"--{flag}={text} is not a list of sizes from 1 to {MAX_SIZE:,}. Write 1,2,4 or 16..512, which doubles."
            )
        size, end = int(first), int(bounds[-1])
        if end < size:
            raise cli.UsageError(f"--{flag}={text} has an empty range: {end} is less than {size}. Write {end}..{size}.")
        while size < end:
            found.append(size)
            size *= 2
        found.append(end)
    return tuple(sorted(set(found)))


def parse_engines(text: str, known: Iterable[str]) -> Tuple[str, ...]:
    """Returns the engines of a list, each once; UsageError for one that there is not."""
    names = list(known)
    found = [part.strip() for part in text.split(",")]
    for name in found:
        if name not in names:
            near = _nearest_name(name, names)
            advice = f"Did you mean {near}?" if near else f"Use {cli.alternatives(names)}."
            raise cli.UsageError(f"--engines={text}: {name or 'an empty name'} is not an engine. {advice}")
    return tuple(dict.fromkeys(found))


def plan_cells(request: Request, is_ours: Callable[[str], bool]) -> Tuple[Cell, ...]:
    """Returns the cells of a study, by engine and size; UsageError for what cannot be planned."""
    _check_flags(request, is_ours)
    layouts = _layouts(request)
    bad = [layout for layout in layouts if _problem(request, layout) is not None]
    if bad:
        raise cli.UsageError(*_refusals(request, bad))
    planned = {layout: plan.plan_run(_configure(request, layout), request.dataset) for layout in layouts}
    cells: List[Cell] = []
    for engine in request.engines:
        if is_ours(engine):
            cells += [_our_cell(engine, layout, run) for layout, run in planned.items()]
        elif engine in ONE_PROCESS_ENGINES:
            # One process computes each global batch alone, so that a batch is measured once.
            batches: Dict[int, _Layout] = {}
            for layout, run in planned.items():
                batches.setdefault(run.batch.global_batch_size, layout)
            cells += [_other_cell(engine, layout, 1, batch, 1) for batch, layout in batches.items()]
        else:
            cells += [
                _other_cell(engine, layout, layout.processes, run.batch.global_batch_size, request.hosts)
                for layout, run in planned.items()
                if layout.processes is not None
            ]
    return tuple(cells)


def common_words(config: TrainConfig, *, is_compared: bool) -> Tuple[str, ...]:
    """Returns the flags of train that all cells have: those that were given and that the study does not set.

    `is_compared`: with other engines, which train on the samples as they are.
    """
    defaults = {flag.name: flag.default for flag in train_flags.FLAGS}
    if is_compared:
        config = dataclasses.replace(config, augment="none")
    values = ((flag.name, getattr(config, flag.name)) for flag in train_flags.FLAGS)
    return tuple(
        cli.flag_text(name, value)
        for name, value in values
        if name not in SET_BY_THE_STUDY and value is not None and value != defaults[name]
    )


def plan_length(seconds: float, update_s: Optional[float], device_iterations: int, updates: Optional[int]) -> Length:
    """Returns the updates of a cell: `updates`, or as many as take about `seconds` at `update_s` each.

    Both numbers are multiples of the updates of an execution. The first execution compiles, so that it is warm-up.
    """
    least, most = _TIMED_UPDATES
    if updates is None:
        updates = least if not update_s else min(max(math.ceil(seconds / update_s), least), most)
    is_slow = update_s is not None and update_s >= _SLOW_UPDATE_S
    warmup = max(updates // 10, 1 if is_slow else 3)
    return Length(*(-(-each // device_iterations) * device_iterations for each in (warmup, updates)))


def _check_flags(request: Request, is_ours: Callable[[str], bool]) -> None:
    config, sentences = request.config, []
    if request.mode == STRONG and config.global_batch_size is None:
        sentences.append("--mode=strong keeps the global batch. Give it, for example --global_batch_size=512.")
    if request.mode == STRONG and config.gradient_accumulation is not None:
        sentences.append(
            f"--gradient_accumulation={config.gradient_accumulation} has no place in --mode=strong, which calculates "
            "it for every size. Leave it out."
        )
    if request.mode in (WEAK, BATCH) and config.global_batch_size is not None:
        fixed = "the samples of a replica" if request.mode == WEAK else "one micro batch"
        sentences.append(
            f"--global_batch_size={config.global_batch_size} has no place in --mode={request.mode}, where an update of "
            f"each replica has {fixed}. Use "
            + ("--micro_batch_size and --gradient_accumulation." if request.mode == WEAK else "--sizes.")
        )
    others = [name for name in request.engines if not is_ours(name)]
    defaults = {flag.name: flag.default for flag in train_flags.FLAGS}
    for name in _OURS_ONLY if others else ():
        value = getattr(config, name)
        if value not in (None, defaults[name], 1):
            sentences.append(
                f"{cli.flag_text(name, value)} is not what {cli.alternatives(others)} can do. Leave it out, or use "
                "--engines=tf_ipu_dp."
            )
    if sentences:
        raise cli.UsageError(*sentences)


def _layouts(request: Request) -> List[_Layout]:
    sizes, config = request.sizes, request.config
    if request.mode == BATCH:
        return [_Layout(size, 1, 1, 1) for size in sizes]
    if request.mode == INSTANCES:
        replicas = (config.ipus or max(sizes)) // _ipus_per_replica(config) or 1
        return [_Layout(size, replicas, size, size) for size in sizes]
    if request.mode == COMPARE:
        most = max(sizes)
        spread = config.instances or most
        found = [_Layout(1, 1, 1, 1, "-alone"), _Layout(most, most, 1, None, "-in_1_instance")]
        return [*found, _Layout(most, most, spread, spread, f"-in_{spread}_instances")]
    if request.unit == REPLICAS:
        most = config.instances or 1
        return [_Layout(size, size, min(most, size), size) for size in sizes]
    each = request.replicas_per_instance
    return [_Layout(size, size * each, size, size) for size in sizes]


def _configure(request: Request, layout: _Layout) -> TrainConfig:
    config = request.config
    changes: Dict[str, object] = {
        "ipus": layout.replicas * _ipus_per_replica(config),
        "instances": layout.instances,
        "hosts": Hosts(_hosts(layout.instances, request.hosts)),
    }
    if request.mode == BATCH:
        changes.update(micro_batch_size=layout.size, gradient_accumulation=None)
    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]


def _hosts(instances: int, most: int) -> int:
    """Returns how many hosts the instances are spread over: a power of two, as many as there are."""
    return 1 << (min(instances, most).bit_length() - 1)


def _ipus_per_replica(config: TrainConfig) -> int:
    return plan.ipus_per_replica(config.requested_stages or 1)


def _problem(request: Request, layout: _Layout) -> Optional[str]:
    """Returns the first rule of the planner that a layout breaks; None if it can be planned."""
    broken = rules.examine(_configure(request, layout), request.dataset, None).broken
    return broken[0].sentence if broken else None


def _refusals(request: Request, bad: Sequence[_Layout]) -> List[str]:
    """Returns a sentence for each reason, with the sizes that break it and the nearest ones that can be planned."""
    sentences = []
    for layout in bad:
        near = _nearest_sizes(request, layout.size)
        advice = f" Nearest sizes that can: {' and '.join(map(str, near))}." if near else ""
        what = cli.count(layout.size, request.axis[:-1])
        sentences.append(f"--sizes: {what} cannot be planned: {_problem(request, layout)}{advice}")
    return list(dict.fromkeys(sentences))


def _nearest_sizes(request: Request, size: int) -> List[int]:
    """Returns the nearest size below and the nearest above that can be planned, where there are such."""
    found = []
    for direction in (range(size - 1, 0, -1), range(size + 1, size + _MAX_TRIED)):
        for near in direction[:_MAX_TRIED]:
            asked = dataclasses.replace(request, sizes=(near,))
            if all(_problem(asked, layout) is None for layout in _layouts(asked)):
                found.append(near)
                break
    return found


def _our_cell(engine: str, layout: _Layout, run: plan.RunPlan) -> Cell:
    batch, topology = run.batch, run.topology
    values = {
        "ipus": topology.ipus,
        "instances": topology.instances,
        "micro_batch_size": batch.micro_batch_size,
        "gradient_accumulation": batch.accumulation,
    }
    return Cell(
        key=f"{engine}-{layout.size}{layout.suffix}",
        engine=engine,
        size=layout.size,
        replicas=topology.replicas,
        instances=topology.instances,
        hosts=topology.hosts.count,
        micro_batch_size=batch.micro_batch_size,
        gradient_accumulation=batch.accumulation,
        global_batch_size=batch.global_batch_size,
        words=tuple(cli.flag_text(name, value) for name, value in values.items()),
    )


def _other_cell(engine: str, layout: _Layout, processes: Optional[int], batch: int, hosts: int) -> Cell:
    """Returns the cell of another engine: each process computes its part of the global batch in one pass."""
    assert processes is not None and batch % processes == 0  # of a batch of whole micro batches
    return Cell(
        key=f"{engine}-{layout.size}{layout.suffix}",
        engine=engine,
        size=layout.size,
        replicas=processes,
        instances=processes,
        hosts=_hosts(processes, hosts),
        micro_batch_size=batch // processes,
        gradient_accumulation=1,
        global_batch_size=batch,
        words=(),
    )


def _nearest_name(name: str, names: Sequence[str]) -> Optional[str]:
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.5)), None)
