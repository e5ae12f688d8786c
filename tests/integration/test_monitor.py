"""The monitor as a user starts it, beside real processes and real runs."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import urllib.request

import pytest

import tf_ipu_dp
from tf_ipu_dp.monitoring import process_info
from tf_ipu_dp.runs import run_folder

MONITOR = [sys.executable, "-m", "tf_ipu_dp.monitor"]
HOLD = """
import os, sys
from tf_ipu_dp.emulator.devices import registry
attachment = registry.Partition.from_environment(os.environ).attach(count=int(sys.argv[1]))
attachment.begin_execution()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def _runtime_dir(tmp_path, monkeypatch, emulator_dir):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def hold():
    """Starts a process that holds so many IPUs."""
    processes = []

    def start(count, *words):
        command = [sys.executable, "-c", HOLD, str(count), *words]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def monitor(run_command):
    return functools.partial(run_command, "monitor")


def test_with_nothing_running_all_emulated_ipus_are_free(monitor):
    done = monitor()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("64 IPUs (emulated), 0 in use, 64 free\n")
    assert done.stdout.split("\n\n")[1] == "free: IPU 0-63"
    every = monitor("--all").stdout
    assert len(re.findall(r"^ *\d+  .* free$", every, re.MULTILINE)) == 64
    assert "\x1b" not in done.stdout and done.stdout.count("Emulated: ") == 1


def test_neither_tensorflow_nor_anything_else_that_is_slow_is_imported():
    code = "import sys; from tf_ipu_dp import monitor; monitor.main([]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"tensorflow", "keras", "numpy", "rich", "matplotlib", "prometheus_client"} & set(done.stderr.split())


def test_a_command_line_with_control_characters_is_shown_whole_and_escaped(hold, monitor):
    process = hold(4, "\x1b[2J[bold]name[/bold]", "x" * 400)
    done = monitor()
    assert "\x1b" not in done.stdout and f"\\x1b[2J[bold]name[/bold] {'x' * 400}\n" in done.stdout
    assert re.search(rf"^ *{process.pid}  \S+ +00:00:\d\d  0-3 +running ", done.stdout, re.MULTILINE)


def test_json_is_typed_and_one_object_per_line_with_watch(hold, monitor):
    process = hold(2)
    value = json.loads(monitor("--json").stdout)
    assert (value["schema"], value["sdk"], len(value["ipus"])) == (1, "emulator", 64)
    assert value["ipus"][0]["pid"] == process.pid and value["ipus"][0]["power_w"] is None
    with subprocess.Popen([*MONITOR, "--json", "--watch=0.2"], stdout=subprocess.PIPE, text=True) as follower:
        times = [json.loads(follower.stdout.readline())["time"] for _ in range(3)]
        follower.send_signal(signal.SIGTERM)
        assert follower.wait(60) == 0
    assert times == sorted(set(times))


def test_the_inventory_of_the_emulated_ipus_is_shown_and_in_json(hold, monitor):
    hold(2)
    rows = monitor("--inventory", IPU_EMULATOR_IPUS="8").stdout.splitlines()
    titles = ["IPU", "Partition", "Machine", "Serial", "Type", "Architecture", "IPU#", "Firmware", "Server", "Routing"]
    assert rows[0].split() == titles
    host, version = socket.gethostname(), tf_ipu_dp.__version__
    assert rows[2].split() == f"4-7 emulated {host} emulated-0001 M2000 ipu2 0-3 emulated {version} DNC 0".split()
    ipu = json.loads(monitor("--inventory", "--json").stdout)["ipus"][5]
    assert (ipu["partition"], ipu["host"], ipu["board_serial"]) == ("emulated", host, "emulated-0001")
    assert (ipu["server_version"], ipu["firmware_version"], ipu["routing_type"]) == (version, "emulated", "DNC")
    boxes = monitor("--gc", IPU_EMULATOR_IPUS="8").stdout
    assert "| Server version |" in boxes and "Attached processes in partition emulated" in boxes


def test_processes_are_filtered_and_sorted_and_measured(hold, monitor):
    small, large = hold(1), hold(4)
    value = json.loads(monitor("--json", "--sort=pid").stdout)
    assert [each["pid"] for each in value["processes"]] == sorted([small.pid, large.pid])
    assert all(each["cpu_pct"] is not None and each["memory_gib"] > 0 for each in value["processes"])
    done = monitor("--user=nobody-of-this-name")
    assert (done.returncode, done.stderr) == (0, "")
    assert "No process of --user=nobody-of-this-name holds IPUs. Those that do: --user=" in done.stdout


