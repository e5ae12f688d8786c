"""Flag files: the words of a command line with every --flagfile replaced by the flags in that file.

absl reads them too, but one inside the other by recursion, and whatever is in them: prose was reported line by line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import List, Sequence, Tuple

from tf_ipu_dp.usage_error import UsageError

_MAX_BYTES = 1 << 20
_MAX_FILES = 100
# A run's saved flags are all in this file. If it names another one, somebody has added that.
_OF_A_RUN = "run.flags"
_COMMENTS = ("#", "//")


def read(words: Sequence[str]) -> List[str]:
    """Returns the words with the flags of flag files in place of their names; UsageError for what is not one."""
    found: List[str] = []
    pending: List[Tuple[str, Tuple[str, ...]]] = [(word, ()) for word in reversed(words)]
    files = 0
    while pending:
        word, inside = pending.pop()
        if word == "--" and not inside:
            return [*found, word, *(each for each, _ in reversed(pending))]
        name, equals, value = word.partition("=")
        if name.lstrip("-") != "flagfile" or not name.startswith("-"):
            found.append(word)
            continue
        if not equals:
            if not pending:
                raise UsageError(f"{word} needs the path of a text file of flags. Write --flagfile=PATH.")
            value = pending.pop()[0]
        path = os.path.abspath(_expand(value))  # noqa: PTH100 - a name, compared and not followed
        files += 1
        if path in inside or files > _MAX_FILES:
            reason = "it reads itself" if path in inside else f"more than {_MAX_FILES} flag files are named"
            raise UsageError(f"--flagfile={value} cannot be read: {reason}. Write all flags into one file.")
        pending += [(line, (*inside, path)) for line in reversed(_read_lines(value))]
    return found


def _read_lines(value: str) -> List[str]:
    """Returns the flags in a file, one per line, without comments."""
    advice = "Give the path of a text file of flags; python -m tf_ipu_dp.list flags shows those that are here."
    try:
        with open(_expand(value), "rb") as file:  # noqa: PTH123 - a pipe from the shell will do
            content = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--flagfile={value} cannot be read: {reason}. {advice}") from None
    if len(content) > _MAX_BYTES:
        raise UsageError(f"--flagfile={value} cannot be read: it is longer than {_MAX_BYTES:,} bytes. {advice}")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--flagfile={value} cannot be read: it is not text ({error.reason}). {advice}") from None
    lines = []
    for number, line in enumerate(text.split("\n"), 1):
        flag = line.strip()
        if not flag or flag.startswith(_COMMENTS):
            continue
        if not flag.startswith("-") or "\0" in flag:
            shown = flag if len(flag) <= 60 else f"{flag[:57]}..."
            raise UsageError(
                f"--flagfile={value} cannot be read: line {number} is {shown!r}, and not a flag like --ipus=8. {advice}"
            )
        if Path(value).name == _OF_A_RUN and flag.lstrip("-").split("=")[0] == "flagfile":
            raise UsageError(
                f"--flagfile={value} cannot be read: line {number} names another flag file, and a run saves all its "
                "flags in one. Remove that line."
            )
        lines.append(flag)
    return lines


def _expand(value: str) -> str:
    return os.path.expanduser(value)  # noqa: PTH111 - it leaves the name of an unknown user as it is
