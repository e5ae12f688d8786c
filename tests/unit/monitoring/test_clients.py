"""gcipuinfo in a child process: a library of this text that works, crashes or hangs."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tf_ipu_dp.monitoring import clients, device_reader, process_info

WORKING = """
import os, sys, time
print("noise of the driver")
class Broken(dict):
    def __getitem__(self, key): raise OSError("link down")
class HalfBroken(dict):
    def __getitem__(self, key): return "7" if key == "id" else 1 / 0
class gcipuinfo:
    def __init__(self): self.queries = 0
    def setUpdateMode(self, on): self.updates = on
    def getDevices(self):
        assert self.updates
        os.write(1, b"more noise\\n")
        self.queries += 1
        if self.queries == 2: HAPPENS
        return [{"id": "0", "ipu power": "40.9 W"}, Broken({"id": "1"}), HalfBroken({"id": "7", "clock": ""})]
    def checkHealthOfDevices(self): return "{}"
    def getLastAppEventRecord(self, path): return {"severity": "error", "description": path}
"""


def test_the_sdks_library_runs_in_a_child_process_and_a_device_that_fails_is_a_row(library):
    library(WORKING.replace("HAPPENS", "pass"))
    reader = device_reader.open_reader("auto")
    try:
        assert (reader.sdk_name, reader.note) == ("poplar", None) and "gcipuinfo" not in sys.modules
        first, second, third = reader.read().ipus
        assert (first.id, first.power_w, first.problem) == (0, 40.9, None)
        assert (second.id, second.problem) == (1, "gcipuinfo failed (OSError: link down)")
        assert (third.id, third.problem) == (7, "gcipuinfo failed (ZeroDivisionError: division by zero)")
        assert reader.read_faults() == [] and reader.read_event("/x")["description"] == "/x"
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "gcipuinfo crashed with signal 11 (Segmentation fault)"),
        ("os._exit(3)", "gcipuinfo ended its process with exit code 3"),
        ("time.sleep(60)", "gcipuinfo did not answer within"),
        ("raise RuntimeError('no partition')", "gcipuinfo failed (RuntimeError: no partition)"),
    ],
)
def test_a_library_that_crashes_or_hangs_later_is_a_reason_and_the_rows_stay(library, happens, reason):
    library(WORKING.replace("HAPPENS", happens))
    reader = device_reader.DeviceReader("poplar", clients.SubprocessClient())
    try:
        assert reader.read().problem is None
        failed = reader.read()
        assert failed.problem.startswith(reason)
        assert [ipu.id for ipu in failed.ipus] == [0, 1, 7]
    finally:
        reader.close()


def test_an_interrupt_while_the_library_hangs_leaves_no_child_process(library, tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    library(f"import os, time; open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(60)")
    monkeypatch.setattr(clients, "_FIRST_ANSWER_S", 60.0)

    def interrupt(*_):
        if pid_file.exists() and pid_file.read_text().endswith("."):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            device_reader.DeviceReader("poplar", clients.SubprocessClient()).read()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not process_info.is_alive(int(pid_file.read_text()[:-1]))


def test_the_child_process_ends_at_once_if_its_parent_has_ended():
    code = "from tf_ipu_dp.monitoring import clients; clients.serve(0)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 0
