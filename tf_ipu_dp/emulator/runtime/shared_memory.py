"""Collectives between the instances of one host, through shared memory.

Horovod sends everything through TCP connections, also between processes of one machine, and its threads poll: two
instances take as long to exchange the 3.4 MB of an MLP as to compute them. Here the instances write to memory that all
of them see, and connections are only used to wait for each other.

The tensors of an exchange are divided into chunks that fit into the caches of a core. Each instance writes a chunk,
waits for the others, and reads what all of them have written; the next chunk is written before the last is read, so
that there is one barrier for each. Large sums over more than two instances take one more: each instance sums its own
part of a chunk, and reads the sums of the other parts.

An instance that ends closes its connections, so the others fail instead of waiting forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

SUMMED_TYPES = ("float32", "float64", "int32", "int64")  # what numpy adds as fast as TensorFlow
_CHUNK = 1 << 20  # bytes: two of each instance and two of sums fit into a cache of some megabytes
_SMALL = 1 << 16  # bytes: each of many instances sums all of it faster than it waits once more
_SLOTS = 2  # a chunk is written while the one before is summed
_ALIGNMENT = 64  # TensorFlow takes over arrays that are aligned like its own, and copies others
_CONNECT_TIMEOUT_S = 30.0
_BACKLOG = 16  # of other processes that try to connect
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class MismatchError(RuntimeError):
    """The instances do not exchange the same tensors. They can go on with the next exchange."""


class Group:
    """The instances of one host, from the point of view of one of them. All of them make the same calls."""

    def __init__(self, rank: int, peers: Dict[int, socket.socket], memory: mmap.mmap, chunk: int = _CHUNK) -> None:
        """`peers`: a connection to each other instance, by its index. `memory`: `memory_size` bytes."""
        self._rank, self._peers, self._chunk = rank, dict(sorted(peers.items())), chunk
        self._count = len(peers) + 1
        self._memory = memory
        self._next_slot = 0
        self._lock = threading.Lock()

    def sum(self, name: str, arrays: Sequence[Any]) -> List[Any]:
        """Returns the sums over all instances of arrays of one type, added in the order of the instances."""
        arrays = [np.asarray(array, order="C") for array in arrays]
        sums = [_aligned_empty(array.shape, array.dtype) for array in arrays]
        given, received = ([each.reshape(-1) for each in whole] for whole in (arrays, sums))
        ticket = _Ticket(name, "sum", arrays)
        with self._lock:
            if self._count > 2 and sum(each.nbytes for each in arrays) > _SMALL:
                self._sum_in_parts(ticket, given, received)
            else:
                self._exchange(ticket, given, lambda values, chunk: _sum_all(values, received, chunk))
        return sums

    def can_sum(self, dtype: str) -> bool:
        """Whether it sums a type of numbers; anything can be gathered and broadcast."""
        return dtype in SUMMED_TYPES

    def gather(self, name: str, array: Any) -> Any:
        """Returns the arrays of all instances, stacked in the order of the instances."""
        array = np.asarray(array, order="C")
        stacked = _aligned_empty((self._count, *array.shape), array.dtype)
        received = [_bytes_of(row) for row in stacked.reshape(self._count, array.size)]

        def read(values: Any, chunk: _Chunk) -> None:
            for row, content in zip(values, received):
                _read(row, [content], chunk)

        with self._lock:
            self._exchange(_Ticket(name, "gather", [array]), [_bytes_of(array)], read)
        return stacked

    def broadcast(self, name: str, array: Any, root: int = 0) -> Any:
        """Returns the array of one instance."""
        array = np.asarray(array, order="C")
        result = _aligned_empty(array.shape, array.dtype)
        received = [_bytes_of(result)]
        with self._lock:
            self._exchange(
                _Ticket(name, f"broadcast from {root}", [array]), [_bytes_of(array)],
                lambda values, chunk: _read(values[root], received, chunk), writes=self._rank == root,
            )  # fmt: skip
        return result

    def close(self) -> None:
        """Closes the connections: the others fail if they still wait for this instance."""
        for peer in self._peers.values():
            peer.close()

    def _exchange(
        self, ticket: _Ticket, given: Sequence[Any], read: Callable[[Any, _Chunk], None], *, writes: bool = True
    ) -> None:
        """Writes flat arrays of one type, and calls `read` with what all instances have written, chunk by chunk."""
        dtype = given[0].dtype
        chunks = _divide([each.size for each in given], self._chunk // dtype.itemsize) or [[]]
        values, _ = self._views(dtype)
        slots = self._take_slots(len(chunks))
        for number in range(len(chunks) + 1):
            if number < len(chunks) and writes:
                _write(values[slots[number], self._rank], given, chunks[number])
            if number:
                read(values[slots[number - 1]], chunks[number - 1])
            if number < len(chunks):
                self._barrier(ticket)

    def _sum_in_parts(self, ticket: _Ticket, given: Sequence[Any], received: Sequence[Any]) -> None:
        """Sums flat arrays; between two barriers it writes a chunk, sums its part of another and reads a third."""
        dtype = given[0].dtype
        chunks = _divide([each.size for each in given], self._chunk // dtype.itemsize)
        values, totals = self._views(dtype)
        slots = self._take_slots(len(chunks))
        for number in range(len(chunks) + 2):
            if number < len(chunks):
                _write(values[slots[number], self._rank], given, chunks[number])
            if 0 < number <= len(chunks):
                slot, size = slots[number - 1], _size_of(chunks[number - 1])
                own = slice(size * self._rank // self._count, size * (self._rank + 1) // self._count)
                _sum(values[slot, :, own], totals[slot, own])
            if number > 1:
                _read(totals[slots[number - 2]], received, chunks[number - 2])
            if number <= len(chunks):
                self._barrier(ticket)

    def _take_slots(self, count: int) -> List[int]:
        """Returns where the chunks of an exchange are written. The first is not where others may still read."""
        slots = [(self._next_slot + number) % _SLOTS for number in range(count)]
        self._next_slot = (self._next_slot + count) % _SLOTS
        return slots

    def _views(self, dtype: Any) -> Tuple[Any, Any]:
        """Returns the shared values by slot, instance and place, and the shared sums by slot and place."""
        shared = np.frombuffer(self._memory, dtype=np.uint8).view(dtype)
        shared = shared.reshape(_SLOTS, self._count + 1, self._chunk // dtype.itemsize)
        return shared[:, :-1], shared[:, -1]

    def _barrier(self, ticket: _Ticket) -> None:
        """Returns when all instances have called it, for the same exchange."""
        for index, peer in self._peers.items():
            with _lost(index):
                peer.send(ticket.digest)
        received = {}
        for index, peer in self._peers.items():
            with _lost(index):
                received[index] = peer.recv(len(ticket.digest))
            if not received[index]:
                raise _lost_peer(index)
        others = [index for index, digest in received.items() if digest != ticket.digest]
        if others:
            # All instances find this at their first barrier, when none reads anything.
            self._next_slot = 0
            raise MismatchError(
                f"Mismatched tensors: instance {others[0]} does not exchange the same as this one ({ticket.words}). "
                "All instances must run the same program, with tensors of the same names, types and shapes."
            )


def memory_size(count: int, chunk: int = _CHUNK) -> int:
    """Returns the bytes that a number of instances share."""
    return _SLOTS * (count + 1) * chunk


def connect(
    rank: int, count: int, gather: Callable[[bytes], Sequence[bytes]], all_of: Callable[[bool], bool]
) -> Optional[Group]:
    """Connects the instances, if all of them are on one host; None if not. All must call it.

    `gather` returns the bytes of all instances, which have the same length; `all_of` whether something is true for
    all. A host is a network namespace: others cannot connect to its sockets, which have no place in a file system.
    """
    with contextlib.ExitStack() as opened:
        listener, address = None, b""
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            address = _address_of_host() + secrets.token_hex(16).encode()
            listener.bind(address)
            listener.listen(count + _BACKLOG)
        addresses = gather(address.ljust(64, b" "))
        group = None
        if listener and all(each.startswith(_address_of_host()) for each in addresses):
            with contextlib.suppress(OSError):  # a limit of open files, for example: then without shared memory
                group = _join(rank, [each.rstrip(b" ") for each in addresses], listener)
        if all_of(group is not None):
            return group
        if group:
            group.close()
        return None


def _address_of_host() -> bytes:
    """Returns what the addresses of this host begin with. Who waits for a connection from another one waits in vain."""
    start = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    network = os.stat("/proc/self/ns/net")  # noqa: PTH116 - of the namespace that the link leads to
    host = hashlib.blake2b(start + b"%d.%d" % (network.st_dev, network.st_ino), digest_size=8)
    return b"\0tf_ipu_dp-" + host.hexdigest().encode()


def _join(rank: int, addresses: Sequence[bytes], listener: socket.socket) -> Group:
    """Connects to the instances before this one, and waits for those after it."""
    peers: Dict[int, socket.socket] = {}
    memory: Optional[mmap.mmap] = None
    try:
        for index, address in enumerate(addresses[:rank]):
            peers[index] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            peers[index].settimeout(_CONNECT_TIMEOUT_S)
            peers[index].connect(address)
            peers[index].send(addresses[index] + b"%d" % rank)  # only instances know all of it
        size = memory_size(len(addresses))
        handle = os.memfd_create("tf_ipu_dp") if rank == 0 else -1
        try:
            if rank == 0:
                os.ftruncate(handle, size)
            deadline = time.monotonic() + _CONNECT_TIMEOUT_S
            while len(peers) < len(addresses) - 1:
                peer, index = _accept(listener, addresses[rank], deadline)
                peers[index] = peer
                if rank == 0:
                    peer.sendmsg([b"m"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", handle))])
            if rank != 0:
                handle = _receive_handle(peers[0])
            memory = mmap.mmap(handle, size)
        finally:
            if handle >= 0:
                os.close(handle)
        for peer in peers.values():
            peer.settimeout(None)  # from now on an exchange waits for an instance that is late
    except BaseException:
        for peer in peers.values():
            peer.close()
        raise
    return Group(rank, peers, memory)


def _accept(listener: socket.socket, address: bytes, deadline: float) -> Tuple[socket.socket, int]:
    """Returns a connection from another instance of the job, and its index, or raises OSError after the deadline.

    Other processes are turned away: anybody can connect, again and again.
    """
    while True:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise OSError("not all instances have connected")
        listener.settimeout(remaining_s)
        peer, _ = listener.accept()
        peer.settimeout(remaining_s)
        credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] == os.getuid():
            with contextlib.suppress(OSError):
                word = peer.recv(256)
                if word.startswith(address) and word[len(address) :].isdigit():
                    return peer, int(word[len(address) :])
        peer.close()


def _receive_handle(peer: socket.socket) -> int:
    """Returns the file of the shared memory, which instance 0 sends."""
    _, ancillary, _, _ = peer.recvmsg(1, socket.CMSG_SPACE(struct.calcsize("i")))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return int(struct.unpack("i", content[: struct.calcsize("i")])[0])
    raise OSError("instance 0 has sent no shared memory")


# A chunk: pieces of the flat arrays, as number of the array, first and last place, in the order of the chunk.
_Chunk = List[Tuple[int, int, int]]


def _divide(sizes: Sequence[int], limit: int) -> List[_Chunk]:
    """Divides the elements of arrays, one array after the other, into chunks of at most `limit` elements."""
    chunks: List[_Chunk] = []
    room = 0
    for number, size in enumerate(sizes):
        begin = 0
        while begin < size:
            if not room:
                chunks.append([])
                room = limit
            end = min(size, begin + room)
            chunks[-1].append((number, begin, end))
            room -= end - begin
            begin = end
    return chunks


def _size_of(chunk: _Chunk) -> int:
    return sum(end - begin for _, begin, end in chunk)


def _write(shared: Any, arrays: Sequence[Any], chunk: _Chunk) -> None:
    for place, number, begin, end in _placed(chunk):
        shared[place : place + end - begin] = arrays[number][begin:end]


def _read(shared: Any, arrays: Sequence[Any], chunk: _Chunk) -> None:
    for place, number, begin, end in _placed(chunk):
        arrays[number][begin:end] = shared[place : place + end - begin]


def _placed(chunk: _Chunk) -> Iterator[Tuple[int, int, int, int]]:
    place = 0
    for number, begin, end in chunk:
        yield place, number, begin, end
        place += end - begin


def _sum_all(values: Any, arrays: Sequence[Any], chunk: _Chunk) -> None:
    for place, number, begin, end in _placed(chunk):
        _sum(values[:, place : place + end - begin], arrays[number][begin:end])


def _sum(values: Any, total: Any) -> None:
    np.add(values[0], values[1], out=total)
    for more in values[2:]:
        np.add(total, more, out=total)


def _aligned_empty(shape: Tuple[int, ...], dtype: Any) -> Any:
    size = math.prod(shape) * dtype.itemsize
    content: Any = np.empty(size + _ALIGNMENT, np.uint8)
    offset = -content.ctypes.data % _ALIGNMENT
    return content[offset : offset + size].view(dtype).reshape(shape)


def _bytes_of(array: Any) -> Any:
    return array.reshape(-1).view(np.uint8)


class _Ticket:
    """What instances that are in the same exchange have in common."""

    def __init__(self, name: str, kind: str, arrays: Sequence[Any]) -> None:
        self.words = f"{kind} of {name}"
        shapes = [(array.dtype.str, array.shape) for array in arrays]
        self.digest = hashlib.blake2b(repr((name, kind, shapes)).encode(), digest_size=8).digest()


@contextlib.contextmanager
def _lost(index: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _lost_peer(index) from error


def _lost_peer(index: int) -> RuntimeError:
    return RuntimeError(f"This instance lost its peers: the connection to instance {index} was closed.")
