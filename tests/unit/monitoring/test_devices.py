"""Device attributes as typed records, and the usage of IPUs against the emulated partition with a clock set by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.sdk_api import gcipuinfo
from tf_ipu_dp.monitoring import devices, snapshots

DEVICE = {
    "id": "3",
    "board ipu index": "3",
    "board type": "M2000",
    "board serial number": "0001.0002.8203321",
    "ipu architecture": "ipu2",
    "clock": "1330MHz",
    "ipu utilisation": "99.96%",
    "ipu utilisation (session)": "87.50 %",
    "ipu power": "40.9 W",
    "total board power": "N/A",
    "average board temp": "29.6 C",
    "ipu error state": "no errors",
    "link correctable error count": "0",
    "user name": "ann",
    "user process id": "4711",
    "user executable": "train",
    "process start time": "20211122T224648Z",
    "number of replicas": "8",
    "ipuof partition id": "p8",
}


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def partition(monkeypatch, emulator_dir):
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "8")
    return registry.Partition.from_environment(os.environ)


@pytest.fixture
def clock(monkeypatch):
    """The clock of the emulated partition."""
    standing = Clock()
    monkeypatch.setattr(time, "monotonic", standing)
    return standing


def sampler_of_this_process(clock=time.monotonic):
    return devices.Sampler(gcipuinfo, pid=os.getpid(), clock=clock)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1330MHz", 1330.0),
        ("40.9 W", 40.9),
        ("99.96%", 99.96),
        ("16 GT/s", 16.0),
        (" -4.5C ", -4.5),
        ("1e3", 1000.0),
        ("29.6 °C", 29.6),
        ("N/A", None),
        ("", None),
        ("%", None),
        ("1.2.3", None),
        ("20211122T224648Z", None),
        ("nan", None),
        ("1e999", None),
        ("12 of 16", None),
        (None, None),
    ],
)
def test_a_number_is_read_with_or_without_its_unit(text, number):
    assert devices.parse_number(text) == number


@given(st.floats(-1e9, 1e9), st.sampled_from(["", " ", "  "]), st.sampled_from(["MHz", "W", "C", "%", "GT/s", ""]))
def test_every_finite_number_survives_its_unit(number, blank, unit):
    assert devices.parse_number(f"{number}{blank}{unit}") == number


@given(st.dictionaries(st.sampled_from(sorted(DEVICE)), st.text() | st.sampled_from(["N/A", "٣ W", "1e400", "-", "²"])))
@example(dict.fromkeys(DEVICE, "N/A"))
def test_odd_attributes_become_numbers_texts_or_nothing(device):
    found = dataclasses.asdict(devices.parse_device(device))
    assert found.pop("other") == {}
    for field, value in found.items():
        assert value is None or type(value) in (int, float, str), field
        assert value not in ("", "N/A"), field


def test_a_device_is_read_with_its_units_and_the_rest_is_not_reported():
    known = {
        "id": 3, "board_ipu_index": 3, "board_type": "M2000", "board_serial": "0001.0002.8203321",
        "architecture": "ipu2", "clock_mhz": 1330.0, "utilisation_pct": 99.96, "session_utilisation_pct": 87.5,
        "power_w": 40.9, "board_temp_c": 29.6, "error_state": "no errors", "link_errors": 0, "user": "ann",
        "pid": 4711, "executable": "train", "start_time": "2021-11-22T22:46:48Z", "replicas": 8, "partition": "p8",
    }  # fmt: skip
    assert devices.parse_device(DEVICE) == devices.Ipu(**known)
    assert devices.parse_device({}) == devices.Ipu()


@given(st.dictionaries(st.text(), st.text()))
def test_attributes_without_a_field_are_kept_as_they_are(device):
    known = {**device, "id": "3"}
    assert devices.parse_device(known).other == {key: text for key, text in device.items() if key not in devices._KEYS}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


class Answering:
    """A library that answers what it is told to."""

    def __init__(self, *answers):
        self._answers = list(answers)

    def ask(self, *_):
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@given(st.lists(st.dictionaries(st.sampled_from(sorted(DEVICE)) | st.text(), st.text()) | st.text(), max_size=4))
def test_a_look_has_one_record_per_device_whatever_these_answer(answers):
    found = devices.Reader("poplar", Answering(answers)).look()
    assert len(found.ipus) == len(answers) and (found.problem is None) == bool(answers)
    assert [ipu.problem is None for ipu in found.ipus] == [isinstance(answer, dict) for answer in answers]


@given(ANYTHING | st.builds(json.dumps, st.fixed_dictionaries({"hosts": ANYTHING})))
def test_no_answer_of_the_health_check_breaks_it(answer):
    assert all(isinstance(fault, str) and "\n" not in fault for fault in devices.parse_health(answer))


def test_a_health_check_is_told_in_words():
    entry = {"error": "device", "id": 3, "partition": "p8", "board ipu index": 1}
    answer = {"hosts": {"10.1.5.1": [entry, {"error": "connection"}]}}
    assert devices.parse_health(json.dumps(answer)) == [
        "device error: IPU 3, partition p8, board IPU 1, host 10.1.5.1",
        "connection error: host 10.1.5.1",
    ]
    assert devices.parse_health("{}") == devices.parse_health("") == []


def test_ipus_that_were_seen_stay_as_rows_with_the_reason_when_the_library_fails():
    failure = devices.TelemetryError("gcipuinfo does not answer within 5 s")
    reader = devices.Reader("poplar", Answering([DEVICE], failure, [DEVICE]))
    assert reader.look().ipus == (devices.parse_device(DEVICE),)
    silent = reader.look()
    assert silent.problem == str(failure)
    assert [(ipu.id, ipu.board_serial, ipu.utilisation_pct, ipu.problem) for ipu in silent.ipus] == [
        (3, "0001.0002.8203321", None, str(failure))
    ]
    assert reader.look().ipus[0].problem is None


def test_a_device_that_fails_keeps_its_own_id_and_gets_none_that_is_guessed():
    two, three = {**DEVICE, "id": "2"}, DEVICE
    reader = devices.Reader("poplar", Answering([two, three], [two, "down"], ["down", three], ["down"], [["3", "x"]]))
    assert [[(ipu.id, ipu.problem) for ipu in reader.look().ipus] for _ in range(5)] == [
        [(2, None), (3, None)],
        [(2, None), (3, "down")],
        [(2, "down"), (3, None)],
        [(None, "down")],
        [(3, "x")],
    ]
    for answers, numbers in (([{"id": "0"}, "down"], [0, 1]), ([two, "down"], [2, None])):
        assert [ipu.id for ipu in devices.Reader("poplar", Answering(answers)).look().ipus] == numbers


def test_the_emulators_module_under_the_sdks_name_is_not_taken_for_the_sdk(partition):
    code = (
        "from tf_ipu_dp import emulator; from tf_ipu_dp.monitoring import devices\n"
        "emulator.install(); import gcipuinfo\n"
        "reader = devices.open_reader('auto'); print(reader.name, reader.failure, reader.note)\n"
        "try: devices.open_reader('poplar')\n"
        "except devices.TelemetryError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said = "the emulator stands in for the Poplar SDK in this process"
    assert done.stdout == f"emulator None {said}\n{said}\n"


def test_the_sdk_is_not_asked_more_often_than_it_may_be(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    reader = devices.Reader("poplar", Answering([{"id": "0"}], [{"id": "1"}]), period_s=0.9)
    assert reader.look() is reader.look()
    clock.now += 1
    assert reader.look().ipus[0].id == 1


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Puts a gcipuinfo of this text in the way, for this process and those that it starts."""

    def write(text):
        # Other tests of this process may have put the emulator there.
        others = [finder for finder in sys.meta_path if type(finder).__module__ != "tf_ipu_dp.emulator"]
        monkeypatch.setattr(sys, "meta_path", others)
        monkeypatch.delitem(sys.modules, "gcipuinfo", raising=False)
        (tmp_path / "gcipuinfo.py").write_text(text, encoding="utf-8")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(devices, "_FIRST_ANSWER_S", 3.0)
        monkeypatch.setattr(devices, "_NEXT_ANSWER_S", 0.5)

    return write