def test_free_ipus_are_printed_for_scripts_and_too_few_are_an_error(hold, monitor):
    hold(4)
    done = monitor("--free", "--need=4", IPU_EMULATOR_IPUS="8")
    assert (done.returncode, done.stdout, done.stderr) == (0, "4 5 6 7\n", "")
    done = monitor("--free", "--need=5", "--json", IPU_EMULATOR_IPUS="8")
    assert done.returncode == 1 and json.loads(done.stdout)["free_ipu_ids"] == [4, 5, 6, 7]
    assert done.stderr == (
        "monitor: --need=5, but 4 of 8 IPUs are free. Use --need=4, or wait, and watch them with: "
        "python -m tf_ipu_dp.monitor --watch\n"
    )


def test_health_shows_the_last_event_and_fails_for_a_bad_one(tmp_path, monitor):
    assert monitor("--health").returncode == 0
    record = tmp_path / "events.json"
    record.write_text(json.dumps({"severity": "error", "description": "parity", "pid": "7"}), encoding="utf-8")
    done = monitor("--health", IPU_APP_EVENT_RECORD_PATH=str(record))
    assert done.returncode == 1
    assert "fault  the last application event has severity error: parity\n" in done.stdout
    record.write_text("no json", encoding="utf-8")
    done = monitor("--health", "--json", f"--events={record}")
    assert done.returncode == 1 and "cannot be read: gcipuinfo failed (JSONDecodeError" in done.stdout


def test_a_partition_that_cannot_be_read_is_a_sentence_and_exit_code_1(tmp_path, monitor):
    (tmp_path / "partition").mkdir(mode=0o755)
    (tmp_path / "partition").chmod(0o755)
    for words in ([], ["--free"], ["--json"]):
        done = monitor(*words)
        assert done.returncode == 1 and done.stderr.startswith("monitor: no device answers: ")
        assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
        assert done.stderr.endswith("Look for the fault with: python -m tf_ipu_dp.monitor --health\n")


def test_poplar_without_the_sdk_is_refused_with_what_works(monitor):
    done = monitor("--sdk=poplar")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("Source the Poplar SDK's enable script, or use --sdk=emulator.\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import os; os.abort()", "gcipuinfo crashed with signal 6"),
        ("def gcipuinfo(): raise OSError('no driver')", "gcipuinfo failed (OSError: no driver)"),
    ],
)
def test_an_sdk_that_cannot_be_read_is_a_fault_and_the_free_ipus_are_called_emulated(tmp_path, text, reason, monitor):
    (tmp_path / "gcipuinfo.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = monitor("--health", PYTHONPATH=paths)
    assert done.returncode == 1 and "no faults" not in done.stdout
    assert f"fault  the Poplar SDK's IPUs cannot be read: {reason}" in done.stdout
    done = monitor("--health", "--json", PYTHONPATH=paths)
    value = json.loads(done.stdout)
    assert (done.returncode, value["healthy"], len(value["faults"])) == (1, False, 1) and reason in value["faults"][0]
    assert monitor("--health", "--sdk=emulator", PYTHONPATH=paths).returncode == 0
    done = monitor("--free", PYTHONPATH=paths, IPU_EMULATOR_IPUS="4")
    assert (done.returncode, done.stdout) == (0, "0 1 2 3\n")
    start = f"monitor: these are the emulator's IPUs, because the Poplar SDK's cannot be read ({reason}"
    assert done.stderr.startswith(start)
    assert done.stderr.endswith("). Use --sdk=poplar to require the real ones.\n") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_monitor_that_is_ended_while_the_library_hangs_leaves_no_process_behind(tmp_path, number, wait_until):
    pid_link = tmp_path / "pid_link"
    text = f"import os, time\nos.symlink(str(os.getpid()), {str(pid_link)!r})\ntime.sleep(600)"
    (tmp_path / "gcipuinfo.py").write_text(text, encoding="utf-8")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(MONITOR, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}) as watching:
        wait_until(pid_link.is_symlink)
        helper = int(os.readlink(pid_link))
        watching.send_signal(number)
        watching.wait(60)
        try:
            assert wait_until(lambda: not process_info.is_alive(helper))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGKILL)


class Terminal:
    """A pseudo terminal with the monitor on it."""

    def __init__(self, *words, rows=30, columns=100):
        self._main, other = pty.openpty()
        self._other = other
        self.settings = self.read_settings()
        self.resize(rows, columns)
        self.process = subprocess.Popen(
            [*MONITOR, *words], stdin=other, stdout=other, stderr=other, close_fds=True, start_new_session=True,
            env={**os.environ, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        )  # fmt: skip

    def resize(self, rows, columns):
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_settings(self):
        return termios.tcgetattr(self._other)

    def press(self, key):
        os.write(self._main, key)

    def read_until(self, text, limit_s=60.0):
        """Returns what was written up to the text."""
        seen, deadline = "", time.monotonic() + limit_s
        while text not in seen:
            assert time.monotonic() < deadline, f"{text!r} did not come: {seen[-2000:]!r}"
            if select.select([self._main], [], [], 0.1)[0]:
                seen += os.read(self._main, 1 << 16).decode("utf-8", "replace")
        return seen

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._other)


