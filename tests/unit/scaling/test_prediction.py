"""The predicted time of an update of a cell."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.collectives import predict as collective_model
from tf_ipu_dp.collectives.calibration import Calibration, MessageTime
from tf_ipu_dp.collectives.fabric import Fabric, Link
from tf_ipu_dp.scaling import prediction
from tf_ipu_dp.scaling.compute_calibration import ComputeCalibration, Shape, ShapeTime, SharedExchange
from tf_ipu_dp.scaling.records import Cell

BYTES = 971_048
COLLECTIVE = Calibration(
    "2026-11-18", "Horovod", (MessageTime(2048, 1e-4), MessageTime(2e6, 2e-3)), jitter_factors=(0.8, 1.0, 1.0, 1.5)
)


def make_compute(*times, emulated=True):
    return ComputeCalibration("2026-11-18", "mlp", 2, emulated, (BYTES,), tuple(times))


def make_time(processes=1, compute_s=0.01, **changes):
    return ShapeTime(Shape(32, 1, 1, processes), compute_s, 0.001, 0.002, 0.003, **changes)


def make_job(exchange_s, slowdown=1.0, instances=2):
    """Returns a job of instances whose updates are so much slower than `make_time` without their exchange."""
    return SharedExchange(Shape(32, 1, 1, instances), exchange_s, slowdown * make_time().total_s + exchange_s)


def make_cell(instances=1, hosts=1, engine="tf_ipu_dp"):
    return Cell(f"{engine}-{instances}", engine, instances, instances, instances, hosts, 32, 1, 32 * instances, ())


def test_one_instance_takes_what_was_calibrated():
    (found,) = prediction.predict([make_cell()], make_compute(make_time(low=0.9, high=1.2)), None)
    assert found.update_s == pytest.approx(0.016) and found.parts.compute_s == 0.01
    assert (found.low_s, found.high_s) == pytest.approx((0.016 * 0.9, 0.016 * 1.2))
    assert not found.core_limited


def test_several_instances_add_the_all_reduce_as_training_sees_it():
    (found,) = prediction.predict([make_cell(2)], make_compute(make_time(2)), COLLECTIVE)
    exchange = collective_model.all_reduce_seconds([BYTES], 2, 1, COLLECTIVE)
    assert found.parts.collective_s == pytest.approx(exchange.seconds)
    assert found.low_s < found.update_s < found.high_s
    assert found.parts.overhead_s > 0.003  # metrics are exchanged, too
    assert found.update_s == pytest.approx(found.parts.total_s)


def test_instances_that_share_cores_take_the_time_measured_beside_the_others_and_are_marked():
    compute = make_compute(make_time(1), make_time(4, compute_s=0.05, deviation_s=0.01))
    (found,) = prediction.predict([make_cell(4)], compute, COLLECTIVE)
    assert found.core_limited and found.parts.compute_s == 0.05 and found.parts.waiting_s == 0.0


def test_instances_that_share_cores_wait_by_the_share_that_two_of_them_did():
    alone = {n: collective_model.all_reduce_seconds([BYTES], n, 1, COLLECTIVE).seconds for n in (2, 4)}
    compute = dataclasses.replace(
        make_compute(make_time(2), make_time(4)), shared_exchanges=(make_job(1.5 * alone[2]),)
    )
    found = prediction.predict([make_cell(2), make_cell(4)], compute, COLLECTIVE)
    assert [each.parts.waiting_s for each in found] == pytest.approx([0.5 * alone[2], 0.5 * alone[4]])
    faster = dataclasses.replace(compute, shared_exchanges=(make_job(0.5 * alone[2]),))
    assert [each.parts.waiting_s for each in prediction.predict([make_cell(2)], faster, COLLECTIVE)] == [0.0]


@pytest.mark.parametrize(("cores", "turns"), [(2, [1, 2]), (4, [1, 1]), (3, [1, 4 / 3])])
def test_an_exchange_through_shared_memory_takes_what_was_measured_and_more_instances_than_cores_take_turns(
    cores, turns
):
    job = dataclasses.replace(make_job(0.0004), in_memory=True)
    compute = dataclasses.replace(make_compute(make_time(2), make_time(4)), shared_exchanges=(job,), cores=cores)
    found = prediction.predict([make_cell(2), make_cell(4)], compute, COLLECTIVE)
    assert [each.parts.collective_s for each in found] == pytest.approx([0.0004 * each for each in turns])
    assert [each.parts.waiting_s for each in found] == [0.0, 0.0]
    # Emulated hosts have a network between them.
    (linked,) = prediction.predict([make_cell(4, hosts=4)], compute, COLLECTIVE, Fabric("slow", 4, Link(rate=1.25e6)))
    assert linked.parts.collective_s > 0.01


def test_the_rest_of_an_update_takes_longer_by_the_share_that_it_did_in_two_instances():
    times = (make_time(1), make_time(2), make_time(4, compute_s=0.02))
    compute = dataclasses.replace(make_compute(*times), shared_exchanges=(make_job(0.01, slowdown=1.25),))
    alone, two, four = prediction.predict([make_cell(1), make_cell(2), make_cell(4)], compute, COLLECTIVE)
    assert alone.parts.compute_s == 0.01
    assert (two.parts.compute_s, four.parts.compute_s) == pytest.approx((0.0125, 0.025))
    assert two.parts.optimizer_s == pytest.approx(0.0025)
    faster = dataclasses.replace(compute, shared_exchanges=(make_job(0.01, slowdown=0.9),))
    assert prediction.predict([make_cell(2)], faster, COLLECTIVE)[0].parts.compute_s == 0.01


def test_of_several_jobs_the_next_smaller_one_says_how_long_an_exchange_and_the_rest_of_an_update_take():
    jobs = [make_job(0.0004, 1.25), make_job(0.003, 1.5, instances=4)]
    jobs = tuple(dataclasses.replace(each, in_memory=True) for each in jobs)
    times = (make_time(2), make_time(3), make_time(4), make_time(8))
    compute = dataclasses.replace(make_compute(*times), shared_exchanges=jobs)
    found = prediction.predict([make_cell(2), make_cell(3), make_cell(4), make_cell(8)], compute, COLLECTIVE)
    assert [each.parts.collective_s for each in found] == pytest.approx([0.0004, 0.0006, 0.003, 0.006])
    assert [each.parts.compute_s for each in found] == pytest.approx([0.0125, 0.0125, 0.015, 0.015])


def test_a_slow_link_is_not_made_slower_by_shared_cores():
    compute = dataclasses.replace(make_compute(make_time(4)), shared_exchanges=(make_job(0.01),))
    fabric = Fabric("slow", 4, Link(rate=1.25e6))
    linked, here = (
        prediction.predict([make_cell(4, hosts=hosts)], compute, COLLECTIVE, given)[0].parts.waiting_s
        for hosts, given in ((4, fabric), (1, None))
    )
    assert linked == pytest.approx(here)


def test_instances_on_machines_of_their_own_wait_for_the_slowest():
    compute = make_compute(make_time(1, deviation_s=0.01))
    (found,) = prediction.predict([make_cell(4, hosts=4)], compute, COLLECTIVE)
    assert not found.core_limited
    assert found.parts.waiting_s == pytest.approx(0.01 * prediction.expected_maximum(4))


def test_ipus_are_not_shared_by_the_processes_of_a_host():
    (found,) = prediction.predict([make_cell(4)], make_compute(make_time(4), emulated=False), COLLECTIVE)
    assert not found.core_limited


def test_emulated_hosts_share_this_machine_and_the_links_limit_the_exchange():
    fabric = Fabric("slow", 4, Link(rate=1.25e7))
    compute = make_compute(make_time(1), make_time(4, compute_s=0.05))
    cell = make_cell(4, hosts=4)
    (found,) = prediction.predict([cell], compute, COLLECTIVE, fabric)
    assert found.core_limited and found.parts.compute_s == 0.05
    assert found.parts.collective_s > 1.5 * BYTES / 1.25e7
    (dilated,) = prediction.predict([cell], compute, COLLECTIVE, dataclasses.replace(fabric, dilation=2.0))
    assert dilated.parts.collective_s > 1.9 * 1.5 * BYTES / 1.25e7


def test_what_cannot_be_predicted_is_left_out():
    compute = make_compute(make_time(1), make_time(2))
    cells = [make_cell(1), make_cell(2), make_cell(4), make_cell(1, engine="ddp"), make_cell(1, engine="tf_ipu_dp_mpi")]
    assert [each.cell for each in prediction.predict(cells, compute, None)] == ["tf_ipu_dp-1", "tf_ipu_dp_mpi-1"]
    found = prediction.predict(cells, compute, COLLECTIVE)
    assert [each.cell for each in found] == ["tf_ipu_dp-1", "tf_ipu_dp-2", "tf_ipu_dp_mpi-1"]


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.integers(2, 8))
def test_more_compute_never_takes_less_time(first, second, instances):
    def seconds(compute_s):
        compute = make_compute(make_time(instances, compute_s=compute_s))
        return prediction.predict([make_cell(instances)], compute, COLLECTIVE)[0].update_s

    assert (seconds(first) <= seconds(second)) == (first <= second)


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_the_largest_of_several_normal_numbers_is_as_large_as_in_a_sample(count):
    sampled = statistics.fmean(np.random.default_rng(1).normal(size=(50_000, count)).max(axis=1).tolist())
    assert prediction.expected_maximum(count) == pytest.approx(sampled, abs=0.02)


def test_one_replica_waits_for_nobody():
    assert prediction.expected_maximum(1) == 0.0


def test_what_gloo_was_calibrated_with_does_not_predict_mpi():
    cells = [make_cell(1, engine="tf_ipu_dp_mpi"), make_cell(2, engine="tf_ipu_dp_mpi")]
    found = prediction.predict(cells, make_compute(make_time(1), make_time(2)), COLLECTIVE)
    assert [each.cell for each in found] == ["tf_ipu_dp_mpi-1"]


def make_engine(*times, exchange_s=None, update_s=0.0):
    """Returns the calibration of another engine, whose exchange adds so much to an update of two processes."""
    jobs = () if exchange_s is None else (SharedExchange(Shape(32, 1, 1, 2), exchange_s, update_s),)
    return dataclasses.replace(make_compute(*times), shared_exchanges=jobs)


def test_one_process_of_another_engine_takes_what_was_calibrated():
    (found,) = prediction.predict_others([make_cell(engine="ddp")], make_engine(make_time(low=0.9, high=1.2)), None)
    assert found.update_s == pytest.approx(0.016) and found.parts.compute_s == found.update_s
    assert (found.low_s, found.high_s) == pytest.approx((0.016 * 0.9, 0.016 * 1.2)) and not found.core_limited


@pytest.mark.parametrize("share", [0.0, 0.5, 3.0])
def test_another_engine_shows_the_share_of_its_exchange_that_two_processes_did(share):
    alone = {n: collective_model.all_reduce_seconds([BYTES], n, 1, COLLECTIVE).seconds for n in (2, 4)}
    compute = make_engine(make_time(2), make_time(4, compute_s=0.03), exchange_s=share * alone[2])
    two, four = prediction.predict_others([make_cell(n, engine="ddp") for n in (2, 4)], compute, COLLECTIVE)
    # What two processes took is predicted as it was measured.
    assert two.update_s == pytest.approx(0.016 + share * alone[2])
    assert four.update_s == pytest.approx(0.036 + share * alone[4])
    assert two.low_s <= two.update_s <= two.high_s and two.core_limited


def test_what_a_link_adds_to_the_exchange_of_another_engine_is_not_hidden():
    compute = make_engine(make_time(4), exchange_s=0.0)
    fabric = Fabric("slow", 4, Link(rate=1.25e6))
    linked, here = (
        prediction.predict_others([make_cell(4, hosts=hosts, engine="ddp")], compute, COLLECTIVE, given)[0].update_s
        for hosts, given in ((4, fabric), (1, None))
    )
    assert here == pytest.approx(0.016) and linked > 1.4 * BYTES / 1.25e6


def test_processes_of_another_engine_are_not_predicted_without_what_they_need():
    cells = [make_cell(1, engine="ddp"), make_cell(2, engine="ddp")]
    times = (make_time(1), make_time(2))
    for compute, collective in ((make_engine(*times), COLLECTIVE), (make_engine(*times, exchange_s=0.01), None)):
        assert [each.cell for each in prediction.predict_others(cells, compute, collective)] == ["ddp-1"]
