from __future__ import annotations

import dataclasses
import http.client
import json
import re
import socket
import threading
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import devices, exporter, snapshots
from tf_ipu_dp.runs.records import Verdict

DASHBOARD = Path(exporter.__file__).parents[2] / "docs" / "grafana-dashboard.json"
BUSY = devices.Ipu(
    id=3, board_serial='b"1\n', utilisation_pct=75.0, session_utilisation_pct=50.0, input_wait_pct=5.0,
    clock_mhz=1330.0, power_w=40.5, die_temp_c=31.0, board_temp_c=29.0, board_power_w=114.7, error_state="no errors",
    link_errors=2, pid=7,
)  # fmt: skip
PROCESS = snapshots.Process(
    7, "ann", "x", 1.0, (3,), "running", 0.5, "/runs/a", "a", 1, 2, "training", 120, 640, 1842.0, "input",
    host="h", loss=0.5, eta_s=95.0, cpu_pct=150.0, memory_gib=0.5,
)  # fmt: skip
SNAPSHOT = snapshots.Snapshot(
    0.0, "poplar", (BUSY, devices.Ipu(id=4, problem="link down")), (PROCESS,),
    verdicts={"/runs/a": Verdict("input", "The bottleneck is the input.", 30.0, flag="prefetch")},
)  # fmt: skip

DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy other tests have set


