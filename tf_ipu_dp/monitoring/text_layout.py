"""Text for terminals and pipes: styled lines, columns that fit a width, sparklines. Pure: takes values, returns text.

Untrusted text must go through `printable`, which escapes control characters.
"""

from __future__ import annotations

import dataclasses
import math
import unicodedata
from typing import Iterable, List, Optional, Sequence, Tuple

from tf_ipu_dp.cli import printable as printable  # noqa: PLC0414 - those who lay out text find it here

Span = Tuple[str, str]  # a text and its style
Line = List[Span]
TextColumn = Tuple[str, List[str]]  # a title and its cells

PLAIN, BOLD, DIM, GOOD, WARN, BAD = "", "1", "2", "32", "33", "31"
SPARKLINE_WIDTH = 20
GAP = 2
_BAR_WIDTH = 8
_BLOCKS, _ASCII_BLOCKS = "▁▂▃▄▅▆▇█", ".:-=+*%#"
_MIN_LAST_COLUMN = 16
_MOST_WRITTEN_OUT = 1e15  # larger numbers are written as 1.23e+45


@dataclasses.dataclass(frozen=True)
class DisplayOptions:
    """What the output can show. A width of None means that lines may be as long as they need."""

    width: Optional[int] = None
    bars: bool = False
    colour: bool = False
    unicode: bool = True


@dataclasses.dataclass
class Column:
    """One column of a table. If space is short, columns without values are dropped first, then by highest rank."""

    title: str
    cells: List[Line]
    right: bool = True
    rank: int = 0  # 0: never dropped

    @property
    def unknown(self) -> bool:
        return all(text in ("-", "") for cell in self.cells for text, _ in cell)

    @property
    def width(self) -> int:
        return max([cell_width(self.title), *(line_width(cell) for cell in self.cells)])


def make_table(columns: Sequence[Column], options: DisplayOptions) -> List[Line]:
    """Returns the header and the rows. If too wide, columns are dropped, then the last one is truncated."""
    if not columns:
        return []
    shown = fit_columns(columns, options.width)
    widths = [column.width for column in shown]
    lines: List[Line] = [_join_cells([[(column.title, BOLD)] for column in shown], shown, widths)]
    lines += [
        _join_cells([column.cells[row] for column in shown], shown, widths) for row in range(len(columns[0].cells))
    ]
    return lines


def fit_columns(columns: Sequence[Column], width: Optional[int]) -> List[Column]:
    """Returns the columns that fit a width: those without values are dropped first, then those of the highest rank."""
    shown = list(columns)
    while width is not None and len(shown) > 1 and _min_width(shown) > width:
        dropped = max(shown, key=lambda column: (column.rank > 0 and column.unknown, column.rank))
        if not dropped.rank:
            break
        shown.remove(dropped)
    return shown


def render_lines(lines: Sequence[Line], options: DisplayOptions) -> str:
    """Returns the lines as text, with colour codes if asked for; a line that is too long is truncated."""
    rendered = []
    for line in lines:
        spans = line
        while spans and not spans[-1][0].strip():
            spans = spans[:-1]
        spans = spans if options.width is None else truncate(spans, options.width)
        if options.colour:
            rendered.append("".join(f"\x1b[{style}m{part}\x1b[0m" if style and part else part for part, style in spans))
        else:
            rendered.append("".join(part for part, _ in spans).rstrip())
    text = "\n".join(rendered) + "\n"
    return text if options.unicode else text.encode("ascii", "backslashreplace").decode()


def wrap(line: Line, width: Optional[int]) -> List[Line]:
    """Breaks a line of one span between words."""
    text, style = line[0]
    if width is None:
        return [line]
    lines, current = [], ""
    for word in text.split(" "):
        if current and len(current) + 1 + len(word) > width:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}" if current else word
    return [[(each, style)] for each in [*lines, current]]


def number(value: Optional[float]) -> str:
    """Returns three digits; a dash for what is not known or not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    if abs(value) >= _MOST_WRITTEN_OUT:
        return f"{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:,.{min(digits, 6)}f}"


def id_ranges(ids: Iterable[int]) -> str:
    """Returns `0-3,8` for 0, 1, 2, 3 and 8."""
    ranges: List[List[int]] = []
    for number in sorted(set(ids)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def duration(seconds: float) -> str:
    """Returns `00:00:42`, `13:05:00` or `2d 03:00`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}:{minutes:02d}" if days else f"{hours:02d}:{minutes:02d}:{rest:02d}"


def sparkline(percentages: Sequence[Optional[float]], unicode: bool = True) -> str:
    """Returns one character per percentage, the newest last; a blank where it is not known."""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    return "".join(
        " " if value is None else blocks[min(7, max(0, int(value * 8 / 100)))]
        for value in percentages[-SPARKLINE_WIDTH:]
    ).rjust(SPARKLINE_WIDTH)


def bar(percent: Optional[float], unicode: bool) -> Span:
    """Returns a horizontal bar; an empty one where the percentage is not known."""
    full, empty = ("█", "·") if unicode else ("#", ".")
    filled = 0 if percent is None else round(min(100.0, max(0.0, percent)) * _BAR_WIDTH / 100)
    style = DIM if not filled else GOOD if filled >= 0.8 * _BAR_WIDTH else WARN
    return (full * filled + empty * (_BAR_WIDTH - filled), style)


def cell_width(text: str) -> int:
    """Returns how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def line_width(line: Line) -> int:
    """Returns how many columns of a terminal a line takes."""
    return sum(cell_width(text) for text, _ in line)


def table_width(columns: Sequence[Column]) -> int:
    """Returns how many columns of a terminal a table takes if nothing is left out of it."""
    return sum(column.width + GAP for column in columns) - GAP


def truncate(line: Line, width: int) -> Line:
    """Returns a line of at most a width; a tilde marks where it was cut."""
    if line_width(line) <= width:
        return line
    kept: Line = []
    left = width - 1
    for text, style in line:
        part = ""
        for each in text:
            left -= cell_width(each)
            if left < 0:
                return [*kept, (part, style), ("~", DIM)]
            part += each
        kept.append((part, style))
    return kept


def _min_width(columns: Sequence[Column]) -> int:
    """Returns the smallest width of a table: its last column may be truncated, but not below its title."""
    return sum(column.width + GAP for column in columns[:-1]) + min(columns[-1].width, _MIN_LAST_COLUMN)


def _join_cells(cells: Sequence[Line], columns: Sequence[Column], widths: Sequence[int]) -> Line:
    line: Line = []
    for cell, column, width in zip(cells, columns, widths):
        blank = (" " * (width - line_width(cell)), PLAIN)
        line += [blank, *cell] if column.right else [*cell, blank]
        line.append((" " * GAP, PLAIN))
    return line
