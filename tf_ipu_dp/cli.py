"""What every command's front has in common: flags, help, mistakes in one sentence, exit codes. No TensorFlow.

absl does the parsing. Added here: all mistakes of a line are found at once, an explicit flag wins over a flag file
wherever the file stands, an unknown flag is refused with the nearest name, and `--help` shows our flags only.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import textwrap
from difflib import get_close_matches
from typing import Any, Callable, Iterable, List, Mapping, Optional, Sequence, TextIO, Tuple

from absl import flags

Flag = Any  # flags.Flag is generic in newer releases of absl only
Groups = Mapping[str, Sequence[str]]

# Below this width rich would cut the numbers of a table.
LEAST_WIDTH = 60
_HELP_WORDS = frozenset(f"{dashes}{word}" for dashes in ("-", "--") for word in ("help", "h", "helpshort", "helpfull"))
_BAD_VALUE = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)
_NO_VALUE = re.compile(r"Missing value for flag --(\w+)")
_NO_ARGUMENT = re.compile(r"-{1,2}(no\w+)=.* does not take an argument", re.DOTALL)
_MOST_CHOICES_IN_A_FORM = 4
_PLACEHOLDERS = {"int": "N", "float": "X", "string": "PATH", "bool": ""}


class UsageError(ValueError):
    """What the user asked for cannot be done. Each sentence is shown as it is."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = sentences


def run(program: str, body: Callable[[], int], stderr: Optional[TextIO]) -> int:
    """Runs a command's body and returns its exit code; a user's mistake is told in a sentence, without a traceback."""
    if sys.stdout is None:  # closed by the caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    stderr = sys.stderr if stderr is None else stderr
    try:
        code = body()
        sys.stdout.flush()
        return code
    except UsageError as error:
        stderr.write(render_problems(program, error.sentences))
        return 1
    except KeyboardInterrupt:
        stderr.write(f"{program}: interrupted.\n")
        return 130
    except BrokenPipeError:  # the reader (head, less) has gone
        _forget_stdout()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _forget_stdout()
        stderr.write(f"{program}: the output cannot be written ({error.strerror}).\n")
        return 1


def wants_help(words: Sequence[str]) -> bool:
    """Whether the command line asks for help rather than for a run."""
    return any(word in _HELP_WORDS for word in _until_end_of_flags(words))


def parse(words: Sequence[str], fv: flags.FlagValues) -> None:
    """Sets the flags from the words after the program's name; refuses with every mistake that the line has."""
    fv.set_gnu_getopt(True)
    sentences = _refuse_special(words)
    if sentences:
        raise UsageError(*sentences)
    try:
        words = fv.read_flags_from_files(_flag_files_first(words), force_gnu=True)
    except flags.CantOpenFlagFileError as error:
        raise UsageError(
            f"--flagfile cannot be read: {_reason(error)}. Give the path of a text file of flags."
        ) from None
    except flags.Error as error:
        raise UsageError(f"{_reason(error)}. Write --flagfile=PATH.") from None
    except ValueError as error:  # not text, or not a path
        raise UsageError(
            f"--flagfile cannot be read: {_reason(error)}. Give the path of a text file of flags."
        ) from None

    positional: Sequence[str] = ()
    while True:
        try:
            positional = fv(["program", *words])[1:]
            break
        except (flags.Error, ValueError) as error:
            name, sentence = _explain(error, words, fv)
        sentences.append(sentence)
        rest = _without(name, words, fv)
        if rest == words:
            break
        words = rest
    sentences += [f"{word!r} is not expected here; options start with --." for word in positional]
    if sentences:
        raise UsageError(*sentences)