WORKING = """
import os, sys, time
print("noise of the driver")
class Broken(dict):
    def __getitem__(self, key): raise OSError("link down")
class HalfBroken(dict):
    def __getitem__(self, key): return "7" if key == "id" else 1 / 0
class gcipuinfo:
    def __init__(self): self.looks = 0
    def setUpdateMode(self, on): self.updates = on
    def getDevices(self):
        assert self.updates
        os.write(1, b"more noise\\n")
        self.looks += 1
        if self.looks == 2: HAPPENS
        return [{"id": "0", "ipu power": "40.9 W"}, Broken({"id": "1"}), HalfBroken({"id": "7", "clock": ""})]
    def checkHealthOfDevices(self): return "{}"
    def getLastAppEventRecord(self, path): return {"severity": "error", "description": path}
"""


def test_the_sdks_library_is_kept_apart_and_a_device_that_fails_is_a_row(library):
    library(WORKING.replace("HAPPENS", "pass"))
    reader = devices.open_reader("auto")
    try:
        assert (reader.name, reader.note) == ("poplar", None) and "gcipuinfo" not in sys.modules
        first, second, third = reader.look().ipus
        assert (first.id, first.power_w, first.problem) == (0, 40.9, None)
        assert (second.id, second.problem) == (1, "gcipuinfo failed (OSError: link down)")
        assert (third.id, third.problem) == (7, "gcipuinfo failed (ZeroDivisionError: division by zero)")
        assert reader.read_faults() == [] and reader.read_event("/x")["description"] == "/x"
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("happens", "reason"),
    [
        ("os.kill(os.getpid(), 11)", "gcipuinfo ended its process by signal 11 (Segmentation fault)"),
        ("os._exit(3)", "gcipuinfo ended its process with exit code 3"),
        ("time.sleep(60)", "gcipuinfo does not answer within"),
        ("raise RuntimeError('no partition')", "gcipuinfo failed (RuntimeError: no partition)"),
    ],
)
def test_a_library_that_crashes_or_hangs_later_is_a_reason_and_the_rows_stay(library, happens, reason):
    library(WORKING.replace("HAPPENS", happens))
    reader = devices.Reader("poplar", devices._Apart())
    try:
        assert reader.look().problem is None
        failed = reader.look()
        assert failed.problem.startswith(reason)
        assert [ipu.id for ipu in failed.ipus] == [0, 1, 7]
    finally:
        reader.close()


