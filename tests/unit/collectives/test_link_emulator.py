"""The switch in user space: when a frame is delivered, and which are lost. No devices: the clock is the test's."""

from __future__ import annotations

import itertools
import random
import statistics
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.collectives import link_emulator
from tf_ipu_dp.collectives.link_emulator import Emulation, Port, Switch, TokenBucket

START = 1000.0


def frame(target, size=1000, content=b"", packet_data=0):
    header = struct.pack("<BBHHHH", 0, 1 if packet_data else 0, 0, packet_data, 0, 0)
    body = bytes([2, 0, 0, 0, 0, target]) + content
    return header + body.ljust(size, b"\0")


def ports(count=2, **fields):
    return tuple(Port(f"n{number}", "eth0", number, **fields) for number in range(1, count + 1))


def deliveries(switch):
    """Returns when each frame is delivered, where, and the frame, if all wake-ups come in time."""
    found = []
    while switch.next_due is not None:
        now = switch.next_due
        found += [(now - START, target, each) for target, each in switch.take_due(now)]
    return found


def test_a_frame_takes_the_delay_of_both_links():
    first, second = Port("a", "eth0", 1, delay_s=0.001), Port("b", "eth0", 2, delay_s=0.005)
    switch = Switch(Emulation((first, second)), START)
    switch.receive(1, frame(2), START)
    assert deliveries(switch) == [(pytest.approx(0.006), 2, frame(2))]


def test_nothing_goes_to_unknown_hosts_to_all_or_back_to_the_sender():
    switch = Switch(Emulation(ports()), START)
    for target in (1, 3, 255):
        switch.receive(1, frame(target), START)
    to_all = bytearray(frame(2))
    to_all[10] = 0xFF
    switch.receive(1, bytes(to_all), START)
    assert deliveries(switch) == []


def test_frames_arrive_at_the_rate_of_the_receiver():
    switch = Switch(Emulation(ports(3, rate=1e6, burst=1000)), START)
    for source, number in itertools.product((1, 2), range(50)):
        switch.receive(source, frame(3, content=bytes([number])), START)
    times = [time for time, _, _ in deliveries(switch)]
    assert times[0] == pytest.approx(0.0, abs=1e-9) and times[-1] == pytest.approx(0.099)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(100, 9000)), min_size=1, max_size=50), st.integers(0, 20000))
def test_a_bucket_never_passes_more_than_its_burst_and_its_rate(arrivals, burst):
    bucket, now, out = TokenBucket(1e6, burst), 0.0, []
    for gap, size in arrivals:
        now += gap
        out.append((bucket.due(now, size), size))
        assert out[-1][0] >= now
    for first, last in itertools.combinations_with_replacement(range(len(out)), 2):
        passed = sum(size for _, size in out[first : last + 1])
        allowed = burst + 1e6 * (out[last][0] - out[first][0]) + out[first][1]
        assert passed <= allowed + 1e-3


def test_a_limited_queue_drops_what_does_not_fit():
    switch = Switch(Emulation(ports(2, rate=1e6, burst=1000, queue=5000)), START)
    for _ in range(100):
        switch.receive(1, frame(2), START)
    assert 4 <= len(deliveries(switch)) <= 8


@pytest.mark.parametrize("law", ["normal", "lognormal", "uniform"])
def test_jitter_has_mean_0_and_the_scale_that_was_asked(law):
    generator = random.Random(1)
    drawn = [link_emulator.draw_jitter(law, 2.0, generator) for _ in range(50_000)]
    assert statistics.mean(drawn) == pytest.approx(0.0, abs=0.05)
    if law == "uniform":
        assert -2.0 <= min(drawn) < -1.99 and 1.99 < max(drawn) <= 2.0
    else:
        assert statistics.pstdev(drawn) == pytest.approx(2.0, rel=0.05)
    assert law != "lognormal" or max(drawn) > 4 * -min(drawn)


@pytest.mark.parametrize("reordering", [False, True])
def test_jitter_changes_the_order_only_where_that_is_asked(reordering):
    switch = Switch(Emulation(ports(delay_s=0.01, jitter_s=0.003), "normal", reordering), START)
    for number in range(200):
        switch.receive(1, frame(2, content=bytes([number])), START + number * 1e-4)
    order = [each[16] for _, _, each in deliveries(switch)]
    assert len(order) == 200 and (order == sorted(order)) != reordering


def test_the_same_seed_gives_the_same_times():
    def run(seed):
        switch = Switch(Emulation(ports(delay_s=0.01, jitter_s=0.003, loss=0.3), seed=seed), START)
        for number in range(100):
            switch.receive(1, frame(2, content=bytes([number])), START)
        return deliveries(switch)

    assert run(1) == run(1) != run(2)


def rows_of_losses(loss, burst):
    process = link_emulator.LossProcess(loss, burst, random.Random(1))
    lost = [process.is_lost() for _ in range(200_000)]
    rows = [len(list(group)) for is_lost, group in itertools.groupby(lost) if is_lost]
    return statistics.mean(lost), statistics.mean(rows)


def test_packets_are_lost_by_themselves_or_in_rows():
    share, length = rows_of_losses(0.05, None)
    assert share == pytest.approx(0.05, rel=0.05) and length == pytest.approx(1 / 0.95, rel=0.05)
    share, length = rows_of_losses(0.05, 8.0)
    assert share == pytest.approx(0.05, rel=0.1) and length == pytest.approx(8.0, rel=0.1)


def test_nothing_passes_during_an_outage():
    switch = Switch(Emulation((Port("a", "eth0", 1), Port("b", "eth0", 2, outage_s=0.25, outage_every_s=1.0))), START)
    for tenth in range(20):
        switch.receive(1, frame(2, content=bytes([tenth])), START + tenth / 10 + 0.01)
    passed = [each[16] for _, _, each in deliveries(switch)]
    assert passed == [*range(8), *range(10, 18)]


def test_a_large_piece_counts_the_headers_of_its_packets():
    assert link_emulator.wire_bytes(frame(2, size=1514)) == 1514
    assert link_emulator.wire_bytes(frame(2, size=66 + 3 * 1448, packet_data=1448)) == 3 * 1514


def test_an_emulation_survives_json():
    emulation = Emulation(ports(3, rate=1e6, loss_burst=2.0), "uniform", True, False, 7)
    assert Emulation.from_json(emulation.to_json()) == emulation
