"""Collectives through shared memory, between threads that have what instances have: index, connections and memory."""

import contextlib
import functools
import mmap
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tf_ipu_dp.emulator.runtime import shared_memory

CHUNK = 64  # bytes: some numbers, so that small arrays have many chunks
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="shared memory is for Linux")


@contextlib.contextmanager
def connected(count):
    """Yields the groups of some instances, and closes them at the end."""
    memory = mmap.mmap(-1, shared_memory.memory_size(count, CHUNK))
    peers = [{} for _ in range(count)]
    for high in range(count):
        for low in range(high):
            peers[high][low], peers[low][high] = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(contextlib.closing(shared_memory.Group(rank, peers[rank], memory, CHUNK)))
            for rank in range(count)
        ]


def in_threads(function, *columns):
    """Calls a function for each instance at the same time; returns what each call returned, or raises its error."""
    with ThreadPoolExecutor(len(columns[0])) as threads:
        return [future.result(timeout=60) for future in [threads.submit(function, *row) for row in zip(*columns)]]


@given(
    count=st.integers(2, 5),
    shapes=st.lists(st.sampled_from([(), (0,), (1,), (5,), (16,), (3, 7), (40,)]), min_size=1, max_size=5),
    dtype=st.sampled_from(shared_memory.SUMMED_TYPES),
    small=st.sampled_from([0, 40, 1 << 16]),
    seed=st.integers(0, 2**16),
)
def test_every_instance_gets_the_sum_in_the_order_of_the_instances_to_the_bit(count, shapes, dtype, small, seed):
    values = np.random.default_rng(seed)
    given_arrays = [[np.asarray(100 * values.normal(size=shape), dtype) for shape in shapes] for _ in range(count)]

    def twice(group, arrays):
        first = group.sum("gradients", arrays)
        return group.sum("gradients", [np.negative(array) for array in arrays]), first

    with connected(count) as groups, pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_SMALL", small)  # bytes up to which nobody sums parts
        found = in_threads(twice, groups, given_arrays)
    expected = [functools.reduce(np.add, arrays) for arrays in zip(*given_arrays)]
    more = [np.negative(total) for total in expected]
    for second, first in found:
        for got, wanted in zip([*first, *second], [*expected, *more]):
            assert got.dtype == wanted.dtype and got.shape == wanted.shape
            np.testing.assert_array_equal(got, wanted)


@given(
    count=st.integers(2, 4),
    kinds=st.lists(st.sampled_from(["sum", "gather", "broadcast"]), min_size=1, max_size=6),
    shape=st.sampled_from([(), (0,), (3,), (16,), (3, 7), (50,)]),
    seed=st.integers(0, 2**16),
)
def test_any_order_of_collectives_gives_all_instances_what_was_given(count, kinds, shape, seed):
    values = np.random.default_rng(seed)
    rows = [[np.asarray(values.integers(0, 100, shape), np.int32) for _ in kinds] for _ in range(count)]
    root = seed % count

    def exchange(group, arrays):
        calls = {
            "sum": lambda array: group.sum("s", [array])[0],
            "gather": lambda array: group.gather("g", array),
            "broadcast": lambda array: group.broadcast("b", array, root),
        }
        return [calls[kind](array) for kind, array in zip(kinds, arrays)]

    with connected(count) as groups:
        found = in_threads(exchange, groups, rows)
    for place, kind in enumerate(kinds):
        column = [row[place] for row in rows]
        expected = {"sum": sum(column), "gather": np.stack(column), "broadcast": column[root]}[kind]
        for results in found:
            assert results[place].dtype == np.int32
            np.testing.assert_array_equal(results[place], expected)


@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.uint8, np.int64])
def test_values_of_any_type_are_gathered_and_broadcast(dtype):
    arrays = [np.arange(30).astype(dtype).reshape(5, 6), np.zeros((5, 6), dtype)]
    with connected(2) as groups:
        gathered = in_threads(lambda group, array: group.gather("all", array), groups, arrays)
        (own, received) = in_threads(lambda group, array: group.broadcast("first", array), groups, arrays)
    for each in gathered:
        assert each.dtype == dtype
        np.testing.assert_array_equal(each, np.stack(arrays))
    np.testing.assert_array_equal(own, arrays[0])
    np.testing.assert_array_equal(received, arrays[0])