@pytest.fixture
def terminal():
    opened = []

    def start(*words, **size):
        opened.append(Terminal(*words, **size))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_watching_redraws_in_place_pauses_resizes_and_leaves_the_terminal_as_it_was(terminal, hold):
    hold(2)
    screen = terminal("--watch=0.2")
    first = screen.read_until("p pause")
    assert first.startswith("\x1b[?1049h\x1b[?25l")
    assert "64 IPUs (emulated), 2 in use" in first and "free: IPU 2-63" in first
    assert screen.read_settings() != screen.settings
    screen.press(b"p")
    screen.read_until("p resume (paused)")
    screen.resize(12, 60)
    os.kill(screen.process.pid, signal.SIGWINCH)
    # What was drawn before the signal may still be on its way.
    small = next(
        text for text in (screen.read_until("p resume (paused)") for _ in range(20)) if "\x1b[13;1H" not in text
    )
    assert "\x1b[12;1H" in small
    screen.press(b"p")
    screen.read_until("p pause")
    screen.press(b"s")
    screen.read_until("s sort: pid")
    screen.press(b"?")
    assert "sort by the next column" in screen.read_until("h back")
    screen.press(b"h")
    screen.read_until("p pause")
    screen.press(b"q")
    assert screen.process.wait(60) == 0
    assert screen.read_until("\x1b[?1049l").endswith("\x1b[?25h\x1b[?1049l")
    assert screen.read_settings() == screen.settings


def test_one_shot_on_a_terminal_has_colours_and_bars_and_without_them_if_asked(terminal, monkeypatch):
    screen = terminal("--all", columns=120)
    assert "\x1b[2m········" in screen.read_until("Clock is nominal")
    monkeypatch.setenv("NO_COLOR", "1")
    plain = terminal("--all", columns=120).read_until("Clock is nominal")
    assert "\x1b" not in plain and "········" in plain


