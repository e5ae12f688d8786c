"""The last snapshot as Prometheus metrics. Scrapes are answered at once, even while the devices hang.

Who connects and asks nothing, or does not read the answer, is disconnected and does not keep others from scraping.
"""

from __future__ import annotations

import collections
import contextlib
import socket
import socketserver
import threading
import time
from typing import Any, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple
from wsgiref import simple_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring.devices import Ipu
from tf_ipu_dp.monitoring.snapshots import RUNNING, Process, Snapshot

# A scrape asks at once and reads at once.
_SILENCE_LIMIT_S = 5.0
_MAX_CONNECTIONS = 32
_IPU_LABELS = ("ipu", "board")
_USE_LABELS = ("ipu", "board", "pid", "run")
# Prometheus itself has a label "instance". Process ids are unique only on their host.
_PROCESS_LABELS = ("host", "pid", "run", "run_instance")
_RUN_LABELS = ("run", "run_dir")
# Name, help text, and value in the unit that the name ends with. Metrics of the device alone have no labels of the
# process: the series would break whenever another process attaches.
_IPU_METRICS: Sequence[Tuple[str, str, Any]] = (
    ("ipu_up", "1 while the IPU answers", lambda ipu: 0.0 if ipu.problem else 1.0),
    ("ipu_clock_hertz", "clock", lambda ipu: None if ipu.clock_mhz is None else 1e6 * ipu.clock_mhz),
    ("ipu_die_temperature_celsius", "average die temperature", lambda ipu: ipu.die_temp_c),
    (
        "ipu_error_state",
        "1 where the IPU reports an error",
        lambda ipu: None if ipu.error_state is None else float(ipu.error_state != "no errors"),
    ),
)
_USE_METRICS: Sequence[Tuple[str, str, Any]] = (
    ("ipu_utilisation_ratio", "share of time busy since the last sample", lambda ipu: _ratio(ipu.utilisation_pct)),
    (
        "ipu_session_utilisation_ratio",
        "share of time busy since the process attached",
        lambda ipu: _ratio(ipu.session_utilisation_pct),
    ),
    ("ipu_input_wait_ratio", "share of time waiting for input; emulator only", lambda ipu: _ratio(ipu.input_wait_pct)),
    ("ipu_power_watts", "power of the IPU", lambda ipu: ipu.power_w),
    ("ipu_attached", "1 while a process holds the IPU", lambda ipu: None if ipu.problem else float(not ipu.free)),
)
_BOARD_METRICS: Sequence[Tuple[str, str, Any]] = (
    ("ipu_board_power_watts", "power of the board", lambda ipus: _first(ipu.board_power_w for ipu in ipus)),
    (
        "ipu_board_temperature_celsius",
        "average board temperature",
        lambda ipus: _first(ipu.board_temp_c for ipu in ipus),
    ),
)
_PROCESS_METRICS: Sequence[Tuple[str, str, Any]] = (
    ("ipu_run_step", "weight updates so far", lambda each: each.step),
    ("ipu_run_planned_steps", "planned weight updates", lambda each: each.planned_steps),
    ("ipu_run_samples_per_second", "recent throughput of the whole job", lambda each: each.samples_per_s),
    ("ipu_run_loss", "loss of the last training record", lambda each: each.loss),
    ("ipu_run_remaining_seconds", "expected training left, without validations", lambda each: each.eta_s),
    ("ipu_run_done_ratio", "share of the planned weight updates that are made", lambda each: _ratio(each.done_pct)),
    ("ipu_process_cpu_ratio", "cores of the host in use since the last sample", lambda each: _ratio(each.cpu_pct)),
    (
        "ipu_process_resident_memory_bytes",
        "memory of the host in use",
        lambda each: None if each.memory_gib is None else each.memory_gib * 2**30,
    ),
    ("ipu_process_silent_seconds", "time since the last heartbeat of the process", lambda each: each.silent_s),
    ("ipu_process_up", "1 while the process has heartbeats", lambda each: float(each.state == RUNNING)),
)


