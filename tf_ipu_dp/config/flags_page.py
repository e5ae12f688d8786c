"""docs/flags.md, made from the declarations of the flags. Pure: returns text."""

from __future__ import annotations

import re
from typing import List, Sequence

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import Effect, Flag

_ON_RESUMPTION = {
    Effect.MODEL: "same, also to evaluate",
    Effect.WEIGHTS: "same",
    Effect.LATER_UPDATES: "may differ, and is logged",
    Effect.RUN: "may differ",
}


def render_page() -> str:
    """Returns the page as Markdown: the flags of train by group, and which may change on resumption."""
    fv = train_flags.make_flags()
    by_name = {flag.name: flag for flag in train_flags.FLAGS}
    sections = [
        "# Flags",
        "<!-- Generated from tf_ipu_dp/config/train_flags.py: python -m tf_ipu_dp.config > docs/flags.md -->",
        "```\npython -m tf_ipu_dp.train [--flag=value ...]\n```",
        "These are the flags of `train`. `launch` takes all of them and [a few more](instances.md); each command lists "
        "its flags with `--help`. `--flagfile=PATH` reads flags from a file, one per line; a flag on the "
        "command line wins over the file's.",
        _render_classes(),
    ]
    for title, names in train_flags.GROUPS.items():
        rows = [_render_row(by_name[name], fv) for name in names]
        sections.append(
            "\n".join([f"## {title}", "", *_render_head("Flag", "Meaning", "Default", "On resumption"), *rows])
        )
    return "\n\n".join(sections) + "\n"


def _render_classes() -> str:
    """Returns what the last column of the tables means, and which flags are exceptions."""
    return "\n".join(
        [
            "A run that resumes takes its own saved flags, and those on the command line win. They are then compared "
            "with those of the checkpoint:",
            "",
            f"- **{_ON_RESUMPTION[Effect.MODEL]}**: defines the model or its data. A checkpoint with another value can "
            "be neither resumed nor evaluated.",
            f"- **{_ON_RESUMPTION[Effect.WEIGHTS]}**: changes the trained weights. A checkpoint with another value "
            "can be evaluated, but not resumed.",
            f"- **{_ON_RESUMPTION[Effect.LATER_UPDATES]}**: changes how the weights are updated from then on.",
            f"- **{_ON_RESUMPTION[Effect.RUN]}**: controls how, where or how long the run executes.",
            "",
            "`--evaluate` takes a run's flags from its folder, except "
            f"{_list_names(train_flags.names_dropped_for_evaluation())}. All instances of a job must have the same "
            f"flags, except {_list_names(train_flags.names_per_instance())}.",
        ]
    )


def _render_row(flag: Flag, fv: flags.FlagValues) -> str:
    choices = getattr(flag.parser, "enum_values", None) or ()
    cells = [
        _render_form(flag.name, choices, cli.flag_form(fv[flag.name])),
        cli.describe_choices(flag.help, choices),
        flag.open_default or _render_value(flag.default),
        _ON_RESUMPTION[flag.effect],
    ]
    return f"| {' | '.join(cells)} |"


def _render_form(name: str, choices: Sequence[str], form: str) -> str:
    """Returns how the flag is written, without a bar: sites and repositories disagree on bars in a table."""
    if choices:
        return f"`--{name}={{{','.join(choices)}}}`"
    form = re.sub(r"\[.*?\]", lambda optional: optional[0].replace("|", "/"), form)
    first, *others = form.split("|")
    return " or ".join([f"`{first}`", *(f"`--{name}={other}`" for other in others)])


def _render_value(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else cli.typed(value)


def _render_head(*titles: str) -> List[str]:
    return [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(f"`--{name}`" for name in names[:-1]) + f" and `--{names[-1]}`"
