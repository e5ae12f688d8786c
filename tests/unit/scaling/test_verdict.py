"""The verdict on a study: always two or three sentences, and one thing that limits it."""

from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.scaling import verdict
from tf_ipu_dp.scaling.analysis import Analysis, Interval, Knee, Row
from tf_ipu_dp.scaling.records import BATCH, COMPARE, INSTANCES, STRONG, WEAK, Cell, Study, UpdateParts

PARTS = UpdateParts(0.08, 0.005, 0.0, 0.0, 0.005, 0.01)


def make_row(
    size,
    rate,
    efficiency=None,
    *,
    parts=PARTS,
    engine="tf_ipu_dp",
    limited=False,
    hosts=1,
    replicas=None,
    instances=None,
):
    replicas, instances = replicas or size, instances or size
    cell = Cell(f"{engine}-{size}-{instances}", engine, size, replicas, instances, hosts, 32, 1, 32 * replicas, ())
    interval = None if rate is None else Interval(rate, rate, rate)
    return Row(
        cell, 3, "" if rate is not None else "it crashed", interval, None, None, efficiency, parts, None, None, None,
        None, limited,
    )  # fmt: skip


def make_analysis(*rows, mode=WEAK, knee=None, unit="instances", facts=None):
    cells = tuple(row.cell for row in rows)
    engines = tuple(dict.fromkeys(cell.engine for cell in cells))
    study = Study(
        mode, unit, tuple(cell.size for cell in cells), engines, 3, 1, 8.0, (), cells, facts=facts or {"sdk": "poplar"}
    )
    return Analysis(study, rows, "tf_ipu_dp at 1 instance", knee, ())


def grown(**changes):
    return dataclasses.replace(PARTS, **changes)


def test_good_scaling_pays_up_to_the_largest_size():
    analysis = make_analysis(make_row(1, 320, 1.0), make_row(2, 621, 0.97), make_row(4, 1229, 0.96))
    assert verdict.render(analysis) == (
        "It pays up to 4 instances, the largest measured: efficiency 96 %, good. "
        "What limits it is compute (80 % of an update): more replicas help, and so does a larger --micro_batch_size "
        "while memory lasts. "
        "One IPU trains 1,106,100 samples an hour."
    )


def test_the_first_poor_size_is_where_it_stops_paying():
    rows = [make_row(1, 320, 1.0), make_row(2, 576, 0.9), make_row(4, 900, 0.7, parts=grown(collective_s=0.04))]
    text = verdict.render(make_analysis(*rows, make_row(8, 1000, 0.4)))
    assert text.startswith("It stops paying after 2 instances: at 4 instances the efficiency is 70 %.")
    assert (
        "What limits it is the collective (29 % of an update): --gradient_accumulation=2 would reduce gradients half "
        "as often, for about 24 % more samples/s, or use 2 instances, the fastest that pays (576 samples/s)." in text
    )


@pytest.mark.parametrize(
    ("changes", "limited", "limit"),
    [
        ({"compute_s": 0.2}, False, verdict.COMPUTE),
        ({"compute_s": 0.2}, True, verdict.CORES),
        ({"waiting_s": 0.05}, True, verdict.CORES),
        ({"input_wait_s": 0.05}, False, verdict.INPUT),
        ({"collective_s": 0.05}, False, verdict.COLLECTIVE),
        ({"collective_s": 0.05}, True, verdict.COLLECTIVE),
        ({"waiting_s": 0.05}, False, verdict.STRAGGLER),
        ({"overhead_s": 0.05}, False, verdict.OVERHEAD),
        ({"optimizer_s": 0.05}, False, verdict.OVERHEAD),
        ({}, False, verdict.COMPUTE),
    ],
)
def test_what_has_grown_most_against_the_baseline_limits_it(changes, limited, limit):
    assert verdict.find_limit(make_row(1, 320), make_row(4, 900, parts=grown(**changes), limited=limited)) == limit


def test_strong_scaling_compares_with_the_baselines_share_of_the_batch():
    base = make_row(1, 320)
    row = make_row(4, 900, parts=dataclasses.replace(PARTS, compute_s=0.04, collective_s=0.005))
    row = dataclasses.replace(row, cell=dataclasses.replace(row.cell, global_batch_size=32))
    # A quarter of 0.08 s would be 0.02 s: compute has grown by 0.02 s, optimizer and overhead by 0.011 s.
    assert verdict.find_limit(base, row) == verdict.COMPUTE


def test_cores_of_this_machine_are_never_sold_as_scaling():
    rows = [make_row(1, 320, 1.0), make_row(2, 330, 0.5, parts=grown(compute_s=0.16), limited=True)]
    assert (
        "What limits it is the cores of this machine (with the waiting for them, 89 % of an update)"
        in verdict.render(make_analysis(*rows))
    )
    assert "this is not a scaling result" in verdict.render(make_analysis(*rows))
    rows[1] = make_row(2, 330, 0.5, parts=grown(collective_s=0.1), limited=True)
    assert "also share the cores of this machine, so this is not a scaling result" in verdict.render(
        make_analysis(*rows)
    )


def test_rows_that_share_cores_are_no_part_of_the_first_sentence():
    rows = [make_row(1, 320, 1.0), make_row(2, 330, 0.5, limited=True), make_row(4, 310, 0.24, limited=True)]
    assert verdict.render(make_analysis(*rows)).startswith(
        "This says nothing about scaling: at 2 and 4 instances the cores of this machine are shared. "
    )
    free = [*rows[:1], make_row(2, 620, 0.97), make_row(4, 640, 0.5, limited=True)]
    assert verdict.render(make_analysis(*free)).startswith(
        "It pays up to 2 instances, the largest measured: efficiency 97 %, good."
    )


