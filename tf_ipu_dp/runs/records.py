"""Typed records of what a run writes into its folder."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional

from tf_ipu_dp import __version__


@dataclasses.dataclass(frozen=True)
class RunTimes:
    """Where a run's seconds went. None: not reported by the device."""

    total_s: float
    compile_s: float  # with the first execution
    executing_s: float  # in the other executions, input wait included
    between_s: float  # between them: calls, beginnings and ends of epochs
    bookkeeping_s: float  # logging and checkpoints
    evaluation_s: float
    input_wait_s: Optional[float]

    @property
    def training_s(self) -> float:
        """Returns what throughput is measured over."""
        return self.executing_s + self.between_s + self.bookkeeping_s

    @property
    def other_s(self) -> float:
        return max(self.total_s - self.compile_s - self.executing_s - self.evaluation_s, 0.0)


@dataclasses.dataclass(frozen=True)
class Scores:
    """The validation set's results, each sample counted once."""

    samples: int
    loss: float
    top1: float
    top5: float


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What came out of a run."""

    run_dir: str
    model: str
    dataset: str
    replicas: int
    updates: int  # in all, those before a resumption too
    planned_updates: int
    timed_samples: int  # trained in training_s
    times: RunTimes
    utilisation_pct: Optional[float]
    scores: Optional[Scores]
    verdict: str
    stopped: Optional[str] = None  # why, if before the end

    @property
    def samples_per_s(self) -> Optional[float]:
        return self.timed_samples / self.times.training_s if self.timed_samples and self.times.training_s else None


def result_value(result: RunResult) -> Dict[str, Any]:
    """Returns the result for a program: typed, with the units in the keys."""
    times, scores, rate = result.times, result.scores, result.samples_per_s
    return {
        "schema": 1,
        "version": __version__,
        "run_dir": result.run_dir,
        "model": result.model,
        "dataset": result.dataset,
        "replicas": result.replicas,
        "updates": result.updates,
        "planned_updates": result.planned_updates,
        "seconds": {
            "total": times.total_s,
            "compile": times.compile_s,
            "executing": times.executing_s,
            "input_wait": times.input_wait_s,
            "between_executions": times.between_s,
            "logging_and_checkpoints": times.bookkeeping_s,
            "evaluation": times.evaluation_s,
            "other": times.other_s,
        },
        "samples_per_s": rate,
        "samples_per_s_per_replica": rate and rate / result.replicas,
        "utilisation_pct": result.utilisation_pct,
        "validation": scores and dataclasses.asdict(scores),
        "verdict": result.verdict,
        "stopped": result.stopped,
    }
