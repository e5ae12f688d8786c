"""Where each instance of a run is, told once a second in a file, and who is to blame when nothing moves any more.

Collectives cannot tell that: an instance that is stopped, or stuck in its input, is missing in them. The files are in
the run's folder, which all hosts share; a pointer to each is in the user's runtime directory, so that a monitor finds
the run of a process. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

PERIOD_S = 1.0
PHASES = ("starting", "compiling", "training", "evaluating", "saving", "exporting")
INPUT, OTHERS, NOTHING = "input", "other instances", "nothing"
_STATUS = "status"
_MOST_CHANGES = 16
_MOST_SECONDS = 1e10  # some hundred years: no clock says more
# Nothing that is written here is longer, and what is longer was not written here.
_MOST_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Status:
    """One instance at one moment."""

    run_dir: str
    instance: int
    instances: int
    host: str
    pid: int
    phase: str = "starting"
    step: int = 0
    planned_steps: int = 0
    samples_per_s: Optional[float] = None  # of the whole job, lately
    waits_for: Optional[str] = None  # input, other instances or nothing; None: not known
    still_s: float = 0.0  # since the phase or the step last changed
    time: float = 0.0  # when this was written, in seconds since the epoch
    changes: Tuple[Tuple[str, float], ...] = ()  # the last phases and when each began, in seconds since the epoch

    def name(self) -> str:
        """Returns `instance 1 on host b (pid 42)`."""
        return f"instance {self.instance} on {self.host} (pid {self.pid})"

    def place(self) -> str:
        """Returns what it does, in words that follow its name."""
        waiting = f", waiting for {self.waits_for}" if self.waits_for not in (None, NOTHING) else ""
        return f"{self.phase} after step {self.step:,}{waiting}"


class StatusReporter:
    """Tells where this instance is, and watches that it and the others move. Any thread may call its methods."""

    def __init__(
        self,
        folder: Path,
        *,
        instance: int = 0,
        instances: int = 1,
        planned_steps: int = 0,
        waits_for: Callable[[], Optional[str]] = lambda: None,
        limit_s: float = 0.0,
        on_stall: Callable[[str, Status], None] = lambda sentence, culprit: None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`on_stall` gets a sentence and whom it is about, once, after `limit_s` without a step (0: never)."""
        self._status = Status(
            str(folder.resolve()), instance, instances, socket.gethostname(), os.getpid(), planned_steps=planned_steps
        )
        self._status = dataclasses.replace(self._status, changes=((self._status.phase, time.time()),))
        self._folder, self._waits_for, self._limit_s, self._on_stall = folder, waits_for, limit_s, on_stall
        self._watched = False
        self._checked = self._input_since = time.monotonic()
        self._expected_s = 0.0
        self._moved = time.monotonic()
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self._threads: List[threading.Thread] = []
        self._environ = environ
        self._detector = StallDetector(instances)

    def start(self) -> None:
        """Tells for the first time, and from then on once a second."""
        self._point()
        self._beat()
        actions: List[Callable[[], None]] = [self._beat]
        if self._limit_s:
            # Reading hangs where the network to a shared folder is gone, which must not keep the watch from ending.
            actions += [self._look_at_others, self._check]
        for action in actions:
            thread = threading.Thread(target=self._repeat, args=(action,), name="heartbeat", daemon=True)
            thread.start()
            self._threads.append(thread)

    def update(
        self, phase: str, step: Optional[int] = None, samples_per_s: Optional[float] = None, *, watched: bool = True
    ) -> None:
        """Notes that the run has moved on. What has no known length, like compiling, is not watched."""
        with self._guard:
            now = self._status
            changes = now.changes if phase == now.phase else (*now.changes, (phase, time.time()))
            self._status = dataclasses.replace(
                now,
                phase=phase,
                changes=changes[-_MOST_CHANGES:],
                step=now.step if step is None else step,
                samples_per_s=now.samples_per_s if samples_per_s is None else samples_per_s,
            )
            self._moved = time.monotonic()
            self._watched = watched

    def expect_step_time(self, seconds: float) -> None:
        """Notes how long a step takes, of which more than the limit may be the usual."""
        self._expected_s = max(self._expected_s, 3 * seconds)

    def stop(self) -> None:
        """Takes the files away: the run has come to its end."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PERIOD_S)
        for path in (self._path(), _pointer(self._environ, self._status.pid)):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            self._path().parent.rmdir()

    def status(self) -> Status:
        """Returns where this instance is now."""
        with self._guard:
            still_s = time.monotonic() - self._moved
            now = self._status
        return dataclasses.replace(now, waits_for=self._waits_for(), still_s=still_s, time=time.time())

    def _path(self) -> Path:
        return _path_of(self._folder, self._status.instance)

    def _repeat(self, action: Callable[[], None]) -> None:
        while not self._stopped.wait(PERIOD_S):
            action()

    def _beat(self) -> None:
        # A run does not end because nobody can be told where it is.
        with contextlib.suppress(OSError):
            self._path().parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path(), dataclasses.asdict(self.status()))

    def _point(self) -> None:
        with contextlib.suppress(OSError):
            pointer = _pointer(self._environ, self._status.pid)
            pointer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(pointer, {"status": str(self._path().resolve())})

    def _look_at_others(self) -> None:
        for instance in set(range(self._status.instances)) - {self._status.instance}:
            path = _path_of(self._folder, instance)
            found = read(path)
            if found is not None:
                self._detector.observe(found, time.monotonic())
            elif not path.exists():
                self._detector.remove(instance)

    def _check(self) -> None:
        own, now = self.status(), time.monotonic()
        pause, self._checked = now - self._checked, now
        if pause > 3 * PERIOD_S:
            # This process itself was stopped, or the machine slept: what it has not heard since is no silence.
            self._detector.discount_pause(pause)
            with self._guard:
                self._moved += pause
            return
        self._detector.observe(own, now)
        # What waits for its input does nothing else: that can be judged in any phase.
        if own.waits_for != INPUT:
            self._input_since = now
        watched = self._watched or now - self._input_since > self._limit_s
        found = self._detector.find_stalled(own, now, max(self._limit_s, self._expected_s), watched)
        if found:
            time.sleep(min(0.5 * own.instance, 5.0))  # the lowest instance speaks first, and its end ends the others
            if not self._stopped.is_set():
                self._stopped.set()
                self._on_stall(*found)


class StallDetector:
    """What one instance knows of all: their last words, and since when there were no new ones. Clocks are its own."""

    def __init__(self, instances: int) -> None:
        self._instances = instances
        self._heard: Dict[int, Tuple[Status, float]] = {}

    def observe(self, status: Status, now: float) -> None:
        """Takes in what an instance says. The same as before is no news: its clock may differ, its change counts."""
        before = self._heard.get(status.instance)
        if before is None or before[0].time != status.time:
            self._heard[status.instance] = (status, now)

    def remove(self, instance: int) -> None:
        """Leaves an instance out that has come to its end."""
        self._heard.pop(instance, None)

    def discount_pause(self, seconds: float) -> None:
        """Leaves some seconds out of all silences."""
        self._heard = {instance: (status, heard + seconds) for instance, (status, heard) in self._heard.items()}

    def find_stalled(self, own: Status, now: float, limit_s: float, watched: bool) -> Optional[Tuple[str, Status]]:
        """Returns a sentence on who keeps all others from moving, and who; None while nothing has stood still so long.

        Where it cannot be told who, it is this instance.
        """
        everyone = list(self._heard.values())
        stands_still = watched and own.still_s > limit_s
        patience_s = min(limit_s, 5 * PERIOD_S) if stands_still else limit_s
        silent = [(status, now - heard) for status, heard in everyone if now - heard > patience_s]
        if silent:
            status, seconds = max(silent, key=lambda each: each[1])
            return (
                f"{status.name()} has not been heard of for {seconds:.0f} s: it is stopped, or its host or the network "
                f"to it is gone. It was {status.place()}."
            ), status
        if not stands_still:
            return None
        known = [status for status, _ in everyone]
        late = [status for status in known if status.waits_for == INPUT]
        late = late or [status for status in known if status.waits_for != OTHERS and len(known) > 1]
        if not late:
            who = "this instance is" if len(known) <= 1 else f"all {len(known)} instances are"
            return (
                f"Nothing has moved for {own.still_s:.0f} s: {who} {own.place()}. The device, its input or the "
                "network between the hosts does not answer."
            ), own
        status = max(late, key=lambda each: each.still_s)
        still_s = max(status.still_s, own.still_s)
        return f"{status.name()} has not moved for {still_s:.0f} s: it is {status.place()}.", status


def read(path: Path) -> Optional[Status]:
    """Returns what a file says, or None where it says nothing that makes sense."""
    value = _read_object(path)
    names = {field.name for field in dataclasses.fields(Status)}
    try:
        status = Status(**{name: each for name, each in (value or {}).items() if name in names})
    except TypeError:
        return None
    numbers = (status.instance, status.instances, status.pid, status.step, status.planned_steps)
    sound = all(type(number) is int for number in numbers) and all(map(_is_time, (status.still_s, status.time)))
    texts = (status.run_dir, status.host, status.phase)
    if not sound or not all(isinstance(text, str) for text in texts):
        return None
    return dataclasses.replace(status, changes=_read_changes(status.changes))


def read_run(folder: Path) -> List[Status]:
    """Returns what the instances of a run last said, in their order."""
    found = (read(path) for path in sorted((folder / _STATUS).glob("instance-*.json")))
    return sorted((status for status in found if status), key=lambda status: status.instance)


def find(pid: int, environ: Mapping[str, str] = os.environ) -> Optional[Status]:
    """Returns what a process of this user and machine says of its run, if it is one of ours."""
    value = _read_object(_pointer(environ, pid))
    path = value.get("status") if value else None
    status = read(Path(path)) if isinstance(path, str) else None
    return status if status and status.pid == pid else None


def _read_changes(value: Any) -> Tuple[Tuple[str, float], ...]:
    """Returns those of the changes that make sense."""
    pairs = [each for each in value if isinstance(each, list) and len(each) == 2] if isinstance(value, list) else []
    sound = [(phase, float(began)) for phase, began in pairs if isinstance(phase, str) and _is_time(began)]
    return tuple(sound[-_MOST_CHANGES:])


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and -_MOST_SECONDS < value < _MOST_SECONDS


def _path_of(folder: Path, instance: int) -> Path:
    return folder / _STATUS / f"instance-{instance:03d}.json"


def _pointer(environ: Mapping[str, str], pid: int) -> Path:
    base = environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(base) / f"tf_ipu_dp-{os.getuid()}" / f"{pid}.json"


def _replace(path: Path, value: Mapping[str, Any]) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(json.dumps(value), encoding="utf-8")
    fresh.replace(path)


def _read_object(path: Path) -> Optional[Dict[str, Any]]:
    try:
        with open(path, "rb", opener=_open_file) as file:
            value = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _open_file(path: str, flags: int) -> int:
    """Opens a file and nothing else: a pipe that nobody writes to would be waited for."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no file")
    return descriptor
