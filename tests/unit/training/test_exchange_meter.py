"""Which exchanges are compared, from what every instance reports of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training.exchange_meter import ExchangeMeter

KEPT = 256


@dataclasses.dataclass(frozen=True)
class Device(Sdk):
    """An SDK that reports these exchanges."""

    name: str = "emulator"
    ipu: Any = None
    popdist: Any = None
    gcipuinfo: Any = None
    seconds: Any = dataclasses.field(default_factory=list)

    def exchange_times(self):
        return len(self.seconds), self.seconds[-KEPT:]


def make_job(instances):
    devices = [Device() for _ in range(instances)]
    return devices, [ExchangeMeter(device, instances) for device in devices]


def exchange_metrics(meters):
    taken = [meter.take() for meter in meters]
    assert len({len(numbers) for numbers in taken}) == 1
    for meter in meters:
        meter.add(taken)


@given(
    st.integers(2, 3).flatmap(lambda n: st.lists(st.lists(st.tuples(*[st.floats(0, 9)] * n), max_size=9), max_size=5))
)
def test_all_instances_compare_every_exchange_however_they_are_grouped(groups):
    instances = max((len(row) for group in groups for row in group), default=2)
    devices, meters = make_job(instances)
    for group in groups:
        for row in group:
            for device, seconds in zip(devices, row):
                device.seconds.append(seconds)
        exchange_metrics(meters)
    rows = [row for group in groups for row in group]
    expected = ExchangeTimes.of(list(zip(*rows)))
    for meter in meters:
        assert (meter.times is None) is (not rows)
        if meter.times:
            assert (meter.times.exchanges, meter.times.compared) == (len(rows), len(rows))
            assert meter.times.seconds.buckets == expected.seconds.buckets
            assert [each.last for each in meter.times.arrivals] == [each.last for each in expected.arrivals]
            assert meter.take_last() == {each.instance: each.last for each in expected.arrivals}
        assert meter.take_last() == {}


def test_of_very_many_exchanges_the_last_are_compared_and_all_are_counted():
    devices, meters = make_job(2)
    devices[0].seconds.extend([9.0] * 744 + [1.0] * KEPT)
    devices[1].seconds.extend([8.0] * 744 + [2.0] * KEPT)
    exchange_metrics(meters)
    times = meters[1].times
    assert (times.exchanges, times.compared) == (1000, KEPT)
    assert [each.last for each in times.arrivals] == [KEPT, 0]
    assert times.seconds.max_s == 1.0


def test_exchanges_before_training_are_not_added():
    devices, meters = make_job(2)
    for device in devices:
        device.seconds.append(30.0)
    for meter in meters:
        meter.take()  # what was measured while compiling
    for device in devices:
        device.seconds.append(0.5)
    exchange_metrics(meters)
    assert (meters[0].times.exchanges, meters[0].times.seconds.max_s) == (1, 0.5)


def test_one_instance_and_a_device_that_does_not_report_have_no_times():
    poplar = Sdk("poplar", None, None, None)
    for meter in (ExchangeMeter(Device(seconds=[1.0]), 1), ExchangeMeter(poplar, 2)):
        assert meter.take() == []
        meter.add([[], []])
        assert meter.times is None and meter.take_last() == {}
