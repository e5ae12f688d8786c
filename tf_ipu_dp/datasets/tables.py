"""Tables of numbers and texts in .csv files, for training and for predictions. Standard library only."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Dict, List, NoReturn, Optional, Sequence

from tf_ipu_dp import cli


@dataclasses.dataclass(frozen=True)
class Table:
    """The columns of a .csv file by their titles. `name` begins the sentence of every refusal."""

    name: str
    columns: Dict[str, List[str]]
    lines: List[int]  # of the samples in the file

    @property
    def rows(self) -> int:
        return len(next(iter(self.columns.values())))

    def numbers(self, title: str, advice: str = "") -> List[float]:
        """Returns the numbers of a column; UsageError, which ends with the advice, if one is missing or not finite."""
        found = [to_number(word) for word in self.columns[title]]
        bad = [place for place, number in enumerate(found) if number is None]
        if bad:
            word, where = self.columns[title][bad[0]], f"in column {title!r}, line {self.lines[bad[0]]}"
            what = f"has {word!r} {where}, which is not a number" if word else f"has no value {where}"
            what += f" ({len(bad):,} such lines)" if len(bad) > 1 else ""
            refuse(self.name, f"{what}. {advice}" if advice else what)
        return [number for number in found if number is not None]


def read_table(path: Path, name: str) -> Table:
    """Returns the table in a file whose first line has the titles; UsageError with one sentence if it has none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            read = [(row, reader.line_num) for row in reader if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        refuse(name, f"cannot be read ({cli.first_line(str(error))})")
    rows, lines = [row for row, _ in read], [line for _, line in read]
    if not rows:
        refuse(name, "is empty")
    header = [word.strip() for word in rows[0]]
    twice = next((word for place, word in enumerate(header) if word in header[:place]), None)
    if twice is not None:
        refuse(name, f"has two columns {twice!r}")
    if len(rows) < 2:
        refuse(name, "has a header and no samples")
    for number, row in zip(lines[1:], rows[1:]):
        if len(row) != len(header):
            refuse(name, f"has {cli.count(len(row), 'value')} in line {number}, but {len(header)} columns")
    columns = {title: [row[place].strip() for row in rows[1:]] for place, title in enumerate(header)}
    return Table(name, columns, lines[1:])


def to_number(word: str) -> Optional[float]:
    """Returns the finite number that a word is, if it is one."""
    try:
        number = float(word)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def name_some(titles: Sequence[str]) -> str:
    """Returns some titles of columns for a sentence."""
    return cli.alternatives(list(titles)[:8])


def refuse(name: str, what: str) -> NoReturn:
    """Raises the UsageError of a table."""
    raise cli.UsageError(f"{name} {what}.")
