"""All-reduce between the instances of one host, through shared memory.

Horovod sends everything through TCP connections, also between processes of one machine, and its threads poll: two
instances take as long to exchange the 3.4 MB of an MLP as to compute them. Here the instances write to memory that all
of them see, and connections are only used to wait for each other.

The tensors of an exchange are divided into chunks that fit into the caches of a core, and a chunk into one part per
instance. For each chunk an instance (1) writes its values, (2) sums its own part over all instances, always in the
same order, (3) reads the sums of the other parts. There is a barrier after each. The chunks are pipelined: between two
barriers an instance does (1) for one chunk, (2) for the one before and (3) for the one before that.

An instance that ends closes its connections, so the others fail instead of waiting forever.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

TYPES = ("float32", "float64")  # what numpy adds as fast as TensorFlow
_CHUNK = 1 << 20  # bytes: two of each instance and two of sums fit into a cache of some megabytes
_SLOTS = 2  # a chunk is written while the one before is summed
_ALIGNMENT = 64  # TensorFlow takes over arrays that are aligned like its own, and copies others
_CONNECT_TIMEOUT_S = 30.0
_BACKLOG = 16  # of other processes that try to connect
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Group:
    """The instances of one host, from the point of view of one of them."""

    def __init__(self, rank: int, peers: Dict[int, socket.socket], memory: mmap.mmap, chunk: int = _CHUNK) -> None:
        """`peers`: a connection to each other instance, by its index. `memory`: `memory_size` bytes."""
        self._rank, self._peers, self._chunk = rank, dict(sorted(peers.items())), chunk
        self._count = len(peers) + 1
        self._memory = memory
        self._lock = threading.Lock()

    def sum(self, name: str, arrays: Sequence[Any]) -> List[Any]:
        """Returns the sums over all instances of arrays of one type. All instances must give the same shapes."""
        arrays = [np.asarray(array, order="C") for array in arrays]
        sums = [_aligned_empty(array) for array in arrays]
        dtype = arrays[0].dtype
        given, received = ([each.reshape(-1) for each in whole] for whole in (arrays, sums))
        chunks = _divide([each.size for each in given], self._chunk // dtype.itemsize)
        values, totals = self._views(dtype)
        ticket = _ticket(name, arrays)
        with self._lock:
            for number in range(len(chunks) + 2):
                if number < len(chunks):
                    _write(values[number % _SLOTS, self._rank], given, chunks[number])
                if 0 < number <= len(chunks):
                    slot, size = (number - 1) % _SLOTS, _size_of(chunks[number - 1])
                    own = slice(size * self._rank // self._count, size * (self._rank + 1) // self._count)
                    _sum(values[slot, :, own], totals[slot, own])
                if number > 1:
                    _read(totals[number % _SLOTS], received, chunks[number - 2])
                if number <= len(chunks):
                    self._barrier(ticket, name)
        return sums

    def close(self) -> None:
        """Closes the connections: the others fail if they still wait for this instance."""
        for peer in self._peers.values():
            peer.close()

    def _views(self, dtype: Any) -> Tuple[Any, Any]:
        """Returns the shared values by slot, instance and place, and the shared sums by slot and place."""
        shared = np.frombuffer(self._memory, dtype=np.uint8).view(dtype)
        shared = shared.reshape(_SLOTS, self._count + 1, self._chunk // dtype.itemsize)
        return shared[:, :-1], shared[:, -1]

    def _barrier(self, ticket: bytes, name: str) -> None:
        """Returns when all instances have called it, for the same exchange."""
        for index, peer in self._peers.items():
            with _lost(index):
                peer.send(ticket)
        for index, peer in self._peers.items():
            with _lost(index):
                received = peer.recv(len(ticket))
            if not received:
                raise _lost_peer(index)
            if received != ticket:
                raise RuntimeError(
                    f"Instance {index} does not exchange the same tensors as this one ({name}): all instances must run "
                    "the same program, with tensors of the same names, types and shapes."
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
            address = b"\0tf_ipu_dp-" + secrets.token_hex(16).encode()
            listener.bind(address)
            listener.listen(count + _BACKLOG)
        addresses = gather(address.ljust(64, b" "))
        group = None
        if listener and all(each.strip() for each in addresses):
            with contextlib.suppress(OSError):  # another host, or a limit of open files: then without shared memory
                group = _join(rank, [each.rstrip(b" ") for each in addresses], listener)
        if all_of(group is not None):
            return group
        if group:
            group.close()
        return None


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


def _sum(values: Any, total: Any) -> None:
    np.add(values[0], values[1], out=total)
    for more in values[2:]:
        np.add(total, more, out=total)


def _aligned_empty(like: Any) -> Any:
    content: Any = np.empty(like.nbytes + _ALIGNMENT, np.uint8)
    offset = -content.ctypes.data % _ALIGNMENT
    return content[offset : offset + like.nbytes].view(like.dtype).reshape(like.shape)


def _ticket(name: str, arrays: Sequence[Any]) -> bytes:
    """Returns what instances that are in the same exchange have in common."""
    shapes = [(array.dtype.str, array.shape) for array in arrays]
    return hashlib.blake2b(repr((name, shapes)).encode(), digest_size=8).digest()


@contextlib.contextmanager
def _lost(index: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _lost_peer(index) from error


def _lost_peer(index: int) -> RuntimeError:
    return RuntimeError(f"This instance lost its peers: the connection to instance {index} was closed.")
