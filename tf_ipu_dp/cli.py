"""How every command behaves: flags, help, mistakes in one sentence, exit codes. No TensorFlow.

absl does the parsing. Added here: all mistakes of a line are reported at once, a flag on the line wins over a flag file
wherever the file is named, an unknown flag is refused with the nearest name, and `--help` shows our flags only.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Callable, List, Mapping, Match, Optional, Sequence, TextIO, Union

from absl import flags

from tf_ipu_dp import __version__, flag_files, flag_help, flag_mistakes, missing_packages
from tf_ipu_dp.early_signals import Interrupted
from tf_ipu_dp.flag_help import alternatives, describe_choices, flag_form, flag_text, typed
from tf_ipu_dp.terminal_text import (
    count,
    first_line,
    launchers_width,
    paint,
    printable,
    printable_lines,
    render_table,
    shorten,
    shows_colour,
    supports_unicode,
    width_of,
    wrap,
)
from tf_ipu_dp.usage_error import UsageError

# This module is also the door to how flags and texts are shown.
__all__ = [
    "Answer", "UsageError", "alternatives", "announce", "as_started", "check_path", "count", "describe_choices",
    "expand_path", "first_line", "flag_form", "flag_text", "paint", "parse", "printable", "printable_lines",
    "render_help", "render_problems", "render_table", "resume_command", "run", "shorten", "show", "shows_colour",
    "supports_unicode", "typed", "wants_help", "width_of", "wrap",
]  # fmt: skip

# Set by launch/tf-ipu-dp: the folder of the wrapper, as it was typed.
_LAUNCH_VARIABLE = "TF_IPU_DP_LAUNCH"
_COMMAND = re.compile(r"python -m tf_ipu_dp\.(\w+(?:\.\w+)*)")
_HELP_WORDS = frozenset(f"{dashes}{word}" for dashes in ("-", "--") for word in ("help", "h", "helpshort", "helpfull"))
_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")
_MAX_FILE_NAME = 255
_MAX_PATH = 4096
_MAX_PROBLEMS = 20


class Answer(Exception):  # noqa: N818 - it is none
    """The command line asks for a text, like the version, in place of what the command does."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def run(program: str, body: Callable[[], int], stderr: Optional[TextIO]) -> int:
    """Runs a command's body and returns its exit code; a user's mistake becomes a sentence, not a traceback."""
    if sys.stdout is None:  # the caller closed it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    stderr = sys.stderr if stderr is None else stderr
    try:
        code = _run_body(body)
        sys.stdout.flush()
        return code
    except UsageError as error:
        text = render_problems(program, error.sentences, _width_of_messages(stderr))
        mark = f"{program}:"
        stderr.write(paint(mark, "red", shows_colour(stderr, os.environ)) + text[len(mark) :])
        return 1
    except KeyboardInterrupt as error:
        stderr.write(f"{program}: interrupted.\n")
        return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)
    except BrokenPipeError:  # the reader (head, less) has ended
        _replace_stdout_by_devnull()
        return 1
    except OSError as error:
        # Paths are looked at in many places, and what a user may not enter is not a bug anywhere.
        if error.filename is not None and error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM):
            path = os.fsdecode(error.filename)
            sentence = f"{path if len(path) < _MAX_FILE_NAME else shorten(path)} cannot be used: {error.strerror}."
            stderr.write(render_problems(program, [sentence], _width_of_messages(stderr)))
            return 1
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _replace_stdout_by_devnull()
        stderr.write(f"{program}: the output cannot be written ({error.strerror}).\n")
        return 1


def resume_command(run_dir: Path, environ: Mapping[str, str], own_code: Mapping[str, str]) -> str:
    """Returns the command that resumes a run, as it can be pasted. Code of users, by the flag, must be named again."""
    words = [f"--run_dir={run_dir}", *(f"--{name}={reference}" for name, reference in own_code.items())]
    return as_started(f"python -m tf_ipu_dp.train {' '.join(map(shlex.quote, words))}", environ)


def _run_body(body: Callable[[], int]) -> int:
    try:
        return body()
    except Answer as answer:
        return show(answer.text)
    except ModuleNotFoundError as error:
        sentence = missing_packages.handle(error)
        if sentence:
            raise UsageError(sentence) from error
        raise


def show(text: str) -> int:
    """Writes the result of a command that has nothing else to do, and returns its exit code."""
    sys.stdout.write(text)
    return 0


def wants_help(words: Sequence[str]) -> bool:
    """Whether the command line asks for help rather than for a run."""
    return any(word.split("=")[0] in _HELP_WORDS for word in _until_end_of_flags(words))