class Collector:
    """Turns the last snapshot into metrics. Any thread may call its methods."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._snapshot: Optional[Snapshot] = None
        self._updated = time.monotonic()
        self._failures = 0
        self._busy_s: Dict[int, float] = {}

    def update(self, snapshot: Snapshot) -> None:
        """Sets the snapshot. Busy time is accumulated, so that infrequent scrapes lose nothing."""
        now = time.monotonic()
        with self._lock:
            span = now - self._updated if self._snapshot else 0.0
            for ipu in snapshot.ipus:
                if ipu.id is not None and ipu.utilisation_pct is not None:
                    self._busy_s[ipu.id] = self._busy_s.get(ipu.id, 0.0) + span * ipu.utilisation_pct / 100
            self._failures += snapshot.problem is not None
            self._snapshot, self._updated = snapshot, now

    def describe(self) -> Iterator[Any]:
        """Returns nothing: the metrics depend on the devices."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Returns the metrics."""
        with self._lock:
            snapshot, busy_s = self._snapshot, dict(self._busy_s)
            age, failures = time.monotonic() - self._updated, self._failures
        yield GaugeMetricFamily("ipu_sample_age_seconds", "time since the devices were last read", value=age)
        yield CounterMetricFamily("ipu_failed_samples", "samples in which no device answered", value=failures)
        if snapshot is None:
            return
        runs = {ipu: process.run for process in snapshot.processes for ipu in process.ipus}
        # IPUs without an id would share one series, which can have only one value.
        named = {ipu.id: ipu for ipu in snapshot.ipus if ipu.id is not None}
        labels = {number: _ipu_labels(ipu, runs) for number, ipu in named.items()}
        yield from _make_gauges(_IPU_METRICS, _IPU_LABELS, [(ipu, labels[number][:2]) for number, ipu in named.items()])
        yield from _make_gauges(_USE_METRICS, _USE_LABELS, [(ipu, labels[number]) for number, ipu in named.items()])
        counter = CounterMetricFamily("ipu_busy_seconds", "busy time since the exporter started", labels=_IPU_LABELS)
        errors = CounterMetricFamily(
            "ipu_corrected_link_errors", "corrected link errors", labels=[*_IPU_LABELS, "link"]
        )
        for number, ipu in named.items():
            place = labels[number][:2]
            if number in busy_s:
                counter.add_metric(place, busy_s[number])
            for link, count in (("host", ipu.host_link_errors), ("ipu", ipu.link_errors)):
                if count is not None:
                    errors.add_metric([*place, link], count)
        yield counter
        yield errors
        boards: Dict[str, List[Ipu]] = {}
        for ipu in snapshot.ipus:
            if ipu.board_serial:
                boards.setdefault(ipu.board_serial, []).append(ipu)
        yield from _make_gauges(
            _BOARD_METRICS, ("board",), [(ipus, [_label(serial)]) for serial, ipus in boards.items()]
        )
        processes = [(each, _process_labels(each)) for each in snapshot.processes]
        yield from _make_gauges(_PROCESS_METRICS, _PROCESS_LABELS, processes)
        for name, about, field in (
            ("ipu_run_phase", "1 for the phase that the process is in", "phase"),
            ("ipu_run_waits_for", "1 for what the process is waiting for", "waits_for"),
        ):
            family = GaugeMetricFamily(name, about, labels=[*_PROCESS_LABELS, field])
            for each, values in processes:
                if getattr(each, field) is not None:
                    family.add_metric([*values, _label(getattr(each, field))], 1.0)
            yield family
        yield from _make_verdicts(snapshot)


def serve(collector: Collector, host: str, port: int) -> int:
    """Starts answering scrapes in threads; returns the port; for 0 the system chooses one."""
    registry = CollectorRegistry()
    registry.register(collector)  # type: ignore[arg-type, unused-ignore]
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        kind = type("_Server", (_Server,), {"address_family": family})
        server = kind((host, port), _Handler)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise cli.UsageError(f"--export={host}:{port} cannot be used ({reason}). Use another port.") from error
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="exporter", daemon=True).start()
    return int(server.server_port)


class _Server(socketserver.ThreadingMixIn, simple_server.WSGIServer):
    """Answers each connection in a thread. If there are too many, the oldest one is closed for the newest."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self._open: Deque[socket.socket] = collections.deque()
        self._guard = threading.Lock()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a connection. A client that sends a byte now and then is closed sooner or later."""
        with self._guard:
            self._open.append(request)
            oldest = self._open.popleft() if len(self._open) > _MAX_CONNECTIONS else None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._guard, contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: the client has gone, or was too slow."""


class _Handler(simple_server.WSGIRequestHandler):
    """Reads one request, within the limit, and logs nothing."""

    timeout = _SILENCE_LIMIT_S

    def handle(self) -> None:
        """Answers the request; a client that is silent for too long gets nothing."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


def _make_gauges(
    metrics: Sequence[Tuple[str, str, Any]], names: Sequence[str], rows: Sequence[Tuple[Any, List[str]]]
) -> Any:
    for name, about, read in metrics:
        family = GaugeMetricFamily(name, about, labels=list(names))
        for subject, labels in rows:
            value = read(subject)
            if value is not None:
                family.add_metric(labels, value)
        yield family


def _make_verdicts(snapshot: Snapshot) -> Iterator[Any]:
    """Returns the bottleneck of each run: its kind and the flag to change, and its share of training."""
    kinds = GaugeMetricFamily(
        "ipu_run_bottleneck",
        "1 for the bottleneck of the run, and the flag to change",
        labels=[*_RUN_LABELS, "kind", "flag"],
    )
    shares = GaugeMetricFamily(
        "ipu_run_bottleneck_ratio",
        "share of training that the bottleneck takes; for none: busy",
        labels=[*_RUN_LABELS, "kind"],
    )
    for run in snapshot.runs:
        if run.verdict is not None:
            labels = [_label(run.run), _label(run.run_dir), _label(run.verdict.kind)]
            kinds.add_metric([*labels, _label(run.verdict.flag)], 1.0)
            if run.verdict.share_pct is not None:
                shares.add_metric(labels, run.verdict.share_pct / 100)
    yield kinds
    yield shares


def _ipu_labels(ipu: Ipu, runs: Mapping[int, Optional[str]]) -> List[str]:
    run = None if ipu.id is None else runs.get(ipu.id)
    return [str(ipu.id), _label(ipu.board_serial), str(ipu.pid or ""), _label(run)]


def _first(values: Iterable[Optional[float]]) -> Optional[float]:
    """Returns the first known value."""
    return next((value for value in values if value is not None), None)


def _process_labels(process: Process) -> List[str]:
    instance = "" if process.instance is None else str(process.instance)
    return [_label(process.host), str(process.pid), _label(process.run), instance]


def _label(text: Optional[str]) -> str:
    """Returns a label that can be encoded: names of files and users may be invalid Unicode."""
    return (text or "").encode("utf-8", "backslashreplace").decode("utf-8")


def _ratio(percent: Optional[float]) -> Optional[float]:
    return None if percent is None else percent / 100
