"""Experiment trackers (--track): W&B and MLflow get a run's flags and the same records as TensorBoard. No TensorFlow.

A tracker that fails, for instance without a network, is reported once and left out: it never ends a run. A resumed run
continues the tracker's own run, whose id is kept in the run's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Protocol, Sequence, Type

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.runs import run_folder, safe_files
from tf_ipu_dp.runs.json_files import read_object
from tf_ipu_dp.runs.records import MetricsRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.training.scalars import scalars

_PROJECT = "tf_ipu_dp"
_IDS = "tracking.json"


class Tracker(Protocol):
    """One run in a tracker."""

    id: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Adds numbers of a step."""

    def finish(self, failed: bool) -> None:
        """Ends the tracker's run."""


class TrackerSink:
    """Hands records to a tracker. The first failure is reported, and ends the tracking of this run."""

    def __init__(self, name: str, tracker: Tracker, warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._tracker: Optional[Tracker] = tracker

    def write(self, record: MetricsRecord) -> None:
        """Logs the numbers of a record."""
        known = {name: value for name, value in scalars(record).items() if value is not None}
        values = {f"{record.KIND}/{name}": value for name, value in known.items()}
        self._try(lambda tracker: tracker.log(values, record.step))

    def __enter__(self) -> TrackerSink:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], _: Optional[BaseException], __: Optional[TracebackType]
    ) -> None:
        self._try(lambda tracker: tracker.finish(failed=kind is not None))

    def _try(self, action: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            action(self._tracker)
        except Exception as error:  # noqa: BLE001 - of a service that training does not depend on
            self._tracker = None
            self._warn(_explain(self._name, error))


@contextlib.contextmanager
def open_trackers(
    cfg: TrainConfig, folder: RunFolder, past: Sequence[MetricsRecord], warn: Callable[[str], None],
    info: Callable[[str], None],
) -> Iterator[Sequence[TrackerSink]]:  # fmt: skip
    """Yields a sink for each tracker of --track. One that is new to a resumed run gets its earlier records too."""
    with contextlib.ExitStack() as stack:
        sinks = []
        ids = _read_ids(folder)
        for name in cfg.track or ():
            try:
                tracker, place = _OPEN[name](folder, _flags_of(cfg), ids.get(name))
            except Exception as error:  # noqa: BLE001 - of a service that training does not depend on
                warn(_explain(name, error))
                continue
            info(f"Records also go to {place}")
            sink = stack.enter_context(TrackerSink(name, tracker, warn))
            if tracker.id != ids.get(name):
                for record in past:
                    sink.write(record)
                ids[name] = tracker.id
                safe_files.write_durably(folder.path / _IDS, run_folder.render_json(ids))
            sinks.append(sink)
        yield sinks


class _Wandb:
    """A run of W&B. Steps are numbers of their own, so that a resumed run may log a step again."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self.id = str(run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def finish(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    """A run of MLflow, through its client: nothing global is set, so that a program around it may use MLflow too."""

    def __init__(self, client: Any, run_id: str) -> None:
        self._client = client
        self.id = run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self.id, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def finish(self, failed: bool) -> None:
        self._client.set_terminated(self.id, "FAILED" if failed else "FINISHED")


def _open_wandb(folder: RunFolder, flags: Dict[str, Any], known: Optional[str]) -> Any:
    import wandb

    # Without a key wandb would ask for one in the middle of a start.
    mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT") or _PROJECT,
        name=folder.path.resolve().name,
        dir=str(folder.path),
        config=flags,
        id=known,
        resume="allow" if known and mode == "online" else None,
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("*", step_metric="step")
    if mode == "online":
        return _Wandb(run), f"W&B: {run.url}"
    return _Wandb(
        run
    ), f"{folder.path / 'wandb'}; upload them with: wandb sync {folder.path / 'wandb' / 'offline-run-*'}"


def _open_mlflow(folder: RunFolder, flags: Dict[str, Any], known: Optional[str]) -> Any:
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder.path.absolute().parent / "mlruns").as_uri()
    if uri.startswith("file:"):
        # Releases from 3.7 on want to be told that files are meant; a run's own folder needs no server.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=uri)
    if known is not None:
        with contextlib.suppress(MlflowException):
            client.update_run(known, status="RUNNING")
            return _Mlflow(client, known), f"MLflow: {uri}"
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
    experiment = client.get_experiment_by_name(name)
    number = experiment.experiment_id if experiment else client.create_experiment(name)
    run = client.create_run(number, run_name=folder.path.resolve().name)
    client.log_batch(run.info.run_id, params=[Param(key, str(value)) for key, value in flags.items()])
    return _Mlflow(client, run.info.run_id), f"MLflow: {uri}"


_OPEN: Dict[str, Callable[[RunFolder, Dict[str, Any], Optional[str]], Any]] = {
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}


def _flags_of(cfg: TrainConfig) -> Dict[str, Any]:
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg)}
    return {
        name: value if isinstance(value, (bool, int, float)) else cli.typed(value)
        for name, value in values.items()
        if value is not None
    }


def _read_ids(folder: RunFolder) -> Dict[str, str]:
    found = read_object(Path(folder.path, _IDS)) or {}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _explain(name: str, error: Exception) -> str:
    reason = cli.first_line(str(error) or type(error).__name__).rstrip(".")
    return f"--track={name} failed ({reason}); the run goes on without it. Its records stay in metrics.jsonl."
