from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import bottleneck
from tf_ipu_dp.monitoring.bottleneck import Facts, InstanceTimes

FACTS = Facts(device_iterations=2, executions=100, larger=(4, 8, 16, 32), prefetch=True, compile_s=5.0, total_s=100.0)


def one(seconds=62.0, executing=60.0, waiting=3.0, **facts):
    stretch = [InstanceTimes(0, seconds, executing, waiting, 0.0)]
    return bottleneck.judge([stretch], dataclasses.replace(FACTS, **facts))


@pytest.mark.parametrize(
    ("found", "kind", "flag", "text"),
    [
        (one(), "well fed", None, "Held back by nothing: the device was at work 92 % of the training."),
        (one(waiting=None), "well fed", None, "Held back by nothing that was measured; how long the input took"),
        (one(waiting=30.0, prefetch=False), "input", "prefetch", "48 % of the training was waiting for samples."),
        (one(waiting=30.0), "input", "eight_bit_io", "Add --eight_bit_io"),
        (one(waiting=30.0, eight_bit_io=True), "input", "instances", "more --instances"),
        (one(80.0), "executions", "device_iterations", "of 600 ms: 25 % of the training"),
        (one(80.0), "executions", "device_iterations", "was between them. Use --device_iterations=16."),
        (one(80.0, larger=()), "executions", "micro_batch_size", "Use a larger --micro_batch_size."),
        (one(80.0, bookkeeping_s=18.0), "keeping", "checkpoint_every", "logging and checkpoints: 22 %"),
        (one(80.0, waiting=30.0), "input", "eight_bit_io", "Held back by its input"),
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
    assert (found.kind, found.flag) == ("executions", "device_iterations")
    assert "of 2 ms: 25 % of the training was between them or at their beginning" in found.sentence
    assert one(1.0, 0.95, 0.2, executions=50).kind == "input"


def stretches(*rows, count=10):
    """Each row: input wait and collective time of an instance in 10 seconds of which 9.8 are executions."""
    return [[InstanceTimes(n, 10.0, 9.8, wait, together) for n, (wait, together) in enumerate(rows)]] * count


def test_the_instance_whose_input_is_slow_is_named_although_the_others_wait_in_the_collective():
    found = bottleneck.judge(stretches((0.1, 4.5), (4.6, 0.2), (0.1, 4.4)), FACTS)
    assert (found.kind, found.instance) == ("input", 1)
    assert "46 % of the training of instance 1 was waiting for samples." in found.sentence


def test_an_instance_that_hardly_waits_is_not_told_to_wait_like_the_one_that_does():
    found = bottleneck.judge(stretches((0.01, 7.2), (7.3, 0.2)), FACTS)
    assert "73 % of the training of instance 1 was waiting for samples." in found.sentence


def test_input_that_all_wait_for_is_told_of_all():
    found = bottleneck.judge(stretches((4.0, 0.2), (5.0, 0.1)), FACTS)
    assert (found.kind, found.instance) == ("input", 1)
    assert "50 % of the training of instance 1 (of no other less than 40 %) was" in found.sentence


def test_an_instance_that_computes_slowly_is_the_late_one_and_how_often_is_told():
    slow = stretches((0.1, 4.0), (0.1, 4.2), (0.1, 0.3), count=9) + stretches(
        (0.1, 0.2), (0.1, 0.2), (0.1, 0.2), count=1
    )
    found = bottleneck.judge(slow, FACTS)
    assert (found.kind, found.instance, found.often_pct) == ("late instance", 2, 90.0)
    assert "instance 2: it was the last in 90 % of the collectives" in found.sentence
    assert found.share_pct == pytest.approx(100 * (0.5 * (36.2 + 38.0) - 2.9) / 100)


def test_instances_that_are_late_in_turn_are_held_back_by_the_collective():
    turns = [InstanceTimes(0, 10.0, 9.8, 0.0, 4.0), InstanceTimes(1, 10.0, 9.8, 0.0, 0.2)]
    swapped = [dataclasses.replace(each, instance=1 - each.instance) for each in turns]
    found = bottleneck.judge([turns, swapped] * 5, FACTS)
    assert (found.kind, found.flag) == ("collective", "gradient_accumulation")


def test_collectives_that_take_long_for_all_are_named():
    found = bottleneck.judge(stretches((0.1, 3.0), (0.1, 3.1)), FACTS)
    assert found.kind == "collective" and "up to 31 % of the training was in them" in found.sentence


def test_waiting_between_executions_for_another_instance_is_no_sign_of_small_executions():
    rows = [InstanceTimes(0, 10.0, 6.0, 0.0, 0.0), InstanceTimes(1, 10.0, 9.9, 0.0, 0.0)]
    assert bottleneck.judge([rows], FACTS).kind == "well fed"


SECONDS = st.floats(0, 1e6)
MAYBE = st.none() | SECONDS
TIMES = st.builds(InstanceTimes, st.integers(0, 4), SECONDS, SECONDS, MAYBE, MAYBE)


@given(
    st.lists(st.lists(TIMES, max_size=5), max_size=5),
    st.builds(
        Facts, st.integers(1, 64), st.integers(0, 1000), compile_s=SECONDS, total_s=SECONDS, bookkeeping_s=SECONDS
    ),
)
def test_any_times_give_one_line(rows, facts):
    found = bottleneck.judge(rows, facts)
    assert found.sentence.endswith(".") and "\n" not in found.sentence and "nan" not in found.sentence
    assert found.to_value()["schema"] == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["instance", "seconds", "executing_s", "input_wait_s"]) | st.text(), inner, max_size=4),
)  # fmt: skip


@given(JSON)
def test_what_a_record_has_is_read_or_passed_over(value):
    found = bottleneck.parse_stretch(value)
    assert found is None or all(isinstance(each, InstanceTimes) for each in found)


def test_a_record_of_a_run_is_read():
    record = [{"instance": 1, "seconds": 2.0, "executing_s": 1, "input_wait_s": None, "collective_s": 0.5}]
    assert bottleneck.parse_stretch(record) == [InstanceTimes(1, 2.0, 1.0, None, 0.5)]
