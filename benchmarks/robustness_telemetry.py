"""Records of devices, runs and recordings with any content, through every output of the monitor.

A case is a partition whose devices report impossible things, a run's folder with a heartbeat, metrics and plan of any
content, and a line of a recording. All of it is shown as a table, as JSON, as Prometheus metrics and recorded; every
hundredth recording is drawn as a page.
"""

from __future__ import annotations

import contextlib
import html.parser
import json
import os
import tempfile
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import (
    devices,
    diagnosis,
    exporter,
    inventory,
    recorder,
    recording_report,
    run_verdicts,
    snapshots,
    tables,
)
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.runs import heartbeat

LIMIT_S = 5.0
KEYS = sorted(devices._KEYS)
TEXTS = (
    "", "0", "1", "17", "-1", "99.96%", "1330MHz", "40.9 W", "N/A", "1e308%", "-1e308", "1e999", "nan", "inf",
    "9" * 400, "9" * 20_000, "9" * 20_000 + "x", "1." * 5_000,
    " " * 20_000 + "1", "٣ W", "a\0b", "\x1b[2J\x1b]0;x\x07", "\u202e",
    "\ud800", "<script>alert(1)</script>", '"}\n# EOF', "a\nb", "x" * 3_000, "20260105T100000Z", "99991231T235959Z",
    "00010101T000000Z", "[red]x[/red]", "{{7*7}}", "%s%n", "日本",
)  # fmt: skip
VALUES = (
    None, True, 0, 1, -1, 2**31, 2**63, 10**400, 0.5, -0.5, 1e308, -1e308, 1e-320, float("nan"), float("inf"), [], {},
    [[]], [None], {"a": {}}, "NEST", "DIGITS", "2026-01-05T10:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00",
)  # fmt: skip


@contextlib.contextmanager
def prepare(options):
    """Yields a folder for the files of one case, in memory where that is possible: a case writes a dozen."""
    del options
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def make_text(chance):
    """Returns a text that a library or a file could contain."""
    if chance.random() < 0.7:
        return chance.choice(TEXTS)
    return "".join(chr(chance.choice((chance.randrange(32, 127), chance.randrange(0x3000)))) for _ in range(12))


def make_value(chance):
    """Returns a JSON value."""
    return make_text(chance) if chance.random() < 0.4 else chance.choice(VALUES)


def render(value):
    """Returns a value as JSON text, nested deeply or with a number of many digits where that is asked for."""
    text = json.dumps(value)
    return text.replace('"NEST"', "[" * 3000 + "]" * 3000).replace('"DIGITS"', "7" * 20_000).encode()


def spoil(chance, value, rate):
    """Returns a JSON object in which some values are others."""
    if isinstance(value, dict):
        return {
            key: make_value(chance) if chance.random() < rate else spoil(chance, each, rate)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [make_value(chance) if chance.random() < rate else spoil(chance, each, rate) for each in value]
    return value


class Reader:
    """Stands where the library is: returns the devices of the case."""

    sdk_name, note, failure, emulated = "emulator", None, None, True

    def __init__(self, reading):
        self._reading = reading

    def read(self):
        return self._reading


class Page(html.parser.HTMLParser):
    """Finds elements and attributes that a page of ours does not have."""

    def __init__(self):
        super().__init__()
        self.wrong = []

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "iframe", "object") or any(name.startswith("on") for name, _ in attrs):
            self.wrong.append(tag)


