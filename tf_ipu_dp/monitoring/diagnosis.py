"""What holds back the run in a folder: its metrics, plan and result, read and judged. No TensorFlow.

The same files are read while the run is under way; what is not there yet is not judged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import schema, train_flags
from tf_ipu_dp.datasets import lookup
from tf_ipu_dp.monitoring import bottleneck
from tf_ipu_dp.planning import errors, plan
from tf_ipu_dp.runs import heartbeat, run_folder

_MOST_ITERATIONS = 1024
_TAIL_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Explanation:
    """A run's verdict, and whether it is the last one."""

    run_dir: str
    verdict: bottleneck.Verdict
    finished: bool
    updates: int


def explain(folder: Path) -> Explanation:
    """Returns what held the run back; `cli.UsageError` for a folder that is no run's."""
    run = run_folder.RunFolder(folder)
    planned = _read_object(run.plan_json)
    if planned is None:
        raise cli.UsageError(f"--explain={folder} is not the folder of a run: it has no plan.json that can be read.")
    records = run.read_metrics()
    result = _read_object(run.result_json)
    compiling = [status for status in heartbeat.read_run(folder) if status.phase == "compiling"]
    if result is None and compiling and not _trained(records):
        seconds = max(status.still_s for status in compiling)
        sentence = f"Compiling for {seconds:.0f} s. --executable_cache keeps what is compiled for the next start."
        found = bottleneck.Verdict(bottleneck.COMPILING, sentence, flag="executable_cache")
        return Explanation(str(folder), found, False, 0)
    cfg = _read_config(folder)
    updates = max([each["step"] for each in _trained(records)], default=0)
    if result is not None and type(result.get("updates")) is int:
        updates = result["updates"]
    facts = _facts(planned, result, updates, cfg)
    return Explanation(str(folder), bottleneck.judge(_stretches(records, result), facts), result is not None, updates)


def explain_lately(folder: Path) -> Optional[bottleneck.Verdict]:
    """Returns what holds a run back that is under way, by the last of its metrics; None where that is not known yet."""
    run = run_folder.RunFolder(folder)
    planned = _read_object(run.plan_json)
    records = _trained(_read_tail(run.metrics))
    stretches = _stretches(records[1:], None)  # the updates of the first one are not known
    if planned is None or not stretches:
        return None
    facts = _facts(planned, None, records[-1]["step"] - records[0]["step"], _read_config(folder))
    found = bottleneck.judge(stretches, facts)
    return None if found.kind == bottleneck.TOO_SHORT else found


def _facts(
    planned: Dict[str, Any],
    result: Optional[Dict[str, Any]],
    updates: int,
    cfg: Optional[schema.TrainConfig],
) -> bottleneck.Facts:
    training = planned.get("training")
    iterations = training.get("updates_per_execution") if isinstance(training, dict) else None
    iterations = iterations if type(iterations) is int and iterations > 0 else 1
    seconds = result.get("seconds") if result else None
    times: Dict[str, Any] = seconds if isinstance(seconds, dict) else {}
    return bottleneck.Facts(
        device_iterations=iterations,
        executions=max(updates // iterations, 0),
        larger=larger_executions(cfg) if cfg else (),
        prefetch=cfg.prefetch if cfg else True,
        eight_bit_io=cfg.eight_bit_io if cfg else False,
        compile_s=_seconds(times, "compile"),
        total_s=_seconds(times, "total"),
        bookkeeping_s=_seconds(times, "logging_and_checkpoints"),
    )


@functools.lru_cache(maxsize=16)
def larger_executions(cfg: schema.TrainConfig) -> Tuple[int, ...]:
    """Returns the device iterations above the present ones that the planner takes with all other flags."""
    found = []
    with contextlib.suppress(cli.UsageError, OSError):
        dataset = lookup.find(cfg.dataset, cfg.data_dir, cfg.image_size)
        epochs = plan.plan_run(cfg, dataset).epochs
        for number in range(epochs.device_iterations + 1, min(epochs.updates_per_epoch, _MOST_ITERATIONS) + 1):
            if epochs.updates_per_epoch % number == 0:
                with contextlib.suppress(errors.PlanError):
                    plan.plan_run(dataclasses.replace(cfg, device_iterations=number), dataset)
                    found.append(number)
    return tuple(found)


def _stretches(records: List[Dict[str, Any]], result: Optional[Dict[str, Any]]) -> List[List[bottleneck.InstanceTimes]]:
    """Returns the times of all instances, record by record; of older runs, those of the whole run."""
    found = [bottleneck.parse_stretch(each.get("instances")) for each in _trained(records)]
    stretches = [stretch for stretch in found if stretch]
    seconds = result.get("seconds") if result else None
    if stretches or not isinstance(seconds, dict):
        return stretches
    executing = _seconds(seconds, "executing")
    whole = executing + _seconds(seconds, "between_executions") + _seconds(seconds, "logging_and_checkpoints")
    waited = seconds.get("input_wait")
    waiting = _seconds(seconds, "input_wait") if type(waited) in (int, float) else None
    return [[bottleneck.InstanceTimes(0, whole, executing, waiting)]] if whole > 0 else []


def _trained(records: List[Dict[str, Any]]) -> List[Dict[str, Any]]:
    return [each for each in records if each.get("kind") == "train" and type(each.get("step")) is int]


def _read_config(folder: Path) -> Optional[schema.TrainConfig]:
    with contextlib.suppress(cli.UsageError):
        return _parse_flags(run_folder.read_run_flags(folder))
    return None


@functools.lru_cache(maxsize=16)
def _parse_flags(words: Tuple[str, ...]) -> schema.TrainConfig:
    return train_flags.parse(words)


def _read_tail(path: Path) -> List[Dict[str, Any]]:
    """Returns the last records: a long run's file is large, and a monitor looks every second."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
            lines = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    return [record for record in map(_parse_object, lines) if record is not None]


def _read_object(path: Path) -> Optional[Dict[str, Any]]:
    try:
        return _parse_object(path.read_bytes())
    except OSError:
        return None


def _parse_object(text: bytes) -> Optional[Dict[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _seconds(times: Dict[str, Any], name: str) -> float:
    value: Any = times.get(name)
    return float(value) if type(value) in (int, float) and value >= 0 else 0.0
