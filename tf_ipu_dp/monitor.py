"""Shows what the IPUs do and what the runs wait for: `python -m tf_ipu_dp.monitor`. Never imports TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli, missing_packages
from tf_ipu_dp.monitoring import (
    device_reader,
    devices,
    inventory,
    process_info,
    run_verdicts,
    snapshots,
    tables,
    terminal,
    text_layout,
)
from tf_ipu_dp.monitoring.monitor_flags import EVENT_PATH, GROUPS, PERIOD_S, MonitorConfig, make_flags, parse
from tf_ipu_dp.runs import heartbeat

_EXAMPLES = (
    "python -m tf_ipu_dp.monitor",
    "python -m tf_ipu_dp.monitor --watch --sort=cpu",
    "python -m tf_ipu_dp.monitor --run=runs/first",
    "python -m tf_ipu_dp.monitor --inventory",
    "python -m tf_ipu_dp.monitor --free --need=8",
    "python -m tf_ipu_dp.monitor --explain=runs/first",
    "python -m tf_ipu_dp.monitor --record=first.jsonl --report=first.html --run_dir=runs/first",
)
_CPU_SPAN_S = 0.2  # over which one shot measures the CPU use of processes
_BAD_SEVERITY = re.compile(r"err|crit|fatal|fail|alert|emerg|panic", re.IGNORECASE)

Sink = Callable[[snapshots.Snapshot], None]


def main(words: Sequence[str]) -> int:
    """Parses the flags, reads the devices and shows or records them."""
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    cfg = parse(words)
    if cfg.explain is not None:
        return _explain(cli.expand_path(cfg.explain), cfg.json)
    if cfg.report is not None and cfg.record is not None and Path(cfg.record).exists():
        from tf_ipu_dp.monitoring import recorder, recording_report

        recording = recorder.read(Path(cfg.record))
        recording_report.draw(recording, Path(cfg.report))
        _say_report(Path(cfg.report), len(recording.samples), recording.path)
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


def _show(reader: device_reader.DeviceReader, cfg: MonitorConfig) -> int:
    if cfg.health:
        return _show_health(reader, cfg)
    snapshot_reader = snapshots.SnapshotReader(reader, folders=_chosen_folders(cfg.run))
    if cfg.free:
        return _show_free(snapshot_reader.read(), reader.failure, cfg)
    if cfg.inventory or cfg.gc:
        return _show_inventory(snapshot_reader.read(), cfg)
    if cfg.watch is None and cfg.record is None and cfg.export is None:
        return _show_once(snapshot_reader, cfg)
    return _follow(snapshot_reader, cfg)


def _chosen_folders(run: Optional[str]) -> List[Path]:
    """Returns the folder of a run that `--run` names, if it names one."""
    folder = cli.expand_path(run) if run else None
    return [folder] if folder is not None and heartbeat.read_run(folder) else []


def _show_once(snapshot_reader: snapshots.SnapshotReader, cfg: MonitorConfig) -> int:
    snapshot = snapshot_reader.read()
    if any(process.memory_gib is not None for process in snapshot.processes):
        time.sleep(_CPU_SPAN_S)  # CPU use is the difference of two readings
        snapshot = snapshot_reader.measure_host_use(snapshot)
    snapshot = run_verdicts.add_verdicts(snapshot)
    if cfg.json:
        sys.stdout.write(json.dumps(cfg.view.apply(snapshot).to_json(), indent=2) + "\n")
    else:
        sys.stdout.write(tables.render(snapshot, terminal.detect_options(sys.stdout), cfg.view))
    return _report_problem(snapshot)


def _show_inventory(snapshot: snapshots.Snapshot, cfg: MonitorConfig) -> int:
    options = terminal.detect_options(sys.stdout)
    if cfg.json:
        sys.stdout.write(json.dumps(inventory.to_json(snapshot), indent=2) + "\n")
    elif cfg.gc:
        sys.stdout.write(inventory.render_like_gc_monitor(snapshot, options))
    else:
        sys.stdout.write(inventory.render(snapshot, options, each_ipu=cfg.all))
    return _report_problem(snapshot)


def _report_problem(snapshot: snapshots.Snapshot) -> int:
    """Prints to stderr why no device answers, if so. Returns the exit code."""
    if snapshot.problem:
        _say(
            f"no device answers: {text_layout.printable(snapshot.problem)}. "
            "Look for the fault with: python -m tf_ipu_dp.monitor --health"
        )
    return 1 if snapshot.problem else 0


def _show_free(snapshot: snapshots.Snapshot, failure: Optional[str], cfg: MonitorConfig) -> int:
    free = snapshot.free
    if cfg.json:
        sys.stdout.write(json.dumps({"schema": snapshots.SCHEMA, "free_ipu_ids": list(free)}) + "\n")
    else:
        sys.stdout.write(" ".join(map(str, free)) + "\n")
    if failure:
        _say(
            f"these are the emulator's IPUs, because the Poplar SDK's cannot be read "
            f"({text_layout.printable(failure)}). Use --sdk=poplar to require the real ones."
        )
    if _report_problem(snapshot):
        return 1
    if len(free) < cfg.need:
        fewer = f"Use --need={len(free)}, or w" if free else "W"
        _say(
            f"--need={cfg.need}, but {len(free)} of {len(snapshot.ipus)} IPUs are free. {fewer}ait, and watch them "
            "with: python -m tf_ipu_dp.monitor --watch"
        )
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
    path = cfg.events or os.environ.get(EVENT_PATH)
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
    period_s = cfg.watch or PERIOD_S
    sinks: List[Sink] = []
    if cfg.pid is not None and not process_info.is_alive(cfg.pid):
        raise cli.UsageError(
            f"--pid={cfg.pid} is not a running process of this machine. The processes that hold IPUs are listed by: "
            "python -m tf_ipu_dp.monitor"
        )
    with contextlib.ExitStack() as stack:
        has_ended = _make_end_check(cfg)
        recording = None
        if cfg.record is not None:
            from tf_ipu_dp.monitoring import recorder, recording_report

            if cfg.report is not None:
                recording_report.check_report_name(Path(cfg.report))
            recording = recorder.Recorder(Path(cfg.record), period_s)
            stack.callback(recording.close)
            sinks.append(recording.write)
        if cfg.export is not None:
            sinks.append(_start_exporter(cfg.export))
        signals = stack.enter_context(terminal.Signals())
        screen = None
        if cfg.watch is not None:
            if cfg.json:
                sinks.append(lambda each: terminal.write(json.dumps(cfg.view.apply(each).to_json()) + "\n"))
            elif terminal.moves_cursor(sys.stdout):
                screen = stack.enter_context(terminal.Screen(signals, cfg.view))
                sinks.append(screen.show)
            else:
                options = terminal.detect_options(sys.stdout)
                sinks.append(lambda each: terminal.write(tables.render(each, options, cfg.view) + "\n"))
        _read_periodically(snapshot_reader, sinks, period_s, signals, screen, has_ended)
    if recording is not None:
        if cfg.report is None:
            _say(
                f"{cli.count(recording.samples, 'sample')} in {recording.path}. Draw them with: "
                f"python -m tf_ipu_dp.monitor --record={shlex.quote(str(recording.path))} --report=report.html"
            )
        else:
            recording_report.draw(recorder.read(recording.path), Path(cfg.report))
            _say_report(Path(cfg.report), recording.samples, recording.path)
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
        snapshot = run_verdicts.add_verdicts(snapshot_reader.read())
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
    folder = cli.expand_path(cfg.run_dir)
    has_started = False

    def run_has_ended() -> bool:
        nonlocal has_started
        running = any(snapshots.is_instance_running(each, time.time()) for each in heartbeat.read_run(folder))
        had_started, has_started = has_started, has_started or running
        return had_started and not running

    if not heartbeat.read_run(folder):
        _say(f"waiting for the run in {folder} to start.")
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
    _say(f"metrics are on http://{host}:{port}/metrics")
    return collector.update


def _say_report(path: Path, samples: int, recording: Path) -> None:
    _say(f"the report of {cli.count(samples, 'sample')} in {recording} is in {path}.")


def _say(sentence: str) -> None:
    """Writes a sentence to stderr, with commands as the user starts them."""
    cli.announce("monitor", sentence)


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
