import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import formulas, schedules, topology

ALPHA, BETA, GAMMA = 3e-5, 1e-9, 2e-10
S = 971_048.0
NETWORK = topology.uniform(1 / BETA, ALPHA, engine=topology.Engine(reduction_s_per_byte=GAMMA))
WIRED = topology.uniform(1 / BETA, ALPHA, ports=2, engine=topology.Engine(reduction_s_per_byte=GAMMA))
RANKS = st.integers(1, 300)
SIZES = st.integers(1, 1 << 30)


def _seconds(algorithm, ranks, size=S, network=NETWORK, **kwargs):
    return formulas.cost(formulas.make_plan(algorithm, ranks, size, network, **kwargs)).total_s


def _ring(n):
    return 2 * (n - 1) * ALPHA + 2 * (n - 1) / n * S * BETA + (n - 1) / n * S * GAMMA


@pytest.mark.parametrize("n", [2, 3, 4, 7, 64, 1000])
def test_rings_cost_what_the_formula_says(n):
    assert _seconds("ring", n) == pytest.approx(_ring(n))
    half = 2 * (n - 1) * ALPHA + (n - 1) / n * S * BETA + (n - 1) / n * S / 2 * GAMMA
    assert _seconds("two_way_ring", n, network=WIRED) == pytest.approx(half)


@pytest.mark.parametrize("n", [2, 4, 64, 1024])
def test_exchanges_of_a_power_of_two_cost_what_the_formula_says(n):
    steps = math.log2(n)
    assert _seconds("recursive_doubling", n) == pytest.approx(steps * (ALPHA + S * BETA + S * GAMMA))
    share = (n - 1) / n * S
    assert _seconds("halving_doubling", n) == pytest.approx(2 * steps * ALPHA + 2 * share * BETA + share * GAMMA)


@pytest.mark.parametrize("n", [3, 5, 12, 100])
def test_other_numbers_of_ranks_are_folded_to_the_next_lower_power_of_two(n):
    lower = 2 ** int(math.log2(n))
    fold = 2 * ALPHA + 2 * S * BETA + S * GAMMA
    for algorithm in ("halving_doubling", "recursive_doubling"):
        assert _seconds(algorithm, n) == pytest.approx(_seconds(algorithm, lower) + fold)


@pytest.mark.parametrize("n", [2, 3, 8, 100])
def test_trees_cost_what_the_formula_says(n):
    depth = math.ceil(math.log2(n))
    assert _seconds("binomial_tree", n) == pytest.approx(2 * depth * (ALPHA + S * BETA) + depth * S * GAMMA)
    for k in (1, 5, 40):
        pipelined = (depth - 1 + k) * (2 * (ALPHA + S * BETA / k) + S / k * GAMMA)
        assert _seconds("double_tree", n, pieces=k) == pytest.approx(pipelined)


@given(st.integers(2, 5000), st.floats(1, 1e9))
def test_no_other_number_of_pieces_makes_a_double_tree_faster(n, size):
    network = topology.uniform(1 / BETA, ALPHA)
    best = formulas.make_plan("double_tree", n, size, network)
    for pieces in (max(1, best.pieces - 1), best.pieces + 1, 1, 10):
        assert formulas.cost(best).total_s <= _seconds("double_tree", n, size, network, pieces=pieces) * (1 + 1e-12)


def test_a_hierarchy_costs_what_the_formula_says():
    g, m, c = 8, 16, 4
    inside = topology.Level("in", g, 1 / BETA, ALPHA)
    between = topology.Level("out", m, 1e8, 1e-4, shared_by=c)
    network = topology.Topology("two", (inside, between))
    expected = 2 * ((g - 1) * ALPHA + (g - 1) / g * S * BETA) + 2 * (m - 1) * 1e-4 + 2 * (m - 1) / m * S / g * c * 1e-8
    assert _seconds("hierarchical", g * m, network=network) == pytest.approx(expected)
    three = topology.Topology("three", (inside, between, topology.Level("far", 5, 1e7, 1e-3)))
    further = 2 * 4 * 1e-3 + 2 * 4 / 5 * S / (g * m) * 1e-7
    assert _seconds("hierarchical", g * m * 5, network=three) == pytest.approx(expected + further)


def test_a_torus_is_a_hierarchy_with_a_level_for_each_dimension():
    expected = 2 * (7 + 4) * ALPHA + 2 * 39 / 40 * S * BETA + 39 / 40 * S * GAMMA
    assert _seconds("torus", 40) == pytest.approx(expected)
    assert _seconds("torus", 40, torus=(20, 2)) == pytest.approx(expected + 2 * 9 * ALPHA)


