from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tf_ipu_dp import cli, doctor, sdk_calls
from tf_ipu_dp.doctor import Probe

ABSENT = Probe(None, "not found on the PATH")
STOCK = Probe({"version": "2.15.1", "path": "x", "poplar": False, "keras": "2.15.0"})
POPLAR = Probe({"version": "2.6.3", "path": "x", "poplar": True, "keras": "2.6.0"})
DEVICE = {"id": "0", "ipuof partition id": "p1", "driver version": "1.1", "firmware version": "2.5"}


def diagnose(environ=None, python=(3, 11), **probes):
    nothing = {
        "tensorflow": Probe(None, "ModuleNotFoundError: No module named 'tensorflow'"),
        "horovod": Probe(None, "ModuleNotFoundError: No module named 'horovod'"),
        "tensorflow_datasets": Probe(None, "ModuleNotFoundError: No module named 'tensorflow_datasets'"),
        "gcipuinfo": Probe(None, "ModuleNotFoundError: No module named 'gcipuinfo'"),
        "poprun": ABSENT,
        "mpirun": ABSENT,
        "srun": ABSENT,
    }
    diagnosis = doctor.diagnose({**nothing, **probes}, environ or {}, python)
    return diagnosis.sdk, {finding.name: finding for finding in diagnosis.findings}, diagnosis


def test_without_tensorflow_train_cannot_start_and_the_advice_says_what_to_do():
    sdk, findings, diagnosis = diagnose()
    assert sdk is None
    assert not findings["TensorFlow"].ok and "launch/train" in findings["TensorFlow"].advice
    assert "Not ready: train cannot start here." in doctor.render(diagnosis, 120)


def test_stock_tensorflow_is_enough_for_the_emulator():
    sdk, findings, _ = diagnose(tensorflow=STOCK)
    assert sdk == "emulator" and findings["Emulator"].ok
    assert findings["Poplar SDK"].ok is None


def test_the_sdk_s_tensorflow_with_an_ipu_is_poplar():
    sdk, findings, _ = diagnose(
        {"POPLAR_SDK_ENABLED": "/sdk"}, tensorflow=POPLAR, gcipuinfo=Probe({"devices": [DEVICE] * 4})
    )
    assert sdk == "poplar"
    assert findings["Poplar SDK"].detail == "4 IPUs, partition p1, driver 1.1, firmware 2.5"


@pytest.mark.parametrize("devices", [Probe({"devices": []}), Probe(None, "ImportError: libgcipuinfo.so")])
def test_an_enabled_sdk_without_an_ipu_is_a_fault(devices):
    sdk, findings, _ = diagnose({"POPLAR_SDK_ENABLED": "/sdk"}, tensorflow=POPLAR, gcipuinfo=devices)
    assert sdk is None and findings["Poplar SDK"].ok is False and findings["Poplar SDK"].advice


def test_ipus_under_a_stock_tensorflow_are_a_fault_of_the_sdk_but_the_emulator_starts():
    sdk, findings, _ = diagnose(tensorflow=STOCK, gcipuinfo=Probe({"devices": [DEVICE]}))
    assert sdk == "emulator" and findings["Poplar SDK"].ok is False


def test_keras_3_is_refused():
    newer = Probe({"version": "2.17.0", "path": "x", "poplar": False, "keras": "3.4.0"})
    sdk, findings, _ = diagnose(tensorflow=newer)
    assert sdk is None and findings["Keras"].advice.startswith("Keras 2 is needed.")


def test_a_python_out_of_range_is_refused():
    assert diagnose(python=(3, 14), tensorflow=STOCK)[0] is None


def test_a_horovod_that_does_not_load_is_a_fault_and_a_missing_one_is_not():
    assert diagnose()[1]["Horovod"].ok is None
    assert diagnose(horovod=Probe(None, "ImportError: undefined symbol"))[1]["Horovod"].ok is False


def test_prepared_data_sets_are_listed(tmp_path):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "downloads").mkdir()
    there = Probe({"version": "4.9.3"})
    _, findings, _ = diagnose({"TFDS_DATA_DIR": str(tmp_path)}, tensorflow_datasets=there)
    assert findings["tensorflow-datasets"].detail == f"4.9.3, data in {tmp_path}: mnist"


def test_the_advice_for_a_broken_tensorflow_is_not_to_install_it():
    _, findings, _ = diagnose(tensorflow=Probe(None, "the interpreter was killed by SIGILL"))
    assert findings["TensorFlow"].advice.startswith("It is installed but cannot be imported.")


