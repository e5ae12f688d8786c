"""Prints a script that completes commands, flags and values in a shell: `python -m tf_ipu_dp.completion bash`.

What can be completed is read from the `--help` of each command, which lists every flag with its choices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import io
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.__main__ import COMMANDS
from tf_ipu_dp.datasets import info

SHELLS = {
    "bash": "source <(tf-ipu-dp completion bash)",
    "zsh": "source <(tf-ipu-dp completion zsh)",
    "fish": "tf-ipu-dp completion fish | source",
}
_EXAMPLES = tuple(f"python -m tf_ipu_dp.completion {shell}" for shell in SHELLS)
# Their help lists no flags: what follows is a program.
_PROGRAMS = ("emulator", "emulator.poprun")
_FLAG = re.compile(r"^  --(?P<no>\[no\])?(?P<name>\w+)(?:\[?=(?P<value>\S+?)\]?)?(?:$|\s)(?P<text>.*)")
# Names that a flag takes among others.
_NAMES = {"dataset": tuple(info.DATASETS)}
_CHOICES = re.compile(r"One of ([^.]*)\.")
_SUBCOMMAND = re.compile(r"^  ([a-z]\w+)  ")


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a command: how it begins, what its values are where these are known, and whether it takes any."""

    name: str
    switch: bool
    choices: Tuple[str, ...]

    @property
    def words(self) -> Tuple[str, ...]:
        """What can be typed: up to the `=` where a value follows."""
        return (f"--{self.name}", f"--no{self.name}") if self.switch else (f"--{self.name}=",)


