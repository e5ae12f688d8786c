"""The hosts of a job: what each of them runs, and how another machine is made to run it.

On another machine, a remote shell starts `python -m tf_ipu_dp.emulator.launcher.hosts`. The two sides exchange lines
of JSON: the job, signals and a regular sign of life one way, output and exits and the same sign the other. When the
other side has been silent for a while, or the job's network has gone, each ends what it has started: nothing is left
behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import ipaddress
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.launcher import orphans, placement, processes

LOOPBACK = "127.0.0.1"
REPORT = "IPU_EMULATOR_REPORT"
REMOTE_SHELL = "OMPI_MCA_plm_rsh_agent"  # the variable of Open MPI that names another one than ssh
_BEAT_S = 3.0
_SILENCE_S = 15.0
_ANSWER_S = 20.0  # ssh gives up after 10
_REACH_S = 10.0
_FRAME = b"\x1eipu:"  # what a login shell prints does not begin so
_NO_DIRECTORY, _NO_PYTHON = 81, 82
_CLONE_NEWUTS, _MOST_NAME = 0x04000000, 64
_FORWARDED = (
    "CPATH", "GCDA_MONITOR", "LD_LIBRARY_PATH", "OPAL_PREFIX", "PATH", "PYTHONPATH", "TFDS_DATA_DIR",
)  # fmt: skip
_FORWARDED_FAMILIES = ("HOROVOD_", "IPUOF_", "IPU_EMULATOR_", "KMP_", "OMP_", "POPLAR_", "PYTHON", "TF_")


class HostError(RuntimeError):
    """A host cannot do its part. The text is shown to the user as is."""

    def __init__(self, host: str, text: str) -> None:
        super().__init__(text)
        self.host = host


@dataclasses.dataclass(frozen=True)
class Interface:
    """An address of a machine."""

    name: str
    address: str
    netmask: str

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/{self.netmask}", strict=False)


@dataclasses.dataclass(frozen=True)
class HostJob:
    """What one host runs. It travels as JSON."""

    program: Sequence[str]
    directory: str
    environ: Mapping[str, str]  # of all instances, beside what the host has of its own
    instances: Mapping[int, Mapping[str, str]]  # each with its own variables
    numa: bool
    server: Optional[Tuple[str, int]] = None  # where the instances meet
    own_name: str = ""  # that the machine takes for the job, where another has the same
    ipus: int = 0  # of the whole job; 0 where none are to be kept for it
    name: str = ""  # of the job

    def commands(self, environ: Mapping[str, str]) -> Dict[int, processes.Command]:
        """Returns the processes, with this machine's cores divided between them, and IPUs that are kept for them."""
        block = None
        with contextlib.suppress(registry.RegistryError):  # it is told to those who attach a device
            if self.ipus:
                partition = registry.Partition.from_environment({**environ, **self.environ})
                block = partition.keep(self.ipus, self.name)
        kept = {registry.BLOCK: registry.render_block(block) if block else ""}
        places = placement.place(placement.read_nodes(self.numa), len(self.instances))
        return {
            index: processes.Command(
                self.program,
                {**place.variables(), **environ, **self.environ, **own, **kept},
                self.directory,
                place.cpus,
            )
            for place, (index, own) in zip(places, self.instances.items())
        }

    def to_json(self) -> Dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> HostJob:
        """Returns what `to_json` was called on; JSON's keys are text."""
        return cls(**{**value, "instances": {int(index): own for index, own in value["instances"].items()}})


def forwarded(environ: Mapping[str, str], extra: Sequence[str]) -> Dict[str, str]:
    """Returns what another machine needs to know of this one's environment."""
    return {
        name: value
        for name, value in environ.items()
        if name in _FORWARDED or name in extra or name.startswith(_FORWARDED_FAMILIES)
    }


def own_environment() -> Dict[str, str]:
    """Returns this process's environment, without what concerns only itself."""
    return {name: value for name, value in os.environ.items() if name not in (REPORT, orphans.NAME)}


