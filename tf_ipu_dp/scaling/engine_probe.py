"""A short calibration of another engine, by its own program: what an update takes, and its exchange in two processes.

Each layout of the engine's cells is trained for about two seconds: as many programs at once as the cell has processes
on a machine, each a job of its own, which exchange nothing. A job of two processes then shows what is added to an
update by the exchange, as far as the engine does not hide it behind compute. The result is kept as that of our engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import statistics
import tempfile
from datetime import date
from pathlib import Path
from typing import Dict, Iterator, List, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import buckets, size
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.scaling import compute_probe, record_windows
from tf_ipu_dp.scaling.compute_calibration import (
    ComputeCalibration,
    Shape,
    ShapeTime,
    SharedExchange,
    shape_of,
    shapes_to_measure,
)
from tf_ipu_dp.scaling.engines import orders, starter
from tf_ipu_dp.scaling.engines.protocol import Order
from tf_ipu_dp.scaling.modes import Length
from tf_ipu_dp.scaling.records import Cell

_MOST_S = 2.0  # of timed updates of a layout, but at least three of them
_WARMUP, _MOST_UPDATES = 3, 2000
_START_S = 6  # of a program, about
_LEARNING_RATE = 1e-3  # no update takes longer with another one
_VERSIONS = ("torch", "horovod")


def probe(
    engine: str, words: Sequence[str], cells: Sequence[Cell], announce: compute_probe.Announce, *, on_one_machine: bool
) -> ComputeCalibration:
    """Returns the times of an engine's cells, from the cache where they were measured before.

    `words` are the flags of train that all cells have in common; `on_one_machine`: the cells' hosts are emulated.
    """
    config = train_flags.parse(words)
    facts = {**compute_probe.facts_of(config), "engine": engine, **_versions()}
    path = compute_probe.cache_path(os.environ, facts)
    kept = compute_probe.load(path)
    known = {each.shape: each for each in kept.times} if kept else {}
    shapes = [shape_of(cell, on_one_machine=on_one_machine) for cell in cells]
    exchange = kept.shared_exchange_of(SharedExchange.FEWEST) if kept else None
    needs_exchange = exchange is None and any(cell.instances > 1 for cell in cells)
    if needs_exchange:
        shapes.append(shape_of_two(shapes))
    missing = [shape for shape in shapes_to_measure(shapes, cores=orders.count_cores()) if shape not in known]
    if needs_exchange and shapes[-1] not in known and shapes[-1] not in missing:
        missing.append(shapes[-1])
    is_new = bool(missing) or needs_exchange
    if is_new:
        starts = len(missing) + needs_exchange
        announce(f"calibrating {engine}: {cli.count(starts, 'start')}, about {_guess_s(starts)} s, kept in {path}")
    with _folders() as folders:
        for shape in missing:
            known[shape] = _measure_shape(engine, config, shape, next(folders))
        if needs_exchange:
            exchange = _measure_two(engine, config, known[shapes[-1]], next(folders))
    found = ComputeCalibration(
        date=kept.date if kept and not is_new else date.today().isoformat(),
        model=config.model,
        cores=orders.count_cores(),
        emulated=True,  # as emulated IPUs do, its processes share the cores
        bucket_bytes=_bucket_bytes(words, cells[0]),
        times=tuple(sorted(known.values(), key=lambda each: dataclasses.astuple(each.shape))),
        facts=facts,
        shared_exchanges=(exchange,) if exchange else (),
    )
    if is_new:
        compute_probe.save(found, path, announce)
    return found


def shape_of_two(shapes: Sequence[Shape]) -> Shape:
    """Returns the layout of the job of two processes: that of such a cell, else the smallest batch in two. Pure."""
    two = [each for each in shapes if each.processes == SharedExchange.FEWEST]
    chosen = min(two or shapes, key=lambda each: each.samples)
    return dataclasses.replace(chosen, processes=SharedExchange.FEWEST)


def time_of_updates(shape: Shape, programs: Sequence[Sequence[float]]) -> ShapeTime:
    """Returns the time of an update from those of single updates in each program: the median of windows. Pure."""
    windows = [each for times in programs for each in split(times)]
    every = [each for times in programs for each in times]
    if not windows:
        raise cli.UsageError("The calibration has no update that was timed.")
    total = statistics.median(windows)
    factors = sorted(each / total for each in windows)
    deviation = math.sqrt(math.fsum((each - total) ** 2 for each in every) / max(len(every) - 1, 1))
    low, high = (compute_probe.quantile(factors, share) for share in (0.1, 0.9))
    return ShapeTime(shape, total, 0.0, 0.0, 0.0, deviation, min(low, 1.0), max(high, 1.0))


def split(times: Sequence[float], window_s: float = record_windows.WINDOW_S) -> List[float]:
    """Returns the mean time of an update in each window of at least so many seconds; a short rest is left out. Pure.

    If all of them together are short, they are one window.
    """
    found: List[float] = []
    window: List[float] = []
    for each in times:
        window.append(each)
        if math.fsum(window) >= window_s:
            found.append(statistics.fmean(window))
            window = []
    return found or ([statistics.fmean(window)] if window else [])


def _measure_shape(engine: str, config: TrainConfig, shape: Shape, folder: Path) -> ShapeTime:
    length = Length(_WARMUP, _MOST_UPDATES)
    order = _make_order(config, shape, length, processes=1)
    order = dataclasses.replace(order, together=shape.processes, times_updates=True, most_s=_MOST_S)
    return time_of_updates(shape, [answer.update_s for answer in starter.run_together(engine, order, folder)])


def _measure_two(engine: str, config: TrainConfig, alone: ShapeTime, folder: Path) -> SharedExchange:
    """Trains two processes that exchange gradients, and returns what that adds to an update without exchanges."""
    shape, count = alone.shape, SharedExchange.FEWEST
    # It takes longer than alone: then it also is timed for longer.
    updates = min(max(math.ceil(_MOST_S / alone.total_s), 3), _MOST_UPDATES)
    order = _make_order(config, shape, Length(_WARMUP, updates), processes=count)
    order = dataclasses.replace(order, times_updates=True)
    batch = shape.micro_batch_size
    cell = Cell(f"{engine}-{count}", engine, count, count, count, 1, batch, 1, batch * count, ())
    answers = starter.run(cell, order, folder, None, lambda _: None)
    update_s = time_of_updates(shape, [answer.update_s for answer in answers]).total_s
    return SharedExchange(shape, max(update_s - alone.total_s, 0.0), update_s)


def _make_order(config: TrainConfig, shape: Shape, length: Length, processes: int) -> Order:
    return orders.make_order(
        config,
        batch_size=shape.micro_batch_size,
        processes=processes,
        on_this_machine=shape.processes,
        length=length,
        learning_rate=_LEARNING_RATE,
    )


def _bucket_bytes(words: Sequence[str], cell: Cell) -> Tuple[int, ...]:
    config = train_flags.parse([*words, f"--micro_batch_size={cell.micro_batch_size}"])
    return tuple(bucket.bytes for bucket in size.read_job_size(config, buckets.FUSION_THRESHOLD).buckets)


def _versions() -> Dict[str, str]:
    found = {}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@contextlib.contextmanager
def _folders() -> Iterator[Iterator[Path]]:
    """Yields new folders, which are removed at the end."""
    with tempfile.TemporaryDirectory(prefix="tf_ipu_dp_probe") as folder:
        yield (Path(folder) / str(number) for number in range(10_000))


def _guess_s(starts: int) -> int:
    return round(starts * (_START_S + _MOST_S))
