"""Plots for terminals: points on axes, drawn with Braille dots or ASCII marks, and shaded maps. Pure: returns text.

Marks tell the series apart where there are no colours; Braille dots, which are finer, are used where there is only one
series or where colours tell them apart.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp.collectives import quantities
from tf_ipu_dp.monitoring.text_layout import DIM, PLAIN, DisplayOptions, Line

Array = Any

COLOURS = ("34", "31", "32", "35", "33", "36", "37", "90")
_MARKS, _ASCII_MARKS = "●▲■◆○△□◇", "ox+*#@%&"
_SHADES, _ASCII_SHADES = " ░▒▓█", " .:+#"
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bit of each dot, by row and column of a cell
_TICK_STEPS = (1, 2, 5)


@dataclasses.dataclass(frozen=True, eq=False)
class Points:
    """Points of one series. A series with a mark of its own is drawn over those without, one mark per point."""

    x: Array
    y: Array
    style: str = PLAIN
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis: its range, whether it is logarithmic, and where its labels are."""

    low: float
    high: float
    logarithmic: bool
    ticks: Tuple[Tuple[float, str], ...]

    def place(self, values: Array) -> Array:
        """Returns where values are between the ends: 0 to 1."""
        values = np.asarray(values, dtype=float)
        if self.logarithmic:
            values = np.maximum(values, self.low)
            return (np.log(values) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (values - self.low) / (self.high - self.low)


def time_axis(values: Array, max_ticks: int) -> Axis:
    """Returns a logarithmic axis of seconds that includes all values, with ticks at round times."""
    values = np.asarray(values, dtype=float)
    values = values[values > 0] if (values > 0).any() else np.array([1e-9])  # a simulated time may be 0
    low, high = float(values.min()), float(values.max())
    # A margin keeps marks away from the ends.
    margin = max((high / low) ** 0.04, 1.05 if high / low < 1.2 else 1.0)
    low, high = low / margin, high * margin
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks: List[float] = []
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [float(f"{step}e{exponent}") for exponent in exponents for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= max_ticks:
            break
    else:
        ticks = ticks[:: math.ceil(len(ticks) / max_ticks)]
    if len(ticks) < 3:
        ticks = _even_ticks(low, high, max_ticks)
    return Axis(low, high, True, tuple((tick, quantities.render_seconds(tick)) for tick in ticks))


def count_axis(count: int, max_ticks: int) -> Axis:
    """Returns a linear axis from 0 to a count."""
    step = next(
        step * 10**exponent for exponent in range(20) for step in _TICK_STEPS
        if count / (step * 10**exponent) <= max_ticks
    )  # fmt: skip
    return Axis(0, max(count, 1), False, tuple((tick, f"{tick:,}") for tick in range(0, count + 1, step)))


def value_axis(values: Array, max_ticks: int) -> Axis:
    """Returns a linear axis that includes all values, with ticks at round numbers."""
    values = np.asarray(values, dtype=float)
    low, high = float(values.min()), float(values.max())
    # A margin keeps marks away from the ends.
    margin = 0.04 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = low - margin, high + margin
    return Axis(low, high, False, tuple((tick, f"{tick:g}") for tick in _even_ticks(low, high, max_ticks)))


def mark(number: int, unicode: bool) -> str:
    """Returns the mark of a series."""
    marks = _MARKS if unicode else _ASCII_MARKS
    return marks[number % len(marks)]


def plot(groups: Sequence[Points], x: Axis, y: Axis, height: int, options: DisplayOptions) -> List[Line]:
    """Returns the lines of a plot of a given height, axes included, as wide as the options say."""
    label_width = max(len(text) for _, text in y.ticks)
    columns = max(20, (options.width or 80) - label_width - 2)
    cells = _draw(groups, x, y, columns, height, options.unicode)
    ticks = {_cell(y.place(tick), height): text for tick, text in y.ticks}
    bar, corner, flat, cross, down = ("│", "└", "─", "┤", "┬") if options.unicode else ("|", "+", "-", "+", "+")
    lines: List[Line] = []
    for row in range(height - 1, -1, -1):
        text = ticks.get(row, "")
        line: Line = [(f"{text:>{label_width}} ", PLAIN), (cross if text else bar, DIM)]
        lines.append([*line, *_merge(cells[row])])
    places = {_cell(x.place(tick), columns): text for tick, text in x.ticks}
    rule = "".join(down if column in places else flat for column in range(columns))
    lines.append([(" " * (label_width + 1), PLAIN), (corner + rule, DIM)])
    lines.append([(" " * (label_width + 2) + _labels(places, columns), PLAIN)])
    return lines


def shaded_map(names: Sequence[str], shares: Array, options: DisplayOptions) -> List[Line]:
    """Returns one line for each row of shares (0 to 1, NaN where not known), a character for each column."""
    shades = _SHADES if options.unicode else _ASCII_SHADES
    bar = "│" if options.unicode else "|"
    width = max(map(len, names))
    lines: List[Line] = []
    for name, row in zip(names, shares):
        text = "".join(
            " " if math.isnan(share) else shades[min(len(shades) - 1, math.ceil(share * (len(shades) - 1)))]
            for share in row
        )
        lines.append([(f"{name:>{width}} ", PLAIN), (bar, DIM), (text, PLAIN), (bar, DIM)])
    return lines


def _draw(
    groups: Sequence[Points], x: Axis, y: Axis, columns: int, rows: int, unicode: bool
) -> List[List[Tuple[str, str]]]:
    """Returns a character and its style for each cell, from the lowest row up."""
    cells = [[(" ", PLAIN)] * columns for _ in range(rows)]
    for each in groups:
        inside = np.isfinite(each.x) & np.isfinite(each.y)
        across, up = x.place(np.asarray(each.x)[inside]), y.place(np.asarray(each.y)[inside])
        if each.mark or not unicode:
            for column, row in zip(_cell(across, columns), _cell(up, rows)):
                cells[row][column] = (each.mark or ".", each.style)
            continue
        dots: Dict[Tuple[int, int], int] = {}
        for column, row in zip(_cell(across, 2 * columns), _cell(up, 4 * rows)):
            place = (row // 4, column // 2)
            dots[place] = dots.get(place, 0) | _DOTS[3 - row % 4][column % 2]
        for (row, column), bits in dots.items():
            cells[row][column] = (chr(_BRAILLE + bits), each.style)
    return cells


def _even_ticks(low: float, high: float, max_ticks: int) -> List[float]:
    """Returns multiples of 1, 2 or 5 times a power of ten between two values."""
    start = math.floor(math.log10(high - low)) - 2
    for exponent in range(start, start + 5):
        for step in _TICK_STEPS:
            unit = float(f"{step}e{exponent}")
            first, last = math.ceil(low / unit), math.floor(high / unit)
            if last - first < max_ticks:
                return [float(f"{count * step}e{exponent}") for count in range(first, last + 1)]
    return [low, high]


def _cell(share: Array, count: int) -> Array:
    found: Array = np.clip((np.asarray(share) * (count - 1)).round().astype(int), 0, count - 1)
    return found.tolist()


def _merge(cells: Sequence[Tuple[str, str]]) -> Line:
    """Joins neighbours of the same style into one span."""
    line: Line = []
    for text, style in cells:
        if line and line[-1][1] == style:
            line[-1] = (line[-1][0] + text, style)
        else:
            line.append((text, style))
    return line


def _labels(places: Dict[int, str], columns: int) -> str:
    """Returns the labels below an axis, each centred on its tick; one that would touch its neighbour is left out."""
    text = ""
    for column, label in sorted(places.items()):
        start = min(max(0, column - len(label) // 2), columns - len(label))
        if not text or start > len(text):
            text = text.ljust(start) + label
    return text


def interpolate(times: Array, shares: Array, steps: int, axis: Axis) -> Tuple[Array, Array]:
    """Returns the points of a step curve close enough to each other that it is drawn as a line."""
    grid = np.exp(np.linspace(math.log(axis.low), math.log(axis.high), steps))
    level = np.searchsorted(times, grid, side="right") - 1
    first = max(0, int(np.searchsorted(grid, times[0])) - 1)
    last: Optional[int] = int(np.searchsorted(grid, times[-1])) + 1
    heights = np.where(level < 0, 0.0, shares[np.maximum(level, 0)])[first:last]
    xs, ys = [grid[first:last]], [heights]
    for position in np.nonzero(np.diff(heights) > 1 / steps)[0]:
        # A rise within one column is a vertical line.
        rise = np.arange(heights[position], heights[position + 1], 1 / steps)
        xs.append(np.full(len(rise), grid[first + position + 1]))
        ys.append(rise)
    return np.concatenate(xs), np.concatenate(ys)
