"""All IPUs of a library, whatever the library does: answers made up, the emulator, and a gcipuinfo of a text."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import device_reader, devices
from tf_ipu_dp.monitoring.clients import DeviceFailure
from tf_ipu_dp.monitoring.device_reader import DeviceReader

DOWN = DeviceFailure("down")
DEVICE = {"id": "3", "board serial number": "0001.0002.8203321", "clock": "1330MHz", "ipu utilisation": "99.96%"}


class PreparedClient:
    """A client with prepared answers."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def read_devices(self):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@given(
    st.lists(
        st.dictionaries(st.sampled_from(sorted(DEVICE)) | st.text(), st.text()) | st.builds(DeviceFailure, st.text()),
        max_size=4,
    )
)
def test_a_reading_has_one_record_per_device_whatever_the_devices_answer(answers):
    found = DeviceReader("poplar", PreparedClient(answers)).read()
    assert len(found.ipus) == len(answers) and (found.problem is None) == bool(answers)
    assert [ipu.problem is None for ipu in found.ipus] == [isinstance(answer, dict) for answer in answers]


def test_known_ipus_stay_as_rows_with_the_reason_when_the_library_fails():
    failure = devices.TelemetryError("gcipuinfo did not answer within 5 s")
    reader = DeviceReader("poplar", PreparedClient([DEVICE], failure, [DEVICE]))
    assert reader.read().ipus == (devices.parse_device(DEVICE),)
    silent = reader.read()
    assert silent.problem == str(failure)
    assert [(ipu.id, ipu.board_serial, ipu.utilisation_pct, ipu.problem) for ipu in silent.ipus] == [
        (3, "0001.0002.8203321", None, str(failure))
    ]
    assert reader.read().ipus[0].problem is None


def test_the_id_of_a_device_that_fails_is_kept_and_never_guessed():
    two, three = {**DEVICE, "id": "2"}, DEVICE
    reader = DeviceReader(
        "poplar", PreparedClient([two, three], [two, DOWN], [DOWN, three], [DOWN], [DeviceFailure("x", "3")])
    )
    assert [[(ipu.id, ipu.problem) for ipu in reader.read().ipus] for _ in range(5)] == [
        [(2, None), (3, None)],
        [(2, None), (3, "down")],
        [(2, "down"), (3, None)],
        [(None, "down")],
        [(3, "x")],
    ]
    for answers, numbers in (([{"id": "0"}, DOWN], [0, 1]), ([two, DOWN], [2, None])):
        assert [ipu.id for ipu in DeviceReader("poplar", PreparedClient(answers)).read().ipus] == numbers


def test_the_emulators_module_under_the_sdks_name_is_not_taken_for_the_sdk(partition):
    code = (
        "from tf_ipu_dp import emulator; from tf_ipu_dp.monitoring import device_reader, devices\n"
        "emulator.install(); import gcipuinfo\n"
        "reader = device_reader.open_reader('auto'); print(reader.sdk_name, reader.failure, reader.note)\n"
        "try: device_reader.open_reader('poplar')\n"
        "except devices.TelemetryError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reason = "the emulator replaces the Poplar SDK in this process"
    assert done.stdout == f"emulator None {reason}\n{reason}\n"


def test_the_sdk_is_not_queried_more_often_than_once_per_period(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    reader = DeviceReader("poplar", PreparedClient([{"id": "0"}], [{"id": "1"}]), period_s=0.9)
    assert reader.read() is reader.read()
    now[0] += 1
    assert reader.read().ipus[0].id == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; os.abort()", "gcipuinfo crashed with signal 6"),
        ("import no_such_module", "gcipuinfo cannot be imported (ModuleNotFoundError: "),
        (
            "class gcipuinfo:\n def setUpdateMode(self, on): pass\n def getDevices(self): return []",
            "gcipuinfo finds no IPU",
        ),
        ("def gcipuinfo(): raise OSError('no driver')", "gcipuinfo failed (OSError: no driver)"),
    ],
)
def test_without_devices_auto_takes_the_emulator_with_the_reason_and_poplar_refuses(library, partition, text, reason):
    library(text)
    reader = device_reader.open_reader("auto")
    assert reader.sdk_name == "emulator" and reader.note.startswith(reason)
    assert reader.failure == (None if reason == "gcipuinfo finds no IPU" else reader.note)
    assert len(reader.read().ipus) == 8
    with pytest.raises(devices.TelemetryError) as caught:
        device_reader.open_reader("poplar")
    assert str(caught.value).startswith(reason)


def test_the_utilisation_of_a_process_without_heartbeats_is_unknown(partition, monkeypatch):
    code = (
        "import os, sys; from tf_ipu_dp.emulator.devices import registry\n"
        "attachment = registry.Partition.from_environment(os.environ).attach(count=4)\n"
        "attachment.begin_execution(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        reader = device_reader.open_reader("emulator")
        assert reader.read().ipus[0].heartbeat_age_s < 5
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 8)
        stale = reader.read().ipus[0]
        assert (stale.utilisation_pct, stale.input_wait_pct, stale.pid) == (None, None, process.pid)
        assert stale.heartbeat_age_s > 5
    finally:
        process.communicate()