def write_run(folder, chance):
    """Writes the files of a run of this process, spoiled."""
    status = heartbeat.Status(
        str(folder), 0, 2, "host", os.getpid(), "training", 40, 99, 123.5, "input", 0.1, 1.7e9, (("training", 1.7e9),),
        0.5, 100.0,
    )  # fmt: skip
    times = {"instance": 0, "seconds": 1.0, "executing_s": 0.9, "input_wait_s": 0.1, "last": 1}
    record = {
        "schema": 1, "kind": "train", "step": 40, "epoch": 0.4, "loss": 1.0, "accuracy": 0.5, "learning_rate": 0.1,
        "samples_per_s": 100.0, "elapsed_s": 1.0, "ipu_utilisation_pct": {"0": 5.0}, "instances": [times],
        "executions": 9,
    }  # fmt: skip
    (folder / "status").mkdir(exist_ok=True)
    (folder / "status" / "instance-000.json").write_bytes(render(spoil(chance, status.to_json(), 0.05)))
    lines = [render(spoil(chance, record, 0.1)) for _ in range(3)]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + chance.choice((b"\n", b"", b"\0\n", b'{"kind": ')))
    (folder / "plan.json").write_bytes(render(spoil(chance, _PLAN, 0.02)))
    (folder / "run.flags").write_text(f"--ipus=2\n--{make_text(chance)}\n", encoding="utf-8", errors="surrogatepass")


def try_case(number, chance, folder):
    """Shows one partition and one run in every form."""
    mappings = [{key: make_text(chance) for key in chance.sample(KEYS, chance.randrange(len(KEYS)))} for _ in range(3)]
    mappings[0]["user process id"] = str(os.getpid())
    ipus = tuple(devices.parse_device(mapping) for mapping in mappings)
    write_run(folder, chance)
    reading = devices.DeviceReading(1.7e9, ipus, make_text(chance) if chance.random() < 0.2 else None)
    snapshot = run_verdicts.add_verdicts(snapshots.SnapshotReader(Reader(reading), {}, [folder]).read())
    seen = "a run" if snapshot.runs else "no run"
    options = DisplayOptions(chance.choice((None, 40, 80, 200)), unicode=chance.random() < 0.8)
    shown = tables.render(snapshot, options) + inventory.render(snapshot, options, each_ipu=True)
    shown += inventory.render_like_gc_monitor(snapshot, options)
    shown += tables.render_health(devices.parse_health(make_text(chance)), {}, None, 3, True)
    with contextlib.suppress(cli.UsageError):
        shown += diagnosis.explain(folder).verdict.sentence
    if not shown.replace("\n", "").isprintable():
        return "escapes", repr(shown)[:3000]
    json.loads(json.dumps(snapshot.to_json(), allow_nan=False))
    collector = exporter.Collector()
    collector.update(snapshot)
    registry = CollectorRegistry()
    registry.register(collector)
    found = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    if not all(name.startswith("ipu_") for name in found):
        return "injected", f"{sorted(found)}"
    outcome, problem = record_and_draw(number, chance, folder, snapshot)
    return f"{outcome}; {seen}", problem


def record_and_draw(number, chance, folder, snapshot):
    """Records the snapshot, spoils the recording, reads it back and draws it."""
    path, page = folder / "r.jsonl", folder / "r.html"
    path.unlink(missing_ok=True)
    writer = recorder.Recorder(path, 1.0)
    writer.write(snapshot)
    writer.write(snapshot)
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    head, samples = lines[0], [spoil(chance, line, 0.05) for line in lines[1:]]
    path.write_bytes(b"\n".join([render(spoil(chance, head, 0.02)), *map(render, samples)]))
    try:
        recording = recorder.read(path)
        if number % 100 == 0:
            recording_report.draw(recording, page)
    except cli.UsageError:
        return "shown; the recording is refused", None
    if number % 100:
        return "shown and recorded", None
    parser = Page()
    parser.feed(page.read_text(encoding="utf-8"))
    return "shown, recorded and drawn", f"the page has {parser.wrong}" if parser.wrong else None


def _make_plan():
    from tf_ipu_dp.config import train_flags
    from tf_ipu_dp.datasets import info
    from tf_ipu_dp.planning import plan
    from tf_ipu_dp.runs.plan_record import PlanRecord

    return PlanRecord.of(plan.plan_run(train_flags.parse(["--ipus=2"]), info.DATASETS["fashion_mini"])).to_json()


_PLAN = _make_plan()