EMPTY = "class gcipuinfo:\n def setUpdateMode(self, on): pass\n def getDevices(self): return []"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; os.abort()", "gcipuinfo ended its process by signal 6"),
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
    reader = devices.open_reader("auto")
    assert reader.name == "emulator" and reader.note.startswith(reason)
    assert reader.failure == (None if reason == "gcipuinfo finds no IPU" else reader.note)
    assert len(reader.look().ipus) == 8
    with pytest.raises(devices.TelemetryError) as caught:
        devices.open_reader("poplar")
    assert str(caught.value).startswith(reason)


def test_who_is_interrupted_while_the_library_hangs_leaves_no_process_behind(library, tmp_path, monkeypatch):
    told = tmp_path / "pid"
    library(f"import os, time; open({str(told)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(60)")
    monkeypatch.setattr(devices, "_FIRST_ANSWER_S", 60.0)

    def interrupt(*_):
        if told.exists() and told.read_text().endswith("."):
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            devices.Reader("poplar", devices._Apart()).look()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not snapshots.is_alive(int(told.read_text()[:-1]))


def test_the_process_that_is_kept_apart_ends_at_once_if_its_parent_has():
    code = "from tf_ipu_dp.monitoring import devices; devices.serve(0)"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 0


def test_a_process_that_tells_nothing_any_more_is_not_called_busy(partition, monkeypatch):
    code = (
        "import os, sys; from tf_ipu_dp.emulator.devices import registry\n"
        "attachment = registry.Partition.from_environment(os.environ).attach(count=4)\n"
        "attachment.begin_execution(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        reader = devices.open_reader("emulator")
        assert reader.look().ipus[0].heartbeat_age_s < 5
        now = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: now() + 8)
        stale = reader.look().ipus[0]
        assert (stale.utilisation_pct, stale.input_wait_pct, stale.pid) == (None, None, process.pid)
        assert stale.heartbeat_age_s > 5
    finally:
        process.communicate()


