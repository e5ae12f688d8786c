import dataclasses

import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import (
    calibration,
    calibration_file,
    fitting,
    formulas,
    horovod_model,
    loss,
    machine_facts,
    predict,
    results,
    timeout_fit,
    topology,
)

LINK = 1.25e7
SIZES = [4096 << step for step in range(11)]


def _step_seconds(message, delay, link):
    """Returns a step of an engine whose notices travel while the message before is sent."""
    transfer = message / (link * 0.95) if link else 0.0
    return delay + 60e-6 + 0.05e-9 * message + max(transfer, 1.2 * delay)


def _measured(delay=0.0, *, link=LINK, trials=40, engine=True):
    """Returns what an engine with a handshake of 2.2, a software time and headers would measure at 2 ranks."""
    rng = np.random.default_rng(5)
    series = []
    for size in SIZES:
        seconds = 2 * _step_seconds(size / 2, delay, link) * rng.normal(1, 0.01, trials)
        whole = seconds + 0.9e-3 + 0.8 * 2 * _step_seconds(8, delay, None) + 2 * size / 2e9
        facts = results.SeriesFacts(2, size, link)
        series.append(results.Series(facts, whole, engine_s=seconds if engine else None))
    facts = tuple(each.facts for each in series)
    description = results.Description(results.MEASURED, "n = 2", "Horovod 0.28.1 on Gloo", "ring", facts)
    return calibration.Measurement(results.Result(description, tuple(series)), delay)


def _calibrated(**kwargs):
    return calibration.fit([_measured(**kwargs), _measured(5e-3)], date="2026-11-17", facts={"cores": "2"})


def test_a_measurement_at_2_ranks_gives_back_what_the_engine_does():
    found = _calibrated()
    assert found.handshake == pytest.approx(2.2, rel=0.03)
    assert found.wire_efficiency == pytest.approx(0.95, rel=0.02)
    assert found.messages[0].seconds == pytest.approx(60e-6, rel=0.1)
    assert found.horovod_rounds == pytest.approx(0.8, rel=0.1)
    assert found.horovod_fixed_s == pytest.approx(0.9e-3, rel=0.1)
    assert found.horovod_copy_bytes_per_s == pytest.approx(2e9, rel=0.1)
    assert found.trial_jitter.sigma == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", [256 << 10, 971_048, 4 << 20])
@pytest.mark.parametrize("delay", [0.0, 1e-3, 5e-3])
def test_a_calibration_predicts_more_ranks_and_other_delays(ranks, size, delay):
    found = predict.all_reduce_seconds(
        [size], ranks, ranks, _calibrated(), link=predict.Link(one_way_delay_s=delay), seen_by="engine"
    )
    assert found.seconds == pytest.approx(2 * (ranks - 1) * _step_seconds(size / ranks, delay, LINK), rel=0.03)
    assert found.low_s < found.seconds < found.high_s


def test_placement_and_a_slow_link_make_the_difference_that_was_measured():
    def seconds(**kwargs):
        link = predict.Link(**kwargs)
        return predict.all_reduce_seconds([971_048], 8, 4, _calibrated(), link=link, seen_by="engine").seconds

    block, robin = seconds(), seconds(placement=topology.ROUND_ROBIN)
    assert robin / block == pytest.approx(2, rel=0.05)
    assert seconds(bytes_per_s=LINK / 4) / block == pytest.approx(4, rel=0.05)


def test_horovod_adds_its_cycle_its_negotiation_and_its_copies():
    network = topology.uniform(1e9, 1e-3)
    model = horovod_model.HorovodModel(cycle_s=2e-3, negotiation_rounds=2, copy_bytes_per_s=1e9, fixed_s=1e-4)
    found = horovod_model.add(model, 4, 1e6, network, 0.5)
    assert found.negotiation_s == pytest.approx(2 * 6 * 1e-3, rel=0.01)
    assert found.wait_s == pytest.approx(6e-3, rel=0.01)  # a cycle lasts as long as its negotiation
    assert found.copy_s == pytest.approx(2e-3)
    assert found.total_s == pytest.approx(0.5 + 6e-3 + 12e-3 + 2e-3, rel=0.01)
    measured = horovod_model.add(model, 4, 1e6, network, 0.5, after_barrier=True)
    assert (measured.wait_s, measured.fixed_s) == (0.0, 1e-4)
    plain = predict.all_reduce_seconds([1000], 4, 4, _calibrated(), seen_by="engine")
    whole = predict.all_reduce_seconds([1000], 4, 4, _calibrated())
    assert whole.seconds - plain.seconds == pytest.approx(whole.breakdown.horovod_s)
    assert whole.breakdown.horovod_s > 0.9e-3


