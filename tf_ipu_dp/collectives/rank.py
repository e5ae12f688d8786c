"""One rank of a measurement: `python -m tf_ipu_dp.collectives.rank ORDER`, started by a launcher. Imports Horovod.

Rank 0 writes what all ranks measured to its standard output, a second's worth of trials at a time.
"""

# poprun preloads: tf_ipu_dp.collectives.protocol

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.collectives import cpu_use, mpi_library, protocol, tcp_counters, timeline
from tf_ipu_dp.collectives.cpu_use import CpuUse
from tf_ipu_dp.collectives.protocol import Order

_CHUNK_S = 1.0
_MAX_CHUNK = 200
_WRITTEN_S, _WRITTEN_LIMIT_S = 0.5, 20.0  # without growth, a file is written; and until then


def main(words: Sequence[str]) -> int:
    """Measures the series of the order and returns the exit code."""
    order = protocol.parse_order(words[0])
    _take_rank(order)
    priority = _raise_priority() if order.real_time else "normal"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if order.timeline is not None:  # on all ranks, or Horovod hangs; rank 0 alone writes the file
        os.environ["HOROVOD_TIMELINE"] = order.timeline
        with contextlib.suppress(OSError):  # it is missing on other hosts than the command's
            Path(order.timeline).parent.mkdir(mode=0o700, exist_ok=True)
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
    writer = _calm_timeline_writer(hvd) if order.timeline is not None else None
    for number, sizes in enumerate(order.series):
        series = _Series(hvd, tf, number, sizes, shares_clock, counts)
        series.measure(order.trials, order.warmup, order.emulator_pid, writer)
    is_first = hvd.rank() == 0
    if order.timeline is not None and writer is not None:
        cpu_use.prefer_thread(writer)
        _wait_until_written(Path(order.timeline))
    hvd.shutdown()  # closes the timeline, and drops what is not written yet
    if order.timeline is not None:
        if is_first:
            _answer_engine_times(order)
        with contextlib.suppress(OSError):  # the last rank of a host removes the folder
            Path(order.timeline).parent.rmdir()
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

    def measure(self, trials: int, warmup: int, emulator_pid: Optional[int], writer: Optional[int]) -> None:
        """Runs the trials; rank 0 answers with every chunk of them."""
        import numpy as np

        shortest_s = min((self._trial()[1] / 1e9 for _ in range(warmup)), default=_CHUNK_S)
        # All ranks must end a chunk together.
        chunk = int(self._hvd.broadcast_object(min(max(int(_CHUNK_S / max(shortest_s, 1e-6)), 1), _MAX_CHUNK)))
        done = 0
        used = CpuUse(emulator_pid, writer)
        while done < trials:
            count = min(chunk, trials - done)
            rows = self._chunk(count)
            gathered = self._hvd.allgather(self._tf.constant(np.array([rows], np.int64))).numpy()
            done += count
            self._answer_trials(gathered)
        threads = self._hvd.allgather(self._tf.constant([used.busiest_thread()], self._tf.float64)).numpy()
        _answer(
            self._hvd,
            "end",
            series=self._number,
            busy=used.cores(),
            threads=threads.tolist(),
            emulator=used.process(),
        )

    def _chunk(self, count: int) -> List[Tuple[int, ...]]:
        """Returns the trials of a chunk: begin, time, whether the sum was wrong, and what TCP counted.

        TCP is read after each barrier. A rank may have handed its last packet to TCP, and be done, before the packet is
        lost and another rank waits for it: only when the next barrier is over have all timers of a trial run out.
        """
        counters = tcp_counters.TcpCounters() if self._counts_timeouts else None
        texts: List[bytes] = []
        rows = [self._trial(counters, texts) for _ in range(count)]
        self._barrier(self._one)
        if counters is None:
            return [(*row, 0, 0, 0) for row in rows]
        texts.append(counters.read())
        counters.close()
        return [(*row, *counted) for row, counted in zip(rows, tcp_counters.between(texts))]

    def _trial(
        self, counters: Optional[tcp_counters.TcpCounters] = None, texts: Optional[List[bytes]] = None
    ) -> Tuple[int, int, int]:
        """Returns when the trial began, how long it took and whether the sum was wrong."""
        self._barrier(self._one)
        if counters is not None and texts is not None:
            texts.append(counters.read())
        began = time.monotonic_ns()
        sums = self._reduce(*self._tensors)
        ended = time.monotonic_ns()
        return began, ended - began, int(not self._is_correct(sums))

    def _is_correct(self, sums: Sequence[Any]) -> bool:
        """Compares every element: between trials, where nobody waits for it."""
        import numpy as np

        return all(np.array_equal(found.numpy(), expected) for found, expected in zip(sums, self._sums))

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
            wrong=int((gathered[:, :, 2].max(axis=0) > 0).sum()),
            tcp=gathered[:, :, 3:].sum(axis=0).tolist(),
        )


def series_name(number: int) -> str:
    """Returns the name that Horovod knows the tensors of a series by."""
    return f"series{number}"


def _answer(hvd: Any, kind: str, **values: Any) -> None:
    if hvd.rank() == 0:
        print(protocol.render_answer(kind, **values), flush=True)


def _calm_timeline_writer(hvd: Any) -> Optional[int]:
    """Keeps rank 0's thread that writes the timeline from taking a core: it polls. Returns the thread, or None."""
    hvd.allgather_object(None)
    writer = cpu_use.calm_polling_thread() if hvd.rank() == 0 else None
    hvd.broadcast_object(None)  # all others wait, so that the cores are free for the thread that does not
    return writer


def _wait_until_written(path: Path) -> None:
    """Waits until a file does not grow any more."""
    deadline = time.monotonic() + _WRITTEN_LIMIT_S
    before = -1
    while time.monotonic() < deadline:
        try:
            size = path.stat().st_size
        except OSError:
            return
        if size == before:
            return
        before = size
        time.sleep(_WRITTEN_S)


def _answer_engine_times(order: Order) -> None:
    assert order.timeline is not None
    try:
        text = Path(order.timeline).read_text(encoding="utf-8", errors="replace")
        Path(order.timeline).unlink()
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
        "mpi": mpi_library.read_loaded() if uses_mpi else None,
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
