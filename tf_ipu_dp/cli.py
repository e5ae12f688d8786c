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
import textwrap
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Callable, Iterable, List, Mapping, Match, Optional, Protocol, Sequence, TextIO, Tuple, Union

from absl import flags

from tf_ipu_dp import __version__, flag_files, missing_packages
from tf_ipu_dp.early_signals import Interrupted
from tf_ipu_dp.usage_error import UsageError as UsageError  # noqa: PLC0414 - all commands know it by this name

Flag = Any  # flags.Flag is generic in newer releases of absl only
Groups = Mapping[str, Sequence[str]]

COLOURS = {"red": "1;31", "yellow": "33", "green": "32"}
# Below this width rich would cut the numbers of a table.
MIN_WIDTH = 60
_MIN_HELP_WIDTH = 40
# Set by launch/tf-ipu-dp: the folder of the wrapper, as it was typed.
_LAUNCH_VARIABLE = "TF_IPU_DP_LAUNCH"
_COMMAND = re.compile(r"python -m tf_ipu_dp\.(\w+(?:\.\w+)*)")
_HELP_WORDS = frozenset(f"{dashes}{word}" for dashes in ("-", "--") for word in ("help", "h", "helpshort", "helpfull"))
# What people type who know other trainers: the flag that is meant, and what to type, with the value that they gave.
_ALIASES = {
    "lr": ("learning_rate", "--learning_rate={value}"),
    "batch": ("micro_batch_size", "--micro_batch_size={value} (one replica) or --global_batch_size={value} (the job)"),
    "batch_size": (
        "micro_batch_size",
        "--micro_batch_size={value} (one replica) or --global_batch_size={value} (the job)",
    ),
    "steps": ("epochs", "--epochs={value}steps"),
    "max_steps": ("epochs", "--epochs={value}steps"),
    "num_steps": ("epochs", "--epochs={value}steps"),
    "num_epochs": ("epochs", "--epochs={value}"),
    "max_epochs": ("epochs", "--epochs={value}"),
    "max_time": ("time_limit", "--time_limit={value}"),
    "replicas": ("ipus", "--ipus={value} (each replica takes 1 IPU per pipeline stage)"),
    "num_replicas": ("ipus", "--ipus={value} (each replica takes 1 IPU per pipeline stage)"),
    "num_ipus": ("ipus", "--ipus={value}"),
    "gpus": ("ipus", "--ipus={value}"),
    "devices": ("ipus", "--ipus={value}"),
    "workers": ("instances", "--instances={value}"),
    "num_instances": ("instances", "--instances={value}"),
    "output": ("run_dir", "--run_dir={value}"),
    "output_dir": ("run_dir", "--run_dir={value}"),
    "log_dir": ("run_dir", "--run_dir={value}"),
    "model_dir": ("run_dir", "--run_dir={value}"),
    "save_dir": ("run_dir", "--run_dir={value}"),
    "resume_from": ("run_dir", "--run_dir={value} (it resumes from the newest checkpoint of that run)"),
    "resume_from_checkpoint": ("run_dir", "--run_dir=FOLDER (it resumes from the newest checkpoint of that run)"),
    "name": ("run_dir", "--run_dir=runs/{value}"),
    "checkpoint": ("run_dir", "--run_dir=FOLDER (it resumes from the newest checkpoint of that run)"),
    "checkpoint_dir": ("run_dir", "--run_dir={value} (its checkpoints are in it)"),
    "interval": ("watch", "--watch={value}"),
}
_BAD_VALUE = re.compile(r"flag --(\w+)=(.*?): (.*)", re.DOTALL)
_WORDS_OF_LIBRARIES = re.compile(r"could not convert|is not a number in the range|invalid literal")
_ERROR_NUMBER = re.compile(r"\[Errno -?\d+\] ")
_NO_VALUE = re.compile(r"Missing value for flag --(\w+)")
_NO_ARGUMENT = re.compile(r"-{1,2}(no\w+)=.* does not take an argument", re.DOTALL)
_MAX_CHOICES_IN_FORM = 4
_MAX_NAME = 100
_MAX_FILE_NAME = 255
_MAX_PATH = 4096
_MAX_PROBLEMS = 20
_PLACEHOLDERS = {"int": "N", "float": "X", "string": "PATH", "bool": ""}


class Terminal(Protocol):
    """What may be a terminal."""

    def isatty(self) -> bool:
        """Whether it is one."""


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
        text = render_problems(program, error.sentences)
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
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            stderr.write(f"{program}: {printable(f'{error.strerror}: {shorten(str(error.filename))}')}.\n")
            return 1
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _replace_stdout_by_devnull()
        stderr.write(f"{program}: the output cannot be written ({error.strerror}).\n")
        return 1


def shows_colour(stream: Terminal, environ: Mapping[str, str]) -> bool:
    """Whether a stream is a terminal that shows colours, and the user wants them."""
    return stream.isatty() and environ.get("TERM") not in (None, "", "dumb") and not environ.get("NO_COLOR")


