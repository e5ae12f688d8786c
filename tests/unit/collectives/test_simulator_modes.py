"""The exact mode against the formulas, chains of events against the exact mode, and the fast mode against it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import event_chains, exact, fast, formulas, loss, noise, overlap, simulator, topology
from tf_ipu_dp.collectives.disturbances import Disturbances

NETWORK = topology.uniform(1.25e8, 5e-5, engine=topology.Engine(reduction_s_per_byte=1e-10, base_s=1e-5))
HOSTS = topology.hosts(8, 1.25e8, 5e-5)
S = 971_048.0


def _recursion(algorithm, ranks, network=NETWORK, size=S, **kwargs):
    return exact.make_recursion(formulas.make_plan(algorithm, ranks, size, network, **kwargs))


@given(st.integers(2, 40), st.integers(1, 10**8), st.sampled_from([1, 2, 4]))
@settings(deadline=None, max_examples=40)
def test_without_noise_the_exact_mode_takes_the_time_of_the_formula(ranks, size, per_host):
    for plan in formulas.possible_plans(ranks, size, topology.hosts(per_host, 1e9, 1e-5)):
        recursion = exact.make_recursion(plan)
        found = exact.simulate(recursion, Disturbances(), 2, np.random.default_rng(0))
        np.testing.assert_allclose(found.seconds, formulas.cost(plan).total_s, rtol=1e-9)
        assert recursion.undisturbed_s == pytest.approx(formulas.cost(plan).total_s)


class _GivenEvents:
    """Steps that take no time, but for events."""

    def __init__(self, recursion, events):
        self.trials = events.weight.shape[1]
        self._number = 0
        self._delays = np.zeros((recursion.steps, self.trials, recursion.ranks))
        for place in np.argwhere(events.weight > 0):
            step, rank = events.step[tuple(place)], events.rank[tuple(place)]
            self._delays[step, place[1], rank] += events.weight[tuple(place)]

    def step(self, phase, receivers, senders):
        found = self._delays[self._number][:, receivers]
        self._number += 1
        return found

    def steps(self, phase, receivers, senders):
        for _ in range(phase.steps):
            yield self.step(phase, receivers, senders), None


def _without_repeats(recursion, events):
    """Leaves out events at the same step and rank, which no chain connects."""
    place = events.step * (recursion.ranks + 1) + events.rank
    weight = events.weight.copy()
    for trial in range(weight.shape[1]):
        _, first = np.unique(place[:, trial], return_index=True)
        weight[np.setdiff1d(np.arange(len(weight)), first), trial] = 0
    return dataclasses.replace(events, weight=weight)


@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        *(("ring", n) for n in (2, 3, 4, 8, 13, 32)),
        *((name, n) for name in ("recursive_doubling", "halving_doubling", "binomial_tree") for n in (4, 8, 16, 32)),
        *(("torus", n) for n in (4, 12, 20, 36)),
        ("hierarchical", 32),
    ],
)
@pytest.mark.parametrize("expected", [1, 6, 20])
def test_the_heaviest_chain_of_events_is_what_the_exact_recursion_adds(algorithm, ranks, expected):
    recursion = _recursion(algorithm, ranks, HOSTS if algorithm == "hierarchical" else NETWORK)
    rng = np.random.default_rng(ranks + expected)
    messages = sum(event_chains.messages_of(recursion, phase) for phase in recursion.phases)
    rates = [expected / messages] * len(recursion.phases)
    events = event_chains.draw(recursion, rates, lambda phase: 0.1 + rng.random(phase.shape), 60, rng)
    events = _without_repeats(recursion, events)
    ends = exact.run(recursion, _GivenEvents(recursion, events), np.zeros((60, ranks)))
    np.testing.assert_allclose(event_chains.heaviest(recursion, events), ends.max(axis=1), atol=1e-12)


JITTER = {law: Disturbances(jitter=noise.parse_law(law)) for law in ("lognormal:0.1", "normal:0.3", "exponential:0.5")}
CASES = {
    **JITTER,
    "pareto": Disturbances(jitter=noise.parse_law("pareto:0.1")),
    "slow ranks": Disturbances(jitter=noise.parse_law("lognormal:0.1"), slow_ranks=2, slow_factor=1.5),
    "slow link": Disturbances(slow_links=1, slow_link_bytes_per_s=3e7),
    "late starts": Disturbances(start=noise.StartLaw("exponential", 1e-3), jitter=noise.parse_law("normal:0.1")),
    "loss": Disturbances(loss=loss.Loss(0.01)),
    "little loss": Disturbances(loss=loss.Loss(2e-5, transport="bbr"), jitter=noise.parse_law("lognormal:0.1")),
    "bursts": Disturbances(loss=loss.Loss(0.001, burst=1.5)),
}


def _quantiles(found):
    return np.percentile(found.seconds, [50, 99])


def _compare(recursion, disturbances, trials, seed=1):
    expected = _quantiles(exact.simulate(recursion, disturbances, trials, np.random.default_rng(seed)))
    found = _quantiles(fast.simulate(recursion, disturbances, 10_000, np.random.default_rng(seed + 1)))
    assert found[0] == pytest.approx(expected[0], rel=0.01)
    assert found[1] == pytest.approx(expected[1], rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_fast_mode_agrees_with_the_exact_one_on_rings(case):
    _compare(_recursion("ring", 80), CASES[case], 3_000)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lognormal:0.1", "exponential:0.5", "slow link", "loss"])
def test_the_fast_mode_agrees_with_the_exact_one_on_a_ring_of_256(case):
    trials = {"slow link": 20, "loss": 6_000}.get(case, 300)
    _compare(_recursion("ring", 256), CASES[case], trials)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["exponential:0.5", "little loss"])
@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        ("halving_doubling", 256),
        ("recursive_doubling", 200),
        ("binomial_tree", 256),
        ("hierarchical", 256),
        ("torus", 144),
        ("two_way_ring", 64),
    ],
)
def test_the_fast_mode_agrees_with_the_exact_one_on_other_algorithms(algorithm, ranks, case):
    _compare(_recursion(algorithm, ranks, HOSTS if algorithm == "hierarchical" else NETWORK), CASES[case], 4_000)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["lognormal:0.1", "little loss"])
def test_the_fast_mode_agrees_with_the_exact_one_on_double_trees(case):
    _compare(_recursion("double_tree", 64, pieces=8), CASES[case], 8_000)


@pytest.mark.parametrize("mode", ["exact", "fast"])
@pytest.mark.parametrize("algorithm", formulas.ALGORITHMS)
def test_the_same_seed_gives_the_same_trials(algorithm, mode):
    def run(seed):
        disturbances = dataclasses.replace(CASES["little loss"], trial_jitter=noise.parse_law("normal:0.01"))
        asked = simulator.Simulation(64, 971_048, HOSTS, algorithm, disturbances, mode=mode, trials=20, seed=seed)
        return simulator.simulate(asked).series.seconds

    np.testing.assert_array_equal(run(3), run(3))
    assert (run(3) != run(4)).any()


def test_the_fast_mode_goes_up_to_65_536_replicas_with_and_without_loss():
    base = topology.preset("pod64x1024")
    few, many = Disturbances(loss=loss.Loss(1e-8)), CASES["loss"]
    for algorithm in formulas.ALGORITHMS:
        recursion = _recursion(algorithm, 65_536, base)
        medians = []
        for disturbances in (CASES["lognormal:0.1"], few, many):
            found = fast.simulate(recursion, disturbances, 20, np.random.default_rng(0))
            assert (found.seconds >= recursion.undisturbed_s * 0.999).all()
            medians.append(np.median(found.seconds) / recursion.undisturbed_s)
        assert 1.0 < medians[0] < 1.5
        assert medians[2] > medians[1] >= 0.999


def test_a_slow_link_bounds_a_ring():
    disturbances = Disturbances(slow_links=1, slow_link_bytes_per_s=3e6)
    network = topology.uniform(1.25e7, 0.0)
    found = exact.simulate(_recursion("ring", 4, network), disturbances, 5, np.random.default_rng(0))
    np.testing.assert_allclose(found.seconds, 1.5 * S / 3e6, rtol=1e-9)


def test_one_late_rank_delays_everybody():
    class _Late(noise.StartLaw):
        def sample(self, rng, size):
            late = np.zeros(size)
            late[:, 2] = 0.5
            return late

    recursion = _recursion("ring", 8)
    found = exact.simulate(recursion, Disturbances(start=_Late("exponential", 1.0)), 3, np.random.default_rng(0))
    np.testing.assert_allclose(found.rank_seconds, recursion.undisturbed_s + 0.5, rtol=1e-9)


def test_dense_jitter_costs_what_the_reference_found():
    network = topology.uniform(1e12, 1e-3)
    means = {}
    for ranks in (4, 16, 64):
        recursion = _recursion("ring", ranks, network, 8.0)
        found = exact.simulate(recursion, JITTER["lognormal:0.1"], 600, np.random.default_rng(1))
        means[ranks] = found.seconds.mean() / recursion.undisturbed_s
    assert [means[ranks] for ranks in (4, 16, 64)] == pytest.approx([1.079, 1.089, 1.0895], abs=0.004)


def test_buckets_hide_behind_the_backward_pass():
    found = overlap.step_times([[5.0, 10.0]], [[2.0, 3.0]], 10.0, 1.0)
    assert (found.step_s.tolist(), found.exposed_s.tolist()) == ([14.0], [3.0])
    hidden = overlap.step_times([[1.0, 2.0]], [[2.0, 3.0]], 10.0)
    assert (hidden.step_s.tolist(), hidden.exposed_s.tolist()) == ([10.0], [0.0])
    behind = overlap.step_times([[5.0, 6.0]], [[4.0, 3.0]], 6.0)
    assert behind.step_s.tolist() == [12.0]
    np.testing.assert_allclose(overlap.even_ready_times(2.0, 8.0, [1, 3]), [4.0, 10.0])


def test_a_closed_simulation_with_buckets_is_the_formula_and_its_step():
    asked = simulator.Simulation(
        8, 8_000, NETWORK, "ring", mode="closed", buckets=2, compute=simulator.Compute(0.1, 0.2, 0.01)
    )
    found = simulator.simulate(asked)
    one = formulas.cost(formulas.make_plan("ring", 8, 4_000, NETWORK)).total_s
    np.testing.assert_allclose(found.series.seconds, 2 * one)
    assert found.step is not None
    np.testing.assert_allclose(found.step.step_s, 0.3 + one + 0.01)


def test_the_exact_mode_refuses_what_would_take_hours():
    asked = simulator.Simulation(65_536, 8, NETWORK, "ring", JITTER["lognormal:0.1"], mode="exact", trials=10_000)
    with pytest.raises(cli.UsageError, match="Use --mode=fast"):
        simulator.simulate(asked)
