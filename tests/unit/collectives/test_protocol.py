from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.collectives import protocol, timeline
from tf_ipu_dp.collectives.protocol import Order


def test_tags_inside_a_long_line_are_left_out():
    line = protocol.render_answer("engine", series=0, seconds=[0.5] * 4000)
    tagged = "".join(f"[1,0]<stdout>:{line[start : start + 4096]}" for start in range(0, len(line), 4096))
    assert protocol.parse_answer(tagged) == protocol.parse_answer(line)
    assert protocol.parse_answer(tagged)["seconds"] == [0.5] * 4000


def test_an_order_is_read_as_it_was_written():
    order = Order(((4096,), (8, 16)), 20, 5, 4, "round-robin", True, False, "/tmp/a b.json")
    assert protocol.parse_order(protocol.render_order(order)) == order


def test_an_answer_is_found_behind_the_tag_of_a_launcher():
    line = "[1,0]<stdout>:" + protocol.render_answer("trials", series=0, wrong=1)
    assert protocol.parse_answer(line) == {"kind": "trials", "series": 0, "wrong": 1}


def test_other_lines_are_no_answers():
    for line in ("", "a library's warning", f"{protocol.MARK}[1]", f"{protocol.MARK}{{", f'{protocol.MARK}{{"a": 1}}'):
        assert protocol.parse_answer(line) is None


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from(["block", "round-robin"]))
def test_every_instance_gets_one_rank_and_keeps_its_host(hosts, per_host, placement):
    instances = hosts * per_host
    ranks = [protocol.rank_of(instance, instances, hosts, placement) for instance in range(instances)]
    assert sorted(ranks) == list(range(instances))
    for instance, rank in enumerate(ranks):
        host = rank // per_host if placement == "block" else rank % hosts
        assert host == instance // per_host


def _event(kind, process, moment=None, name=None):
    return {
        "ph": kind,
        "pid": process,
        **({"ts": moment} if moment is not None else {}),
        **({"name": name} if name else {}),
    }


def _timeline(*events):
    names = [
        {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}
        for process, name in ((1, "barrier"), (2, "series0_1of2"), (3, "series0_2of2"))
    ]
    return "[\n" + ",\n".join(json.dumps(each) for each in [*names, *events])


def _all_reduce(process, begin, end):
    return [
        _event("B", process, begin - 20, "NEGOTIATE_ALLREDUCE"),
        _event("E", process, begin - 10),
        _event("B", process, begin - 5, "ALLREDUCE"),
        _event("B", process, begin, "GLOO_ALLREDUCE"),
        _event("E", process, end),
        _event("E", process, end + 5),
    ]


def test_the_engine_s_time_is_without_negotiation_and_a_fused_buffer_counts_once():
    text = _timeline(
        *_all_reduce(1, 100, 900),
        *_all_reduce(2, 1000, 2998), *_all_reduce(3, 1002, 3000),  # fused
        *_all_reduce(2, 5000, 6000), *_all_reduce(3, 6100, 6300),  # one after the other
    )  # fmt: skip
    names = ["series0_1of2", "series0_2of2"]
    assert timeline.engine_seconds(text + "]\n", names) == [0.002, 0.0012]
    assert timeline.engine_seconds(text, names) == [0.002, 0.0012]


def test_a_timeline_that_ends_in_the_middle_gives_the_trials_before():
    text = _timeline(*_all_reduce(2, 1000, 3000), *_all_reduce(3, 1000, 3000), *_all_reduce(2, 5000, 6000))
    for length in range(len(text) - 200, len(text)):
        assert timeline.engine_seconds(text[:length], ["series0_1of2", "series0_2of2"]) == [0.002]
    assert timeline.engine_seconds("", ["x"]) == [] == timeline.engine_seconds("[\n{", ["x"])
