"""Flags as text: how they are typed, what they take, their defaults, and the help of a command. Pure."""

from __future__ import annotations

import textwrap
from typing import Any, Iterable, Mapping, Sequence

from absl import flags

Flag = Any  # flags.Flag is generic in newer releases of absl only
Groups = Mapping[str, Sequence[str]]

_LEAST_WIDTH = 40
_NARROW = 60  # below it a flag's text begins in a line of its own
_MAX_CHOICES_IN_FORM = 4
_PLACEHOLDERS = {"int": "N", "float": "X", "string": "PATH", "bool": ""}


def render_help(
    usage: str, about: str, groups: Groups, fv: flags.FlagValues, width: int, examples: Sequence[str] = ()
) -> str:
    """Returns the help text: the groups' flags with what they take, what they do and their defaults, and examples."""
    width = max(width, _LEAST_WIDTH)
    blocks = [fill_usage(usage, width), _fill_words(about, width, indent="")]
    column = 2 + max((len(flag_form(fv[name])) for names in groups.values() for name in names), default=0)
    column = 6 if width < _NARROW else min(column, 28) + 2
    for title, names in groups.items():
        lines = [_fill_words(title, width)]
        for name in names:
            form = "  " + flag_form(fv[name])
            text = f"{_help_text(fv[name])} {_default_text(fv[name])}".strip()
            told = _fill_words(text, width - column, indent="").split("\n")
            first = [f"{form:<{column}}{told[0]}"] if len(form) < column else [form, " " * column + told[0]]
            lines += first + [" " * column + line for line in told[1:]]
        blocks.append("\n".join(lines))
    blocks.append(
        _fill_words(
            "--flagfile=PATH reads flags from a file, one per line; a flag on the command line wins over the file's.",
            width,
            indent="",
        )
    )
    if examples:
        blocks.append("\n".join(["Examples", *(f"  {line}" for line in examples)]))
    return "\n\n".join(blocks) + "\n"


def fill_usage(usage: str, width: int) -> str:
    """Returns `usage: COMMAND ...`, broken between words, but not before the command, which may be a long path."""
    return _fill_words(f"usage:\0{usage}", width).replace("\0", " ")


def _fill_words(text: str, width: int, indent: str = "  ") -> str:
    """Breaks lines between words only: flags, paths and names like gc-monitor stay whole."""
    return textwrap.fill(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def alternatives(values: Iterable[object]) -> str:
    """Returns `a`, `a or b`, `a, b or c`."""
    words = [typed(value) for value in values]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


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
    value = placeholder(flag)
    if flag.boolean and value:
        return f"--{flag.name}[={value}]"
    return f"--{flag.name}={value}" if value else f"--[no]{flag.name}"


def describe_choices(text: str, choices: Sequence[str]) -> str:
    """Returns a help text, followed by the choices if they are too many for the flag's form."""
    return text if len(choices) <= _MAX_CHOICES_IN_FORM else f"{text.rstrip('.')}. One of {alternatives(choices)}."


def placeholder(flag: Flag) -> str:
    """Returns what stands for a flag's value in its form; nothing for a switch."""
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


def accepted_values(flag: Flag) -> str:
    """Returns which values a flag takes, for a sentence."""
    choices = getattr(flag.parser, "enum_values", None)
    if choices:
        return alternatives(choices)
    if flag.boolean and not placeholder(flag):
        return "true or false"
    lower, upper = getattr(flag.parser, "lower_bound", None), getattr(flag.parser, "upper_bound", None)
    if lower is not None:
        kind = "a number" if isinstance(flag.parser, flags.FloatParser) else "a whole number"
        return f"{kind} from {_bound_text(lower)} " + ("on" if upper is None else f"to {_bound_text(upper)}")
    return getattr(flag.parser, "syntactic_help", "") or f"a {flag.flag_type()}"


def _bound_text(bound: float) -> str:
    return str(int(bound) if float(bound).is_integer() else bound)


def _default_text(flag: Flag) -> str:
    if flag.default is None or (flag.boolean and placeholder(flag)):
        return ""
    if flag.boolean:
        return f"Default: {'on' if flag.default else 'off'}."
    return f"Default: {flag.default_as_str.strip(chr(39))}."
