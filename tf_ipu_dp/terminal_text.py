"""Text for people: as wide as the terminal that shows it, in colours where it shows them; plain and whole in files.

Pure but for `width_of` and `launchers_width`, which ask a terminal for its size.
"""

from __future__ import annotations

import io
import os
import re
from typing import List, Mapping, Optional, Protocol, Sequence

# By which the instances of a launcher find the terminals that show what they write to stderr and stdout.
TERMINAL_VARIABLE = "TF_IPU_DP_TERMINAL"
RESULT_TERMINAL_VARIABLE = "TF_IPU_DP_RESULT_TERMINAL"
COLOURS = {"red": "1;31", "yellow": "33", "green": "32"}
_LEAST_WIDTH = 12  # of lines; narrower terminals break them themselves
_LAST_COLUMN = 20  # of a table: with less room, words stand below their row
_BELOW = "    "
_GAP = 2
_NO_LIMIT = 100_000  # words are broken into lines before
_COLOUR_CODE = re.compile(r"\033\[[\d;]*m")
# A command with its flags is never broken, so that it can be copied.
_COMMAND = r"(?:\S*python[\d.]* -m \S+|\S*launch/[\w.-]+|\btf-ipu-dp \w+|\btensorboard)(?: --?(?:[\w=]\S*)?)*"
_UNIT = re.compile(rf"(\s*)({_COMMAND}|\S+)")


class Terminal(Protocol):
    """What may be a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""


class SizedTerminal(Terminal, Protocol):
    """What may be a terminal, by the number of its file."""

    def fileno(self) -> int:
        """Returns the number of the open file."""


class EncodedStream(Protocol):
    """What text is written to."""

    @property
    def encoding(self) -> Optional[str]:
        """Returns the name of its encoding, if it has one."""


def shows_colour(stream: Terminal, environ: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that shows colours, and the user wants them."""
    return stream.isatty() and environ.get("TERM") not in (None, "", "dumb") and not environ.get("NO_COLOR")


def paint(text: str, colour: str, wanted: bool) -> str:
    """Returns a text in a colour of `COLOURS`, if that is wanted."""
    return f"\033[{COLOURS[colour]}m{text}\033[0m" if wanted else text


def supports_unicode(stream: EncodedStream, environ: Mapping[str, str]) -> bool:
    """Whether box-drawing characters can be written to a stream, and are shown as such.

    In the C locale Python writes UTF-8 all the same. Where nobody chose a locale, as in containers, terminals show it;
    LANG=C says that this one may not.
    """
    names = (environ.get("LC_ALL"), environ.get("LC_CTYPE"), environ.get("LANG"))
    # Python sets LC_CTYPE to this value itself when it starts in the C locale.
    chosen = next((name for name in names if name and name != "C.UTF-8"), "")
    return chosen not in ("C", "POSIX") and (stream.encoding or "").lower().replace("-", "").startswith("utf")


def count(number: int, one: str, many: str = "") -> str:
    """Returns `1 replica`, `1,024 replicas`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(text: str) -> str:
    """Returns the first line of a library's message that is not blank, to be quoted inside a sentence."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def shorten(text: str) -> str:
    """Returns a text of 60 characters at most, to be quoted inside a sentence."""
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    """Returns a text without characters that move the cursor, change colours or are invisible.

    All that comes from files, other processes or the command line goes through it before a terminal shows it.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "backslashreplace").decode() for each in text
    )


def printable_lines(text: str) -> str:
    """Returns a text of several lines, each of them printable."""
    return "\n".join(map(printable, text.split("\n")))


def width_of(stream: SizedTerminal) -> Optional[int]:
    """Returns the columns of a terminal; None for a file, a pipe and a terminal that does not know its size."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or None if stream.isatty() else None
    except (OSError, ValueError):
        return None


def launchers_width(environ: Mapping[str, str]) -> Optional[int]:
    """Returns the columns of the terminal on which a launcher shows what this process writes to stderr, if it does."""
    path = environ.get(TERMINAL_VARIABLE)
    if not path:
        return None
    try:
        with open(path, encoding="utf-8", opener=_open_terminal) as terminal:
            return width_of(terminal)
    except OSError:
        return None


def _open_terminal(path: str, _: int) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)


def wrap(text: str, width: Optional[int], indent: str = "  ") -> str:
    """Returns a text with its lines broken between words to fit a width; as it is without one.

    Lines go on after an `indent`. Those that begin with a blank are code, and stay whole; so does a command, which gets
    a line of its own if it does not fit: the terminal breaks that without a line feed, and it can be copied.
    """
    if width is None:
        return text
    return "\n".join(line if line.startswith(" ") else _wrap_line(line, width, indent) for line in text.split("\n"))


def render_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], width: Optional[int], right: Sequence[int] = ()
) -> str:
    """Returns a table as plain text; the columns in `right` are aligned to the right.

    The last column is broken between words. Where there is no room for it, a table with titles is a list with a line
    for each value, and of one without them, what does not fit stands below its row.
    """
    rows = [list(map(printable_lines, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    before = sum(each + _GAP for each in widths[:-1])
    left = None if width is None else width - before
    if left is None or left >= widths[-1]:
        return _draw_table(header, rows, right)
    if not any(header) and left < _LAST_COLUMN:
        lines = _draw_table(header, [[*row[:-1], row[-1] if len(row[-1]) <= left else ""] for row in rows], right)
        below = ["" if len(row[-1]) <= left else _indented(row[-1], width) for row in rows]
        return "".join(f"{line}\n{rest}" for line, rest in zip(lines.splitlines(), below))
    words = [len(word) for row in rows for word in row[-1].split()]
    if any(header) and left < max([len(header[-1]), *words]):
        return "\n".join(render_table(("", ""), list(zip(header, row)), width) for row in rows)
    return _draw_table(header, [[*row[:-1], wrap(row[-1], left, indent="")] for row in rows], right)


def render_names(texts: Mapping[str, str], width: int) -> str:
    """Returns names with what each is about, as `--help` lists commands. Needs no other package."""
    longest = max(map(len, texts))
    indent = " " * (longest + 2 * _GAP)
    lines = []
    for name, text in texts.items():
        told = wrap(text, width - len(indent), indent="").replace("\n", f"\n{indent}")
        lines.append(f"{'':{_GAP}}{name:{longest}}{'':{_GAP}}{told}")
    return "\n".join(lines)


def _draw_table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="", pad_edge=False, padding=(0, _GAP, 0, 0), show_header=any(header))
    for number, title in enumerate(header):
        table.add_column(title, justify="right" if number in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    stream = io.StringIO()
    Console(file=stream, width=_NO_LIMIT, color_system=None, highlight=False, markup=False).print(table)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def _indented(text: str, width: Optional[int]) -> str:
    lines = wrap(text, width and width - len(_BELOW), indent="").split("\n")
    return "".join(f"{_BELOW}{line}\n" for line in lines)


def _wrap_line(line: str, width: int, indent: str) -> str:
    lines: List[str] = []
    current = ""
    for blank, unit in _UNIT.findall(line):
        if current and _length(current + blank + unit) > max(width, _LEAST_WIDTH):
            lines.append(current)
            current = indent + unit
        else:
            current += blank + unit
    return "\n".join([*lines, current])


def _length(text: str) -> int:
    return len(_COLOUR_CODE.sub("", text))
