"""One rank of a measurement: `python -m tf_ipu_dp.collectives.rank ORDER`, started by a launcher. Imports Horovod.

Rank 0 writes what all ranks measured to its standard output, a second's worth of trials at a time.
"""

# poprun preloads: tf_ipu_dp.collectives.protocol

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from tf_ipu_dp.collectives import protocol, timeline
from tf_ipu_dp.collectives.protocol import Order

_CHUNK_S = 1.0
_MAX_CHUNK = 200
# A probe for the end of a message that may be lost is a timeout too: alone on its way, it waits for 200 ms.
_TIMERS = ("TCPTimeouts", "TCPLossProbes")
_CHECKED = 64  # elements that are compared with the sum after every trial


def main(words: Sequence[str]) -> int:
    """Measures the series of the order and returns the exit code."""
    order = protocol.parse_order(words[0])
    _take_rank(order)
    priority = _raise_priority() if order.real_time else "normal"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if order.timeline is not None:  # on all ranks, or Horovod hangs; rank 0 alone writes the file
        os.environ["HOROVOD_TIMELINE"] = order.timeline
    import horovod.tensorflow as hvd
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    wanted = os.environ.get("HOROVOD_CPU_OPERATIONS", "gloo").lower()
    if not (hvd.mpi_built() if wanted == "mpi" else hvd.gloo_built()):
        sentence = f"--engine={wanted} needs a Horovod that was built with it; this one was not. Use another --engine."
        print(protocol.render_answer("refused", sentence=sentence), flush=True)
        return 1
    hvd.init()
    _answer(hvd, "facts", priority=priority, **_facts(hvd, tf))
    shares_clock = len(set(hvd.allgather_object(_read_boot_id()))) == 1
    counts = order.count_timeouts and hvd.local_rank() == 0
    for number, sizes in enumerate(order.series):
        _Series(hvd, tf, number, sizes, shares_clock, counts).measure(order.trials, order.warmup)
    is_first = hvd.rank() == 0
    hvd.shutdown()  # completes the timeline
    if order.timeline is not None and is_first:
        _answer_engine_times(order)
    return 0


