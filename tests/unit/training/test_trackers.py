"""Trackers get a run's records: in their real offline modes where they are installed."""

from __future__ import annotations

import contextlib

import pytest
import sample_records

from tf_ipu_dp import cli, missing_packages
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.training import preflight, trackers


@pytest.fixture
def track(tmp_path, monkeypatch):
    """Returns a function that tracks some records of a run in a folder, and returns what was said and warned."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)

    def run(name, *records, past=(), error=None):
        said, warned = [], []
        cfg = train_flags.parse([f"--track={name}", "--ipus=4"])
        opened = trackers.open_trackers(cfg, RunFolder(folder), past, warned.append, said.append)
        with contextlib.suppress(ZeroDivisionError), opened as sinks:
            for record in records:
                for sink in sinks:
                    sink.write(record)
            if error:
                raise error
        return said, warned

    run.folder = folder
    return run


def test_mlflow_gets_flags_and_records_and_a_resumed_run_continues_its_own(track):
    pytest.importorskip("mlflow", reason="MLflow is not installed (extra mlflow)")
    from mlflow.tracking import MlflowClient

    validation = sample_records.make_validation(8)
    said, warned = track("mlflow", sample_records.make_training(8), validation, past=[sample_records.make_training(4)])
    assert (warned, len(said)) == ([], 1)
    track("mlflow", sample_records.make_training(12), past=[sample_records.make_training(4)], error=ZeroDivisionError())
    client = MlflowClient(tracking_uri=(track.folder.parent / "mlruns").as_uri())
    (experiment,) = [each for each in client.search_experiments() if each.name == "tf_ipu_dp"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "first" and run.info.status == "FAILED"
    assert run.data.params["ipus"] == "4" and run.data.params["model"] == "cnn"
    assert [each.step for each in client.get_metric_history(run.info.run_id, "train/loss")] == [4, 8, 12]
    assert run.data.metrics["validation/accuracy_pct"] == 75.0


def test_wandb_writes_offline_without_a_key_and_keeps_its_id(track):
    pytest.importorskip("wandb", reason="W&B is not installed (extra wandb)")
    said, warned = track("wandb", sample_records.make_training(8), sample_records.make_validation(8))
    assert warned == [] and "wandb sync" in said[0]
    track("wandb", sample_records.make_training(12))
    files = sorted((track.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and len({file.name for file in files}) == 1
    content = b"".join(file.read_bytes() for file in files)
    assert all(key in content for key in (b"train/loss", b"validation/accuracy_pct", b"learning_rate"))


def test_a_tracker_that_fails_is_reported_once_and_the_run_goes_on(track, monkeypatch):
    class Broken:
        id = "1"

        def log(self, values, step):
            raise OSError("no network")

        def finish(self, failed):
            raise AssertionError("it was left out")

    monkeypatch.setitem(trackers._OPEN, "wandb", lambda *_: (Broken(), "nowhere"))
    _, warned = track("wandb", sample_records.make_training(8), sample_records.make_training(12))
    sentence = "--track=wandb failed (no network); the run goes on without it. Its records stay in metrics.jsonl."
    assert warned == [sentence]

    def refuse(*_):
        raise OSError("no network")

    monkeypatch.setitem(trackers._OPEN, "wandb", refuse)
    assert track("wandb", sample_records.make_training(8)) == ([], [sentence])


def test_a_tracker_that_is_not_installed_is_refused_before_training(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(missing_packages, "_is_installed", lambda name: name not in ("wandb", "mlflow"))
    cfg = train_flags.parse(["--track=mlflow"])
    from tf_ipu_dp.datasets import info

    with pytest.raises(ModuleNotFoundError) as caught:
        preflight.check(cfg, plan.plan_run(cfg, info.DATASETS["fashion_mini"]))
    assert "[mlflow]'" in missing_packages.explain(caught.value)


def test_an_unknown_tracker_is_refused():
    with pytest.raises(cli.UsageError, match="It takes wandb or mlflow, or several, separated by commas"):
        train_flags.parse(["--track=wandb,tensorbord"])
    assert train_flags.parse(["--track=wandb,mlflow,wandb"]).track == ("wandb", "mlflow")