def paint(text: str, colour: str, wanted: bool) -> str:
    """Returns a text in a colour of `COLOURS`, if that is wanted."""
    return f"\033[{COLOURS[colour]}m{text}\033[0m" if wanted else text


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
    return any(word in _HELP_WORDS for word in _until_end_of_flags(words))


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
    sentences = _find_impossible_names(words)
    if sentences:
        raise UsageError(*sentences)

    positional: Sequence[str] = ()
    while True:
        try:
            positional = fv(["program", *words])[1:]
            break
        except (flags.Error, ValueError) as error:
            name, sentence = _explain(error, words, fv)
        sentences.append(sentence)
        rest = _remove_flag(name, words, fv)
        if rest == words or len(sentences) >= _MAX_PROBLEMS:
            break
        words = rest
    if not arguments:
        sentences += [f"{shorten(repr(word))} is not expected here; options start with --." for word in positional]
    if sentences:
        raise UsageError(*sentences[:_MAX_PROBLEMS])
    return list(positional)


def render_help(
    usage: str, about: str, groups: Groups, fv: flags.FlagValues, width: int, examples: Sequence[str] = ()
) -> str:
    """Returns the help text: the groups' flags with what they take, what they do and their defaults, and examples."""
    width = max(width, _MIN_HELP_WIDTH)
    blocks = [as_started(f"usage: {usage}", os.environ), textwrap.fill(about, width)]
    column = 2 + max((len(flag_form(fv[name])) for names in groups.values() for name in names), default=0)
    column = 6 if width < MIN_WIDTH else min(column, 28) + 2
    for title, names in groups.items():
        lines = [title]
        for name in names:
            form = "  " + flag_form(fv[name])
            text = textwrap.wrap(f"{_help_text(fv[name])} {_default_text(fv[name])}".strip(), width - column)
            first = [f"{form:<{column}}{text[0]}"] if len(form) < column else [form, " " * column + text[0]]
            lines += first + [" " * column + line for line in text[1:]]
        blocks.append("\n".join(lines))
    blocks.append(
        textwrap.fill(
            "--flagfile=PATH reads flags from a file, one per line; a flag on the command line wins over the file's.",
            width,
        )
    )
    if examples:
        blocks.append("\n".join(["Examples", *(f"  {as_started(line, os.environ)}" for line in examples)]))
    return "\n\n".join(blocks) + "\n"


def as_started(text: str, environ: Mapping[str, str]) -> str:
    """Returns a text with its `python -m tf_ipu_dp.COMMAND` as the user starts commands: from launch/, if so."""
    launch = environ.get(_LAUNCH_VARIABLE)

    def replace(match: Match[str]) -> str:
        own = f"{launch}/{match[1]}"
        return own if os.access(own, os.X_OK) else f"{launch}/tf-ipu-dp {match[1]}"

    return _COMMAND.sub(replace, text) if launch else text


def render_problems(program: str, sentences: Sequence[str]) -> str:
    """Returns the text for stderr: a sentence, or a numbered list of several."""
    sentences = [printable_lines(as_started(_ERROR_NUMBER.sub("", sentence), os.environ)) for sentence in sentences]
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
        table.add_row(*map(printable_lines, row))
    stream = io.StringIO()
    # A narrower terminal wraps the lines, so that no number is cut.
    Console(file=stream, width=max(width, MIN_WIDTH), color_system=None, highlight=False, markup=False).print(table)
    return "".join(line.rstrip() + "\n" for line in stream.getvalue().splitlines())