def test_a_mark_tells_the_mean_since_the_mark_before_and_not_since_the_ipus_were_attached(partition, clock):
    attachment = partition.attach(count=2)
    clock.now += 100  # idle, before anybody looked
    sampler = sampler_of_this_process(clock)
    assert sampler.mark(clock.now) == devices.Usage(0.0, None, {0: None, 1: None}, sampler.latest())
    attachment.begin_execution()
    clock.now += 6
    attachment.end_execution(waited=0.0)
    clock.now += 2
    usage = sampler.mark(clock.now)
    assert (usage.seconds, usage.utilisation_pct, usage.per_ipu_pct) == (8.0, 75.0, {0: 75.0, 1: 75.0})
    clock.now += 4
    assert sampler.mark().utilisation_pct == 0.0
    assert [(ipu.id, ipu.pid, ipu.session_utilisation_pct) for ipu in usage.ipus] == [
        (0, os.getpid(), 5.56),
        (1, os.getpid(), 5.56),
    ]
    attachment.release()


# What happens in a stretch: an execution of so many seconds with a share of waiting, a look, or a pause.
EVENTS = st.one_of(
    st.tuples(st.just("execute"), st.floats(0.1, 20), st.floats(0, 1), st.integers(0, 3)),
    st.tuples(st.just("look"), st.just(0.0), st.just(0.0), st.just(0)),
    st.tuples(st.just("pause"), st.floats(0.1, 20), st.just(0.0), st.just(0)),
)


@settings(max_examples=60)
@given(st.lists(EVENTS, min_size=1, max_size=12))
def test_looks_in_between_do_not_change_what_two_marks_tell(events):
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPU_EMULATOR_DIR", str(Path(folder) / "partition"))
        patch.setenv("IPU_EMULATOR_IPUS", "4")
        patch.setattr(time, "monotonic", clock)
        attachment = registry.Partition.from_environment(os.environ).attach(count=4)
        sampler = sampler_of_this_process(clock)
        sampler.mark()
        began, busy = clock.now, 0.0
        for kind, seconds, waiting, looks in events:
            if kind == "look":
                sampler.look()
            elif kind == "pause":
                clock.now += seconds
            else:
                start = clock.now
                attachment.begin_execution(lambda start=start, waiting=waiting: (clock.now - start) * waiting)
                for _ in range(looks + 1):
                    clock.now += seconds / (looks + 1)
                    sampler.look()
                attachment.end_execution(waited=seconds * waiting)
                busy += seconds * (1 - waiting)
        usage = sampler.mark(clock.now)
        attachment.release()
    total = clock.now - began
    assert usage.seconds == pytest.approx(total)
    if total:
        assert usage.utilisation_pct == pytest.approx(100 * busy / total, abs=0.02)
    else:
        assert usage.utilisation_pct is None


def test_waiting_that_shows_only_at_the_end_is_taken_off_the_next_looks(partition, clock):
    attachment = partition.attach(count=1)
    sampler = sampler_of_this_process(clock)
    sampler.mark()
    for _ in range(4):
        attachment.begin_execution()
        for _ in range(5):
            clock.now += 1
            sampler.look()
        attachment.end_execution(waited=4.0)
    clock.now += 20
    # 4 of 40 seconds; of the last execution, more was told than is true, and there was no work to take it off from.
    assert 100 * 4 / 40 <= sampler.mark().utilisation_pct <= 100 * 8 / 40 + 0.02
    attachment.release()