def is_here(host: str) -> bool:
    """Whether a name or an address is this machine's."""
    if host in ("localhost", LOOPBACK, "::1", socket.gethostname(), socket.gethostname().split(".")[0]):
        return True
    try:
        found = socket.getaddrinfo(host.rpartition("@")[2], 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind((address[0], 0))  # which only an own address allows
            return True
    return False


def read_interfaces() -> List[Interface]:
    """Returns the addresses of this machine that others can use."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        Interface(name, each.address, each.netmask)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name in up and each.family == socket.AF_INET and each.netmask and not each.address.startswith("127.")
    ]


def choose_interface(host: str, theirs: Sequence[Interface], ours: Sequence[Interface], subnet: str) -> Interface:
    """Returns the address of a host that the others talk to: of the subnet, or of its name, or of a shared network."""
    if subnet:
        try:
            network = ipaddress.ip_network(subnet, strict=False)
        except ValueError as error:
            raise HostError(host, f"--host-subnet {subnet} is not a network like 10.1.0.0/16.") from error
        wanted = [each for each in theirs if ipaddress.ip_address(each.address) in network]
    else:
        with contextlib.suppress(OSError):
            known = socket.gethostbyname(host.rpartition("@")[2])
            named = [each for each in theirs if each.address == known]
            if named:
                return named[0]
        networks = [each.network for each in ours]
        wanted = [each for each in theirs if each.network in networks]
    if not wanted:
        has = ", ".join(f"{each.address} ({each.name})" for each in theirs) or "none"
        where = f"in --host-subnet {subnet}" if subnet else "in a network of this machine"
        raise HostError(host, f"Host {host} has no address {where}; it has {has}. Choose one with --host-subnet CIDR.")
    return wanted[0]


def address_towards(host: str, address: str) -> str:
    """Returns the address of this machine that another one sees. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise HostError(host, f"There is no route to host {host} at {address} ({error.strerror}).") from error
        return str(probe.getsockname()[0])


def find_remote_shell(asked: Optional[str]) -> List[str]:
    """Returns the command that runs a line on another machine: the first that is there of what Open MPI is told."""
    choices = [shlex.split(each) for each in (asked or "ssh").split(":") if each.strip()]
    for words in choices:
        if words and shutil.which(words[0]):
            usual = ["-x", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"] if Path(words[0]).name == "ssh" else []
            return [*words, *usual]
    names = " or ".join(words[0] for words in choices if words) or repr(asked)
    raise HostError(
        "", f"There is no {names} to reach other hosts with. Name a remote shell in OMPI_MCA_plm_rsh_agent."
    )


class Remote:
    """The processes of a job on another machine; to its user, a `processes.Group`."""

    def __init__(self, host: str, shell: Sequence[str], output: processes.Output, events: processes.Events) -> None:
        self.host = host
        self.indices: List[int] = []
        self.hostname = ""
        self.interfaces: List[Interface] = []
        self._job: Optional[HostJob] = None
        self._output, self._events = output, events
        self._said: List[str] = []  # by the remote shell, on its stderr
        self._answered, self._closed = threading.Event(), threading.Event()
        self._refusal = ""
        self._busy = False
        self._heard = time.monotonic()
        self._sending = threading.Lock()
        self._process = subprocess.Popen(
            [*shell, host, _command_line()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for target in (self._read, self._read_errors, self._beat):
            threading.Thread(target=target, daemon=True).start()

    def wait(self) -> None:
        """Returns when the other side has answered."""
        self._answered.wait(_ANSWER_S)
        if not self._answered.is_set():
            self._refusal = f"Host {self.host} did not answer within {_ANSWER_S:.0f} s."
        if self._refusal:
            raise HostError(self.host, self._refusal)

    def give(self, job: HostJob) -> None:
        """Says what to run."""
        self._job, self.indices = job, list(job.instances)

    def start(self) -> None:
        """Starts the processes. That they could not be is told as an event."""
        assert self._job is not None
        self._send(job=self._job.to_json())

    def send(self, number: int) -> None:
        """Sends a signal to every process."""
        self._send(signal=number)

    def close(self, patience_s: float, ask: bool) -> None:
        """Ends whatever is left there, and the connection."""
        if not self._refusal and self._job is not None:
            self._send(close=[patience_s, ask])
            self._closed.wait(patience_s + processes.FAILURE_GRACE_S)
        self._refusal = self._refusal or "closed"
        self._closed.set()
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(processes.FAILURE_GRACE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def is_told(self) -> bool:
        """Whether all output has been passed on. For a closed group."""
        return self._closed.is_set()

    def _send(self, **frame: Any) -> None:
        assert self._process.stdin is not None
        with self._sending, contextlib.suppress(OSError, ValueError):  # its end is noticed by who reads
            self._process.stdin.write(json.dumps(frame).encode() + b"\n")
            self._process.stdin.flush()

    def _beat(self) -> None:
        while not self._refusal:
            self._send(beat=1)
            time.sleep(_BEAT_S)
            silent = time.monotonic() - self._heard
            if self._answered.is_set() and silent > _SILENCE_S and not self._busy:
                self._lose(f"Host {self.host} has not answered for {silent:.0f} s.")

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._heard = time.monotonic()
                if line.startswith(_FRAME):
                    self._take(line[len(_FRAME) :])
        except Exception as error:
            self._lose(f"What host {self.host} sent could not be used ({type(error).__name__}: {error}).")
            return
        self._process.wait()
        time.sleep(0.1)  # for the last words of the remote shell
        self._lose(self._why_it_ended())

    def _take(self, frame: bytes) -> None:
        self._busy = True  # whoever reads our output may take his time
        try:
            ((what, value),) = json.loads(frame).items()
            handler: Callable[[Any], None] = getattr(self, f"_on_{what}")
            handler(value)
        finally:
            self._heard, self._busy = time.monotonic(), False

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for raw in self._process.stderr:
            line = raw.decode("utf-8", "replace").strip()
            self._said = [*self._said[-20:], line]
            if self.hostname and line:
                self._output.write(min(self.indices, default=0), "stderr", f"{self.host}: {line}\n".encode())

    def _lose(self, reason: str) -> None:
        if not self._refusal:
            self._refusal = reason
            self._answered.set()
            if self._job is not None:
                self._events.lost(self.host, reason)
        self._closed.set()

    def _why_it_ended(self) -> str:
        code, said = self._process.returncode, next((line for line in reversed(self._said) if line), "")
        if code == _NO_DIRECTORY:
            return f"Host {self.host} has no directory {Path.cwd()}. Make it there, or start from one that all have."
        if code == _NO_PYTHON:
            return f"Host {self.host} has no {sys.executable}. Install the same environment at the same place there."
        if "No module named" in said:
            return f"Host {self.host} misses a part of the same environment in {sys.prefix}: {said}."
        if self.hostname:
            return f"The connection to host {self.host} was lost{f' ({said})' if said else ''}."
        return f"Host {self.host} cannot be reached: {said or f'the remote shell ended with {code}'}."

    def _on_hello(self, value: Sequence[Any]) -> None:
        self.hostname, interfaces = value
        self.interfaces = [Interface(*each) for each in interfaces]
        self._answered.set()

    def _on_beat(self, _: Any) -> None:
        pass

    def _on_output(self, value: Tuple[int, str, str]) -> None:
        self._output.write(value[0], value[1], value[2].encode("latin-1"))

    def _on_finish(self, value: Tuple[int, str]) -> None:
        self._output.finish(*value)

    def _on_exited(self, value: Tuple[int, int, int]) -> None:
        self._events.exited(processes.Exit(*value))

    def _on_refused(self, value: str) -> None:
        self._lose(f"Host {self.host}: {value}")

    def _on_closed(self, _: Any) -> None:
        self._closed.set()


def _command_line() -> str:
    """Returns what the other machine's shell is told, whichever shell it is."""
    root = Path(__file__).resolve().parents[3]
    directory, python = shlex.quote(str(Path.cwd())), shlex.quote(sys.executable)
    script = (
        f"cd {directory} 2>/dev/null || exit {_NO_DIRECTORY}; test -x {python} || exit {_NO_PYTHON}; "
        f"PYTHONPATH={shlex.quote(str(root))} exec {python} -m tf_ipu_dp.emulator.launcher.hosts"
    )
    return f"exec sh -c {shlex.quote(script)}"


class _Agent:
    """The other side of `Remote`. It is also where the group's output and events go."""

    def __init__(self) -> None:
        # Signal handlers put into it, at any moment.
        self._inbox: queue.SimpleQueue[Optional[Dict[str, Any]]] = queue.SimpleQueue()
        self._group: Optional[processes.Group] = None
        self._writing = threading.Lock()

    def run(self) -> None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, lambda *_: self._inbox.put(None))
        interfaces = [[each.name, each.address, each.netmask] for each in read_interfaces()]
        self._tell("hello", [socket.gethostname(), interfaces])
        for target in (self._read, self._beat):
            threading.Thread(target=target, daemon=True).start()
        heard = time.monotonic()
        while True:
            try:
                frame = self._inbox.get(timeout=1.0)
            except queue.Empty:
                if time.monotonic() - heard > _SILENCE_S:
                    break
                continue
            if frame is None:
                break
            heard = time.monotonic()
            ((what, value),) = frame.items()
            if what == "job":
                self._start(HostJob.from_json(value))
            elif what == "signal" and self._group is not None:
                self._group.send(value)
            elif what == "close":
                threading.Thread(target=self._close, args=tuple(value), daemon=True).start()
        if self._group is not None:
            self._group.close(processes.FAILURE_GRACE_S, ask=True)

    def write(self, index: int, name: str, data: bytes) -> None:
        self._tell("output", [index, name, data.decode("latin-1")])

    def finish(self, index: int, name: str) -> None:
        self._tell("finish", [index, name])

    def exited(self, ended: processes.Exit) -> None:
        self._tell("exited", [ended.index, ended.status, ended.by_signal])

    def _start(self, job: HostJob) -> None:
        why = _reach(job.server, _REACH_S)
        if why:
            self._refuse(f"{why} Choose another network with --host-subnet CIDR.")
            return
        if job.own_name and not _take_name(job.own_name):
            self._refuse(
                f"another host is called {socket.gethostname()} too, and Horovod takes the two for one. "
                "Give them different names."
            )
            return
        try:
            self._group = processes.Group("", job.commands(own_environment()), self, self)
            self._group.start()
        except OSError as error:
            self._refuse(f"{job.program[0]} cannot be started ({error.strerror}).")
            return
        threading.Thread(target=self._watch_network, args=(job.server,), daemon=True).start()

    def _close(self, patience_s: float, ask: bool) -> None:
        if self._group is not None:
            self._group.close(patience_s, ask)
            while not self._group.is_told():
                time.sleep(0.01)
        self._tell("closed", 1)

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            self._inbox.put(json.loads(line))
        self._inbox.put(None)

    def _beat(self) -> None:
        while True:
            self._tell("beat", 1)
            time.sleep(_BEAT_S)

    def _watch_network(self, server: Optional[Tuple[str, int]]) -> None:
        """The remote shell may come another way than the instances talk to each other."""
        while True:
            time.sleep(_BEAT_S)
            why = _reach(server, _SILENCE_S)
            if why:
                self._refuse(why)
                return

    def _refuse(self, why: str) -> None:
        self._tell("refused", why)
        self._inbox.put(None)

    def _tell(self, what: str, value: Any) -> None:
        data = _FRAME + json.dumps({what: value}).encode() + b"\n"
        try:
            with self._writing:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except (OSError, ValueError):  # the other side has gone
            self._inbox.put(None)


def _take_name(name: str) -> bool:
    """Gives this process and its children a host name of their own; containers and namespaces may share one."""
    libc = ctypes.CDLL(None, use_errno=True)
    text = name.encode()[:_MOST_NAME]
    return bool(libc.unshare(_CLONE_NEWUTS) == 0 and libc.sethostname(text, len(text)) == 0)


def _reach(server: Optional[Tuple[str, int]], patience_s: float) -> str:
    """Returns why the place where instances meet cannot be reached for so long, or nothing."""
    if server is None:
        return ""
    deadline = time.monotonic() + patience_s
    while True:
        began = time.monotonic()
        try:
            with socket.create_connection((server[0], server[1]), timeout=max(min(deadline - began, 5.0), 0.1)):
                return ""
        except OSError as error:
            if time.monotonic() >= deadline - 0.2:
                return f"{server[0]} port {server[1]} could not be reached for {patience_s:.0f} s ({error})."
        time.sleep(0.2)


if __name__ == "__main__":
    _Agent().run()
    os._exit(0)  # threads may be stuck in what nobody reads
