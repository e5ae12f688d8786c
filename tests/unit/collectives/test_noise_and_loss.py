import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import disturbances, loss, noise

LAWS = ["normal:0.1", "lognormal:0.5", "exponential:0.8", "pareto:0.2", "pareto:0.3:4"]


@pytest.mark.parametrize("text", LAWS)
def test_every_law_has_the_mean_1_and_the_deviation_it_says(text):
    law = noise.parse_law(text)
    values = law.sample(np.random.default_rng(1), 400_000)
    assert values.mean() == pytest.approx(1, abs=0.005)
    assert values.std() == pytest.approx(law.sigma, rel=0.15 if law.name == "pareto" else 0.02)
    assert values.min() >= 0
    assert str(law).startswith(text)


@pytest.mark.parametrize("text", LAWS)
def test_quantiles_are_those_of_the_draws(text):
    law = noise.parse_law(text)
    values = law.sample(np.random.default_rng(2), 400_000)
    for tail in (0.5, 0.1, 0.01):
        assert law.upper_quantile(tail) == pytest.approx(np.quantile(values, 1 - tail), rel=0.02)


@pytest.mark.parametrize("text", ["normal:0.1", "lognormal:0.3", "exponential:0.5"])
def test_the_slowest_of_many_is_one_draw(text):
    law = noise.parse_law(text)
    rng = np.random.default_rng(3)
    brute = law.sample(rng, (2_000, 1_000)).max(axis=1)
    one = law.slowest(rng, 1_000, 2_000)
    for share in (10, 50, 90):
        assert np.percentile(one, share) == pytest.approx(np.percentile(brute, share), rel=0.01)


def test_the_slowest_of_65_536_normal_draws_is_4_25_deviations_late():
    found = np.median(noise.Law("normal", 0.1).slowest(np.random.default_rng(0), 65_536, 10_000))
    assert (found - 1) / 0.1 == pytest.approx(4.25, abs=0.01)


@pytest.mark.parametrize("text", ["exponential:1ms", "normal:1ms", "lognormal:1ms", "pareto:1ms"])
def test_the_latest_start_of_many_is_one_draw(text):
    law = noise.parse_start_law(text)
    rng = np.random.default_rng(4)
    brute = law.sample(rng, (3_000, 200)).max(axis=1)
    assert np.median(law.latest(rng, 200, 3_000)) == pytest.approx(np.median(brute), rel=0.03)
    assert (brute >= 0).all()


def test_a_measured_law_draws_from_what_was_measured():
    law = noise.empirical([1.0, 2.0, 3.0])
    assert set(law.sample(np.random.default_rng(0), 100)) == {0.5, 1.0, 1.5}
    with pytest.raises(cli.UsageError, match="at least 2 measured times"):
        noise.empirical([1.0])


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (noise.parse_law, "lognorm:0.1", "the nearest is lognormal"),
        (noise.parse_law, "xyz", "use none, normal"),
        (noise.parse_law, "normal", "for example normal:0.1"),
        (noise.parse_law, "normal:x", "where a number is expected"),
        (noise.parse_law, "normal:-1", "not from 0 to 10"),
        (noise.parse_law, "exponential:2", "not from 0 to 1 times"),
        (noise.parse_law, "pareto:0.1:1.5", "must be more than 2"),
        (noise.parse_law, "pareto:9", "negative length"),
        (noise.parse_start_law, "normal", "needs a time"),
        (noise.parse_start_law, "normal:5", "has no unit"),
        (loss.parse_loss, "1.5", "from 0 to less than 1"),
        (loss.parse_loss, "-0.1", "from 0 to less than 1"),
        (loss.parse_loss, "lots", "is not a loss like"),
        (loss.parse_loss, "0.1:0.5", "Use 1 or more"),
        (loss.parse_transport, "reno", "is not a transport"),
        (disturbances.parse_stragglers, "3", "COUNT:FACTOR"),
        (disturbances.parse_stragglers, "3:0.5", "from 1 to"),
        (disturbances.parse_stragglers, "3:x", "is not a number"),
        (disturbances.parse_slow_links, "1:-25Mbit", "is not a rate"),
    ],
)
def test_what_cannot_be_read_is_told_in_a_sentence(parse, text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_timeouts_double_each_time():
    lossy = loss.Loss(0.01, burst=4)
    found = np.unique(np.round(lossy.sample_timeout_delay(np.random.default_rng(0), 10_000), 6))
    assert found[:5].tolist() == [0.2, 0.6, 1.4, 3.0, 6.2]


def test_roce_waits_for_its_own_timer():
    assert loss.roce_timeout_s(14) == pytest.approx(0.067, abs=0.001)
    assert loss.roce_timeout_s(20) == pytest.approx(4.29, abs=0.01)
    transport = loss.parse_transport("roce:18")
    assert (str(transport), transport.timeout_s) == ("roce", pytest.approx(1.07, abs=0.01))


def test_a_message_of_one_packet_that_is_lost_waits_for_the_timeout():
    lossy = loss.Loss(0.01)
    assert lossy.timeout_probability(100) == pytest.approx(0.01)
    assert lossy.timeout_probability(144_800) == pytest.approx(1 - (1 - 0.01 * 0.4 * 0.01) ** 100, rel=1e-6)
    assert lossy.small_rates(100) == (0.0, 0.0)


def test_a_run_with_1_percent_loss_has_the_share_of_timeouts_that_was_measured():
    # 4 ranks, 971,048 bytes: 48 messages of 84 packets; between 10 and 25 % of the trials had a timeout.
    lossy = loss.Loss(0.01, transport="bbr")
    events = 48 * lossy.timeout_probability(121_384)
    assert 0.10 < 1 - np.exp(-events) < 0.25


def test_cubic_pays_for_losses_in_the_stream_and_bbr_does_not():
    assert loss.Loss(0.01, transport="bbr").stream_recovery_s == 0
    slow = loss.Loss(0.01, round_trip_s=1e-3, packet_s=1e-4)
    assert slow.stream_recovery_s == pytest.approx(1e-3 + np.sqrt(150) * 1e-4)
