"""Two ways to query gcipuinfo: in this process, or in a child process that may crash or hang without harm."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Iterator, Mapping, Optional, Protocol, Sequence, Tuple, Union

from tf_ipu_dp import sdk_types
from tf_ipu_dp.monitoring import devices
from tf_ipu_dp.monitoring.devices import TelemetryError

_FIRST_ANSWER_S = 10.0
_NEXT_ANSWER_S = 5.0
_RETRY_DELAY_S = 10.0
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class DeviceFailure:
    """A device whose attributes cannot be read."""

    reason: str
    id: Optional[str] = None  # if at least the id could be read


DeviceAnswer = Union[Mapping[str, str], DeviceFailure]


class Client(Protocol):
    """Queries gcipuinfo. All methods raise TelemetryError where the library as a whole fails."""

    def read_devices(self) -> Sequence[DeviceAnswer]:
        """Returns the attributes of each device, or why they cannot be read."""

    def check_health(self) -> str:
        """Returns the library's answer to its health check, as text."""

    def read_event(self, path: str) -> Mapping[str, str]:
        """Returns the last event record of an application, empty if there is none."""

    def close(self) -> None:
        """Releases the client's resources."""


class InProcessClient:
    """Queries the library in this process."""

    def __init__(self, library: sdk_types.GcipuinfoModule) -> None:
        self._library = library
        self._inventory: Optional[sdk_types.DeviceInventory] = None

    def read_devices(self) -> Sequence[DeviceAnswer]:
        """Returns the attributes of each device, or why they cannot be read."""
        with self._open_inventory() as inventory:
            return [_read_attributes(device) for device in inventory.getDevices()]

    def check_health(self) -> str:
        """Returns the library's answer to its health check, as text."""
        with self._open_inventory() as inventory:
            return str(inventory.checkHealthOfDevices())

    def read_event(self, path: str) -> Mapping[str, str]:
        """Returns the last event record of an application, empty if there is none."""
        with self._open_inventory() as inventory:
            record = inventory.getLastAppEventRecord(path)
            return {str(key): str(record[key]) for key in record}

    def close(self) -> None:
        """Does nothing: the library stays loaded until this process ends."""

    @contextlib.contextmanager
    def _open_inventory(self) -> Iterator[sdk_types.DeviceInventory]:
        """Opens the inventory at the first query, and turns any error of the library into a TelemetryError."""
        try:
            if self._inventory is None:
                inventory = self._library.gcipuinfo()
                inventory.setUpdateMode(True)
                self._inventory = inventory
            yield self._inventory
        except Exception as error:
            raise TelemetryError(f"gcipuinfo failed ({devices.shorten(error)})") from error


class SubprocessClient:
    """Queries the Poplar SDK's library in a child process, because it may crash, hang or print to stdout."""

    def __init__(self) -> None:
        self._process: Optional[subprocess.Popen[bytes]] = None
        self._last_failure: Optional[Tuple[float, str]] = None
        self._buffer = b""
        self._lock = threading.Lock()

    def read_devices(self) -> Sequence[DeviceAnswer]:
        """Returns the attributes of each device, or why they cannot be read."""
        answers = self._query("devices")
        return [DeviceFailure(*answer) if isinstance(answer, list) else answer for answer in answers]

    def check_health(self) -> str:
        """Returns the library's answer to its health check, as text."""
        return str(self._query("health"))

    def read_event(self, path: str) -> Mapping[str, str]:
        """Returns the last event record of an application, empty if there is none."""
        event: Mapping[str, str] = self._query("event", path)
        return event

    def close(self) -> None:
        """Kills the child process, if there is one."""
        with self._lock:
            self._kill()

    def _query(self, name: str, *arguments: str) -> Any:
        """Returns the child's answer; TelemetryError after a timeout of some seconds at most."""
        with self._lock:
            timeout_s = _NEXT_ANSWER_S
            if self._process is None:
                if self._last_failure and time.monotonic() - self._last_failure[0] < _RETRY_DELAY_S:
                    raise TelemetryError(self._last_failure[1])
                self._start()
                timeout_s = _FIRST_ANSWER_S
            try:
                answer = json.loads(self._exchange(json.dumps([name, *arguments]).encode() + b"\n", timeout_s))
            except (OSError, ValueError, EOFError) as error:
                problem = self._describe_failure(error, timeout_s)
                self._last_failure = (time.monotonic(), problem)
                self._kill()
                raise TelemetryError(problem) from error
            except BaseException:
                # A late answer would be mistaken for the answer to the next query.
                self._kill()
                raise
        if "answer" not in answer:
            raise TelemetryError(answer.get("problem", devices.NO_ANSWER))
        return answer["answer"]

    def _start(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        serve = f"from tf_ipu_dp.monitoring import clients; clients.serve({os.getpid()})"
        code = f"import sys; sys.path.append({root!r}); {serve}"
        self._buffer = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            bufsize=0,
        )  # fmt: skip

    def _exchange(self, query: bytes, timeout_s: float) -> bytes:
        assert self._process and self._process.stdin and self._process.stdout
        self._process.stdin.write(query)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                raise TimeoutError
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                raise EOFError
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _describe_failure(self, error: BaseException, timeout_s: float) -> str:
        if isinstance(error, TimeoutError):
            return f"gcipuinfo did not answer within {timeout_s:.0f} s"
        assert self._process
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            if code < 0:
                return f"gcipuinfo crashed with signal {-code} ({signal.strsignal(-code)})"
            return f"gcipuinfo ended its process with exit code {code}"
        return f"gcipuinfo's answer is not valid ({devices.shorten(error)})"

    def _kill(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream:
                    with contextlib.suppress(OSError):
                        stream.close()
            self._process = None


def serve(parent: int) -> None:
    """Answers the queries of a SubprocessClient, one JSON line each, in its child process. Ends with its parent."""
    _end_with_parent()
    if os.getppid() != parent:
        return
    # Control-C reaches this process too, but the monitor ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # keeps what the library prints out of the answers
    client: Optional[InProcessClient] = None
    for line in sys.stdin:
        try:
            if client is None:
                library: Any = importlib.import_module("gcipuinfo")
                client = InProcessClient(library)
            answer = {"answer": _answer(client, *json.loads(line))}
        except TelemetryError as error:
            answer = {"problem": str(error)}
        except Exception as error:
            answer = {"problem": f"gcipuinfo cannot be imported ({devices.shorten(error)})"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(client: InProcessClient, name: str, *arguments: str) -> Any:
    """Returns the answer to a query as a JSON value: a failed device is a list of its reason and id."""
    if name == "health":
        return client.check_health()
    if name == "event":
        return client.read_event(*arguments)
    return [[each.reason, each.id] if isinstance(each, DeviceFailure) else each for each in client.read_devices()]


def _end_with_parent() -> None:
    """Makes Linux kill this process when its parent ends, even while the library hangs."""
    if sys.platform == "linux":
        with contextlib.suppress(ImportError, OSError, AttributeError):
            import ctypes

            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _read_attributes(device: Mapping[str, str]) -> DeviceAnswer:
    try:
        return {str(key): str(device[key]) for key in device}
    except Exception as error:
        reason = f"gcipuinfo failed ({devices.shorten(error)})"
    with contextlib.suppress(Exception):
        return DeviceFailure(reason, str(device["id"]))
    return DeviceFailure(reason)
