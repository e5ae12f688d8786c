"""Where a run's seconds go: compiling, executing, bookkeeping, evaluation, overhead. No TensorFlow."""

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
        self._compile_s = self._training_s = self._executing_s = self._bookkeeping_s = self._evaluation_s = 0.0
        self._part_began = began
        self.compiled = False

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._began

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
                self._bookkeeping_s += self._now() - began

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

    def parts(self, input_wait_s: Optional[float]) -> Sequence[float]:
        """Returns this instance's parts as numbers to gather from all instances, for `slowest_times`."""
        between_s = max(self._training_s - self._executing_s - self._bookkeeping_s, 0.0)
        waited_s = math.nan if input_wait_s is None else input_wait_s
        return (
            self._training_s, self._compile_s, self._executing_s, between_s, self._bookkeeping_s, self._evaluation_s,
            waited_s,
        )  # fmt: skip

    def slowest_times(self, parts_of_all: Sequence[Sequence[float]]) -> RunTimes:
        """Returns the times of the instance that trained longest, which throughput is measured over."""
        slowest = max(parts_of_all, key=lambda parts: parts[0])
        _, compile_s, executing_s, between_s, bookkeeping_s, evaluation_s, waited_s = slowest
        return RunTimes(
            total_s=self.elapsed_s,
            compile_s=compile_s,
            executing_s=executing_s,
            between_s=between_s,
            bookkeeping_s=bookkeeping_s,
            evaluation_s=evaluation_s,
            input_wait_s=None if math.isnan(waited_s) else waited_s,
        )