def test_a_recording_ends_with_the_process_and_is_drawn(tmp_path, hold, monitor):
    process = hold(4)
    recorded, drawn = tmp_path / "r.jsonl", tmp_path / "r.svg"
    with subprocess.Popen(
        [*MONITOR, f"--record={recorded}", "--watch=0.2", "--json", f"--pid={process.pid}", f"--report={drawn}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as recorder:  # fmt: skip
        for _ in range(3):
            recorder.stdout.readline()
        process.kill()
        process.wait()
        _, said = recorder.communicate(timeout=120)
    assert recorder.returncode == 0
    assert re.fullmatch(rf"monitor: the report of \d+ samples in {recorded} is in {drawn}\.\n", said)
    assert "IPU" in drawn.read_text(encoding="utf-8")
    done = monitor(f"--record={recorded}")
    assert done.returncode == 1 and "already exists" in done.stderr
    again = monitor(f"--record={recorded}", f"--report={tmp_path / 'again.html'}")
    assert (again.returncode, again.stdout) == (0, "")
    assert again.stderr.endswith(f" samples in {recorded} is in {tmp_path / 'again.html'}.\n")


def test_two_monitors_and_an_exporter_work_at_once_and_answer_while_the_devices_fail(tmp_path, hold, wait_until):
    process = hold(2)
    shown = [tmp_path / "first.txt", tmp_path / "second.txt"]
    others = []
    for path in shown:
        with path.open("w", encoding="utf-8") as stdout:
            others.append(subprocess.Popen([*MONITOR, "--watch=0.1"], stdout=stdout))
    exporter = subprocess.Popen([*MONITOR, "--export=0", "--watch=0.1", "--json"], stdout=subprocess.DEVNULL,
                                stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        url = exporter.stderr.readline().split()[-1]
        assert url.startswith("http://127.0.0.1:")

        def scrape_until(text):
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            wait_until(lambda: text.encode("utf-8") in opener.open(url, timeout=60).read())

        scrape_until(f'ipu_utilisation_ratio{{board="emulated-0000",ipu="0",pid="{process.pid}"')
        (tmp_path / "partition").chmod(0o755)
        scrape_until('ipu_up{board="emulated-0000",ipu="0"} 0.0')
        (tmp_path / "partition").chmod(0o700)
        scrape_until('ipu_up{board="emulated-0000",ipu="0"} 1.0')
        wait_until(lambda: all(path.stat().st_size for path in shown))  # then they handle signals
        assert [each.poll() for each in others] == [None, None]
    finally:
        for each in (*others, exporter):
            each.terminate()
        statuses = [each.wait(60) for each in (*others, exporter)]
        exporter.stderr.close()
    assert statuses == [0, 0, 0]


@pytest.mark.slow
def test_a_run_is_seen_while_it_trains_and_explained_when_it_is_over(tmp_path, monitor, wait_until):
    run = tmp_path / "run"
    command = [sys.executable, "-m", "tf_ipu_dp.train", "--ipus=4", "--epochs=40", "--sdk=emulator", f"--run_dir={run}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as training:

        def training_process():
            seen = next(iter(json.loads(monitor("--json").stdout)["processes"]), {})
            return seen if seen.get("samples_per_s") and seen["phase"] == "training" else None

        def run_with_verdict():
            seen = next(iter(json.loads(monitor("--json").stdout)["runs"]), {})
            return seen if seen.get("verdict") and seen["eta_s"] else None

        seen = wait_until(training_process, pause_s=0.3)
        assert (seen["pid"], seen["run"], seen["ipus"], seen["instance"]) == (training.pid, "run", [0, 1, 2, 3], 0)
        assert seen["step"] > 0 and seen["planned_steps"] == 40 * 64 and seen["waits_for"] in ("nothing", "input")
        progress = wait_until(run_with_verdict, pause_s=0.3)
        assert progress["loss"] > 0 and progress["eta_s"] > 0 and 0 < progress["done_pct"] < 100
        assert (progress["run"], progress["hosts"]) == ("run", [socket.gethostname()])
        assert "ottleneck" in progress["verdict"]["sentence"] and progress["verdict"]["kind"]
        assert "run: " in monitor(f"--run={run}").stdout
        training.send_signal(signal.SIGTERM)
        training.wait(120)
    done = monitor(f"--explain={run}")
    assert done.returncode == 0 and "ottleneck" in done.stdout
    assert json.loads(monitor("--explain", str(run), "--json").stdout)["kind"]


# A run as it is started by `train`, with a cause that is made on purpose.
SLOWED_DOWN = """
import os, sys, time
import tensorflow as tf
from tf_ipu_dp import cli, train
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.training import optimizers

def after_a_while(seconds, value):
    with tf.control_dependencies([tf.numpy_function(lambda: time.sleep(seconds), [], [])]):
        return tf.identity(value)

def begin_after_a_while(self, *words, **names):
    time.sleep(0.05)
    return begin(self, *words, **names)

make, call = sources.make_training, optimizers.Crossentropy.call
begin = tf.keras.callbacks.CallbackList.on_train_batch_begin
if sys.argv[1] == "input":
    sources.make_training = lambda *a, **k: make(*a, **k).map(lambda image, label: (after_a_while(0.15, image), label))
if sys.argv[1] == "executions":
    tf.keras.callbacks.CallbackList.on_train_batch_begin = begin_after_a_while
if sys.argv[1] == "late" and os.environ["POPDIST_REPLICA_INDEX_OFFSET"] != "0":
    optimizers.Crossentropy.call = lambda self, y, out: call(self, y, after_a_while(0.2, out))
sys.exit(cli.run("train", lambda: train.main(sys.argv[2:]), sys.stderr))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cause", "flags", "verdict"),
    [
        ("input", ["--ipus=2", "--epochs=15steps"], ("input", None, "eight_bit_io")),
        (
            "executions",
            ["--ipus=1", "--epochs=80steps", "--device_iterations=1"],
            ("small executions", None, "device_iterations"),
        ),
        ("late", ["--ipus=4", "--instances=2", "--epochs=12steps"], ("late instance", 1, "instances")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bottleneck_of_a_run_is_found_and_named(tmp_path, cause, flags, verdict, monitor):
    program = tmp_path / "program.py"
    program.write_text(SLOWED_DOWN, encoding="utf-8")
    poprun = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", "2", "--num-replicas", "4"]
    words = ["--model=mlp", "--sdk=emulator", f"--run_dir={tmp_path / 'run'}"]
    command = [sys.executable, str(program), cause, *flags, *words]
    done = subprocess.run(
        [*(poprun if cause == "late" else []), *command], capture_output=True, text=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(monitor(f"--explain={tmp_path / 'run'}", "--json").stdout)
    assert (found["kind"], found["instance"], found["flag"]) == verdict, found["sentence"]
    assert found["share_pct"] > 10
    times = run_folder.RunFolder(tmp_path / "run").read_exchange_times()
    if cause != "late":  # one instance has nothing to exchange
        assert times is found["exchanges"] is None
        return
    assert times.exchanges == times.compared == 11  # without the one that compiled
    late = times.most_often_last
    assert late.instance == 1 and late.last >= 9 and late.late.p50_s > 0.1
    assert f"instance 1: it was last in {times.last_pct(1):.0f} % of the exchanges" in found["sentence"]
    assert (found["last_pct"], found["exchanges"]["last_pct"]) == (times.last_pct(1), times.last_pct(1))
    told = monitor(f"--explain={tmp_path / 'run'}").stdout
    assert f"Instance 1 was last in {times.last_pct(1):.0f} % of them" in told