def test_ranks_that_share_cores_take_turns_where_the_link_does_not_limit_them():
    alone = _calibrated()
    shared = dataclasses.replace(alone, shared_cores=2)

    def seconds(found, size, ranks):
        return predict.all_reduce_seconds([size], ranks, ranks, found, seen_by="engine").seconds

    assert seconds(shared, 4096, 16) == pytest.approx(8 * 30 * 60e-6, rel=0.1)
    assert seconds(shared, 4 << 20, 16) == pytest.approx(seconds(alone, 4 << 20, 16))
    assert seconds(shared, 4096, 2) == pytest.approx(seconds(alone, 4096, 2))


def test_small_messages_that_pass_before_the_rate_applies_are_all_software():
    given = _measured()
    facts = [dataclasses.replace(each.facts, link_burst_bytes=3000) for each in given.result.series]
    series = [dataclasses.replace(each, facts=own) for each, own in zip(given.result.series, facts)]
    series[0] = dataclasses.replace(series[0], engine_s=np.full(40, 2 * 100e-6))
    result = results.Result(given.result.description, tuple(series))
    found = calibration.fit([calibration.Measurement(result)], date="2026-11-17")
    assert {each.seconds >= 100e-6 for each in found.messages} == {True}
    assert found.messages[0].seconds == pytest.approx(100e-6)


def test_buckets_add_up_and_a_topology_needs_no_calibration():
    network = topology.preset("pod64")
    one = predict.all_reduce_seconds([1000], 64, network=network)
    two = predict.all_reduce_seconds([1000, 1000], 64, network=network)
    assert two.seconds == pytest.approx(2 * one.seconds)
    assert one.low_s == one.seconds == one.high_s
    parts = one.breakdown
    assert one.seconds == pytest.approx(parts.latency_s + parts.bandwidth_s + parts.reduction_s + parts.horovod_s)
    with pytest.raises(cli.UsageError, match="either a calibration or a topology"):
        predict.all_reduce_seconds([1000], 64)
    with pytest.raises(cli.UsageError, match="at least one bucket"):
        predict.all_reduce_seconds([], 64, network=network)


def test_a_machine_without_a_link_is_all_software():
    found = calibration.fit([_measured(link=None)], date="2026-11-17")
    assert (found.link_bytes_per_s, found.handshake) == (None, calibration.GLOO_HANDSHAKE)
    predicted = predict.all_reduce_seconds([8 << 20], 2, calibration=found, seen_by="engine")
    assert predicted.seconds == pytest.approx(2 * (60e-6 + 0.05e-9 * (4 << 20)), rel=0.05)


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    path = calibration.default_path({"XDG_CACHE_HOME": str(tmp_path)})
    assert path == tmp_path / "tf_ipu_dp" / "collectives" / "calibration.json"
    assert calibration.default_path({"HOME": "/home/a"}).parts[:4] == ("/", "home", "a", ".cache")
    assert calibration.load(path) is None
    found = _calibrated()
    calibration.save(found, path)
    assert calibration.load(path) == found
    path.write_text("{}")
    with pytest.raises(cli.UsageError, match=r"is not a calibration.*Calibrate again"):
        calibration.load(path)


def _lossy(size, per_small, per_message, per_packet, trials=100_000):
    """Returns a series at 2 ranks, of which so many trials meet a timeout."""
    rate = 4 * per_small if size <= 8 else 2 * per_small + 4 * per_message + 4 * (size / 2 / 1448) * per_packet
    late = round((1 - np.exp(-rate)) * trials)
    return results.Series(results.SeriesFacts(2, size), np.array([0.1] * (trials - late) + [0.3] * late))


