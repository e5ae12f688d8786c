"""Fits of times that others measured, to predict further points: (ranks, bytes, seconds). Pure, numpy.

- ring: a base latency, a latency per step and a time per byte: base + 2(n-1) step + 2(n-1)/n S beta.
- piecewise: latency and bandwidth by message size, for any algorithm; linear between the points of a number of ranks.
- saturation: the efficiency of a link by size and ranks, A / (1 + B n^C / S), from points with an efficiency.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import io
import itertools
import math
from typing import Any, Dict, List, Sequence, Tuple, Union

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import formulas, quantities
from tf_ipu_dp.collectives.topology import UNLIMITED, Engine, Level, Topology

Array = Any  # numpy has no types that hold for both releases

RING, PIECEWISE, SATURATION = "ring", "piecewise", "saturation"
FORMS = (RING, PIECEWISE, SATURATION)
_EXPONENTS = np.linspace(-1.0, 3.0, 401)
# As good as unlimited: the time is in the software part.
_NO_LINK_BYTES_PER_S = 1e18


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured time or, for saturation, a measured efficiency."""

    ranks: int
    bytes: float
    value: float


@dataclasses.dataclass(frozen=True)
class RingFit:
    """A ring with a base latency, as NCCL's planner has it."""

    base_s: float
    step_s: float
    s_per_byte: float

    def predict(self, ranks: int, size: float) -> float:
        """Returns seconds."""
        steps = 2 * (ranks - 1)
        return self.base_s + steps * self.step_s + steps / ranks * size * self.s_per_byte

    def topology(self) -> Topology:
        """Returns a network with these times, for the simulator."""
        rate = 1 / self.s_per_byte if self.s_per_byte > 0 else _NO_LINK_BYTES_PER_S
        level = Level("fitted", UNLIMITED, rate, self.step_s)
        return Topology("fitted ring", (level,), Engine(base_s=self.base_s))

    def describe(self) -> str:
        """Returns the parameters in words."""
        rate = quantities.render_rate(1 / self.s_per_byte) if self.s_per_byte > 0 else "no limit"
        step = quantities.render_seconds(self.step_s)
        return f"base {quantities.render_seconds(self.base_s)}, per step {step}, bandwidth {rate}"


@dataclasses.dataclass(frozen=True)
class PiecewiseFit:
    """Times of one message by its size, in the steps of an algorithm."""

    algorithm: str
    messages: Tuple[Tuple[float, float], ...]  # bytes and seconds

    def predict(self, ranks: int, size: float) -> float:
        """Returns seconds."""
        return formulas.cost(formulas.make_plan(self.algorithm, ranks, size, self.topology())).total_s

    def topology(self) -> Topology:
        """Returns a network with these times, for the simulator."""
        level = Level("fitted", UNLIMITED, _NO_LINK_BYTES_PER_S, 0.0, software=self.messages)
        return Topology("fitted pieces", (level,))

    def describe(self) -> str:
        """Returns the parameters in words."""
        first, last = self.messages[0], self.messages[-1]
        return (
            f"{len(self.messages)} message sizes from {quantities.render_bytes(first[0])} "
            f"({quantities.render_seconds(first[1])}) to {quantities.render_bytes(last[0])} "
            f"({quantities.render_seconds(last[1])})"
        )


@dataclasses.dataclass(frozen=True)
class SaturationFit:
    """The share of a link's bandwidth that is reached."""

    highest: float
    half_bytes: float  # at one rank
    exponent: float

    def predict(self, ranks: int, size: float) -> float:
        """Returns an efficiency."""
        return float(self.highest / (1 + self.half_bytes * ranks**self.exponent / size))

    def describe(self) -> str:
        """Returns the parameters in words."""
        half = quantities.render_bytes(self.half_bytes)
        return f"highest {self.highest:.3g}, half of it at {half} x n^{self.exponent:.3g}"


Fit = Union[RingFit, PiecewiseFit, SaturationFit]


def fit(points: Sequence[Point], form: str, algorithm: str = formulas.RING) -> Fit:
    """Returns the fit with the least relative errors; UsageError if there are too few points."""
    if form not in FORMS:
        near = difflib.get_close_matches(form, FORMS, n=1)
        advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(FORMS)}."
        raise cli.UsageError(f"{form} is not a form of fits. {advice}")
    needed = 3 if form == SATURATION else 2
    if len({(point.ranks, point.bytes) for point in points}) < needed:
        raise cli.UsageError(f"A {form} fit needs at least {needed} different points.")
    if form == RING:
        return _fit_ring(points)
    return _fit_pieces(points, algorithm) if form == PIECEWISE else _fit_saturation(points)


