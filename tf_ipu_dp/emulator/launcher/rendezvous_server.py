"""The rendezvous server: instances leave their addresses here, and read those of the others.

It speaks the part of HTTP that Horovod's Gloo controller uses: GET, PUT and DELETE of /GROUP/KEY, where the groups are
those of this job and keys are ranks; and exit notices. Everything else is refused. It knows who asks:

- A job of poprun has a secret, which its instances find in their environment and send with every request. It stands in
  the address that Horovod gets, `ADDRESS:PORT/SECRET`, because Horovod puts the rest of a URL behind what it is given.
- Without a secret, under mpirun and srun, connections from this machine must belong to this user.

Of several hosts, only the addresses that they have announced are answered.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hmac
import http
import http.server
import os
import re
import socket
import socketserver
import struct
import threading
from pathlib import Path
from typing import AbstractSet, Any, Callable, Deque, Dict, List, Optional, Sequence, Set, Tuple

from tf_ipu_dp.emulator.launcher import exit_notices
from tf_ipu_dp.emulator.launcher.connection_watch import ConnectionWatch

_REQUEST_TIMEOUT_S = 10.0  # for one request; a client that sends nothing is dropped
_MAX_REQUESTS, _MAX_REQUESTS_PER_INSTANCE = 64, 4  # at the same time
_MAX_BODY_BYTES, _MAX_BODY_BYTES_PER_INSTANCE = 4096, 1024  # Gloo sends about 70 bytes for each other instance
_MAX_PROCESS_SETS = 1024
_PORT_ATTEMPTS = 20
_PROCESS_SET = re.compile(r"(.+)_process_set_hash_[0-9a-f]{1,16}")
_KEY = re.compile(r"(?:rank_)?([0-9]{1,7})")
_CONNECTIONS = Path("/proc/net/tcp")


class Server:
    """The server, in threads of this process: one port, at one or several addresses."""

    def __init__(
        self,
        slots: Sequence[Tuple[str, int]],
        addresses: Sequence[str],
        port: int = 0,
        *,
        secret: str = "",
        peers: Optional[AbstractSet[str]] = None,
        on_exit_notice: Callable[[int], None] = lambda instance: None,
        watch: Optional[ConnectionWatch] = None,
    ) -> None:
        """`slots` are hosts and their numbers of instances; `peers` the addresses to answer, None for all."""
        self._watch = watch
        self._groups = _Groups(slots)
        self._listeners = _listen(addresses, port)
        for listener in self._listeners:
            listener.accept_from(self._groups, secret, peers, on_exit_notice, watch)
            threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listeners[0].server_address[1])

    def stop(self) -> None:
        """Closes the port."""
        if self._watch is not None:
            self._watch.close()
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()


class _Groups:
    """What instances have written: their addresses, by group and key. Can be used from any thread."""

    def __init__(self, slots: Sequence[Tuple[str, int]]) -> None:
        self.instances = sum(count for _, count in slots)
        self.max_body_bytes = _MAX_BODY_BYTES + self.instances * _MAX_BODY_BYTES_PER_INSTANCE
        most = max(count for _, count in slots)
        # Horovod's groups: all instances, those of each host, and those with the same index on every host.
        self._sizes = {"global": self.instances}
        self._sizes.update({f"local_{host}": count for host, count in slots})
        self._sizes.update({f"cross_{local}": sum(count > local for _, count in slots) for local in range(most)})
        self._lock = threading.Lock()
        self._values: Dict[str, Dict[str, bytes]] = {}
        self._connected: Dict[str, Set[str]] = collections.defaultdict(set)

    def parse(self, path: str) -> Optional[Tuple[str, str]]:
        """Returns group and key of a path; None if this job has no such group or instance."""
        group, _, key = path[1:].rpartition("/")
        of_subset = _PROCESS_SET.fullmatch(group)
        rank = _KEY.fullmatch(key)
        is_known = (of_subset[1] if of_subset else group) in self._sizes
        return (group, key) if path.startswith("/") and is_known and rank and int(rank[1]) < self.instances else None

    def get(self, group: str, key: str) -> Optional[bytes]:
        with self._lock:
            return self._values.get(group, {}).get(key)

    def put(self, group: str, key: str, value: bytes) -> bool:
        """Stores a value; returns whether there was room."""
        with self._lock:
            if group not in self._values and len(self._values) >= len(self._sizes) + _MAX_PROCESS_SETS:
                return False
            self._values.setdefault(group, {})[key] = value
            return True

    def delete(self, group: str, key: str) -> None:
        """Notes that a member has connected; the addresses of a group are removed when all members have.

        They may connect again later, at other addresses. The groups of process sets have no known size: their
        addresses are removed one by one.
        """
        with self._lock:
            size = self._sizes.get(group)
            if size is None:
                values = self._values.get(group, {})
                values.pop(key, None)
                if not values:
                    self._values.pop(group, None)
                return
            self._connected[group].add(key)
            if len(self._connected[group]) == size:
                del self._connected[group]
                self._values.pop(group, None)


class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """The server at one address."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024  # all instances connect at once
    groups: _Groups

    def accept_from(
        self,
        groups: _Groups,
        secret: str,
        peers: Optional[AbstractSet[str]],
        on_exit_notice: Callable[[int], None],
        watch: Optional[ConnectionWatch],
    ) -> None:
        """Sets what is served, and to whom. Called before the first request is read."""
        self.groups, self.on_exit_notice, self.watch = groups, on_exit_notice, watch
        self._peers, self._has_secret = peers, bool(secret)
        self.prefix = f"/{secret}:{self.server_address[1]}" if secret else ""
        self._max_requests = _MAX_REQUESTS + _MAX_REQUESTS_PER_INSTANCE * groups.instances
        self._open: Deque[Any] = collections.deque()
        self._guard = threading.Lock()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if self._peers is not None and client_address[0] not in self._peers:
            return False
        return self._has_secret or _is_own_user(client_address, request.getsockname())

    def process_request(self, request: Any, client_address: Any) -> None:
        """Starts the thread of a request. One too many replaces the oldest: the job's own take milliseconds."""
        with self._guard:
            self._open.append(request)
            oldest = self._open.popleft() if len(self._open) > self._max_requests else None
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard, contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing when a client closes its connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
    """One request."""

    server: _Listener
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        place = self._find_place()
        value = self.server.groups.get(*place) if place else None
        if place and value is None:
            self._answer(http.HTTPStatus.NOT_FOUND)
        elif value is not None:
            self._answer(http.HTTPStatus.OK, value)

    def do_PUT(self) -> None:
        path = self._authorised_path()
        instance = exit_notices.parse(path) if path is not None else None
        if instance is not None and instance < self.server.groups.instances:
            self.server.on_exit_notice(instance)  # before the answer, for which the instance waits
            self._answer(http.HTTPStatus.OK)
            return
        place = self._find_place() if path is not None else None
        if place is None:
            return
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,9}", length):
            self._answer(http.HTTPStatus.LENGTH_REQUIRED)
        elif int(length) > self.server.groups.max_body_bytes:
            self._answer(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            self._put(place, int(length))

    def do_DELETE(self) -> None:
        place = self._find_place()
        if place is not None:
            if self.server.watch is not None:
                self.server.watch.deleted(place[0])
            self.server.groups.delete(*place)
            self._answer(http.HTTPStatus.OK)

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""

    def _put(self, place: Tuple[str, str], length: int) -> None:
        value = self.rfile.read(length)
        if len(value) < length:
            self._answer(http.HTTPStatus.BAD_REQUEST)
        elif not self.server.groups.put(*place, value):
            self._answer(http.HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        else:
            if self.server.watch is not None:
                self.server.watch.written(*place)
            self._answer(http.HTTPStatus.OK)

    def _authorised_path(self) -> Optional[str]:
        """Returns the path without the secret; None, after an answer, if the client does not have it."""
        prefix = self.server.prefix
        if not hmac.compare_digest(self.path[: len(prefix)].encode(), prefix.encode()):
            self._answer(http.HTTPStatus.FORBIDDEN)
            return None
        return self.path[len(prefix) :]

    def _find_place(self) -> Optional[Tuple[str, str]]:
        """Returns group and key of the request; None, after an answer, if it is refused."""
        path = self._authorised_path()
        place = self.server.groups.parse(path) if path is not None else None
        if path is not None and place is None:
            self._answer(http.HTTPStatus.BAD_REQUEST)
        return place

    def _answer(self, status: http.HTTPStatus, value: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(value)))
        self.end_headers()
        self.wfile.write(value)


def _listen(addresses: Sequence[str], port: int) -> List[_Listener]:
    """Returns a listener at each address, all at the same port: the given one, or one that is free at all of them."""
    for attempt in range(_PORT_ATTEMPTS):
        listeners: List[_Listener] = []
        try:
            for address in dict.fromkeys(addresses):
                chosen = listeners[0].server_address[1] if listeners else port
                listeners.append(_Listener((address, int(chosen)), _Handler))
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.server_close()
            if port or error.errno != errno.EADDRINUSE or attempt == _PORT_ATTEMPTS - 1:
                raise
    raise AssertionError("the loop returns or raises")


def _is_own_user(client: Tuple[str, int], server: Tuple[str, int]) -> bool:
    """Whether a connection from this machine belongs to this user; those from other machines are not known here."""
    try:
        lines = _CONNECTIONS.read_text(encoding="ascii").splitlines()[1:]
    except OSError:  # not Linux
        return True
    ends = (_as_in_proc(client), _as_in_proc(server))
    for line in lines:
        words = line.split()
        if (words[1], words[2]) == ends:
            return int(words[7]) == os.geteuid()
    return not client[0].startswith("127.") and client[0] != server[0]


def _as_in_proc(end: Tuple[str, int]) -> str:
    """Returns an address and a port as /proc/net/tcp has them: in the machine's order of bytes."""
    (number,) = struct.unpack("=I", socket.inet_aton(end[0]))
    return f"{number:08X}:{end[1]:04X}"