def test_the_fastest_measured_size_is_what_to_use_on_shared_cores():
    rows = [make_row(1, 320, 1.0), make_row(2, 330, 0.5, limited=True)]
    rows.append(make_row(4, 310, 0.24, parts=grown(compute_s=0.3), limited=True))
    assert (
        "measure with --hosts on machines of their own, or use 2 instances, the fastest measured (330 samples/s) here; "
        "this is not a scaling result." in verdict.render(make_analysis(*rows))
    )


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"input_wait_s": 0.05}, "try --eight_bit_io, .* for at most 53 % more samples/s"),
        ({"waiting_s": 0.05}, "see in the run's exchange_times.json .* for at most 50 % more samples/s"),
        ({"overhead_s": 0.05}, "raise --device_iterations, .* for at most 56 % more samples/s"),
    ],
)
def test_advice_says_what_it_would_bring(changes, advice):
    rows = [make_row(1, 320, 1.0), make_row(4, 900, 0.7, parts=grown(**changes))]
    assert re.search(advice, verdict.render(make_analysis(*rows)))


def test_in_strong_scaling_a_larger_batch_reduces_gradients_less_often():
    row = make_row(4, 900, 0.6, parts=grown(collective_s=0.06))
    text = verdict.render(make_analysis(make_row(1, 320, 1.0), row, mode=STRONG))
    assert "--global_batch_size=256 would reduce gradients half as often, for about 31 % more samples/s" in text


def test_what_trains_is_called_what_it_is():
    def last(**changes):
        return verdict.render(make_analysis(make_row(1, 320, 1.0, **changes), facts=facts)).rpartition(". ")[2]

    facts = {"cores": "2"}
    assert last() == "One replica trains 1,152,000 samples an hour."
    facts = {"sdk": "emulator"}
    assert last(engine="ddp", parts=None) == "One process of ddp trains 1,152,000 samples an hour."


def test_thresholds_are_those_of_the_mode_and_the_hosts():
    row, spread = make_row(4, 900, 0.7), make_row(4, 900, 0.7, hosts=4)
    assert verdict.stops_paying(make_analysis(row), [row]) is row
    assert verdict.stops_paying(make_analysis(spread), [spread]) is None
    assert verdict.stops_paying(make_analysis(row, mode=STRONG), [row]) is None


def test_an_engine_that_reports_no_parts_has_no_known_limit():
    rows = [make_row(size, 300 * size, 0.94, parts=None, engine="ddp") for size in (1, 2)]
    assert "is not known, since ddp does not report where its time goes" in verdict.render(make_analysis(*rows))


def test_the_other_engines_are_named_with_the_ratio():
    rows = [make_row(1, 320, 1.0), make_row(2, 600, 0.94), make_row(2, 500, 0.9, engine="ddp", parts=None)]
    assert verdict.render(make_analysis(*rows)).endswith(
        "One IPU trains 1,080,000 samples an hour, at the rate of 1.20 times ddp."
    )


def test_emulated_ipus_are_called_so():
    text = verdict.render(make_analysis(make_row(1, 320, 1.0), facts={"sdk": "emulator"}))
    assert text.startswith("Only 1 instance was measured, which says nothing about scaling.")
    assert text.endswith("One emulated IPU trains 1,152,000 samples an hour.")


def test_the_knee_of_a_batch_sweep_is_named():
    rows = [make_row(size, rate, replicas=1, instances=1) for size, rate in ((16, 500), (64, 900), (256, 950))]
    text = verdict.render(make_analysis(*rows, mode=BATCH, knee=Knee(64, 0.9, 256), unit="samples"))
    assert text.startswith(
        "Beyond a batch of 64 a larger one does not pay: it has at least 90 % of the best rate, which 256 has."
    )
    assert "3,240,000 samples an hour" in text


@pytest.mark.parametrize("mode", [COMPARE, INSTANCES])
def test_the_best_layout_of_the_same_replicas_is_named(mode):
    rows = [make_row(1, 320), make_row(4, 800, replicas=4, instances=1), make_row(4, 1000, replicas=4, instances=2)]
    assert verdict.render(make_analysis(*rows, mode=mode)).startswith(
        "2 instances x 2 replicas is the best layout of 4 replicas: 25 % more samples/s than 1 instance x 4 replicas."
    )


def test_a_study_without_measurements_gives_the_reason():
    assert verdict.render(make_analysis(make_row(1, None))) == "Nothing was measured: it crashed"


@given(
    st.lists(st.tuples(st.floats(1, 1e4), st.floats(0.05, 1.2), st.booleans()), min_size=1, max_size=5),
    st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6),
    st.sampled_from([WEAK, STRONG, COMPARE, INSTANCES, BATCH]),
)
def test_every_study_gets_two_or_three_sentences_that_name_one_limit(rows, parts, mode):
    made = [
        make_row(1 << place, rate, efficiency, parts=UpdateParts(*parts) if place else PARTS, limited=limited)
        for place, (rate, efficiency, limited) in enumerate(rows)
    ]
    text = verdict.render(make_analysis(*made, mode=mode))
    assert text.count(". ") <= 2 and text.endswith(".")
    assert sum(text.count(f"What limits it is {limit}") for limit in verdict.LIMITS) == 1