@given(RANKS, SIZES)
@settings(deadline=None)
def test_no_algorithm_is_below_the_lower_bounds(n, size):
    bound = formulas.lower_bound(n, size, ALPHA, BETA, GAMMA)
    for plan in formulas.possible_plans(n, size, NETWORK):
        found = formulas.cost(plan)
        assert found.latency_s >= bound.latency_s * (1 - 1e-9)
        assert found.bandwidth_s >= bound.bandwidth_s * (1 - 1e-9)
        if plan.algorithm != "two_way_ring":  # both directions add at the same time
            assert found.reduction_s >= bound.reduction_s * (1 - 1e-9)


@given(
    RANKS,
    SIZES,
    st.floats(0, 1e-3),
    st.floats(1e6, 1e11),
    st.floats(0, 1e-8),
    st.sampled_from([each for each in formulas.ALGORITHMS if each not in ("hierarchical", "torus")]),
)
@settings(deadline=None)
def test_costs_grow_with_size_latency_time_per_byte_and_reduction(n, size, latency, rate, gamma, algorithm):
    def seconds(size, latency, rate, gamma):
        engine = topology.Engine(reduction_s_per_byte=gamma)
        return _seconds(algorithm, n, size, topology.uniform(rate, latency, engine=engine))

    base = seconds(size, latency, rate, gamma) * (1 - 1e-9)
    assert seconds(size * 2, latency, rate, gamma) >= base
    assert seconds(size, latency * 2, rate, gamma) >= base
    assert seconds(size, latency, rate / 2, gamma) >= base
    assert seconds(size, latency, rate, gamma * 2) >= base


@given(st.integers(1, 500), SIZES, st.sampled_from(["ring", "two_way_ring", "binomial_tree", "double_tree"]))
@settings(deadline=None)
def test_costs_grow_with_the_number_of_ranks(n, size, algorithm):
    assert _seconds(algorithm, n + 1, size) >= _seconds(algorithm, n, size) * (1 - 1e-9)


@given(st.integers(0, 10), SIZES, st.sampled_from(["recursive_doubling", "halving_doubling"]))
def test_costs_of_exchanges_grow_with_powers_of_two(bits, size, algorithm):
    assert _seconds(algorithm, 2 ** (bits + 1), size) >= _seconds(algorithm, 2**bits, size) * (1 - 1e-9)


@given(st.integers(1, 40), st.integers(0, 60), st.sampled_from([1, 2, 3, 4]), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=30)
def test_every_schedule_leaves_the_sum_on_every_rank(n, elements, per_host, seed):
    rng = np.random.default_rng(seed)
    for plan in formulas.possible_plans(n, 1000, topology.hosts(per_host, 1e9, 1e-5)):
        buffers = [rng.integers(-1000, 1000, elements) for _ in range(n)]
        expected = np.sum(buffers, axis=0)
        schedules.execute(schedules.make_schedule(plan, elements), buffers)
        for buffer in buffers:
            np.testing.assert_array_equal(buffer, expected)


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8, 16])
def test_schedules_have_the_steps_and_the_largest_messages_that_the_formulas_count(n):
    elements = n * 64
    for algorithm in (each.algorithm for each in formulas.possible_plans(n, float(elements), NETWORK)):
        plan = formulas.make_plan(algorithm, n, float(elements), NETWORK, pieces=1)
        schedule = schedules.make_schedule(plan, elements)
        sizes = [phase.message_bytes for phase in plan.phases for _ in range(phase.steps)]
        largest = [max((each.last - each.first for each in step), default=0) for step in schedule]
        # A rank of the double tree gets a message of half the data from each of two others.
        factor = 2 if plan.algorithm == "double_tree" else 1
        assert [each * factor for each in largest] == sizes, plan.algorithm


def test_the_cheapest_algorithm_is_chosen():
    assert formulas.choose(64, 8, NETWORK).algorithm == "recursive_doubling"
    large = formulas.choose(64, 1 << 30, NETWORK)
    assert formulas.cost(large).total_s == min(
        formulas.cost(plan).total_s for plan in formulas.possible_plans(64, 1 << 30, NETWORK)
    )


def test_sizes_and_ranks_can_be_arrays():
    found = formulas.all_reduce_seconds("ring", np.array([[2], [4]]), np.array([1e3, 1e6, 1e9]), NETWORK)
    assert found.shape == (2, 3)
    assert found[1, 2] == _seconds("ring", 4, 1e9)
    assert formulas.all_reduce_seconds("ring", 4, 1e9, NETWORK) == found[1, 2]


def test_gloo_cuts_the_buffer_of_the_reference_run_into_eight_segments():
    assert topology.gloo_segments(971_048, 4) == (8, 121_384, 121_360)
    count, segment, _ = topology.gloo_segments(64 << 20, 3)
    assert (count % 3, segment <= 1 << 20) == (0, True)
    engine = topology.Engine(overhead_s=1e-5, segments=topology.GLOO_SEGMENTS)
    network = topology.uniform(1e9, 0.0, engine=engine)
    plan = formulas.make_plan("ring", 4, 971_048, network)
    assert plan.phases[0].messages == 2
    assert formulas.cost(plan).latency_s == pytest.approx(12 * 1e-5)


