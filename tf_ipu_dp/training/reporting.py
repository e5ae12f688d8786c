"""What a run reports while it trains: heartbeat, stall watch, and the sinks of its records."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from typing import Callable, Iterator, List, Optional

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.distributed.world import World
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs.heartbeat import Status, StatusReporter
from tf_ipu_dp.runs.records import MetricsRecord, StopReason, ValidationRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.runs.stall import Stall
from tf_ipu_dp.runs.stall_watch import StallWatch
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training import trackers
from tf_ipu_dp.training.console import Console
from tf_ipu_dp.training.sinks import ConsoleSink, HeartbeatSink, MetricsFileSink, Sink
from tf_ipu_dp.training.tensorboard import Examples, TensorBoardSink, render_command

_WRITE_STALL_WITHIN_S = 5.0


class Reporting:
    """The heartbeat, the stall watch and the sinks of one run. Every instance has one; only the leader writes files."""

    def __init__(
        self,
        cfg: TrainConfig,
        plan: RunPlan,
        sdk: Sdk,
        world: World,
        folder: RunFolder,
        console: Console,
        stalled: Callable[[str], StopReason],
    ) -> None:
        """`stalled` returns the stop reason for a sentence about a stall."""
        self._cfg, self._world, self._folder, self._console, self._stalled = cfg, world, folder, console, stalled
        self._reporter = StatusReporter(
            folder.path,
            instance=world.instance,
            instances=world.instances,
            planned_steps=plan.epochs.updates,
            waits_for=sdk.waits_for,
        )
        self._watch = StallWatch(
            folder.path, self._reporter, limit_s=cfg.stall_timeout.seconds, on_stall=self._exit_stalled
        )
        self._lines = ConsoleSink(console, plan)
        self._sinks: List[Sink] = [HeartbeatSink(self._reporter), self._lines]
        self.phase = self._reporter.update
        self.expect_step_time = self._watch.expect_step_time

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Writes a heartbeat each second, and watches those of other instances."""
        self._reporter.start()
        self._watch.start()
        try:
            yield
        finally:
            self._watch.stop()
            self._reporter.stop()

    def remove_heartbeat(self) -> None:
        """Removes the heartbeat, from any thread: the process is about to end."""
        self._reporter.remove()

    @contextlib.contextmanager
    def records(self, read_examples: Callable[[], Optional[Examples]]) -> Iterator[List[ValidationRecord]]:
        """Opens the sinks, which continue the folder's records. Yields past validations, on the leader."""
        if not self._world.is_leader:
            yield []
            return
        past = self._folder.read_metrics()
        validated = [record for record in past if isinstance(record, ValidationRecord)]
        self._lines.lowest_loss = min((each.loss for each in validated if each.loss is not None), default=math.inf)
        board = self._folder.tensorboard
        with contextlib.ExitStack() as stack:
            tensorboard = TensorBoardSink(board, self._cfg, past, read_examples())
            stack.enter_context(contextlib.closing(tensorboard))
            self._console.info(f"Records go to {self._folder.path}; see them with: {render_command(board)}")
            self._sinks += [MetricsFileSink(self._folder, (record.step for record in validated)), tensorboard]
            if self._cfg.track:
                console = self._console
                opened = trackers.open_trackers(self._cfg, self._folder, past, console.warning, console.info)
                self._sinks += stack.enter_context(opened)
            yield validated

    def write(self, record: MetricsRecord) -> None:
        """Writes a record to every sink."""
        for sink in self._sinks:
            sink.write(record)

    def _exit_stalled(self, stall: Stall) -> None:
        """Exits from the watching thread: the main thread may hang inside the device or a collective."""
        message = self._stalled(stall.sentence).message
        self._console.warning(f"train: {message}")
        # The folder may be what does not respond: it gets some seconds.
        writer = threading.Thread(target=self._write_stall, args=(stall.culprit, message), daemon=True)
        writer.start()
        writer.join(_WRITE_STALL_WITHIN_S)
        os._exit(1)

    def _write_stall(self, culprit: Status, message: str) -> None:
        with contextlib.suppress(cli.UsageError):
            self._folder.write_stall(culprit, message, reported_by=self._world.instance)