def _timeouts(*lossy):
    found = timeout_fit.fit_timeouts(_calibrated(), lossy, loss=0.01)
    return found.timeout_per_single_packet, found.timeout_per_message, found.timeout_per_packet


def test_lossy_runs_of_three_sizes_tell_timeouts_of_single_packets_messages_and_packets_apart():
    true = (0.008, 0.004, 3e-5)
    assert _timeouts(*(_lossy(size, *true) for size in (4, 65_536, 524_288))) == pytest.approx(true, rel=0.05)


def test_lossy_runs_of_fewer_sizes_leave_out_what_they_cannot_tell_apart():
    assert _timeouts(_lossy(65_536, 0, 0.009, 2e-5), _lossy(971_048, 0, 0.009, 2e-5)) == (
        0.0, pytest.approx(0.009, rel=0.05), pytest.approx(2e-5, rel=0.05)
    )  # fmt: skip
    # Where the larger size has fewer timeouts, packets do not matter.
    small, message, packet = _timeouts(_lossy(65_536, 0, 0.01, 0.0), _lossy(971_048, 0, 0.009, 0.0))
    assert (small, packet) == (0.0, 0.0) and message == pytest.approx(0.0095, rel=0.02)
    small, message, packet = _timeouts(_lossy(65_536, 0, 0.009, 2e-5))
    assert (small, packet) == (0.0, 0.0) and message > 0.009


def test_timeouts_are_scaled_to_another_loss():
    found = timeout_fit.fit_timeouts(
        _calibrated(), [_lossy(size, 0.008, 0.004, 3e-5) for size in (4, 65_536, 524_288)], loss=0.01, packet_bytes=8948
    )
    half = found.with_timeouts(loss.Loss(0.005))
    assert half.timeout_per_single_packet == pytest.approx(found.timeout_per_single_packet / 2)
    assert half.timeout_per_message == pytest.approx(found.timeout_per_message / 2)
    assert half.timeout_per_packet == pytest.approx(found.timeout_per_packet / 4)
    assert half.packet_bytes == 8948
    assert _calibrated().with_timeouts(loss.Loss(0.005)) == loss.Loss(0.005)


def test_a_fabric_s_calibration_is_kept_beside_the_machine_s_own():
    environ = {"XDG_CACHE_HOME": "/cache"}
    own, r4 = calibration_file.path(environ), calibration_file.path(environ, "r4")
    assert (own.name, r4.name, r4.parent) == ("calibration.json", "calibration-r4.json", own.parent)
    assert calibration_file.path(environ, "/home/a/my fabric.ini").name == "calibration-my-fabric.json"
    named = {"TF_IPU_DP_CALIBRATION": "/a/mine"}
    assert (
        str(calibration_file.path(named, "r4")) == "/a/mine-r4.json" and str(calibration_file.path(named)) == "/a/mine"
    )


def test_another_machine_s_calibration_is_told_from_this_one_s():
    here = machine_facts.read()
    assert {"host", "cores", "kernel", "TensorFlow", "Horovod"} <= set(here)
    assert machine_facts.differences({**here, "load average at the start": "3"}, here) == []
    then = {"cores": "64", "kernel": here["kernel"], "Horovod": "0.1"}
    assert machine_facts.differences(then, here) == [
        f"cores 64, and here {here['cores']}", f"Horovod 0.1, and here {here['Horovod']}"
    ]  # fmt: skip


def test_of_two_rounds_the_one_that_other_work_did_not_slow_down_counts():
    given = _measured().result
    slow = [
        dataclasses.replace(each, seconds=1.2 * each.seconds, engine_s=1.2 * each.engine_s)
        for each in given.series[::2]
    ]
    both = results.Result(given.description, (*slow, *given.series))
    assert calibration.fit([calibration.Measurement(both)], date="2026-11-17") == calibration.fit(
        [_measured()], date="2026-11-17"
    )


def test_the_cycle_of_the_measurement_is_kept():
    model = horovod_model.HorovodModel(cycle_s=5e-3)
    assert calibration.fit([_measured()], date="2026-11-17", model=model).horovod_cycle_s == 5e-3