def test_the_engine_adds_a_handshake_a_base_latency_and_headers():
    engine = topology.Engine(handshake=2.2, base_s=1e-3, wire_efficiency=0.95)
    found = formulas.cost(formulas.make_plan("ring", 4, 400, topology.uniform(1e9, 1e-3, engine=engine)))
    assert found.latency_s + found.bandwidth_s == pytest.approx(1e-3 + 6 * 2.2e-3)
    assert found.bandwidth_s == pytest.approx(1.5 * 400 / 1e9 / 0.95)
    # Notices travel while the messages before them are sent.
    found = formulas.cost(formulas.make_plan("ring", 4, 1e8, topology.uniform(1e9, 1e-3, engine=engine)))
    assert found.latency_s == pytest.approx(1e-3 + 6 * 1e-3)


def test_round_robin_placement_loads_a_link_with_every_rank_of_a_host():
    block = topology.hosts(2, 1.25e7, 0.0, inside_latency_s=0.0)
    rate = 971_048 * 2 * 7 / 8 / 1.25e7
    assert _seconds("ring", 8, network=block) == pytest.approx(rate)
    robin = topology.hosts(2, 1.25e7, 0.0, inside_latency_s=0.0, placement=topology.ROUND_ROBIN)
    assert _seconds("ring", 8, network=robin) == pytest.approx(2 * rate)


def test_pieces_give_messages_of_each_size_their_own_latency_and_bandwidth():
    pieces = topology.parse_pieces("4KiB:20us:1GB/s,64KiB:30us:2GB/s,max:50us:3GB/s")
    network = topology.uniform(1.0, 1.0, pieces=pieces)
    assert _seconds("ring", 2, 2 * 4096, network) == pytest.approx(2 * (20e-6 + 4096 / 1e9))
    assert _seconds("ring", 2, 2 * 65536, network) == pytest.approx(2 * (30e-6 + 65536 / 2e9))
    assert _seconds("ring", 2, 2e6, network) == pytest.approx(2 * (50e-6 + 1e6 / 3e9))


@pytest.mark.parametrize("name", list(topology.PRESETS))
def test_every_preset_says_that_it_is_not_validated(name):
    network = topology.preset(name)
    assert "not validated" in network.note
    assert formulas.cost(formulas.make_plan("auto", 16, S, network)).total_s > 0


def test_the_largest_preset_has_65_536_ipus_in_pods_of_64():
    network = topology.preset("ipu-pod64x1024")
    assert network.capacity == 65_536
    assert formulas.make_plan("hierarchical", 65_536, S, network).shape == (64, 1024)
    assert network.sized(128).shape == (64, 2)


def test_other_collectives_cost_their_share_of_the_ring():
    network = topology.uniform(1 / BETA, ALPHA)
    half = (7 * ALPHA) + 7 / 8 * S * BETA
    for name in ("reduce_scatter", "all_gather", "all_to_all"):
        assert formulas.other_collective_seconds(name, 8, S, network) == pytest.approx(half)
    assert formulas.other_collective_seconds("broadcast", 8, S, network) == pytest.approx(3 * (ALPHA + S * BETA))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: formulas.make_plan("ring", 0, 8, NETWORK), "of 0 ranks is not possible"),
        (lambda: formulas.make_plan("ring", 4, 0, NETWORK), "of 0 bytes is not possible"),
        (lambda: formulas.make_plan("rign", 4, 8, NETWORK), "Did you mean ring"),
        (lambda: formulas.make_plan("torus", 13, 8, NETWORK), "prime number"),
        (lambda: formulas.make_plan("torus", 12, 8, NETWORK, torus=(5, 2)), "has 10 ranks, not 12"),
        (lambda: formulas.make_plan("ring", 65, 8, topology.preset("pod64")), "do not fit on pod64, which has 64"),
        (
            lambda: formulas.make_plan("hierarchical", 100, 8, topology.preset("pod256")),
            "groups of 64, as hierarchical needs on pod256. Nearest: 64 or 128",
        ),
        (lambda: topology.preset("pod46"), "Did you mean pod64"),
        (lambda: topology.uniform(-1.0, 0.0), "no bandwidth"),
        (lambda: topology.uniform(1.0, -1.0), "cannot be negative"),
        (lambda: topology.Engine(handshake=0), "handshake"),
        (lambda: topology.Engine(overhead_s=-1), "cannot be negative"),
    ],
)
def test_what_is_not_possible_is_told_in_a_sentence(make, words):
    with pytest.raises(cli.UsageError, match=words):
        make()
