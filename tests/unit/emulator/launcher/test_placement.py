"""How instances share the cores of a host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator.launcher import placement
from tf_ipu_dp.emulator.runtime import cores

NODES = st.lists(st.integers(1, 16), min_size=1, max_size=8)


def make_nodes(sizes):
    cpus = iter(range(sum(sizes)))
    return [[next(cpus) for _ in range(size)] for size in sizes]


@given(NODES, st.integers(1, 40))
def test_every_core_is_used_by_one_instance_and_none_spans_nodes_without_need(sizes, instances):
    nodes = make_nodes(sizes)
    places = placement.place(nodes, instances)
    assert len(places) == instances and all(1 <= place.threads <= len(place.cpus) for place in places)
    assert {cpu for place in places for cpu in place.cpus} == set(range(sum(sizes)))
    homes = [[number for number, node in enumerate(nodes) if set(node) & set(place.cpus)] for place in places]
    assert homes == sorted(homes)
    assert all(len(own) == 1 or instances < len(nodes) for own in homes)
    counts = [sum(number in own for own in homes) for number in range(len(nodes))]
    assert max(counts) - min(counts) <= 1
    for number, node in enumerate(nodes):
        own = [place for place, home in zip(places, homes) if number in home]
        shares = [set(place.cpus) & set(node) for place in own]
        if len(own) > len(node):
            assert all(share == set(node) for share in shares)
        else:
            assert sum(map(len, shares)) == len(node) and max(map(len, shares)) - min(map(len, shares)) <= 1


@given(NODES, st.integers(1, 40))
def test_instances_that_are_not_pinned_share_the_threads(sizes, instances):
    places = placement.place_anywhere(make_nodes(sizes), instances)
    assert places == [placement.Place(max(sum(sizes) // instances, 1), None)] * instances


@given(st.lists(st.integers(0, 300), unique=True))
def test_the_kernels_lists_are_read(cpus):
    ranges = sorted(cpus)
    assert placement.parse_cpus(",".join(str(cpu) for cpu in ranges) + "\n") == ranges
    assert placement.parse_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]


def test_the_nodes_have_the_cores_that_this_process_may_use():
    nodes = placement.read_nodes()
    assert sorted(cpu for node in nodes for cpu in node) == sorted(os.sched_getaffinity(0))


def test_threads_of_a_physical_core_stand_together(monkeypatch):
    monkeypatch.setattr(placement, "_physical_core", lambda cpu: (cpu % 4, cpu))  # 0 and 4 are one core
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(1000, 1008)))  # which no node here has
    assert placement.read_nodes() == [[1000, 1004, 1001, 1005, 1002, 1006, 1003, 1007]]


@pytest.mark.parametrize("words", [(), ("--process-placement", "disabled")], ids=["pinned", "anywhere"])
def test_instances_get_cores_of_their_own_unless_that_is_turned_off(words):
    """Forks and fresh processes."""
    program = "import os; print(*sorted(os.sched_getaffinity(0)))"
    command = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", "2", "--num-replicas", "2", *words]
    expected = placement.place(placement.read_nodes(), 2)
    cpus = [sorted(os.sched_getaffinity(0) if words else place.cpus) for place in expected]
    for preloads in "10":
        environ = {**os.environ, "IPU_EMULATOR_PRELOAD": preloads}
        done = subprocess.run(
            [*command, sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
        )
        lines = [f"[1,{index}]<stdout>:{' '.join(map(str, own))}" for index, own in enumerate(cpus)]
        assert sorted(done.stdout.splitlines()) == lines


def test_instances_get_their_share_of_threads_unless_somebody_has_chosen():
    program = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['TF_NUM_INTRAOP_THREADS'])"
    command = [sys.executable, "-m", "tf_ipu_dp.emulator.poprun", "--num-instances", "2", "--num-replicas", "2"]
    environ = {**os.environ, "OMP_NUM_THREADS": "7"}
    environ.pop("TF_NUM_INTRAOP_THREADS", None)
    done = subprocess.run(
        [*command, sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    share = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert sorted(done.stdout.splitlines()) == [f"[1,{index}]<stdout>:7 {share}" for index in range(2)]


def test_an_instance_knows_its_cores_under_any_launcher(monkeypatch):
    for name in ("IPU_EMULATOR_CORES", "HOROVOD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores.of_instance() == 8
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")  # of horovodrun, which binds nobody
    assert cores.of_instance() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})  # of mpirun, which binds
    assert cores.of_instance() == 3
    monkeypatch.setenv("IPU_EMULATOR_CORES", "5")  # of poprun
    assert cores.of_instance() == 5
