"""An emulated partition, a gcipuinfo of a given text in place of the Poplar SDK's, and recordings."""

from __future__ import annotations

import os
import sys

import pytest

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.monitoring import clients, devices, recorder, snapshots


@pytest.fixture
def partition(tmp_path, monkeypatch):
    """A partition of eight emulated IPUs of this test's own."""
    monkeypatch.setenv("IPU_EMULATOR_DIR", str(tmp_path / "partition"))
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "8")
    return registry.Partition.from_environment(os.environ)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Makes a gcipuinfo of the given text importable, in this process and in those that it starts."""

    def write(text):
        # Other tests of this process may have installed the emulator.
        others = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("tf_ipu_dp.emulator")]
        monkeypatch.setattr(sys, "meta_path", others)
        monkeypatch.delitem(sys.modules, "gcipuinfo", raising=False)
        (tmp_path / "gcipuinfo.py").write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(clients, "_FIRST_ANSWER_S", 3.0)
        monkeypatch.setattr(clients, "_NEXT_ANSWER_S", 0.5)

    return write


@pytest.fixture
def snapshot():
    """Makes a snapshot of one process on so many IPUs, some seconds after a fixed time."""

    def make(seconds, phase="training", ipus=2):
        found = [
            devices.Ipu(id=n, board_serial=f"b{n // 4}", utilisation_pct=80.0 + n, pid=7, board_power_w=100.0)
            for n in range(ipus)
        ]
        process = snapshots.Process(
            7, "<b>ann</b>", "train\x1b[31m", 1.0, tuple(range(ipus)), "running", run="r$1_$", instance=0, phase=phase
        )
        return snapshots.Snapshot(1e9 + seconds, "poplar", tuple(found), (process,))

    return make


@pytest.fixture
def runs_in():
    """Makes three snapshots of runs in these folders, one IPU each."""

    def make(*folders):
        processes = [
            snapshots.Process(
                n, "ann", "x", 1.0, (n,), "running", run_dir=folder, run=folder.rpartition("/")[2], instance=0
            )
            for n, folder in enumerate(folders)
        ]
        ipus = tuple(devices.Ipu(id=n, utilisation_pct=50.0, pid=n) for n in range(len(folders)))
        return [snapshots.Snapshot(1e9 + seconds, "poplar", ipus, tuple(processes)) for seconds in range(3)]

    return make


@pytest.fixture
def record(tmp_path):
    """Records snapshots and returns the file."""

    def write(*recorded, name="a.jsonl"):
        writer = recorder.Recorder(tmp_path / name, 1.0)
        for each in recorded:
            writer.write(each)
        writer.close()
        return writer.path

    return write