def test_ipus_of_other_processes_do_not_count(partition, clock):
    code = (
        "import os, sys; from tf_ipu_dp.emulator.devices import registry\n"
        "attachment = registry.Partition.from_environment(os.environ).attach(count=4)\n"
        "attachment.begin_execution(); print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        sampler = sampler_of_this_process(clock)
        sampler.mark()
        clock.now += 1
        usage = sampler.mark()
        assert (usage.utilisation_pct, usage.per_ipu_pct, usage.ipus) == (None, {}, ())
        assert usage.problem == f"gcipuinfo shows no IPU of process {os.getpid()}"
        attachment = partition.attach(count=2)
        clock.now += 1
        assert sampler.mark().per_ipu_pct == {4: 0.0, 5: 0.0}
        attachment.release()
    finally:
        process.communicate()


def test_a_library_that_cannot_be_started_is_a_reason_and_not_an_error(partition, monkeypatch, clock):
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "3")
    sampler = sampler_of_this_process(clock)
    sampler.start()
    clock.now += 5
    usage = sampler.mark(clock.now)
    sampler.stop()
    assert (usage.seconds, usage.utilisation_pct, usage.ipus) == (5.0, None, ())
    assert "IPU_EMULATOR_IPUS='3' is not possible" in usage.problem
    monkeypatch.setenv("IPU_EMULATOR_IPUS", "8")
    assert sampler.mark().problem == usage.problem, "it is not tried again and again"


def test_a_query_that_fails_is_made_up_for_by_the_next(partition, clock):
    attachment = partition.attach(count=1)
    sampler = sampler_of_this_process(clock)
    sampler.mark()
    attachment.begin_execution()
    clock.now += 3
    partition.folder.chmod(0o755)
    failed = sampler.mark()
    assert (failed.seconds, failed.utilisation_pct, failed.per_ipu_pct) == (3.0, None, {0: None})
    assert failed.problem.startswith("gcipuinfo failed (RegistryError: ")
    partition.folder.chmod(0o700)
    attachment.end_execution(waited=0.0)
    clock.now += 1
    usage = sampler.mark()
    assert (usage.utilisation_pct, usage.problem) == (75.0, None)
    attachment.release()


def test_the_thread_looks_by_itself_and_ends(partition):
    attachment = partition.attach(count=1)
    before = threading.active_count()
    sampler = sampler_of_this_process()
    sampler.start()
    first, deadline = sampler.latest(), time.monotonic() + 60
    while sampler.latest() is first and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert sampler.latest() is not first
    sampler.stop()
    assert threading.active_count() == before
    attachment.release()


def test_a_period_of_less_than_a_second_is_refused():
    with pytest.raises(ValueError, match=r"0\.1 s is too short"):
        devices.Sampler(gcipuinfo, pid=1, period_s=0.1)


COMPUTE = """
import os, time
import tensorflow as tf
from tf_ipu_dp.monitoring import devices
from tf_ipu_dp.emulator.sdk_api import gcipuinfo
from tf_ipu_dp.emulator.sdk_api.ipu import config, ipu_strategy

ipus = config.IPUConfig()
ipus.auto_select_ipus = 2
ipus.configure_ipu_system()
strategy = ipu_strategy.IPUStrategy()

@tf.function
def compute(steps):
    x = tf.eye(200)
    for _ in tf.range(steps):
        x = tf.matmul(x, x)
    return x

strategy.run(compute, [tf.constant(1)])
sampler = devices.Sampler(gcipuinfo, pid=os.getpid())
sampler.start()
began = time.monotonic()
while time.monotonic() - began < 2.5:
    strategy.run(compute, [tf.constant(2000)])
computing = sampler.mark()
sum(range(3_000_000))
idle = sampler.mark()
sampler.stop()
print(computing.utilisation_pct, idle.utilisation_pct, *computing.per_ipu_pct)
"""


@pytest.mark.slow
def test_a_process_that_computes_is_busy_and_one_that_does_not_is_idle(partition, tmp_path):
    program = tmp_path / "compute.py"
    program.write_text(COMPUTE)
    environ = {**os.environ, "PYTHONPATH": str(Path(devices.__file__).parents[2])}
    done = subprocess.run([sys.executable, program], stdout=subprocess.PIPE, text=True, check=True, env=environ)
    computing, idle, *ipus = done.stdout.split()
    assert float(computing) > 60
    assert float(idle) < 40
    assert ipus == ["0", "1"]
