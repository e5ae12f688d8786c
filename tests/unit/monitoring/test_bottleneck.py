from __future__ import annotations

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import bottleneck
from tf_ipu_dp.monitoring.bottleneck import Facts
from tf_ipu_dp.runs.records import InstanceTimes

FACTS = Facts(
    device_iterations=2, executions=100, larger_executions=(4, 8, 16, 32), prefetch=True, compile_s=5.0, total_s=100.0
)


def one(seconds=62.0, executing=60.0, waiting=3.0, **facts):
    times = [InstanceTimes(0, seconds, executing, waiting, 0.0)]
    return bottleneck.find_bottleneck([times], dataclasses.replace(FACTS, **facts))


@pytest.mark.parametrize(
    ("found", "kind", "flag", "text"),
    [
        (one(), "none", None, "No bottleneck: the device was busy 92 % of training."),
        (one(waiting=None), "none", None, "No bottleneck was measured; the device does not report"),
        (one(waiting=30.0, prefetch=False), "input", "prefetch", "48 % of training was waiting for samples."),
        (one(waiting=30.0), "input", "eight_bit_io", "Add --eight_bit_io"),
        (one(waiting=30.0, eight_bit_io=True), "input", "instances", "more --instances"),
        (one(80.0), "small executions", "device_iterations", "of 600 ms: 25 % of training"),
        (one(80.0), "small executions", "device_iterations", "was between them. Use --device_iterations=16."),
        (one(80.0, larger_executions=()), "small executions", "micro_batch_size", "Use a larger --micro_batch_size."),
        (one(80.0, bookkeeping_s=18.0), "logging and checkpoints", "checkpoint_every", "logging and checkpoints: 22 %"),
        (one(80.0, waiting=30.0), "input", "eight_bit_io", "The bottleneck is the input"),
        (one(compile_s=70.0), "compiling", "executable_cache", "compiling: 70.0 of 100.0 s, 70 % of the run."),
        (one(0.0, 0.0), "too short", "epochs", "Train longer with --epochs"),
        (one(0.0, 0.0, compile_s=90.0), "compiling", "executable_cache", "90 % of the run"),
    ],
    ids=str,
)  # fmt: skip
def test_one_instance_is_judged_by_what_cost_it_most(found, kind, flag, text):
    assert (found.kind, found.flag) == (kind, flag)
    assert text in found.sentence and "\n" not in found.sentence


def test_input_that_is_there_within_a_millisecond_of_each_call_is_a_sign_of_small_executions():
    found = one(1.0, 0.95, 0.2, executions=500)
    assert (found.kind, found.flag) == ("small executions", "device_iterations")
    assert "of 2 ms: 25 % of training was between them or at their start" in found.sentence
    assert one(1.0, 0.95, 0.2, executions=50).kind == "input"


def records_of(*rows, count=10, last=()):
    """Each row: input wait and collective time of an instance in 10 seconds of which 9.8 are executions.

    `last`: in how many exchanges of a record each instance was last.
    """
    last = dict(enumerate(last))
    return [
        [InstanceTimes(n, 10.0, 9.8, wait, together, last.get(n)) for n, (wait, together) in enumerate(rows)]
    ] * count


def test_the_instance_whose_input_is_slow_is_named_although_the_others_wait_in_the_collective():
    found = bottleneck.find_bottleneck(records_of((0.1, 4.5), (4.6, 0.2), (0.1, 4.4)), FACTS)
    assert (found.kind, found.instance) == ("input", 1)
    assert "46 % of training of instance 1 was waiting for samples." in found.sentence


def test_an_instance_that_hardly_waits_is_not_named():
    found = bottleneck.find_bottleneck(records_of((0.01, 7.2), (7.3, 0.2)), FACTS)
    assert "73 % of training of instance 1 was waiting for samples." in found.sentence


def test_input_that_all_wait_for_is_told_of_all():
    found = bottleneck.find_bottleneck(records_of((4.0, 0.2), (5.0, 0.1)), FACTS)
    assert (found.kind, found.instance) == ("input", 1)
    assert "50 % of training of instance 1 (and at least 40 % of every other) was" in found.sentence


def test_an_instance_that_computes_slowly_is_the_late_one_and_how_often_is_told():
    slow = records_of((0.1, 4.0), (0.1, 4.2), (0.1, 0.3), count=9, last=(2, 3, 45)) + records_of(
        (0.1, 0.2), (0.1, 0.2), (0.1, 0.2), count=1, last=(20, 15, 15)
    )
    found = bottleneck.find_bottleneck(slow, FACTS)
    assert (found.kind, found.instance, found.last_pct) == ("late instance", 2, 84.0)
    assert found.sentence == (
        "The bottleneck is instance 2: it was last in 84 % of the exchanges, and 34 % of the others' training was "
        "waiting for it. Check its host, or run without it (fewer --instances)."
    )
    assert found.share_pct == pytest.approx(100 * (0.5 * (36.2 + 38.0) - 2.9) / 100)


