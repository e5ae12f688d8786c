"""The bottleneck of a run, from its records, plan and flags. The only module that builds the input of `bottleneck`.

The verdict at the end of training, the monitor's live verdict and `--explain`, as text or JSON, all come from here. No
TensorFlow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts as dataset_facts
from tf_ipu_dp.monitoring import bottleneck
from tf_ipu_dp.planning import errors, plan
from tf_ipu_dp.runs import heartbeat, run_folder
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import ExchangeSummary, InstanceTimes, MetricsRecord, RunTimes, TrainingRecord, Verdict

_MAX_ITERATIONS = 1024
_TAIL_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A run's verdict, and whether it is the final one."""

    run_dir: str
    verdict: Verdict
    finished: bool
    updates: int
    exchanges: Optional[ExchangeSummary] = None  # None: one instance, or not reported by the device


def judge(
    planned: PlanRecord, cfg: Optional[TrainConfig], records: Sequence[TrainingRecord], times: Optional[RunTimes] = None
) -> Verdict:
    """Returns the bottleneck in some records of a run. `times` are the totals of the run, once it has ended."""
    usable = [record for record in records if record.instances and all(_is_valid(each) for each in record.instances)]
    instances = [record.instances for record in usable]
    if not instances and times and times.training_s > 0:
        instances = [(InstanceTimes(0, times.training_s, times.executing_s, times.input_wait_s),)]
    facts = bottleneck.Facts(
        device_iterations=planned.training.updates_per_execution,
        executions=_count_executions(usable, planned),
        larger_executions=larger_executions(cfg) if cfg else (),
        prefetch=cfg.prefetch if cfg else True,
        eight_bit_io=cfg.eight_bit_io if cfg else False,
        compile_s=times.compile_s if times else 0.0,
        total_s=times.total_s if times else 0.0,
        bookkeeping_s=times.bookkeeping_s if times else _recorded_bookkeeping_s(usable),
        training_s=times.training_s if times else 0.0,
    )
    return bottleneck.find_bottleneck(instances, facts)


def explain(path: Path) -> Explanation:
    """Returns the bottleneck of the run in a folder; `cli.UsageError` if it is not the folder of a run."""
    folder = run_folder.RunFolder(path)
    planned = folder.read_plan()
    if planned is None:
        raise cli.UsageError(
            f"--explain={path} is not the folder of a run: it has no plan.json that can be read. Give a run's folder, "
            "like runs/first."
        )
    records = _training_records(folder.read_metrics())
    result = folder.read_result()
    if result is not None and result.verdict.kind != Verdict.UNKNOWN:
        return Explanation(str(path), result.verdict, result.is_finished, result.updates, result.exchanges)
    compiling = [status for status in heartbeat.read_run(path) if status.phase == "compiling"]
    if result is None and compiling and not records:
        seconds = max(status.still_s for status in compiling)
        sentence = f"Compiling for {seconds:.0f} s. --executable_cache keeps compiled programs for the next start."
        return Explanation(str(path), Verdict(bottleneck.COMPILING, sentence, flag="executable_cache"), False, 0)
    found = judge(planned, _read_config(path), records, result.times if result else None)
    updates = result.updates if result else max((record.step for record in records), default=0)
    times = folder.read_exchange_times()
    finished = result is not None and result.is_finished
    return Explanation(str(path), found, finished, updates, times.summary() if times else None)


def explain_recent(path: Path) -> Optional[Verdict]:
    """Returns the current bottleneck of a live run, from its last records; None if it is not known yet."""
    folder = run_folder.RunFolder(path)
    planned = folder.read_plan()
    records = _training_records(folder.read_last_metrics(_TAIL_BYTES))
    if planned is None or not records:
        return None
    found = judge(planned, _read_config(path), records)
    return None if found.kind == bottleneck.TOO_SHORT else found


@functools.lru_cache(maxsize=16)
def larger_executions(cfg: TrainConfig) -> Tuple[int, ...]:
    """Returns the larger device iterations that the planner accepts with all other flags unchanged."""
    found = []
    with contextlib.suppress(cli.UsageError, OSError):
        dataset = dataset_facts.find(cfg, may_load=False)
        epochs = plan.plan_run(cfg, dataset).epochs
        for number in range(epochs.device_iterations + 1, min(epochs.updates_per_epoch, _MAX_ITERATIONS) + 1):
            if epochs.updates_per_epoch % number == 0:
                with contextlib.suppress(errors.PlanError):
                    plan.plan_run(dataclasses.replace(cfg, device_iterations=number), dataset)
                    found.append(number)
    return tuple(found)


def _recorded_bookkeeping_s(records: Sequence[TrainingRecord]) -> float:
    """Returns the time in logging and checkpoints, which the instances do together; 0 where it was not recorded."""
    return sum(max(each.bookkeeping_s or 0.0 for each in record.instances) for record in records)


def _count_executions(records: Sequence[TrainingRecord], planned: PlanRecord) -> int:
    """Returns the number of executions in some records; from their steps where version 0.1 wrote no number."""
    if all(record.executions is not None for record in records):
        return sum(record.executions or 0 for record in records)
    return (records[-1].step - records[0].step) // planned.training.updates_per_execution


def _is_valid(times: InstanceTimes) -> bool:
    waits = (times.input_wait_s, times.collective_s, times.program_collective_s)
    optional = (*waits, times.optimizer_s, times.bookkeeping_s, times.last)
    numbers = (times.seconds, times.executing_s, *(number or 0 for number in optional))
    return times.instance >= 0 and all(number >= 0 for number in numbers)


def _training_records(records: Sequence[MetricsRecord]) -> List[TrainingRecord]:
    return [record for record in records if isinstance(record, TrainingRecord)]


def _read_config(path: Path) -> Optional[TrainConfig]:
    with contextlib.suppress(cli.UsageError):
        return _parse_flags(run_folder.read_run_flags(path))
    return None


@functools.lru_cache(maxsize=16)
def _parse_flags(words: Tuple[str, ...]) -> TrainConfig:
    return train_flags.parse(words)