def test_children_of_a_probe_that_hangs_are_killed_with_it(tmp_path, wait_until):
    mark = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 200 & echo $! >{mark}; wait"]
    assert doctor.read_probe(command, 2.0).failure == "no answer within 2 s"
    status = Path("/proc", mark.read_text(encoding="utf-8").strip(), "stat")
    wait_until(lambda: not status.exists() or status.read_text(encoding="utf-8").split(")")[1].split()[0] == "Z")


def test_the_json_says_the_same_as_the_table():
    _, findings, diagnosis = diagnose(tensorflow=STOCK)
    value = json.loads(doctor.render_json(diagnosis))
    assert value["ready"] is True and value["sdk"] == "emulator"
    assert [entry["name"] for entry in value["findings"]] == list(findings)


def probe(code, timeout_s=30.0):
    return doctor.read_probe([sys.executable, "-c", code], timeout_s)


def test_the_last_line_of_a_probe_is_its_answer():
    assert probe("print('chatter'); print('{\"a\": 1}')") == Probe({"a": 1})


def test_a_probe_that_crashes_hangs_or_fails_is_a_reason_and_not_an_error():
    assert probe("import os; os.abort()") == Probe(None, "the interpreter was killed by SIGABRT")
    assert probe("while True: pass", 0.5) == Probe(None, "no answer within 0 s")
    assert probe("import no_such_module") == Probe(None, "ModuleNotFoundError: No module named 'no_such_module'")
    assert probe("import os; os._exit(0)") == Probe(None, "it exited without an answer")
    assert probe("print('no JSON')") == Probe(None, "it exited without an answer")
    assert probe("import os; os.kill(os.getpid(), 40)") == Probe(None, "the interpreter was killed by signal 40")
    assert doctor.read_probe(["/no/such/program"], 1.0) == Probe(None, "No such file or directory")


REPORT = """
import os, signal, sys, time
from tf_ipu_dp.sdk_calls import Call, Reporter
reporter = Reporter(sys.stdout)
print("whatever the SDK prints")
reporter.begin("first()")
reporter.end(Call("first()", True, "4 IPUs"))
print("its last words", file=sys.stderr)
"""


def calls_of(code, limit_s=60.0):
    return list(sdk_calls.read_calls([sys.executable, "-c", REPORT + code], limit_s))


FIRST = sdk_calls.Call("first()", True, "4 IPUs")


@pytest.mark.parametrize(
    ("code", "last"),
    [
        ("", []),
        ("reporter.end(Call('second()', False, 'ValueError: no'))", [("second()", "ValueError: no")]),
        (
            "reporter.begin('second()'); os.kill(os.getpid(), signal.SIGABRT)",
            [("second()", "the process was killed by SIGABRT, its last words")],
        ),
        (
            "reporter.begin('second()'); os._exit(0)",
            [("second()", "the process ended with exit code 0, its last words")],
        ),
        ("os._exit(3)", [("exit", "the process ended with exit code 3, its last words")]),
    ],
)
def test_calls_are_read_until_the_process_ends_and_the_one_that_ended_it_is_named(code, last):
    assert calls_of(code) == [FIRST, *(sdk_calls.Call(name, False, answer) for name, answer in last)]


def test_a_call_that_is_not_answered_in_time_is_ended():
    assert calls_of("reporter.begin('hangs()'); time.sleep(1000)", limit_s=5.0) == [
        FIRST,
        sdk_calls.Call("hangs()", False, "no answer within 5 s, its last words"),
    ]


def test_a_process_that_can_make_no_calls_says_why():
    with pytest.raises(cli.UsageError, match=r"^there is no SDK$"):
        calls_of("reporter.refuse('there is no SDK')")


def test_a_package_that_is_not_installed_is_said_so_and_not_in_python_s_words():
    probes = {name: Probe(None, f"ModuleNotFoundError: No module named {name!r}") for name in doctor._PROBES}
    probes.update(dict.fromkeys(doctor._TOOLS, ABSENT))
    details = {finding.name: finding.detail for finding in doctor.diagnose(probes, {}, (3, 11)).findings}
    assert (details["TensorFlow"], details["tensorflow-datasets"]) == ("not installed", "not installed")
    assert not [detail for detail in details.values() if "ModuleNotFoundError" in detail]
