"""Where a run's seconds go: start-up, compiling, executing, bookkeeping, evaluation. No TensorFlow."""

from __future__ import annotations

import contextlib
import math
import time
from typing import Callable, Iterator, Optional, Sequence

from tf_ipu_dp.runs.records import RunTimes


class RunClock:
    """Adds up the parts of a run's time. Every second since `began` belongs to exactly one part."""

    def __init__(self, began: float, now: Callable[[], float] = time.perf_counter) -> None:
        self._began, self._now = began, now
        self._startup_s = self._compile_s = self._training_s = self._executing_s = self._evaluation_s = 0.0
        self._export_s: Optional[float] = None
        self.bookkeeping_s = 0.0  # logging and checkpoints, within training time
        self._part_began = began
        self.compiled = False

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._began

    def finish_startup(self) -> None:
        """Ends the start-up: what follows is compiling, training or evaluation."""
        self._startup_s = self.elapsed_s

    def start_epoch(self) -> None:
        """Begins training time or, in the first epoch, compile time."""
        self._part_began = self._now()

    def finish_compiling(self) -> None:
        """Ends compile time, which the first execution is part of, and begins training time."""
        now = self._now()
        self._compile_s, self._part_began = now - self._part_began, now
        self.compiled = True

    def add_execution(self, seconds: float) -> None:
        """Counts an execution, other than the first, within training time."""
        self._executing_s += seconds

    @contextlib.contextmanager
    def bookkeeping(self) -> Iterator[None]:
        """Counts logging and checkpoints within training time."""
        began = self._now()
        try:
            yield
        finally:
            if self.compiled:
                self.bookkeeping_s += self._now() - began

    def end_epoch(self) -> None:
        """Ends training time."""
        if self.compiled:
            self._training_s += self._now() - self._part_began

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[Callable[[], float]]:
        """Counts a validation; yields a function that returns its seconds so far."""
        began = self._now()
        try:
            yield lambda: self._now() - began
        finally:
            self._evaluation_s += self._now() - began

    @contextlib.contextmanager
    def exporting(self) -> Iterator[None]:
        """Counts the export."""
        began = self._now()
        try:
            yield
        finally:
            self._export_s = self._now() - began

    def parts(self, input_wait_s: Optional[float], collective_s: Optional[float]) -> Sequence[float]:
        """Returns this instance's parts as numbers to gather from all instances, for `slowest_times`."""
        between_s = max(self._training_s - self._executing_s - self.bookkeeping_s, 0.0)
        waits = (math.nan if seconds is None else seconds for seconds in (input_wait_s, collective_s))
        return (
            self._training_s, self._startup_s, self._compile_s, self._executing_s, between_s, self.bookkeeping_s,
            self._evaluation_s, *waits,
        )  # fmt: skip

    def slowest_times(self, parts_of_all: Sequence[Sequence[float]]) -> RunTimes:
        """Returns the times of the instance that trained longest, which throughput is measured over."""
        slowest = max(parts_of_all, key=lambda parts: parts[0])
        _, startup_s, compile_s, executing_s, between_s, bookkeeping_s, evaluation_s, *waits = slowest
        waited_s, collective_s = (None if math.isnan(seconds) else seconds for seconds in waits)
        return RunTimes(
            total_s=self.elapsed_s,
            startup_s=startup_s,
            compile_s=compile_s,
            executing_s=executing_s,
            between_s=between_s,
            bookkeeping_s=bookkeeping_s,
            evaluation_s=evaluation_s,
            input_wait_s=waited_s,
            collective_s=collective_s if len(parts_of_all) > 1 else None,
            export_s=self._export_s,
        )