@pytest.fixture
def scrape():
    collector = exporter.Collector()
    port = exporter.serve(collector, "127.0.0.1", 0)

    def read():
        with DIRECTLY.open(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode("utf-8")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return {(sample.name, *sorted(sample.labels.items())): sample.value for sample in samples}

    read.update = collector.update
    return read


def test_metrics_carry_ipu_board_process_and_run_and_unknown_values_are_absent(scrape):
    scrape.update(SNAPSHOT)
    found = scrape()
    use = (("board", 'b"1\n'), ("ipu", "3"), ("pid", "7"), ("run", "a"))
    assert found[("ipu_utilisation_ratio", *use)] == 0.75
    assert found[("ipu_power_watts", *use)] == 40.5 and found[("ipu_attached", *use)] == 1.0
    place = use[:2]
    assert found[("ipu_clock_hertz", *place)] == 1.33e9 and found[("ipu_up", *place)] == 1.0
    assert found[("ipu_corrected_link_errors_total", *place, ("link", "ipu"))] == 2.0
    assert found[("ipu_board_power_watts", ("board", 'b"1\n'))] == 114.7
    run = (("host", "h"), ("pid", "7"), ("run", "a"), ("run_instance", "1"))
    assert found[("ipu_run_step", *run)] == 120 and found[("ipu_run_samples_per_second", *run)] == 1842.0
    assert found[("ipu_run_waits_for", *run, ("waits_for", "input"))] == 1.0
    assert found[("ipu_up", ("board", ""), ("ipu", "4"))] == 0.0
    assert not [key for key in found if ("ipu", "4") in key and key[0] == "ipu_utilisation_ratio"]


def test_loss_progress_and_the_verdict_are_exported(scrape):
    scrape.update(SNAPSHOT)
    found = scrape()
    run = (("host", "h"), ("pid", "7"), ("run", "a"), ("run_instance", "1"))
    assert found[("ipu_run_loss", *run)] == 0.5 and found[("ipu_run_remaining_seconds", *run)] == 95.0
    assert found[("ipu_run_done_ratio", *run)] == 120 / 640
    assert found[("ipu_process_cpu_ratio", *run)] == 1.5
    assert found[("ipu_process_resident_memory_bytes", *run)] == 2**29
    place = (("kind", "input"), ("run", "a"), ("run_dir", "/runs/a"))
    assert found[("ipu_run_bottleneck", ("flag", "prefetch"), *place)] == 1.0
    assert found[("ipu_run_bottleneck_ratio", *place)] == 0.3


def test_processes_of_two_hosts_with_the_same_number_are_two_series(scrape):
    elsewhere = dataclasses.replace(PROCESS, host="there", ipus=(), loss=0.25)
    scrape.update(dataclasses.replace(SNAPSHOT, processes=(PROCESS, elsewhere)))
    assert sorted(value for key, value in scrape().items() if key[0] == "ipu_run_loss") == [0.25, 0.5]


def test_an_unknown_owner_counts_as_attached_ipus_without_an_id_are_left_out_and_boards_have_their_known_values(scrape):
    ipus = [
        devices.Ipu(id=0, board_serial="b", user="ann"),
        devices.Ipu(id=1, board_serial="b", board_power_w=100.0),
        devices.Ipu(board_serial="b"),
        devices.Ipu(problem="link down"),
    ]
    scrape.update(snapshots.Snapshot(0.0, "poplar", tuple(ipus), ()))
    found = scrape()
    attached = {dict(key[1:])["ipu"]: value for key, value in found.items() if key[0] == "ipu_attached"}
    assert attached == {"0": 1.0, "1": 0.0}
    assert len([key for key in found if key[0] == "ipu_up"]) == 2
    assert found[("ipu_board_power_watts", ("board", "b"))] == 100.0


def test_scrapes_are_answered_before_the_first_snapshot_and_while_no_device_answers(scrape):
    assert scrape()[("ipu_failed_samples_total",)] == 0.0
    silent = devices.Ipu(id=3, problem="gone")
    scrape.update(SNAPSHOT)
    scrape.update(snapshots.Snapshot(1.0, "poplar", (silent,), (), problem="gcipuinfo does not answer"))
    found = scrape()
    assert found[("ipu_failed_samples_total",)] == 1.0 and found[("ipu_up", ("board", ""), ("ipu", "3"))] == 0.0


def test_busy_time_is_accumulated_between_scrapes(scrape, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(exporter.time, "monotonic", lambda: now[0])
    for _ in range(4):
        scrape.update(SNAPSHOT)
        now[0] += 2.0
    assert scrape()[("ipu_busy_seconds_total", ("board", 'b"1\n'), ("ipu", "3"))] == pytest.approx(0.75 * 6.0)


def test_labels_that_are_no_valid_unicode_are_escaped(scrape):
    scrape.update(snapshots.Snapshot(0.0, "poplar", (devices.Ipu(id=0, board_serial="\ud800"),), ()))
    assert ("ipu_up", ("board", "\\ud800"), ("ipu", "0")) in scrape()


def test_a_port_that_is_taken_is_refused_in_a_sentence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(cli.UsageError, match=f"--export=127.0.0.1:{port} cannot be used .*another port"):
            exporter.serve(exporter.Collector(), "127.0.0.1", port)


def test_the_dashboard_queries_only_metrics_and_labels_that_exist(scrape):
    scrape.update(SNAPSHOT)
    keys = list(scrape())
    names = {key[0] for key in keys}
    labels = {label for key in keys for label, _ in key[1:]} | {"job"}
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    asked += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(asked) > 15
    for query in asked:
        found = re.findall(r"\bipu_\w+", query)
        assert found and set(found) <= names, query
        assert set(re.findall(r"(\w+)=~", query)) <= labels, query
    legends = [target["legendFormat"] for panel in board["panels"] for target in panel["targets"]]
    assert {label for text in legends for label in re.findall(r"{{(\w+)}}", text)} <= labels
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))


def _ask(port):
    """Scrapes without urllib, whose proxies another test may have set."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().status
    finally:
        connection.close()


def test_connections_that_ask_nothing_do_not_keep_others_from_scraping(wait_until):
    port = exporter.serve(exporter.Collector(), "127.0.0.1", 0)
    before = threading.active_count()
    halves = []
    for number in range(3 * exporter._MAX_CONNECTIONS):
        half = socket.create_connection(("127.0.0.1", port))
        half.sendall(b"GET /metrics HT" if number % 2 else b"")
        halves.append(half)
        assert number % 16 or _ask(port) == 200
    wait_until(lambda: threading.active_count() <= before + exporter._MAX_CONNECTIONS)
    assert _ask(port) == 200
    closed = halves[0]
    closed.settimeout(60)
    assert closed.recv(1) == b""
    for half in halves:
        half.close()


def test_a_client_that_is_silent_is_disconnected_without_a_word(monkeypatch, capfd):
    monkeypatch.setattr(exporter._Handler, "timeout", 0.1)
    port = exporter.serve(exporter.Collector(), "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        silent.settimeout(60)
        assert silent.recv(1) == b""
    assert _ask(port) == 200 and capfd.readouterr() == ("", "")