def parse(words: Sequence[str], fv: flags.FlagValues, *, arguments: bool = False) -> List[str]:
    """Sets the flags from the words after the program's name, or refuses the line with all of its mistakes.

    Returns the words that belong to no flag; they are mistakes unless the command takes `arguments`.
    """
    if "--version" in _until_end_of_flags(words):
        raise Answer(f"tf_ipu_dp {__version__}\n")
    fv.set_gnu_getopt(True)
    sentences = _find_refused_absl_flags(words)
    if sentences:
        raise UsageError(*sentences)
    words = flag_files.read(_flag_files_first(words))
    sentences = flag_mistakes.find_impossible_names(_until_end_of_flags(words))
    if sentences:
        raise UsageError(*sentences)

    positional: Sequence[str] = ()
    while True:
        try:
            positional = fv(["program", *words])[1:]
            break
        except (flags.Error, ValueError) as error:
            name, sentence = flag_mistakes.explain(error, words, fv)
        sentences.append(sentence)
        rest = _remove_flag(name, words, fv)
        if rest == words or len(sentences) >= _MAX_PROBLEMS:
            break
        words = rest
    if not arguments:
        sentences += [flag_mistakes.explain_argument(word, fv) for word in positional]
    if sentences:
        raise UsageError(*sentences[:_MAX_PROBLEMS])
    return list(positional)


def render_help(
    usage: str,
    about: str,
    groups: flag_help.Groups,
    fv: flags.FlagValues,
    width: int,
    examples: Sequence[str] = (),
) -> str:
    """Returns the help of a command, with the command as the user has started it."""
    lines = [as_started(line, os.environ) for line in examples]
    return flag_help.render_help(as_started(usage, os.environ), about, groups, fv, width, lines)


def announce(program: str, text: str) -> None:
    """Writes a line to stderr, with commands as the user starts them, as wide as the terminal if that is one.

    The text may have names from files and other processes in it: it is made printable.
    """
    line = printable_lines(as_started(f"{program}: {text}", os.environ))
    sys.stderr.write(wrap(line, _width_of_messages(sys.stderr)) + "\n")
    sys.stderr.flush()


def as_started(text: str, environ: Mapping[str, str]) -> str:
    """Returns a text with its `python -m tf_ipu_dp.COMMAND` as the user starts commands: from launch/, if so."""
    launch = environ.get(_LAUNCH_VARIABLE)

    def replace(match: Match[str]) -> str:
        own = f"{launch}/{match[1]}"
        return own if os.access(own, os.X_OK) else f"{launch}/tf-ipu-dp {match[1]}"

    return _COMMAND.sub(replace, text) if launch else text


def render_problems(program: str, sentences: Sequence[str], width: Optional[int] = None) -> str:
    """Returns the text for stderr: a sentence, or a numbered list of several. `width`: that of a terminal."""
    sentences = [printable_lines(as_started(_ERROR_NUMBER.sub("", sentence), os.environ)) for sentence in sentences]
    if len(sentences) == 1:
        return wrap(f"{program}: {sentences[0]}", width) + "\n"
    lines = [f"{program}: {len(sentences)} problems:"]
    for number, sentence in enumerate(sentences, 1):
        mark = f"  {number}. "
        lines.append(mark + wrap(sentence, width and width - len(mark), " " * len(mark)))
    return "\n".join(lines) + "\n"


def expand_path(text: Union[str, os.PathLike[str]]) -> Path:
    """Returns a path with ~ expanded: a shell does not expand it in --flag=~/folder. Unknown users stay as they are."""
    return Path(os.path.expanduser(text))  # noqa: PTH111 - pathlib raises where there is no home folder


def check_path(text: str) -> str:
    """Returns the text of a path, unchanged; ValueError with the reason if no file can have that name."""
    if "\0" in text:
        raise ValueError("a path has no NUL")
    encoded = os.fsencode(text)
    longest = max(map(len, encoded.split(b"/")))
    if longest > _MAX_FILE_NAME or len(encoded) >= _MAX_PATH:
        raise ValueError(f"a name has up to {_MAX_FILE_NAME} bytes and a path up to {_MAX_PATH - 1}")
    if text.startswith("~"):
        user = text[1:].split("/", maxsplit=1)[0]
        try:
            Path(text.split("/", maxsplit=1)[0]).expanduser()
        except (RuntimeError, ValueError):
            raise ValueError(f"there is no user {user!r} with a home folder") from None
    return text


def _width_of_messages(stream: TextIO) -> Optional[int]:
    return width_of(stream) or launchers_width(os.environ)


def _replace_stdout_by_devnull() -> None:
    """Keeps Python from failing again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _until_end_of_flags(words: Sequence[str]) -> Sequence[str]:
    return words[: words.index("--")] if "--" in words else words


def _flag_files_first(words: Sequence[str]) -> List[str]:
    """Moves every --flagfile to the front, so that flags on the line itself are read last and win."""
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


def _remove_flag(name: str, words: Sequence[str], fv: flags.FlagValues) -> List[str]:
    """Returns the words without a flag, and without its value where that is a separate word."""
    kept: List[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--":
            return [*kept, word, *pending]
        bare = word.lstrip("-") if word.startswith("-") else ""
        if bare.split("=")[0] != name:
            kept.append(word)
        elif bare == name and pending and _takes_next_word(name, pending[0], fv):
            pending.pop(0)
    return kept


def _takes_next_word(name: str, following: str, fv: flags.FlagValues) -> bool:
    """Whether the next word is the value of a flag without `=`; a guess for an unknown flag."""
    return not fv[name].boolean if name in fv else not following.startswith("-")


def _find_refused_absl_flags(words: Sequence[str]) -> List[str]:
    """Returns a sentence for each use of absl's own flags that is refused.

    --undefok would let unknown flags through, and absl ignores a --flagfile without a path.
    """
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
