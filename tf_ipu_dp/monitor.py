"""Shows what the IPUs do, and why they wait: `python -m tf_ipu_dp.monitor`. Never imports TensorFlow."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Optional, Sequence, TextIO, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import devices, snapshots, tables
from tf_ipu_dp.runs import heartbeat

GROUPS = {
    "Show": ("watch", "json", "free", "need", "health", "events", "explain"),
    "Keep": ("record", "report", "export", "pid", "run_dir"),
    "Where": ("sdk",),
}
_PERIOD_S = 1.0
_LEAST_PERIOD_S = 0.1
_HOST, _PORT = "127.0.0.1", 9510
_HISTORY = 120
_BAD_SEVERITY = re.compile(r"err|crit|fatal|fail|alert|emerg|panic", re.IGNORECASE)
_EVENT_PATH = "IPU_APP_EVENT_RECORD_PATH"


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """What was asked for. Field names are the flag names; defaults live in the flags only."""

    watch: Optional[float]
    json: bool
    free: bool
    need: int
    health: bool
    events: Optional[str]
    explain: Optional[str]
    record: Optional[str]
    report: Optional[str]
    export: Optional[Tuple[str, int]]
    pid: Optional[int]
    run_dir: Optional[str]
    sdk: str


def main(words: Sequence[str]) -> int:
    """Parses, reads, shows."""
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    cfg = parse(words)
    if cfg.explain is not None:
        return _explain(Path(cfg.explain).expanduser(), cfg.json)
    if cfg.report is not None and cfg.record is not None and Path(cfg.record).exists():
        from tf_ipu_dp.monitoring import recording

        recording.draw(recording.read(Path(cfg.record)), Path(cfg.report))
        return 0
    try:
        reader = devices.open_reader(cfg.sdk)
    except devices.TelemetryError as error:
        raise cli.UsageError(
            f"--sdk=poplar cannot be used: {error}. Source the Poplar SDK's enable script, or use --sdk=emulator."
        ) from error
    try:
        return _show(reader, cfg)
    finally:
        reader.close()


def parse(words: Sequence[str]) -> MonitorConfig:
    """Returns what the words ask for; refuses what does not go together."""
    fv = make_flags()
    cli.parse(words, fv)
    values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(MonitorConfig)}
    cfg = MonitorConfig(**values)
    asked = [
        f"--{name}"
        for name, given in (
            ("free", cfg.free),
            ("health", cfg.health),
            ("explain", cfg.explain is not None),
            ("watch", cfg.watch is not None),
            ("record", cfg.record is not None),
            ("export", cfg.export is not None),
        )
        if given
    ]
    alone = [name for name in asked if name in ("--free", "--health", "--explain")]
    if alone and len(asked) > 1:
        raise cli.UsageError(f"{' and '.join(asked)} do not go together. Use {alone[0]} alone.")
    if cfg.explain == "":
        raise cli.UsageError("--explain= names nothing: give it a run's folder.")
    follows = bool(asked) and not alone
    if cfg.need and not cfg.free:
        raise cli.UsageError(f"--need={cfg.need} is for --free. Use --free --need={cfg.need}.")
    if cfg.events is not None and not cfg.health:
        raise cli.UsageError(f"--events={cfg.events} is for --health. Use --health --events={cfg.events}.")
    if cfg.report is not None and cfg.record is None:
        raise cli.UsageError(
            f"--report={cfg.report} is drawn from a recording. Add --record=FILE: one that is there is drawn, "
            "another is made first."
        )
    for name, value in (("pid", cfg.pid), ("run_dir", cfg.run_dir)):
        if value is not None and not follows:
            raise cli.UsageError(f"--{name}={value} says when to end. Use it with --record, --watch or --export.")
    if cfg.pid is not None and cfg.run_dir is not None:
        raise cli.UsageError(
            f"--pid={cfg.pid} and --run_dir={cfg.run_dir} do not go together: use the one that says when to end."
        )
    return cfg


def make_flags() -> flags.FlagValues:
    """Returns the monitor's flags, unset."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define: Any = flags.DEFINE
    define(
        _Seconds(), "watch", None, "Look again every so many seconds, 1 if not said. Keys: q quits, p pauses.",
        flag_values=fv, boolean=True,
    )  # fmt: skip
    flags.DEFINE_bool("json", False, "Print JSON; with --watch one object per line.", flag_values=fv)
    flags.DEFINE_bool("free", False, "Print the ids of the free IPUs.", flag_values=fv)
    flags.DEFINE_integer("need", 0, "With --free: exit code 1 when fewer IPUs are free.", lower_bound=0, flag_values=fv)
    flags.DEFINE_bool(
        "health", False, "Print what is wrong with the IPUs, and the last application event. Exit code 1 when "
        "something is.", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string(
        "events", None, f"With --health: where applications leave their events. Without it, {_EVENT_PATH} says it.",
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string("explain", None, "Say what held the run in this folder back, and which flag to change.",
                        flag_values=fv)  # fmt: skip
    flags.DEFINE_string("record", None, "Write what is seen to this file, as JSON lines, until stopped.",
                        flag_values=fv)  # fmt: skip
    flags.DEFINE_string(
        "report", None, "Draw the recording of --record as PNG, SVG or HTML, by the ending of this name: the recording "
        "that is there, or the one that is made now.", flag_values=fv,
    )  # fmt: skip
    define(
        _Address(), "export", None, f"Serve Prometheus metrics, on {_HOST}:{_PORT} if not said.", flag_values=fv,
        boolean=True,
    )  # fmt: skip
    flags.DEFINE_integer("pid", None, "End when this process does.", lower_bound=1, flag_values=fv)
    flags.DEFINE_string("run_dir", None, "End when the run in this folder does.", flag_values=fv)
    flags.DEFINE_enum(
        "sdk", "auto", ["auto", "poplar", "emulator"], "Whose IPUs: the Poplar SDK's or the emulator's. auto takes the "
        "Poplar SDK's where there are any.", flag_values=fv,
    )  # fmt: skip
    return fv


class _Seconds(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """Seconds between looks; a flag without a value means the usual ones."""

    placeholder = "SECONDS"
    syntactic_help = f"a number of seconds from {_LEAST_PERIOD_S:g} to 86400"

    def parse(self, argument: Any) -> Optional[float]:
        """Reads the flag's text."""
        if argument in ("true", True):
            return _PERIOD_S
        if argument in ("false", False, None):
            return None
        seconds = float(argument)
        if not _LEAST_PERIOD_S <= seconds <= 86400:
            raise ValueError("out of range")
        return seconds

    def flag_type(self) -> str:
        return "seconds"


class _Address(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """Where to listen: a port of this machine alone, or of an address."""

    placeholder = "[HOST:]PORT"
    syntactic_help = "a port from 0 to 65535, with an address in front of it where others shall reach it"

    def parse(self, argument: Any) -> Optional[Tuple[str, int]]:
        """Reads the flag's text."""
        if argument in ("true", True):
            return (_HOST, _PORT)
        if argument in ("false", False, None):
            return None
        host, _, port = str(argument).rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError("no port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        return (host or _HOST, int(port))

    def flag_type(self) -> str:
        return "address"


def _show(reader: devices.Reader, cfg: MonitorConfig) -> int:
    if cfg.health:
        return _show_health(reader, cfg)
    watcher = snapshots.Watcher(reader)
    if cfg.free:
        return _show_free(watcher.look(), reader.failure, cfg)
    if cfg.watch is None and cfg.record is None and cfg.export is None:
        return _show_once(watcher.look(), cfg)
    return _follow(watcher, cfg)


def _show_once(snapshot: snapshots.Snapshot, cfg: MonitorConfig) -> int:
    if cfg.json:
        sys.stdout.write(json.dumps(snapshot.to_value(), indent=2) + "\n")
    else:
        sys.stdout.write(tables.render(snapshot, _look_of(sys.stdout), _read_verdicts(snapshot)))
    return _judge_answers(snapshot)


def _judge_answers(snapshot: snapshots.Snapshot) -> int:
    if snapshot.problem:
        sys.stderr.write(f"monitor: no device answers: {tables.printable(snapshot.problem)}.\n")
    return 1 if snapshot.problem else 0


def _show_free(snapshot: snapshots.Snapshot, failure: Optional[str], cfg: MonitorConfig) -> int:
    free = snapshot.free
    if cfg.json:
        sys.stdout.write(json.dumps({"schema": snapshots.SCHEMA, "free_ipu_ids": list(free)}) + "\n")
    else:
        sys.stdout.write(" ".join(map(str, free)) + "\n")
    if failure:
        sys.stderr.write(
            f"monitor: these are the emulator's IPUs, because the Poplar SDK's cannot be read "
            f"({tables.printable(failure)}); --sdk=poplar insists on the real ones.\n"
        )
    if _judge_answers(snapshot):
        return 1
    if len(free) < cfg.need:
        sys.stderr.write(f"monitor: --need={cfg.need}, but {len(free)} of {len(snapshot.ipus)} IPUs are free.\n")
        return 1
    return 0


def _show_health(reader: devices.Reader, cfg: MonitorConfig) -> int:
    found = reader.look()
    faults = [f"the Poplar SDK's IPUs cannot be read: {reader.failure}"] if reader.failure else []
    if found.problem:
        faults.append(found.problem)
    for ipu in found.ipus:
        name = f"IPU {'-' if ipu.id is None else ipu.id}"
        if ipu.problem and not found.problem:
            faults.append(f"{name} does not answer: {ipu.problem}")
        if ipu.error_state not in (None, "no errors"):
            faults.append(f"{name}: {ipu.error_state}")
    path = cfg.events or os.environ.get(_EVENT_PATH)
    event: Dict[str, str] = {}
    try:
        faults += reader.read_faults()
    except devices.TelemetryError as error:
        faults.append(f"the health check cannot be made: {error}")
    if path:
        try:
            event = reader.read_event(path)
        except devices.TelemetryError as error:
            faults.append(f"the events in {path} cannot be read: {error}")
    severity = event.get("severity", "")
    if _BAD_SEVERITY.search(severity):
        faults.append(f"the last application event is of severity {severity}: {event.get('description', '-')}")
    faults = list(dict.fromkeys(faults))
    if cfg.json:
        value = {
            "schema": snapshots.SCHEMA, "healthy": not faults, "ipus_checked": len(found.ipus), "faults": faults,
            "last_event": event or None, "sdk": reader.name,
        }  # fmt: skip
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    else:
        sys.stdout.write(tables.render_health(faults, event, path, len(found.ipus), reader.name == "emulator"))
    return 1 if faults else 0


def _explain(folder: Path, as_json: bool) -> int:
    from tf_ipu_dp.monitoring import diagnosis

    found = diagnosis.explain(folder)
    if as_json:
        value = {**found.verdict.to_json(), "run_dir": found.run_dir, "finished": found.finished}
        sys.stdout.write(json.dumps({**value, "updates": found.updates}, indent=2) + "\n")
        return 0
    state = "finished" if found.finished else "not finished"
    sys.stdout.write(f"{tables.printable(found.run_dir)}, {state} at step {found.updates:,}\n")
    sys.stdout.write(f"{tables.printable(found.verdict.sentence)}\n")
    return 0


Sink = Callable[[snapshots.Snapshot], None]


def _follow(watcher: snapshots.Watcher, cfg: MonitorConfig) -> int:
    """Looks again and again, and gives each look to all that was asked for."""
    period_s = cfg.watch or _PERIOD_S
    sinks: List[Sink] = []
    if cfg.pid is not None and not snapshots.is_alive(cfg.pid):
        raise cli.UsageError(f"--pid={cfg.pid} is no process of this machine.")
    with contextlib.ExitStack() as stack:
        ended = _ending(cfg)
        recorder = None
        if cfg.record is not None:
            from tf_ipu_dp.monitoring import recording

            if cfg.report is not None:
                recording.check_report_name(Path(cfg.report))
            recorder = recording.Recorder(Path(cfg.record), period_s)
            stack.callback(recorder.close)
            sinks.append(recorder.write)
        if cfg.export is not None:
            sinks.append(_export(cfg.export))
        signals = stack.enter_context(_Signals())
        screen = None
        if cfg.watch is not None:
            if cfg.json:
                sinks.append(lambda snapshot: _write(json.dumps(snapshot.to_value()) + "\n"))
            elif _moves_cursor(sys.stdout):
                screen = stack.enter_context(_Screen(signals))
                sinks.append(screen.show)
            else:
                look = _look_of(sys.stdout)
                sinks.append(lambda each: _write(tables.render(each, look, _read_verdicts(each)) + "\n"))
        _loop(watcher, sinks, period_s, signals, screen, ended)
    if recorder is not None:
        sys.stderr.write(f"monitor: {cli.count(recorder.samples, 'sample')} in {recorder.path}.\n")
        if cfg.report is not None:
            recording.draw(recording.read(recorder.path), Path(cfg.report))
    return 0


def _loop(
    watcher: snapshots.Watcher,
    sinks: Sequence[Sink],
    period_s: float,
    signals: _Signals,
    screen: Optional[_Screen],
    ended: Callable[[], bool],
) -> None:
    due = time.monotonic()
    while True:
        last = ended()
        snapshot = watcher.look()
        for sink in sinks:
            sink(snapshot)
        if last:
            return
        # A look that takes long is not made up for.
        due = max(due + period_s, time.monotonic())
        while time.monotonic() < due:
            signals.wait(due - time.monotonic(), screen.keys if screen else None)
            if signals.stopped or (screen and screen.handle_keys()):
                return


def _ending(cfg: MonitorConfig) -> Callable[[], bool]:
    """Returns whether what was to be watched has come to its end; a run that has not begun is waited for."""
    if cfg.pid is not None:
        pid = cfg.pid
        return lambda: not snapshots.is_alive(pid)
    if cfg.run_dir is None:
        return lambda: False
    folder = Path(cfg.run_dir).expanduser()
    seen = False

    def over() -> bool:
        nonlocal seen
        alive = any(snapshots.is_under_way(each, time.time()) for each in heartbeat.read_run(folder))
        was, seen = seen, seen or alive
        return was and not alive

    if not heartbeat.read_run(folder):
        sys.stderr.write(f"monitor: waiting for the run in {folder} to begin.\n")
    return over


def _export(address: Tuple[str, int]) -> Sink:
    try:
        from tf_ipu_dp.monitoring import exporter
    except ImportError as error:
        raise cli.UsageError(
            f"--export needs prometheus_client ({error}). Install it with: pip install prometheus_client"
        ) from error
    collector = exporter.Collector()
    port = exporter.serve(collector, *address)
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    sys.stderr.write(f"monitor: metrics are on http://{host}:{port}/metrics\n")
    return collector.update


def _read_verdicts(snapshot: snapshots.Snapshot) -> Dict[str, str]:
    """Returns what holds each run back, by the last of its metrics: the sentences by the runs' names.

    Runs that share a name are told by their folders.
    """
    folders = {process.run_dir: process.run for process in snapshot.processes if process.run_dir and process.run}
    if not folders:
        return {}
    from tf_ipu_dp.monitoring import diagnosis

    names = collections.Counter(folders.values())
    found = {folder: diagnosis.explain_lately(Path(folder)) for folder in folders}
    return {
        folder if names[folders[folder]] > 1 else folders[folder]: verdict.sentence
        for folder, verdict in found.items()
        if verdict is not None
    }


class _Signals:
    """Turns the signals that end the monitor or resize its terminal into something that can be waited for."""

    def __init__(self) -> None:
        self.stopped = False
        self.resized = False

    def __enter__(self) -> _Signals:
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._stop) for number in ends}
        self._before[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, self._resize)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        for end in self._pipe:
            os.close(end)

    def wait(self, seconds: float, keys: Optional[int]) -> None:
        """Returns after some time, or when a signal or a key comes."""
        watched = [self._pipe[0], *([] if keys is None else [keys])]
        ready, _, _ = select.select(watched, [], [], max(seconds, 0.0))
        if self._pipe[0] in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], 1024)

    def _stop(self, *_: object) -> None:
        self.stopped = True

    def _resize(self, *_: object) -> None:
        self.resized = True


class _Screen:
    """A terminal's other screen, on which lines are written only where they change."""

    def __init__(self, signals: _Signals) -> None:
        self._paused = False
        self.keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._signals = signals
        self._shown: List[str] = []
        self._snapshot: Optional[snapshots.Snapshot] = None
        self._history: Dict[int, Deque[Optional[float]]] = {}
        self._sentences: Dict[str, str] = {}
        self._settings: Any = None

    def __enter__(self) -> _Screen:
        self._suspending = signal.signal(signal.SIGTSTP, self._suspend)
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        signal.signal(signal.SIGTSTP, self._suspending)

    def show(self, snapshot: snapshots.Snapshot) -> None:
        """Takes in a snapshot and draws it, unless the screen is paused."""
        for ipu in snapshot.ipus:
            if ipu.id is not None:
                self._history.setdefault(ipu.id, collections.deque(maxlen=_HISTORY)).append(ipu.utilisation_pct)
        if not self._paused:
            self._snapshot, self._sentences = snapshot, _read_verdicts(snapshot)
            self._draw()

    def handle_keys(self) -> bool:
        """Does what keys and a new size ask for; returns whether to quit."""
        if self.keys is not None and select.select([self.keys], [], [], 0)[0]:
            pressed = os.read(self.keys, 1024)
            if not pressed:  # the terminal is gone
                return True
            if b"q" in pressed or b"Q" in pressed or b"\x04" in pressed:
                return True
            if (pressed.count(b"p") + pressed.count(b"P")) % 2:
                self._paused = not self._paused
                self._draw()
        if self._signals.resized:
            self._signals.resized = False
            self._shown = []
            self._draw()
        return False

    def _draw(self) -> None:
        if self._snapshot is None:
            return
        # Not shutil's: what it takes from the environment does not follow a terminal that changes its size.
        try:
            size = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            size = shutil.get_terminal_size()
        look = dataclasses.replace(_look_of(sys.stdout), width=size.columns)
        moment = time.strftime("%H:%M:%S", time.localtime(self._snapshot.time))
        footer = f"{moment}  q quit  p {'go on, paused' if self._paused else 'pause'}"
        history = {identity: list(values) for identity, values in self._history.items()}
        lines = tables.render_screen(self._snapshot, look, size.lines, history, footer, self._sentences)
        text = "" if self._shown else "\x1b[2J"
        for number, line in enumerate(lines):
            if number >= len(self._shown) or self._shown[number] != line:
                text += f"\x1b[{number + 1};1H{line}\x1b[K"
        if len(lines) < len(self._shown):
            text += f"\x1b[{len(lines) + 1};1H\x1b[J"
        self._shown = lines
        _write(text)

    def _enter(self) -> None:
        if self.keys is not None:
            import termios
            import tty

            self._settings = termios.tcgetattr(self.keys)
            tty.setcbreak(self.keys)
        _write("\x1b[?1049h\x1b[?25l\x1b[2J")
        self._shown = []

    def _leave(self) -> None:
        _write("\x1b[2J\x1b[H\x1b[?25h\x1b[?1049l")  # a terminal that has grown may keep what is there
        if self._settings is not None and self.keys is not None:
            import termios

            with contextlib.suppress(termios.error):  # the terminal is gone
                termios.tcsetattr(self.keys, termios.TCSADRAIN, self._settings)

    def _suspend(self, *_: object) -> None:
        self._leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._suspend)
        self._enter()
        self._draw()


def _look_of(stream: TextIO) -> tables.Look:
    """Returns how to draw there: a pipe gets whole lines of plain text."""
    terminal = stream.isatty()
    return tables.Look(
        width=shutil.get_terminal_size().columns if terminal else None,
        bars=terminal,
        colour=terminal and not _is_dumb() and not os.environ.get("NO_COLOR"),
        unicode=cli.speaks_unicode(stream),
    )


def _moves_cursor(stream: TextIO) -> bool:
    return stream.isatty() and not _is_dumb()


def _is_dumb() -> bool:
    return os.environ.get("TERM", "") in ("", "dumb")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.monitor [--flag=value ...]",
        "Shows what the IPUs do, who holds them, and what the runs wait for. Without the Poplar SDK these are the "
        "emulator's IPUs.",
        GROUPS,
        make_flags(),
        shutil.get_terminal_size().columns,
    )


if __name__ == "__main__":
    sys.exit(cli.run("monitor", lambda: main(sys.argv[1:]), sys.stderr))