def alternatives(values: Iterable[object]) -> str:
    """Returns `a`, `a or b`, `a, b or c`."""
    words = [typed(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def count(number: int, one: str, many: str = "") -> str:
    """Returns `1 replica`, `1,024 replicas`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


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


def first_line(text: str) -> str:
    """Returns the first line of a library's message that is not blank, to be quoted inside a sentence."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")


def flag_text(name: str, value: object) -> str:
    """Returns a flag as one would type it."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    return f"--{name}={typed(value)}"


def typed(value: object) -> str:
    """Returns a flag's value as one would type it."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def flag_form(flag: Flag) -> str:
    """Returns how a flag is typed, with a placeholder for its value: `--ipus=N`, `--[no]json`."""
    value = _placeholder(flag)
    if flag.boolean and value:
        return f"--{flag.name}[={value}]"
    return f"--{flag.name}={value}" if value else f"--[no]{flag.name}"


def describe_choices(text: str, choices: Sequence[str]) -> str:
    """Returns a help text, followed by the choices if they are too many for the flag's form."""
    return text if len(choices) <= _MAX_CHOICES_IN_FORM else f"{text.rstrip('.')}. One of {alternatives(choices)}."


def expand_path(text: Union[str, Path]) -> Path:
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


def supports_unicode(stream: TextIO) -> bool:
    """Whether a stream can encode box-drawing characters."""
    return (stream.encoding or "").lower().replace("-", "").startswith("utf")


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


def _find_impossible_names(words: Sequence[str]) -> List[str]:
    """Returns a sentence for each flag whose name is too long: comparing it with all others would take seconds."""
    names = (word.lstrip("-").split("=")[0] for word in _until_end_of_flags(words) if word.startswith("-"))
    return [
        f"--{shorten(name)} is not a flag. See --help for those that are." for name in names if len(name) > _MAX_NAME
    ]


def _explain(error: Exception, words: Sequence[str], fv: flags.FlagValues) -> Tuple[str, str]:
    """Returns the name on the line that an absl error is about, and the sentence for the user."""
    text = _reason(error)
    if isinstance(error, flags.UnrecognizedFlagError):
        advice = _suggest_flag(error.flagname, _last_value(error.flagname, words), fv)
        return error.flagname, f"--{error.flagname} is not a flag. {advice}"
    missing = _NO_VALUE.match(text)
    if missing:
        return missing[1], f"--{missing[1]} needs a value: {flag_form(fv[missing[1]])}."
    bad = _BAD_VALUE.match(text)
    if bad:
        flag = fv[bad[1]]
        reason = f": {bad[3].rstrip('.')}" if hasattr(flag.parser, "placeholder") else ""
        if _WORDS_OF_LIBRARIES.search(reason):  # what the flag takes says the same
            reason = ""
        given = _last_value(bad[1], words)
        near = _nearest_choice(given.lower(), getattr(flag.parser, "enum_values", None) or ())
        guess = f" Did you mean --{bad[1]}={near}?" if near else ""
        sentence = f"--{bad[1]}={shorten(given)} is not possible{reason}.{guess} It takes {_accepted_values(flag)}."
        return bad[1], sentence
    denied = _NO_ARGUMENT.match(text)
    if denied:
        return denied[1], f"{text}. Write --{denied[1]}, or --{denied[1][2:]}."
    return "", text


def _last_value(name: str, words: Sequence[str]) -> str:
    """Returns the value that the line gives a flag: the last one, as in absl."""
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


def _suggest_flag(name: str, value: str, fv: flags.FlagValues) -> str:
    plain = name.lower().replace("-", "_")
    flag, form = _ALIASES.get(plain, ("", ""))
    if flag in fv:
        return f"Use {form.format(value=shorten(value) or 'VALUE')}."
    # Below this, flags that merely share letters would be offered: --precision for --version.
    near = get_close_matches(plain, list(fv), n=1, cutoff=0.7)
    return f"Did you mean --{near[0]}?" if near else "See --help for those that are."


def _nearest_choice(given: str, choices: Sequence[str]) -> Optional[str]:
    """Returns the choice that was probably meant: of names with a number, like resnet50, that with the nearest one."""
    parts = re.fullmatch(r"([a-z]+)(\d{1,9})", given)
    if parts:
        alike = [each for each in choices if re.fullmatch(parts[1] + r"\d+", each)]
        if alike:
            return min(alike, key=lambda each: abs(int(each[len(parts[1]) :]) - int(parts[2])))
    return next(iter(get_close_matches(given, choices, n=1)), None)


def _placeholder(flag: Flag) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return "|".join(choices) if len(choices) <= _MAX_CHOICES_IN_FORM else "NAME"
    return getattr(flag.parser, "placeholder", None) or _PLACEHOLDERS.get(flag.flag_type(), "TEXT")


def _help_text(flag: Flag) -> str:
    """Returns the declared help text, followed by the choices if the flag's form does not show them.

    absl puts an enum's choices in front of the text.
    """
    text = str(flag.help)
    choices = getattr(flag.parser, "enum_values", None)
    if not choices:
        return text
    return describe_choices(text.split(">: ", 1)[-1], choices)


def _accepted_values(flag: Flag) -> str:
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return alternatives(choices)
    if flag.boolean and not _placeholder(flag):
        return "true or false"
    lower, upper = getattr(flag.parser, "lower_bound", None), getattr(flag.parser, "upper_bound", None)
    if lower is not None:
        kind = "a number" if isinstance(flag.parser, flags.FloatParser) else "a whole number"
        return f"{kind} from {_bound_text(lower)} " + ("on" if upper is None else f"to {_bound_text(upper)}")
    return getattr(flag.parser, "syntactic_help", "") or f"a {flag.flag_type()}"


def _bound_text(bound: float) -> str:
    return str(int(bound) if float(bound).is_integer() else bound)


def _default_text(flag: Flag) -> str:
    if flag.default is None or (flag.boolean and _placeholder(flag)):
        return ""
    if flag.boolean:
        return f"Default: {'on' if flag.default else 'off'}."
    return f"Default: {flag.default_as_str.strip(chr(39))}."
