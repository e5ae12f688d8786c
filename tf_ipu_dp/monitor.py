"""Shows what the IPUs do and what the runs wait for: `python -m tf_ipu_dp.monitor`. Never imports TensorFlow."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli, missing_packages
from tf_ipu_dp.monitoring import device_reader, devices, process_info, snapshots, tables, terminal, text_layout
from tf_ipu_dp.runs import heartbeat

GROUPS = {
    "Show": ("watch", "json", "free", "need", "health", "events", "explain"),
    "Keep": ("record", "report", "export", "pid", "run_dir"),
    "Where": ("sdk",),
}
_EXAMPLES = (
    "python -m tf_ipu_dp.monitor",
    "python -m tf_ipu_dp.monitor --watch",
    "python -m tf_ipu_dp.monitor --free --need=8",
    "python -m tf_ipu_dp.monitor --explain=runs/first",
    "python -m tf_ipu_dp.monitor --record=first.jsonl --report=first.html --run_dir=runs/first",
)
_ACTIONS = {
    "--free": "prints the free IPUs once",
    "--health": "checks for faults once",
    "--explain": "explains one run",
    "--watch": "shows the IPUs until stopped",
    "--record": "records until stopped",
    "--export": "serves metrics until stopped",
}
_PERIOD_S = 1.0
_MIN_PERIOD_S = 0.1
_HOST, _PORT = "127.0.0.1", 9510
_BAD_SEVERITY = re.compile(r"err|crit|fatal|fail|alert|emerg|panic", re.IGNORECASE)
_EVENT_PATH = "IPU_APP_EVENT_RECORD_PATH"

Sink = Callable[[snapshots.Snapshot], None]


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """The parsed command line. Field names are the flag names; defaults live in the flags only."""

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
    """Parses the flags, reads the devices and shows or records them."""
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    cfg = parse(words)
    if cfg.explain is not None:
        return _explain(Path(cfg.explain).expanduser(), cfg.json)
    if cfg.report is not None and cfg.record is not None and Path(cfg.record).exists():
        from tf_ipu_dp.monitoring import charts, recorder

        charts.draw(recorder.read(Path(cfg.record)), Path(cfg.report))
        return 0
    try:
        reader = device_reader.open_reader(cfg.sdk)
    except devices.TelemetryError as error:
        raise cli.UsageError(
            f"--sdk=poplar cannot be used: {error}. Source the Poplar SDK's enable script, or use --sdk=emulator."
        ) from error
    try:
        return _show(reader, cfg)
    finally:
        reader.close()


def parse(words: Sequence[str]) -> MonitorConfig:
    """Returns the config of a command line; refuses flags that cannot be combined."""
    fv = make_flags()
    cli.parse(words, fv)
    values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(MonitorConfig)}
    cfg = MonitorConfig(**values)
    actions = [
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
    exclusive = [name for name in actions if name in ("--free", "--health", "--explain")]
    if exclusive and len(actions) > 1:
        what = ", ".join(f"{name} {_ACTIONS[name]}" for name in actions)
        raise cli.UsageError(f"{' and '.join(actions)} cannot be combined: {what}. Use {exclusive[0]} alone.")
    if cfg.explain == "":
        raise cli.UsageError("--explain needs the folder of a run, for example --explain=runs/first.")
    continuous = bool(actions) and not exclusive
    if cfg.need and not cfg.free:
        raise cli.UsageError(f"--need={cfg.need} works only with --free. Use --free --need={cfg.need}.")
    if cfg.events is not None and not cfg.health:
        raise cli.UsageError(f"--events={cfg.events} works only with --health. Use --health --events={cfg.events}.")
    if cfg.report is not None and cfg.record is None:
        raise cli.UsageError(
            f"--report={cfg.report} needs a recording. Add --record=FILE: an existing recording is drawn, "
            "a new one is recorded first."
        )
    for name, value in (("pid", cfg.pid), ("run_dir", cfg.run_dir)):
        if value is not None and not continuous:
            raise cli.UsageError(f"--{name}={value} sets when to stop. Use it with --record, --watch or --export.")
    if cfg.pid is not None and cfg.run_dir is not None:
        raise cli.UsageError(
            f"--pid={cfg.pid} and --run_dir={cfg.run_dir} cannot be combined: both set when to stop. Use one of them."
        )
    return cfg


def make_flags() -> flags.FlagValues:
    """Returns the monitor's flags, unset."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define: Any = flags.DEFINE
    define(
        _Seconds(), "watch", None, f"Seconds between refreshes, {_PERIOD_S:g} by default. Keys: q quits, p pauses.",
        flag_values=fv, boolean=True,
    )  # fmt: skip
    flags.DEFINE_bool("json", False, "Print JSON; with --watch one object per line.", flag_values=fv)
    flags.DEFINE_bool("free", False, "Print the ids of the free IPUs.", flag_values=fv)
    flags.DEFINE_integer("need", 0, "With --free: exit code 1 when fewer IPUs are free.", lower_bound=0, flag_values=fv)
    flags.DEFINE_bool(
        "health", False, "Print the faults of the IPUs and the last application event. Exit code 1 when there is a "
        "fault.", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string(
        "events", None, f"With --health: the file with application events. By default {_EVENT_PATH} names it.",
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string("explain", None, "Name the bottleneck of the run in this folder, and the flag to change.",
                        flag_values=fv)  # fmt: skip
    flags.DEFINE_string("record", None, "Record snapshots to this file, as JSON lines, until stopped.",
                        flag_values=fv)  # fmt: skip
    flags.DEFINE_string(
        "report", None, "Draw the recording of --record as PNG, SVG or HTML, by the ending of this name: an existing "
        "recording, or the one that is made now.", flag_values=fv,
    )  # fmt: skip
    define(
        _Address(), "export", None, f"Serve Prometheus metrics, on {_HOST}:{_PORT} by default.", flag_values=fv,
        boolean=True,
    )  # fmt: skip
    flags.DEFINE_integer("pid", None, "Stop when this process ends.", lower_bound=1, flag_values=fv)
    flags.DEFINE_string("run_dir", None, "Stop when the run in this folder ends.", flag_values=fv)
    flags.DEFINE_enum(
        "sdk", "auto", ["auto", "poplar", "emulator"], "Whose IPUs to show: the Poplar SDK's or the emulator's. auto "
        "takes the Poplar SDK's where there are any.", flag_values=fv,
    )  # fmt: skip
    return fv


class _Seconds(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """The refresh period; a flag without a value means the default."""

    placeholder = "SECONDS"
    syntactic_help = f"a number of seconds from {_MIN_PERIOD_S:g} to 86400"

    def parse(self, argument: Any) -> Optional[float]:
        """Reads the flag's text."""
        if argument in ("true", True):
            return _PERIOD_S
        if argument in ("false", False, None):
            return None
        seconds = float(argument)
        if not _MIN_PERIOD_S <= seconds <= 86400:
            raise ValueError("out of range")
        return seconds

    def flag_type(self) -> str:
        return "seconds"


class _Address(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """Where to listen: a port for this machine alone, or an address and a port."""

    placeholder = "[HOST:]PORT"
    syntactic_help = "a port from 0 to 65535, after an address if other machines are to reach it"

    def parse(self, argument: Any) -> Optional[Tuple[str, int]]:
        """Reads the flag's text."""
        if argument in ("true", True):
            return (_HOST, _PORT)
        if argument in ("false", False, None):
            return None
        host, _, port = str(argument).rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError("not a port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        return (host or _HOST, int(port))

    def flag_type(self) -> str:
        return "address"


def _show(reader: device_reader.DeviceReader, cfg: MonitorConfig) -> int:
    if cfg.health:
        return _show_health(reader, cfg)
    snapshot_reader = snapshots.SnapshotReader(reader)
    if cfg.free:
        return _show_free(snapshot_reader.read(), reader.failure, cfg)
    if cfg.watch is None and cfg.record is None and cfg.export is None:
        return _show_once(snapshot_reader.read(), cfg)
    return _follow(snapshot_reader, cfg)


def _show_once(snapshot: snapshots.Snapshot, cfg: MonitorConfig) -> int:
    if cfg.json:
        sys.stdout.write(json.dumps(snapshot.to_json(), indent=2) + "\n")
    else:
        options = terminal.detect_options(sys.stdout)
        sys.stdout.write(tables.render(snapshot, options, _read_verdicts(snapshot)))
    return _report_problem(snapshot)


def _report_problem(snapshot: snapshots.Snapshot) -> int:
    """Prints to stderr why no device answers, if so. Returns the exit code."""
    if snapshot.problem:
        sys.stderr.write(f"monitor: no device answers: {text_layout.printable(snapshot.problem)}.\n")
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
            f"({text_layout.printable(failure)}). Use --sdk=poplar to require the real ones.\n"
        )
    if _report_problem(snapshot):
        return 1
    if len(free) < cfg.need:
        sys.stderr.write(f"monitor: --need={cfg.need}, but {len(free)} of {len(snapshot.ipus)} IPUs are free.\n")
        return 1
    return 0


def _show_health(reader: device_reader.DeviceReader, cfg: MonitorConfig) -> int:
    reading = reader.read()
    faults = [f"the Poplar SDK's IPUs cannot be read: {reader.failure}"] if reader.failure else []
    if reading.problem:
        faults.append(reading.problem)
    for ipu in reading.ipus:
        name = f"IPU {'-' if ipu.id is None else ipu.id}"
        if ipu.problem and not reading.problem:
            faults.append(f"{name} does not answer: {ipu.problem}")
        if ipu.error_state not in (None, "no errors"):
            faults.append(f"{name}: {ipu.error_state}")
    path = cfg.events or os.environ.get(_EVENT_PATH)
    event: Dict[str, str] = {}
    try:
        faults += reader.read_faults()
    except devices.TelemetryError as error:
        faults.append(f"the health check failed: {error}")
    if path:
        try:
            event = reader.read_event(path)
        except devices.TelemetryError as error:
            faults.append(f"the events in {path} cannot be read: {error}")
    severity = event.get("severity", "")
    if _BAD_SEVERITY.search(severity):
        faults.append(f"the last application event has severity {severity}: {event.get('description', '-')}")
    faults = list(dict.fromkeys(faults))
    if cfg.json:
        value = {
            "schema": snapshots.SCHEMA, "healthy": not faults, "ipus_checked": len(reading.ipus), "faults": faults,
            "last_event": event or None, "sdk": reader.sdk_name,
        }  # fmt: skip
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    else:
        sys.stdout.write(tables.render_health(faults, event, path, len(reading.ipus), reader.emulated))
    return 1 if faults else 0


def _explain(folder: Path, as_json: bool) -> int:
    from tf_ipu_dp.monitoring import diagnosis
    from tf_ipu_dp.runs import result_report

    found = diagnosis.explain(folder)
    if as_json:
        value = {**found.verdict.to_json(), "run_dir": found.run_dir, "finished": found.finished}
        exchanges = found.exchanges.to_json() if found.exchanges else None
        sys.stdout.write(json.dumps({**value, "updates": found.updates, "exchanges": exchanges}, indent=2) + "\n")
        return 0
    state = "finished" if found.finished else "not finished"
    sys.stdout.write(f"{text_layout.printable(found.run_dir)}, {state} at step {found.updates:,}\n")
    sys.stdout.write(f"{text_layout.printable(found.verdict.sentence)}\n")
    if found.exchanges:
        sys.stdout.write(f"{result_report.render_exchanges(found.exchanges)}\n")
    return 0


def _follow(snapshot_reader: snapshots.SnapshotReader, cfg: MonitorConfig) -> int:
    """Reads snapshots until stopped, and gives each to the recorder, the exporter and the display."""
    period_s = cfg.watch or _PERIOD_S
    sinks: List[Sink] = []
    if cfg.pid is not None and not process_info.is_alive(cfg.pid):
        raise cli.UsageError(f"--pid={cfg.pid} is not a running process of this machine.")
    with contextlib.ExitStack() as stack:
        has_ended = _make_end_check(cfg)
        recording = None
        if cfg.record is not None:
            from tf_ipu_dp.monitoring import charts, recorder

            if cfg.report is not None:
                charts.check_report_name(Path(cfg.report))
            recording = recorder.Recorder(Path(cfg.record), period_s)
            stack.callback(recording.close)
            sinks.append(recording.write)
        if cfg.export is not None:
            sinks.append(_start_exporter(cfg.export))
        signals = stack.enter_context(terminal.Signals())
        screen = None
        if cfg.watch is not None:
            if cfg.json:
                sinks.append(lambda snapshot: terminal.write(json.dumps(snapshot.to_json()) + "\n"))
            elif terminal.moves_cursor(sys.stdout):
                screen = stack.enter_context(terminal.Screen(signals, _read_verdicts))
                sinks.append(screen.show)
            else:
                options = terminal.detect_options(sys.stdout)
                sinks.append(lambda each: terminal.write(tables.render(each, options, _read_verdicts(each)) + "\n"))
        _read_periodically(snapshot_reader, sinks, period_s, signals, screen, has_ended)
    if recording is not None:
        sys.stderr.write(f"monitor: {cli.count(recording.samples, 'sample')} in {recording.path}.\n")
        if cfg.report is not None:
            charts.draw(recorder.read(recording.path), Path(cfg.report))
    return 0


def _read_periodically(
    snapshot_reader: snapshots.SnapshotReader,
    sinks: Sequence[Sink],
    period_s: float,
    signals: terminal.Signals,
    screen: Optional[terminal.Screen],
    has_ended: Callable[[], bool],
) -> None:
    due = time.monotonic()
    while True:
        is_last = has_ended()
        snapshot = snapshot_reader.read()
        for sink in sinks:
            sink(snapshot)
        if is_last:
            return
        # After a slow reading, missed periods are not made up for.
        due = max(due + period_s, time.monotonic())
        while time.monotonic() < due:
            signals.wait(due - time.monotonic(), screen.keys if screen else None)
            if signals.stopped or (screen and screen.handle_events()):
                return


def _make_end_check(cfg: MonitorConfig) -> Callable[[], bool]:
    """Returns a function that checks whether the process or run of the flags has ended; a run may start later."""
    if cfg.pid is not None:
        pid = cfg.pid
        return lambda: not process_info.is_alive(pid)
    if cfg.run_dir is None:
        return lambda: False
    folder = Path(cfg.run_dir).expanduser()
    has_started = False

    def run_has_ended() -> bool:
        nonlocal has_started
        running = any(snapshots.is_instance_running(each, time.time()) for each in heartbeat.read_run(folder))
        had_started, has_started = has_started, has_started or running
        return had_started and not running

    if not heartbeat.read_run(folder):
        sys.stderr.write(f"monitor: waiting for the run in {folder} to start.\n")
    return run_has_ended


def _start_exporter(address: Tuple[str, int]) -> Sink:
    try:
        from tf_ipu_dp.monitoring import exporter
    except ImportError as error:
        missing_packages.restart()
        raise cli.UsageError(
            f"--export needs prometheus_client ({error}). Install it with: pip install prometheus_client"
        ) from error
    collector = exporter.Collector()
    port = exporter.serve(collector, *address)
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    sys.stderr.write(f"monitor: metrics are on http://{host}:{port}/metrics\n")
    return collector.update


def _read_verdicts(snapshot: snapshots.Snapshot) -> Dict[str, str]:
    """Returns a sentence on the current bottleneck of each run, by its name, or by its folder where names repeat."""
    folders = {process.run_dir: process.run for process in snapshot.processes if process.run_dir and process.run}
    if not folders:
        return {}
    from tf_ipu_dp.monitoring import diagnosis

    names = collections.Counter(folders.values())
    verdicts = {folder: diagnosis.explain_recent(Path(folder)) for folder in folders}
    return {
        folder if names[folders[folder]] > 1 else folders[folder]: verdict.sentence
        for folder, verdict in verdicts.items()
        if verdict is not None
    }


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.monitor [--flag=value ...]",
        "Shows what the IPUs do, which processes hold them, and what the runs are waiting for. Without the Poplar SDK "
        "these are the emulator's IPUs.",
        GROUPS,
        make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(cli.run("monitor", lambda: main(sys.argv[1:]), sys.stderr))