def render_help(usage: str, about: str, groups: Groups, fv: flags.FlagValues, width: int) -> str:
    """Returns the help text: the groups' flags with what they take, what they do and their defaults."""
    width = max(60, min(width, 120))
    blocks = [f"usage: {usage}", textwrap.fill(about, width)]
    column = 2 + max(len(_form(fv[name])) for names in groups.values() for name in names)
    column = min(column, 28) + 2
    for title, names in groups.items():
        lines = [title]
        for name in names:
            form = "  " + _form(fv[name])
            text = textwrap.wrap(f"{_about(fv[name])} {_default(fv[name])}".strip(), width - column)
            first = [f"{form:<{column}}{text[0]}"] if len(form) < column else [form, " " * column + text[0]]
            lines += first + [" " * column + line for line in text[1:]]
        blocks.append("\n".join(lines))
    blocks.append(
        textwrap.fill(
            "--flagfile=PATH reads flags from a file, one per line; a flag on the command line wins over the file's.",
            width,
        )
    )
    return "\n\n".join(blocks) + "\n"


def render_problems(program: str, sentences: Sequence[str]) -> str:
    """Returns the text for stderr: the sentence, or a numbered list of them."""
    if len(sentences) == 1:
        return f"{program}: {sentences[0]}\n"
    lines = [f"{program}: {len(sentences)} problems:"]
    lines += [f"  {number}. {sentence}" for number, sentence in enumerate(sentences, 1)]
    return "\n".join(lines) + "\n"


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: Sequence[int] = ()) -> str:
    """Returns a table as plain text; the columns in `right` are aligned to the right."""
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="", pad_edge=False, padding=(0, 2, 0, 0), show_header=any(header))
    for number, title in enumerate(header):
        last = number == len(header) - 1
        table.add_column(title, justify="right" if number in right else "left", no_wrap=not last, overflow="fold")
    for row in rows:
        table.add_row(*row)
    stream = io.StringIO()
    # Below this width rich would cut the numbers; the terminal had better wrap the line.
    Console(file=stream, width=max(width, LEAST_WIDTH), color_system=None, highlight=False, markup=False).print(table)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def alternatives(values: Iterable[object]) -> str:
    """Returns `a`, `a or b`, `a, b or c`."""
    words = [typed(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count(number: int, one: str, many: str = "") -> str:
    """Returns `1 replica`, `1,024 replicas`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def first_line(text: str) -> str:
    """Returns the first line of a library's message that says something, for a place inside a sentence."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def flag_text(name: str, value: object) -> str:
    """Returns a flag as one would type it."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={typed(value)}"


def typed(value: object) -> str:
    """Returns a flag's value as one would type it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def speaks_unicode(stream: TextIO) -> bool:
    """Whether a stream can carry box drawings."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


def _forget_stdout() -> None:
    """Python would complain again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _until_end_of_flags(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _flag_files_first(words: Sequence[str]) -> List[str]:
    """Moves every --flagfile to the front, so that what stands on the line itself is read last and wins."""
    flags_part = list(_until_end_of_flags(words))
    rest = list(words[len(flags_part) :])
    files: List[str] = []
    others: List[str] = []
    pending = iter(flags_part)
    for word in pending:
        if word in ("--flagfile", "-flagfile"):
            files += [word, *[value for value in [next(pending, None)] if value is not None]]
        elif word.startswith(("--flagfile=", "-flagfile=")):
            files.append(word)
        else:
            others.append(word)
    return files + others + rest


def _without(name: str, words: Sequence[str], fv: flags.FlagValues) -> List[str]:
    """Leaves out a flag, and the value that follows it as a word of its own."""
    kept: List[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return [*kept, word, *pending]
        bare = word.lstrip("-") if word.startswith("-") else ""
        if bare.split("=")[0] != name:
            kept.append(word)
        elif bare == name and pending and _takes_next(name, pending[0], fv):
            pending.pop(0)
    return kept


def _takes_next(name: str, following: str, fv: flags.FlagValues) -> bool:
    """Whether a flag without `=` has the next word as its value; of an unknown flag that is only likely."""
    return not fv[name].boolean if name in fv else not following.startswith("-")


def _refuse_special(words: Sequence[str]) -> List[str]:
    """absl's own flags: --undefok would let unknown flags through, and a --flagfile without a path would be ignored."""
    sentences = []
    for word, following in zip(words, [*words[1:], "--"]):
        bare = word.lstrip("-") if word.startswith("-") else ""
        if word == "--":
            break
        if bare.split("=")[0] == "undefok":
            sentences.append("--undefok is not a flag: unknown flags are always refused.")
        if bare == "flagfile=" or (bare == "flagfile" and following.startswith("-")):
            sentences.append("--flagfile needs the path of a text file of flags.")
    return sentences


def _explain(error: Exception, words: Sequence[str], fv: flags.FlagValues) -> Tuple[str, str]:
    """Returns the name on the line that an absl error is about, and the sentence for the user."""
    text = _reason(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        return error.flagname, f"--{error.flagname} is not a flag. {_nearest_flag(error.flagname, fv)}"
    missing = _NO_VALUE.match(text)
    if missing:
        return missing[1], f"--{missing[1]} needs a value: {_form(fv[missing[1]])}."
    bad = _BAD_VALUE.match(text)
    if bad:
        flag = fv[bad[1]]
        reason = f": {bad[3].rstrip('.')}" if hasattr(flag.parser, "placeholder") else ""
        given = _given_value(bad[1], words)
        return bad[1], f"--{bad[1]}={_shortened(given)} is not possible{reason}. It takes {_takes(flag)}."
    denied = _NO_ARGUMENT.match(text)
    if denied:
        return denied[1], f"{text}. Write --{denied[1]}, or --{denied[1][2:]}."
    return "", text


def _given_value(name: str, words: Sequence[str]) -> str:
    """Returns what the line has for a flag; the last one, as absl reads it."""
    value = ""
    for word, following in zip(words, [*words[1:], ""]):
        bare = word.lstrip("-") if word.startswith("-") else ""
        if bare == name:
            value = following
        elif bare.startswith(f"{name}="):
            value = bare[len(name) + 1 :]
    return value


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()).rstrip(".").replace("ERROR:: ", "")


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nearest_flag(name: str, fv: flags.FlagValues) -> str:
    near = get_close_matches(name.lower(), list(fv), n=1, cutoff=0.5)
    return f"Did you mean --{near[0]}?" if near else "See --help for those that are."


def _form(flag: Flag) -> str:
    value = _value_form(flag)
    if flag.boolean and value:
        return f"--{flag.name}[={value}]"
    return f"--{flag.name}={value}" if value else f"--[no]{flag.name}"


def _value_form(flag: Flag) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return "|".join(choices) if len(choices) <= _MOST_CHOICES_IN_A_FORM else "NAME"
    return getattr(flag.parser, "placeholder", None) or _PLACEHOLDERS.get(flag.flag_type(), "TEXT")


def _about(flag: Flag) -> str:
    """The help text as it was written: absl puts an enum's choices in front of it."""
    text = str(flag.help)
    choices = getattr(flag.parser, "enum_values", None)
    if not choices:
        return text
    text = text.split(">: ", 1)[-1]
    return text if len(choices) <= _MOST_CHOICES_IN_A_FORM else f"{text.rstrip('.')}: {alternatives(choices)}."


def _takes(flag: Flag) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return alternatives(choices)
    if flag.boolean and not _value_form(flag):
        return "true or false"
    lower, upper = getattr(flag.parser, "lower_bound", None), getattr(flag.parser, "upper_bound", None)
    if lower is not None:
        return f"a whole number from {lower} " + ("on" if upper is None else f"to {upper}")
    return getattr(flag.parser, "syntactic_help", "") or f"a {flag.flag_type()}"


def _default(flag: Flag) -> str:
    if flag.default is None or flag.boolean:
        return ""
    return f"Default: {flag.default_as_str.strip(chr(39))}."
