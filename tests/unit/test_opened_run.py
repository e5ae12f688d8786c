"""`tf_ipu_dp.open_run`: what a run has, from Python, without TensorFlow."""

from __future__ import annotations

import subprocess
import sys

import pytest
import sample_records

import tf_ipu_dp
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.runs.run_folder import RunFolder


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "first")
    folder.path.mkdir()
    folder.write_start(train_flags.parse(["--ipus=4"]), sample_records.make_plan("--ipus=4"))
    folder.append_metrics(sample_records.make_training(8))
    folder.append_metrics(sample_records.make_validation(8))
    return tf_ipu_dp.open_run(folder.path)


def test_a_run_has_typed_records_plan_flags_and_result(run):
    assert [type(each).__name__ for each in run.metrics] == ["TrainingRecord", "ValidationRecord"]
    assert run.metrics.training[0].step == 8 and run.metrics.validation[0].accuracy == 0.75
    assert run.plan.topology.replicas == 4 and run.flags["ipus"] == "4"
    assert run.result is None and run.state == "failed" and "failed" in repr(run)
    RunFolder(run.path).write_result(sample_records.make_result())
    assert run.result.scores.top1 == 0.8765 and run.state == "finished"


def test_records_become_a_data_frame_where_pandas_is_there(run):
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = run.metrics.to_pandas()
    assert list(frame["kind"]) == ["train", "validation"] and list(frame["step"]) == [8, 8]
    assert frame["accuracy"].tolist() == [0.75, 0.75] and "instances" not in frame


def test_without_pandas_or_weights_an_error_says_what_to_do(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(tf_ipu_dp.UsageError, match=r"to_pandas\(\) needs pandas .* pip install 'pandas<3'"):
        run.metrics.to_pandas()
    with pytest.raises(tf_ipu_dp.UsageError, match="has no good checkpoint and no export"):
        run.model()


def test_what_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(tf_ipu_dp.UsageError, match=r"is not the folder of a run: it has no run\.flags"):
        tf_ipu_dp.open_run(tmp_path)


def test_the_package_stays_light_and_knows_what_it_offers():
    code = (
        "import sys, tf_ipu_dp; assert not {'absl', 'numpy', 'tensorflow', 'tf_ipu_dp.cli'} & set(sys.modules); "
        "assert 'open_run' in dir(tf_ipu_dp); tf_ipu_dp.open_run; print(*{'numpy', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\n", "")
    with pytest.raises(AttributeError, match="no attribute 'fly'"):
        _ = tf_ipu_dp.fly
