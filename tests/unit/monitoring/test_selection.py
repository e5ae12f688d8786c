"""Which processes a view shows, and in which order."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.monitoring import devices, selection, snapshots
from tf_ipu_dp.runs.records import Verdict

OPTIONAL = st.none() | st.floats(0, 1e6)


def process(pid, user="ann", run=None, **facts):
    folder = f"/home/ann/runs/{run}" if run else None
    ipus = facts.pop("ipus", (pid,))
    return snapshots.Process(pid, user, "x", 1.0, ipus, "running", run=run, run_dir=folder, host="h", **facts)


def snapshot(*processes):
    ipus = tuple(devices.Ipu(id=n, pid=n if n < 3 else None) for n in range(5))
    verdicts = {each.run_dir: Verdict("none", "x") for each in processes if each.run_dir}
    return snapshots.Snapshot(0.0, "poplar", ipus, tuple(processes), verdicts=verdicts)


@given(st.lists(st.builds(process, st.integers(1, 99), cpu_pct=OPTIONAL, loss=OPTIONAL, eta_s=OPTIONAL), max_size=8),
       st.sampled_from(selection.SORT_NAMES))  # fmt: skip
def test_sorting_keeps_every_process_and_puts_unknown_values_last(processes, name):
    found = selection.sort_processes(tuple(processes), name)
    assert sorted(map(id, found)) == sorted(map(id, processes))
    if name == "cpu":
        known = [each.cpu_pct for each in found if each.cpu_pct is not None]
        assert known == sorted(known, reverse=True) and [each.cpu_pct for each in found[: len(known)]] == known
    if name == "eta":
        known = [each.eta_s for each in found if each.eta_s is not None]
        assert known == sorted(known) and [each.eta_s for each in found[: len(known)]] == known


@pytest.mark.parametrize("text", ["b", "/home/ann/runs/b", "/home/ann/runs/b/", "runs/b", "./b"])
def test_a_run_is_chosen_by_its_name_or_by_its_folder(text):
    found = selection.View(run=text).apply(snapshot(process(0, run="a"), process(1, run="b"), process(2)))
    assert [each.pid for each in found.processes] == [1]
    assert [ipu.id for ipu in found.ipus] == [1] and list(found.verdicts) == ["/home/ann/runs/b"]


def test_a_user_s_run_is_shown_with_its_instances_on_other_hosts():
    here, there = process(1, run="b"), dataclasses.replace(process(1, run="b", ipus=()), host="there", user=None)
    found = selection.View(user="ann").apply(snapshot(here, there, process(2, user="bob")))
    assert [each.host for each in found.processes] == ["h", "there"]
    assert selection.View(user="bob").apply(snapshot(here, there)).processes == ()


def test_a_filter_that_leaves_nothing_says_what_to_type():
    found = snapshot(process(0, run="a"), process(1, run="b", user="bob"))
    assert (
        selection.View(run="c").describe(found) == "No process of --run=c holds IPUs. Those that do: --run=a, --run=b."
    )
    nobody = snapshot()
    assert selection.View(user="ann").describe(nobody).endswith("Leave the filter out to see all IPUs.")
    assert selection.View(user="bob").describe(found) == "--user=bob: 1 of 2 processes shown."
    assert selection.View().describe(found) is None


def test_every_order_follows_another_until_the_first_comes_again():
    name, seen = selection.SORT_NAMES[0], []
    for _ in selection.SORT_NAMES:
        seen.append(name)
        name = selection.next_order(name)
    assert tuple(seen) == selection.SORT_NAMES and name == seen[0]