class _Series:
    """The trials of one list of tensors."""

    def __init__(
        self, hvd: Any, tf: Any, number: int, sizes: Sequence[int], shares_clock: bool, counts_timeouts: bool
    ) -> None:
        import numpy as np

        self._hvd, self._tf, self._number = hvd, tf, number
        self._shares_clock, self._counts_timeouts = shares_clock, counts_timeouts
        ranks, rank = hvd.size(), hvd.rank()
        # Small whole numbers, whose sum is exact in any order.
        patterns = [np.arange(max(size // 4, 1)) % 251 for size in sizes]
        self._sums = [(ranks * pattern + ranks * (ranks - 1) // 2).astype(np.float32) for pattern in patterns]
        self._tensors = [tf.constant((pattern + rank).astype(np.float32)) for pattern in patterns]
        self._one = tf.ones([1])
        self._reduce = tf.function(
            lambda *tensors: hvd.grouped_allreduce(list(tensors), op=hvd.Sum, name=series_name(number))
        )
        self._barrier = tf.function(lambda one: hvd.allreduce(one, op=hvd.Sum, name="barrier"))

    def measure(self, trials: int, warmup: int) -> None:
        """Runs the trials; rank 0 answers with every chunk of them."""
        import numpy as np

        shortest_s = min((self._trial(check_all=trial == 0)[1] / 1e9 for trial in range(warmup)), default=_CHUNK_S)
        # All ranks must end a chunk together.
        chunk = int(self._hvd.broadcast_object(min(max(int(_CHUNK_S / max(shortest_s, 1e-6)), 1), _MAX_CHUNK)))
        done = 0
        busy = _BusyCores()
        while done < trials:
            count = min(chunk, trials - done)
            rows = [self._trial(check_all=done + place + 1 == trials) for place in range(count)]
            gathered = self._hvd.allgather(self._tf.constant(np.array([rows], np.int64))).numpy()
            done += count
            self._answer_trials(gathered)
        _answer(self._hvd, "end", series=self._number, busy=busy.share())

    def _trial(self, check_all: bool) -> Tuple[int, int, int, int]:
        """Returns when the trial began, how long it took, TCP's timeouts during it and whether the sum was wrong."""
        before = _read_timeouts() if self._counts_timeouts else 0
        self._barrier(self._one)
        began = time.monotonic_ns()
        sums = self._reduce(*self._tensors)
        ended = time.monotonic_ns()
        after = _read_timeouts() if self._counts_timeouts else 0
        return began, ended - began, after - before, int(not self._is_correct(sums, check_all))

    def _is_correct(self, sums: Sequence[Any], check_all: bool) -> bool:
        import numpy as np

        for found, expected in zip(sums, self._sums):
            step = 1 if check_all else max(expected.size // _CHECKED, 1)
            if not np.array_equal(found.numpy()[::step], expected[::step]):
                return False
        return True

    def _answer_trials(self, gathered: Any) -> None:
        """Answers with rank x trial arrays of times in nanoseconds."""
        began, took = gathered[:, :, 0], gathered[:, :, 1]
        # The rank that waits the shortest time came last; with a common clock one can tell directly.
        late = began - began.min(axis=0) if self._shares_clock else took.max(axis=0) - took
        _answer(
            self._hvd,
            "trials",
            series=self._number,
            took_ns=took.T.tolist(),
            late_ns=late.T.tolist(),
            timeouts=gathered[:, :, 2].sum(axis=0).tolist(),
            wrong=int((gathered[:, :, 3].max(axis=0) > 0).sum()),
        )


def series_name(number: int) -> str:
    """Returns the name that Horovod knows the tensors of a series by."""
    return f"series{number}"


def _answer(hvd: Any, kind: str, **values: Any) -> None:
    if hvd.rank() == 0:
        print(protocol.render_answer(kind, **values), flush=True)


def _answer_engine_times(order: Order) -> None:
    assert order.timeline is not None
    try:
        text = Path(order.timeline).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for number, sizes in enumerate(order.series):
        names = [f"{series_name(number)}_{place}of{len(sizes)}" for place in range(1, len(sizes) + 1)]
        seconds = timeline.engine_seconds(text, names)
        print(protocol.render_answer("engine", series=number, seconds=seconds[order.warmup :]), flush=True)


def _take_rank(order: Order) -> None:
    """Takes another rank than the launcher's if ranks are dealt out to the hosts."""
    if order.placement == "block" or order.hosts == 1 or "HOROVOD_RANK" not in os.environ:
        return
    instance, instances = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    os.environ["HOROVOD_RANK"] = str(protocol.rank_of(instance, instances, order.hosts, order.placement))


def _raise_priority() -> str:
    """Lets other work on this machine disturb less, where the user may; returns the priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        return "real time"
    except (OSError, AttributeError):
        return "normal"


def _facts(hvd: Any, tf: Any) -> Dict[str, Any]:
    import horovod

    uses_mpi = os.environ.get("HOROVOD_CPU_OPERATIONS", "").lower() == "mpi"
    hosts: List[str] = hvd.allgather_object(platform.node())
    return {
        "horovod": horovod.__version__,
        "operations": "MPI" if uses_mpi else "Gloo",
        "tensorflow": tf.__version__,
        "ranks": hvd.size(),
        "hosts": hosts,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "cycle_ms": float(os.environ.get("HOROVOD_CYCLE_TIME", "1")),
    }


def _read_boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _read_timeouts() -> int:
    """Returns how often a timer of TCP has run out in this network namespace, because an answer was missing."""
    try:
        lines = Path("/proc/net/netstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = {
        name: int(value) for names, values in zip(lines[::2], lines[1::2]) for name, value in _pairs(names, values)
    }
    return sum(found.get(name, 0) for name in _TIMERS)


def _pairs(names: str, values: str) -> List[Tuple[str, str]]:
    return list(zip(names.split()[1:], values.split()[1:]))


class _BusyCores:
    """How much of all cores of this machine is used, by any process."""

    def __init__(self) -> None:
        self._before = self._read()

    def share(self) -> float:
        """Returns the used share since the beginning, from 0 to 1."""
        idle, total = (now - before for now, before in zip(self._read(), self._before))
        return 1 - idle / total if total > 0 else 0.0

    @staticmethod
    def _read() -> Tuple[int, int]:
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
        except OSError:
            return 0, 0
        numbers = [int(field) for field in fields]
        return numbers[3] + numbers[4], sum(numbers)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
