"""Predictions for sizes and fabrics that are not here."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import formulas, topology
from tf_ipu_dp.scaling import extrapolation
from tf_ipu_dp.scaling.compute_calibration import ComputeCalibration, Shape, ShapeTime
from tf_ipu_dp.scaling.records import STRONG, WEAK, Cell, Study

BYTES = 102_000_000


def make_compute(deviation_s=0.0):
    times = [
        ShapeTime(Shape(32, count, 1, 1), 0.01 + 0.02 * count, 0.001, 0.002, 0.003, deviation_s, 0.9, 1.1)
        for count in (4, 8)
    ]
    return ComputeCalibration("2026-11-18", "resnet50", 2, True, (BYTES,), tuple(times))


def make_study(mode=WEAK, engine="tf_ipu_dp"):
    cell = Cell("a", engine, 1, 1, 1, 1, 32, 4, 128, ("--ipus=1",))
    return Study(mode, "instances", (1,), (engine,), 3, 1, 8.0, (), (cell,))


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("16..64", (16, 32, 64)),
        ("16..100", (16, 32, 64)),
        ("1..1", (1,)),
        ("16,64,256", (16, 64, 256)),
        ("3..13", (3, 6, 12)),
    ],
)
def test_sizes_are_doubled_or_listed(text, sizes):
    assert extrapolation.doublings(text) == sizes


@pytest.mark.parametrize("text", ["", "64..16", "0..4", "a..b", "16,0", "-2..4"])
def test_a_text_that_is_no_range_is_refused(text):
    with pytest.raises(ValueError):
        extrapolation.doublings(text)


def test_a_weak_study_adds_the_all_reduce_of_the_fabric_to_the_compute_of_one_replica():
    (found,) = extrapolation.extrapolate(make_study(), make_compute(), [64], ["pod64"])
    exchange = formulas.cost(formulas.make_plan(formulas.AUTO, 64, float(BYTES), topology.preset("pod64"))).total_s
    assert found.parts.compute_s == pytest.approx(0.09)
    assert found.parts.collective_s == pytest.approx(exchange)
    assert found.samples_per_s == pytest.approx(64 * 128 / (0.096 + exchange))
    assert found.efficiency == pytest.approx(0.096 / (0.096 + exchange))


def test_one_replica_is_what_was_calibrated():
    (found,) = extrapolation.extrapolate(make_study(), make_compute(), [1], ["pod16"])
    assert found.efficiency == pytest.approx(1.0) and found.parts.collective_s == 0.0


def test_a_strong_study_divides_the_global_batch():
    first, last = extrapolation.extrapolate(make_study(STRONG), make_compute(), [1, 16], ["pod16"])
    assert first.efficiency == pytest.approx(1.0)
    assert last.parts.compute_s == pytest.approx(0.01 + 0.08 / 16)
    assert last.samples_per_s == pytest.approx(128 / last.parts.total_s)


def test_a_strong_study_needs_a_sample_for_every_replica():
    with pytest.raises(cli.UsageError, match="one each for 128\\. Use sizes up to 128"):
        extrapolation.extrapolate(make_study(STRONG), make_compute(), [64, 256], ["pod256"])


def test_sizes_beyond_a_fabric_are_left_out_and_none_at_all_is_refused():
    found = extrapolation.extrapolate(make_study(), make_compute(), [16, 64], ["pod16", "pod64"])
    assert [(each.fabric, each.size) for each in found] == [("pod16", 16), ("pod64", 16), ("pod64", 64)]
    with pytest.raises(cli.UsageError, match="None of the sizes from 64 to 64 fits on pod16"):
        extrapolation.extrapolate(make_study(), make_compute(), [64], ["pod16"])


def test_a_fabric_with_the_compute_of_this_cpu_is_called_so():
    (found,) = extrapolation.extrapolate(make_study(), make_compute(), [16], ["pod16"])
    assert found.compute == "compute of this CPU"
    on_ipus = dataclasses.replace(make_compute(), emulated=False)
    assert extrapolation.extrapolate(make_study(), on_ipus, [16], ["pod16"])[0].compute == "compute as calibrated"


def test_the_compute_of_a_replica_may_be_given():
    (found,) = extrapolation.extrapolate(make_study(), None, [16], ["pod16"], compute_ms=12.5, bucket_bytes=[BYTES])
    assert found.compute == "compute of 12.5 ms a micro batch"
    assert found.parts.compute_s == pytest.approx(4 * 0.0125) and found.parts.overhead_s == 0.0
    with pytest.raises(cli.UsageError, match="--compute_ms=0 is not a time"):
        extrapolation.extrapolate(make_study(), None, [16], ["pod16"], compute_ms=0.0, bucket_bytes=[BYTES])


def test_a_fabric_that_is_unknown_or_an_engine_without_a_calibration_is_refused():
    with pytest.raises(cli.UsageError, match="Did you mean pod64"):
        extrapolation.extrapolate(make_study(), make_compute(), [4], ["pod46"])
    with pytest.raises(cli.UsageError, match="other engines are not predicted"):
        extrapolation.extrapolate(make_study(engine="ddp"), make_compute(), [4], ["pod64"])


@given(
    st.lists(st.integers(0, 16).map(lambda power: 1 << power), min_size=2, max_size=6, unique=True).map(sorted),
    st.sampled_from(["pod64x1024", "ethernet-clos", "ethernet-10g"]),
    st.floats(0.0, 0.05),
)
def test_efficiency_is_lost_to_the_exchange_and_to_waiting_alone_and_the_rate_lies_in_its_band(
    sizes, fabric, deviation_s
):
    found = extrapolation.extrapolate(make_study(), make_compute(deviation_s), sizes, [fabric])
    for each in found:
        assert each.low <= each.samples_per_s <= each.high
        assert 0 < each.efficiency <= 1 + 1e-9
        assert each.samples_per_s == pytest.approx(each.size * 128 / each.parts.total_s)
        lost_s = each.parts.collective_s + each.parts.waiting_s
        assert each.efficiency == pytest.approx((each.parts.total_s - lost_s) / each.parts.total_s)