def test_an_instance_that_ends_is_named_by_those_that_wait_for_it():
    with connected(2) as (staying, leaving), ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(staying.sum, "gradients", [np.ones(40, np.float32)])
        leaving.close()
        with pytest.raises(RuntimeError, match="This instance lost its peers: the connection to instance 1 was closed"):
            waiting.result(timeout=60)


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("others", np.ones(4, np.float32)),
        ("gradients", np.ones(5, np.float32)),
        ("gradients", np.ones(40, np.float32)),  # several chunks
        ("gradients", np.ones(4)),
    ],
)
def test_instances_that_exchange_different_tensors_are_told_so(name, array):
    with connected(2) as groups, ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(groups[0].sum, "gradients", [np.ones(4, np.float32)]),
            threads.submit(groups[1].sum, name, [array]),
        ]
        for call, other in zip(calls, (1, 0)):
            sentence = f"Mismatched tensors: instance {other} does not exchange the same as this one"
            with pytest.raises(shared_memory.MismatchError, match=sentence):
                call.result(timeout=60)
        for total in in_threads(lambda group: group.sum("next", [np.ones(40, np.float32)])[0], groups):
            np.testing.assert_array_equal(total, np.full(40, 2, np.float32))


class Instances:
    """What Horovod does for instances while they connect."""

    def __init__(self, count):
        self.rows, self.turn = [None] * count, threading.Barrier(count)

    def collect(self, rank, value):
        self.rows[rank] = value
        self.turn.wait(60)
        found = list(self.rows)
        self.turn.wait(60)
        return found

    def connect(self, rank, wrap=lambda addresses: addresses):
        return shared_memory.connect(
            rank, len(self.rows),
            lambda own: wrap(self.collect(rank, own)), lambda value: all(self.collect(rank, value)),
        )  # fmt: skip


def test_instances_of_one_host_connect_and_strangers_are_turned_away():
    def disturb(addresses):
        """Other processes of the user try to connect before the instances do."""
        for content in (b"", b"hello", addresses[0].rstrip() + b"x"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(addresses[0].rstrip())
                stranger.send(content)
        return addresses

    job = Instances(3)
    groups = in_threads(lambda rank: job.connect(rank, disturb), range(3))
    sums = in_threads(lambda group, rank: group.sum("g", [np.full(100_000, rank, np.float64)]), groups, range(3))
    for (total,) in sums:
        np.testing.assert_array_equal(total, np.full(100_000, 3.0))
    for group in groups:
        group.close()


@pytest.mark.parametrize("address", [b"", b"\0tf_ipu_dp-of-another-host"], ids=["without", "elsewhere"])
def test_nobody_uses_shared_memory_if_one_instance_cannot(address, monkeypatch):
    monkeypatch.setattr(shared_memory, "_join", lambda *given: pytest.fail("Nobody waits for connections."))
    job = Instances(3)

    def replace(addresses):
        return [*addresses[:1], address.ljust(len(addresses[1])), *addresses[2:]]

    assert in_threads(lambda rank: job.connect(rank, replace), range(3)) == [None] * 3


def test_who_connects_again_and_again_does_not_keep_instances_waiting_for_one_that_cannot_connect(monkeypatch):
    monkeypatch.setattr(shared_memory, "_CONNECT_TIMEOUT_S", 0.5)
    job, is_over = Instances(2), threading.Event()
    strangers = []

    def connect_until_the_end(address):
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
                stranger.connect(address)
                stranger.send(b"hello")

    def begin(addresses):
        strangers.append(threading.Thread(target=connect_until_the_end, args=(addresses[0].rstrip(),)))
        strangers[0].start()
        return addresses

    def look_elsewhere(addresses):
        return [b"\0tf_ipu_dp-of-another-host".ljust(len(addresses[0])), addresses[1]]

    pool = ThreadPoolExecutor(2)
    try:
        waiting = [pool.submit(job.connect, rank, wrap) for rank, wrap in enumerate([begin, look_elsewhere])]
        assert [future.result(timeout=60) for future in waiting] == [None, None]
    finally:
        is_over.set()
        strangers[0].join()
        pool.shutdown()