@pytest.mark.parametrize(
    ("rows", "last", "kind"),
    [
        (((0.1, 4.0), (0.1, 0.3)), (26, 74), "collectives"),  # last often, but not far more than half of the time
        (((0.1, 4.0), (0.1, 0.3)), (24, 76), "late instance"),
        (((0.1, 4.0), (0.1, 4.0), (0.1, 0.3), (0.1, 4.0)), (13, 12, 62, 13), "collectives"),
        (((0.1, 4.0), (0.1, 4.0), (0.1, 0.3), (0.1, 4.0)), (12, 12, 64, 12), "late instance"),
        (((0.1, 4.0), (0.1, 3.5)), (0, 100), "collectives"),  # it spends as long in the exchanges itself
        (((0.1, 0.9), (0.1, 0.1)), (0, 100), "none"),  # the others do not wait long
        (((0.1, 4.0), (0.1, 0.3)), (), "collectives"),  # an earlier version did not count
    ],
)
def test_the_last_is_the_bottleneck_if_it_is_so_far_more_often_than_its_share_and_the_others_wait(rows, last, kind):
    assert bottleneck.find_bottleneck(records_of(*rows, last=last), FACTS).kind == kind


def test_instances_that_are_late_in_turn_make_the_collectives_the_bottleneck():
    turns = [InstanceTimes(0, 10.0, 9.8, 0.0, 4.0, 1), InstanceTimes(1, 10.0, 9.8, 0.0, 0.2, 49)]
    swapped = [dataclasses.replace(each, instance=1 - each.instance) for each in turns]
    found = bottleneck.find_bottleneck([turns, swapped] * 5, FACTS)
    assert (found.kind, found.flag) == ("collectives", "gradient_accumulation")


def test_shares_of_a_whole_run_are_those_of_its_table_although_part_of_training_is_in_no_record():
    records = records_of((0.1, 4.0), (0.1, 3.9))  # 100 s, with 40 s and 39 s of collectives
    found = bottleneck.find_bottleneck(records, dataclasses.replace(FACTS, training_s=125.0))
    assert "the instances spent 31 to 32 % of training in them" in found.sentence
    waited = bottleneck.find_bottleneck(records_of((3.0, 0.1)), dataclasses.replace(FACTS, training_s=125.0))
    assert "24 % of training was waiting for samples" in waited.sentence


def test_collectives_that_take_long_for_all_are_named():
    found = bottleneck.find_bottleneck(records_of((0.1, 3.0), (0.1, 3.1)), FACTS)
    assert found.kind == "collectives" and "the instances spent 30 to 31 % of training in them. Raise" in found.sentence
    same = bottleneck.find_bottleneck(records_of((0.1, 3.0), (0.1, 3.0)), FACTS)
    assert "the instances spent 30 % of training in them. Raise" in same.sentence


def test_waiting_between_executions_for_another_instance_is_no_sign_of_small_executions():
    rows = [InstanceTimes(0, 10.0, 6.0, 0.0, 0.0), InstanceTimes(1, 10.0, 9.9, 0.0, 0.0)]
    assert bottleneck.find_bottleneck([rows], FACTS).kind == "none"


SECONDS = st.floats(0, 1e6)
MAYBE = st.none() | SECONDS
TIMES = st.builds(InstanceTimes, st.integers(0, 4), SECONDS, SECONDS, MAYBE, MAYBE, st.none() | st.integers(0, 10**6))


@given(
    st.lists(st.lists(TIMES, max_size=5), max_size=5),
    st.builds(
        Facts, st.integers(1, 64), st.integers(0, 1000), compile_s=SECONDS, total_s=SECONDS, bookkeeping_s=SECONDS
    ),
)
def test_any_times_give_one_line(rows, facts):
    found = bottleneck.find_bottleneck(rows, facts)
    assert found.sentence.endswith(".") and "\n" not in found.sentence and "nan" not in found.sentence
    assert found.to_json()["schema"] == 1


@pytest.mark.parametrize(
    ("speed", "facts", "kind", "flag", "text"),
    [
        (50.0, FACTS, "input", "eight_bit_io", "50 % of training would be waiting for samples. Add --eight_bit_io"),
        (95.0, FACTS, "none", None, "it is 0.9 times as fast as the model."),
        (400.0, FACTS, "none", None, "The input is not the bottleneck: it is 4.0 times as fast as the model."),
        (400.0, dataclasses.replace(FACTS, prefetch=False), "input", "prefetch", "20 % of training would be waiting"),
    ],
)
def test_the_input_alone_gets_the_verdict_that_a_run_with_it_would_get(speed, facts, kind, flag, text):
    found = bottleneck.predict_input(speed, 100.0, facts)
    assert (found.kind, found.flag) == (kind, flag) and text in found.sentence
    # A run that takes as long as its samples need: computing, and waiting for those that are not there.
    computing, loading = 10.0, 1000 / speed
    waiting = max(loading - computing, 0.0) if facts.prefetch else loading
    measured = bottleneck.find_bottleneck(
        [[InstanceTimes(0, computing + waiting, computing + waiting, waiting, 0.0)]],
        dataclasses.replace(facts, executions=10),
    )
    assert (measured.kind, measured.flag) == (kind, flag)
    assert measured.share_pct == pytest.approx(found.share_pct)


@given(st.lists(st.tuples(*4 * [st.floats(0, 1e6)]), min_size=1, max_size=4), *3 * [st.floats(0, 1e6)])
def test_a_share_is_never_more_than_everything(rows, bookkeeping_s, compile_s, total_s):
    times = [InstanceTimes(number, *row[:3], collective_s=row[3]) for number, row in enumerate(rows)]
    facts = dataclasses.replace(FACTS, bookkeeping_s=bookkeeping_s, compile_s=compile_s, total_s=total_s)
    found = bottleneck.find_bottleneck([times], facts)
    assert 0 <= (found.share_pct or 0.0) <= 100
    assert all(int(percent) <= 100 for percent in re.findall(r"(\d+) %", found.sentence))