def test_real_hosts_have_cores_of_their_own():
    shared = dataclasses.replace(_calibrated(), shared_cores=2)

    def seconds(**kwargs):
        link = predict.Link(**kwargs)
        return predict.all_reduce_seconds([4096], 16, 16, shared, link=link, seen_by="engine").seconds

    alone = predict.all_reduce_seconds([4096], 16, 16, _calibrated(), seen_by="engine").seconds
    assert seconds() > 3 * alone and seconds(emulated=False) == pytest.approx(alone)


def test_a_calibration_needs_several_sizes_at_2_ranks():
    measured = _measured()
    other = tuple(
        dataclasses.replace(each, facts=dataclasses.replace(each.facts, ranks=4)) for each in measured.result.series
    )
    with pytest.raises(cli.UsageError, match="at least 2 sizes at 2 ranks"):
        calibration.fit([calibration.Measurement(results.Result(measured.result.description, other))], date="")


def test_public_latencies_of_16_and_64_ranks_predict_those_of_32():
    points = [fitting.Point(16, 8, 163.4e-6), fitting.Point(64, 8, 631.3e-6)]
    found = fitting.fit(points, fitting.RING)
    assert found.predict(32, 8) == pytest.approx(319.4e-6, rel=0.02)
    assert found.base_s == pytest.approx(17.2e-6, rel=0.02)
    assert found.step_s == pytest.approx(4.874e-6, rel=0.001)
    plan = formulas.make_plan("ring", 32, 8, found.topology())
    assert formulas.cost(plan).total_s == pytest.approx(found.predict(32, 8))


def test_a_ring_fit_finds_latency_and_bandwidth():
    network = topology.uniform(2e9, 3e-6, engine=topology.Engine(base_s=2e-5))
    points = [
        fitting.Point(n, size, formulas.all_reduce_seconds("ring", n, size, network))
        for n in (2, 8, 32)
        for size in (1e3, 1e6, 1e8)
    ]
    found = fitting.fit(points, fitting.RING)
    assert (found.base_s, found.step_s, found.s_per_byte) == pytest.approx((2e-5, 3e-6, 5e-10), rel=1e-3)


def test_a_piecewise_fit_on_half_of_the_sizes_predicts_the_others():
    def seconds(size):  # a protocol that changes at 8 KiB
        return 20e-6 + size * 4e-10 + (60e-6 if size > 8192 else 0.0)

    points = [fitting.Point(8, 4.0 * 2**k, seconds(4.0 * 2**k)) for k in range(19)]
    for algorithm in ("ring", "recursive_doubling", "binomial_tree"):
        found = fitting.fit(points[::2], fitting.PIECEWISE, algorithm)
        assert fitting.mean_error(found, points[::2]) < 1e-6
        assert fitting.mean_error(found, points[1::2]) < 0.10


def test_a_saturation_fit_finds_its_three_parameters():
    true = fitting.SaturationFit(0.93, 4e6, 0.7)
    points = [fitting.Point(n, size, true.predict(n, size)) for n in (2, 8, 32) for size in (1e6, 1e7, 1e9)]
    found = fitting.fit(points, fitting.SATURATION)
    for n, size in ((128, 1e8), (4, 1e10)):
        assert found.predict(n, size) == pytest.approx(true.predict(n, size), rel=0.01)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "needs the columns ranks, bytes and seconds"),
        ("ranks,bytes\n1,2\n", "needs the columns"),
        ("ranks,bytes,seconds\n2,8,abc\n", "line 2: 'abc' is not a time"),
        ("ranks,bytes,seconds\n2,xyz,1\n", "line 2: 'xyz' is not a size"),
        ("ranks,bytes,seconds\n0,8,1\n", "must be above 0"),
        ("ranks,bytes,efficiency\n2,8,-1\n", "must be above 0"),
    ],
)
def test_points_that_cannot_be_read_are_told_in_a_sentence(text, words):
    with pytest.raises(cli.UsageError, match=words):
        fitting.read_points(text, "points.csv")


def test_too_few_points_and_unknown_forms_are_told_in_a_sentence():
    with pytest.raises(cli.UsageError, match="at least 2 different points"):
        fitting.fit([fitting.Point(2, 8, 1.0)], fitting.RING)
    with pytest.raises(cli.UsageError, match="Did you mean ring"):
        fitting.fit([], "rings")