def mean_error(found: Fit, points: Sequence[Point]) -> float:
    """Returns the mean relative error of a fit on points."""
    errors = [abs(found.predict(point.ranks, point.bytes) / point.value - 1) for point in points]
    return math.fsum(errors) / len(errors)


def read_points(text: str, name: str) -> Tuple[str, List[Point]]:
    """Returns the column that was measured (seconds or efficiency) and the points of a CSV text."""
    rows = list(csv.DictReader(io.StringIO(text)))
    columns = list(rows[0]) if rows else []
    measured = [column for column in ("seconds", "efficiency") if column in columns]
    if not measured or not {"ranks", "bytes"} <= set(columns):
        raise cli.UsageError(f"{name} needs the columns ranks, bytes and seconds (or efficiency) and at least one row.")
    points = []
    for number, row in enumerate(rows, 2):
        try:
            value = _value(row[measured[0]] or "", measured[0])
            point = Point(int(row["ranks"]), float(quantities.parse_bytes(row["bytes"])), value)
        except (TypeError, ValueError) as error:
            raise cli.UsageError(f"{name}, line {number}: {error}") from None
        if point.ranks < 1 or not 0 < point.value < math.inf:
            raise cli.UsageError(f"{name}, line {number}: ranks and {measured[0]} must be above 0.")
        points.append(point)
    return measured[0], points


def _value(text: str, column: str) -> float:
    try:
        return float(text)
    except ValueError:
        if column == "seconds":
            return quantities.parse_seconds(text)
        raise ValueError(f"{text!r} is not a number.") from None


def _fit_ring(points: Sequence[Point]) -> RingFit:
    steps = [2.0 * (point.ranks - 1) for point in points]
    moved = [each / point.ranks * point.bytes for each, point in zip(steps, points)]
    columns = [[1.0] * len(points), steps]
    if len({point.bytes for point in points}) > 1:
        columns.append(moved)
    found = _least_squares(np.array(columns).T, np.array([point.value for point in points]))
    return RingFit(found[0], found[1], found[2] if len(found) > 2 else 0.0)


def _fit_pieces(points: Sequence[Point], algorithm: str) -> PiecewiseFit:
    """Takes all steps of a collective as equal messages; several numbers of ranks give several points of one curve."""
    by_message: Dict[float, List[float]] = {}
    for point in points:
        if point.ranks < 2:
            raise cli.UsageError("A piecewise fit needs points with at least 2 ranks.")
        size, seconds = _as_message(point, algorithm)
        by_message.setdefault(size, []).append(seconds)
    sizes = sorted(by_message)
    medians = np.maximum.accumulate([float(np.median(by_message[size])) for size in sizes])
    return PiecewiseFit(algorithm, tuple(zip(sizes, medians.tolist())))


def _as_message(point: Point, algorithm: str) -> Tuple[float, float]:
    level = Level("unit", UNLIMITED, 1.0, 1.0)
    cost = formulas.cost(formulas.make_plan(algorithm, point.ranks, point.bytes, Topology("unit", (level,))))
    return cost.bandwidth_s / cost.latency_s, point.value / cost.latency_s


def _fit_saturation(points: Sequence[Point]) -> SaturationFit:
    values = np.array([1 / point.value for point in points])
    best: Tuple[float, SaturationFit] = (math.inf, SaturationFit(1.0, 0.0, 0.0))
    ranks, sizes = np.array([[point.ranks, point.bytes] for point in points], dtype=float).T
    for exponent in _EXPONENTS if len(set(ranks)) > 1 else (0.0,):
        matrix = np.stack([np.ones(len(points)), ranks**exponent / sizes], axis=1)
        found = _least_squares(matrix, values)
        error = float((((matrix @ found) / values - 1) ** 2).sum())
        if error < best[0] and found[0] > 0:
            best = error, SaturationFit(1 / found[0], found[1] / found[0], float(exponent))
    return best[1]


def _least_squares(matrix: Array, values: Array) -> List[float]:
    """Returns the factors of the columns, none of them negative, with the least relative errors."""
    scaled = matrix / values[:, None]
    best: Tuple[float, List[float]] = (math.inf, [0.0] * matrix.shape[1])
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = scaled[:, list(chosen)]
            scale = np.abs(part).max(axis=0)
            if not (scale > 0).all():
                continue
            found = np.linalg.lstsq(part / scale, np.ones(len(values)), rcond=None)[0] / scale
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best[0] * (1 - 1e-9):
                factors = [0.0] * matrix.shape[1]
                for column, factor in zip(chosen, found.tolist()):
                    factors[column] = factor
                best = error, factors
    return best[1]