def main(words: Sequence[str]) -> int:
    """Prints the script for the shell that the first word names."""
    if cli.wants_help(words):
        return cli.show(_help())
    shells = [word for word in words if not word.startswith("-")]
    cli.parse([word for word in words if word.startswith("-")], _make_flags())
    if len(shells) != 1 or shells[0] not in SHELLS:
        near = difflib.get_close_matches(shells[0], SHELLS, n=1) if len(shells) == 1 else []
        what = f"{shells[0]} is not a shell that is known" if len(shells) == 1 else "the name of the shell is needed"
        raise cli.UsageError(f"{what}. " + (f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(SHELLS)}."))
    subcommands = read_subcommands()
    return cli.show(render(shells[0], read_flags(subcommands), subcommands))


def read_flags(subcommands: Mapping[str, Sequence[str]]) -> Dict[str, List[Flag]]:
    """Returns the flags of every command, and of every subcommand as `collectives size`."""
    found = {name: parse_help(_help_of(name)) for name in COMMANDS if name not in _PROGRAMS}
    for name, words in subcommands.items():
        if name != "completion":
            found.update({f"{name} {each}": parse_help(_help_of(name, each)) for each in words})
    # It takes all of train's as well, which its help does not repeat.
    own = {flag.name for flag in found["launch"]}
    found["launch"] += [flag for flag in found["train"] if flag.name not in own]
    return found


def read_subcommands() -> Dict[str, List[str]]:
    """Returns the first words that a command takes, by its name."""
    found: Dict[str, List[str]] = {"completion": list(SHELLS)}
    for name in COMMANDS:
        text = "" if name in _PROGRAMS else _help_of(name)
        usage = text.splitlines()[0] if text else ""
        if "SUBCOMMAND" in usage:
            found[name] = [match[1] for match in map(_SUBCOMMAND.match, text.splitlines()) if match]
    return found


def parse_help(text: str) -> List[Flag]:
    """Returns the flags that a help text lists, in its order."""
    found = []
    for match in filter(None, map(_FLAG.match, text.splitlines())):
        value, listed = match["value"] or "", _CHOICES.search(match["text"])
        if "|" in value and value == value.lower():  # capitals stand for what is not a word
            choices = tuple(value.split("|"))
        else:
            choices = tuple(re.split(r", | or ", listed[1])) if listed else ()
        found.append(Flag(match["name"], bool(match["no"]), choices or _NAMES.get(match["name"], ())))
    return found


def render(shell: str, by_command: Dict[str, List[Flag]], subcommands: Dict[str, List[str]]) -> str:
    """Returns the script of a shell."""
    return (_render_fish if shell == "fish" else _render_bash)(by_command, subcommands, shell)


def _render_bash(by_command: Dict[str, List[Flag]], subcommands: Dict[str, List[str]], shell: str) -> str:
    cases = []
    for name, found in by_command.items():
        words = [*subcommands.get(name, ()), *(word for flag in found for word in flag.words), *_COMMON]
        cases.append(f'        "{name}") words="{" ".join(words)}" ;;')
    values = []
    for flag in {(flag.name, flag.choices): flag for found in by_command.values() for flag in found}.values():
        if flag.choices:
            values.append(f'        --{flag.name}) words="{" ".join(flag.choices)}" ;;')
    names = ["tf-ipu-dp", "launch/tf-ipu-dp", *(f"launch/{name}" for name in COMMANDS)]
    text = _BASH.format(
        commands=" ".join(COMMANDS), cases="\n".join(cases), values="\n".join(dict.fromkeys(values)),
        subcommands="|".join(subcommands), names=" ".join(names), options="-o nospace " if shell == "zsh" else "",
    )  # fmt: skip
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _render_fish(by_command: Dict[str, List[Flag]], subcommands: Dict[str, List[str]], shell: str) -> str:
    lines = [f"# Completion of tf-ipu-dp. In config.{shell}: {SHELLS[shell]}"]
    for name, about in COMMANDS.items():
        lines.append(f"complete -c tf-ipu-dp -n __fish_use_subcommand -f -a {name} -d {_quote(about)}")
    for name, words in subcommands.items():
        seen = f"__fish_seen_subcommand_from {name}; and not __fish_seen_subcommand_from {' '.join(words)}"
        lines.append(f"complete -c tf-ipu-dp -n {_quote(seen)} -f -a {_quote(' '.join(words))}")
    for name, found in by_command.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for flag in found:
            start = f"complete -c tf-ipu-dp -n {_quote(seen)} -l"
            if flag.switch:
                lines += [f"{start} {flag.name}", f"{start} no{flag.name}"]
            else:
                given = f" -f -a {_quote(' '.join(flag.choices))}" if flag.choices else ""
                lines.append(f"{start} {flag.name} -r{given}")
    return "\n".join(lines) + "\n"


_COMMON = ("--flagfile=", "--help", "--version")
_BASH = r"""# Completion of tf-ipu-dp and of the commands in launch/.
_tf_ipu_dp() {{
    [[ -n ${{ZSH_VERSION-}} ]] && setopt local_options ksh_arrays sh_word_split
    local line=${{COMP_LINE:0:$COMP_POINT}} words= before= current command sub
    local -a typed
    typed=($line)
    [[ $line == *[[:space:]] ]] && typed+=("")
    current=${{typed[${{#typed[@]}}-1]}}
    command=${{typed[0]##*/}}
    if [[ $command == tf-ipu-dp ]]; then
        command=${{typed[1]-}}
        typed=("${{typed[@]:1}}")
    fi
    case $command in {subcommands}) sub=${{typed[1]-}} ;; esac
    if ((${{#typed[@]}} < 2)); then
        words="{commands} --help --version"
    elif [[ $current == --*=* ]]; then
        case ${{current%%=*}} in
{values}
        esac
        # bash splits words at =, zsh does not.
        [[ -n ${{ZSH_VERSION-}} ]] && before=${{current%%=*}}=
        current=${{current#*=}}
        if [[ -z $words ]]; then
            COMPREPLY=($(compgen -P "$before" -f -- "$current"))
            return
        fi
    else
        [[ -n ${{sub-}} && ${{#typed[@]}} -gt 2 ]] && command+=" $sub"
        case $command in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -P "$before" -W "$words" -- "$current"))
    if [[ ${{#COMPREPLY[@]}} == 0 && $current != -* ]]; then
        COMPREPLY=($(compgen -f -- "$current"))
    elif [[ ${{COMPREPLY[0]-}} == *= ]]; then
        compopt -o nospace 2>/dev/null
    fi
}}
complete {options}-F _tf_ipu_dp {names}
"""


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _help_of(command: str, *words: str) -> str:
    """Returns the help of a command, in lines long enough that none is wrapped."""
    module = importlib.import_module(f"{__package__}.{command}{'.__main__' if _is_package(command) else ''}")
    said = io.StringIO()
    with _wide_terminal(), contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        module.main([*words, "--help"])
    return said.getvalue()


def _is_package(command: str) -> bool:
    return Path(__file__).with_name(command).is_dir()


@contextlib.contextmanager
def _wide_terminal() -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "10000"
    try:
        yield
    finally:
        del os.environ["COLUMNS"]
        if before is not None:
            os.environ["COLUMNS"] = before


def _make_flags() -> flags.FlagValues:
    return flags.FlagValues()  # type: ignore[no-untyped-call, no-any-return, unused-ignore]


def _help() -> str:
    lines = [f"  {shell:<4}  {line}" for shell, line in SHELLS.items()]
    text = cli.render_help(
        "python -m tf_ipu_dp.completion SHELL",
        "Prints a script that completes commands, flags and their values. It is read once per shell:",
        {},
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )
    return text.replace("per shell:\n", "\n".join(["per shell:", *lines, ""]))


if __name__ == "__main__":
    sys.exit(cli.run("completion", lambda: main(sys.argv[1:]), sys.stderr))
