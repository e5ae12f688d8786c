"""Published curves: the efficiencies that are computed from them are those that were published."""

from __future__ import annotations

import pytest

from tf_ipu_dp.scaling import published, records, statistics


def find(title):
    (curve,) = (curve for curve in published.CURVES if curve.title == title)
    return curve


@pytest.mark.parametrize(
    ("title", "time_pct", "throughput_pct"),
    [
        ("Graphcore POD, MLPerf v1.0", [100, 64.1], [100, 73.2]),
        ("Graphcore POD, MLPerf v1.1", [100, 83.3, 62.4, 46.7], [100, 86.4, 73.0, 64.5]),
        ("Graphcore Bow Pod, MLPerf v2.0", [100, 77.9, 58.6, 45.9], [100, 85.2, 67.3, 61.2]),
    ],
)
def test_efficiencies_of_graphcore_are_those_of_the_published_table(title, time_pct, throughput_pct):
    # Minutes are published with two digits after the point, which may move the last digit of an efficiency.
    assert [100 * each.efficiency for each in find(title).points] == pytest.approx(time_pct, abs=0.15)
    rates = find(f"{title}, throughput").points
    assert [100 * each.efficiency for each in rates] == pytest.approx(throughput_pct, abs=0.06)


def test_efficiencies_of_nvidia_are_those_of_the_published_table():
    assert [100 * each.efficiency for each in find("NVIDIA DGX A100, MLPerf v1.1").points] == pytest.approx(
        [100, 80.4, 39.6, 15.6], abs=0.06
    )
    assert [100 * each.efficiency for each in find("NVIDIA DGX A100, MLPerf v2.0").points] == pytest.approx(
        [100, 79.6, 40.4, 17.0], abs=0.1
    )


def test_efficiencies_of_rates_are_those_of_the_published_table():
    daint = find("tf_cnn_benchmarks, Piz Daint P100").points
    assert [100 * each.efficiency for each in daint] == pytest.approx([100, 95.7, 94.7, 92.1], abs=0.06)
    user = find("Horovod, VGG-16, under-used NIC (a user's report)").points
    assert 100 * user[-1].efficiency == pytest.approx(17.9, abs=0.06)


@pytest.mark.parametrize("each", published.DECOMPOSITIONS, ids=lambda each: f"{each.title} {each.devices}")
def test_the_published_decomposition_is_computed_again(each):
    curve = find(each.title)

    def trained(point):
        return statistics.Trained(point.devices, point.rate, point.epochs, 60 * point.minutes)

    (point,) = (point for point in curve.points if point.devices == each.devices)
    found = statistics.factors(trained(curve.points[0]), trained(point))
    assert found.hardware == pytest.approx(each.hardware, abs=6e-4)
    assert found.statistical == pytest.approx(each.statistical, abs=6e-4)
    assert found.overhead == pytest.approx(each.overhead, abs=2e-3)
    assert found.efficiency == pytest.approx(each.product, abs=1e-3)
    assert found.hardware * found.statistical * found.overhead == pytest.approx(found.efficiency)


def test_every_curve_has_a_source_a_unit_and_a_kind_and_begins_with_its_baseline():
    for curve in published.CURVES:
        assert curve.title and curve.source and curve.kind in published.KINDS
        assert curve.unit in (published.IPUS, published.GPUS, published.NODES)
        devices = [point.devices for point in curve.points]
        assert devices == sorted(set(devices)) and len(devices) >= 2
        assert curve.points[0].efficiency == 1 and all(0 < point.efficiency <= 1.01 for point in curve.points)
    assert len({curve.title for curve in published.CURVES}) == len(published.CURVES)


def test_only_curves_of_the_same_kind_stand_behind_a_study():
    assert {curve.kind for curve in published.behind(records.WEAK)} == {published.WEAK}
    assert {curve.kind for curve in published.behind(records.STRONG)} == {published.STRONG}
    assert published.behind(records.BATCH) == published.behind(records.COMPARE) == []
