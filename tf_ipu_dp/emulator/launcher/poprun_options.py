"""The options of poprun, parsed from the command line and config files into a frozen record.

Booleans take yes or no, 1 or 0, on or off, and mean yes without any of these.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import shlex
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

_YES_OR_NO = {"1": True, "yes": True, "on": True, "true": True, "0": False, "no": False, "off": False, "false": False}
_MAX_HOSTS = 4096
_MAX_HOSTS_TEXT = 100_000
_MAX_BRACKETS = 8


class OptionError(ValueError):
    """The options cannot be parsed, or describe an impossible job. The text is shown to the user as is."""


class Option(NamedTuple):
    """One option: its kind is a metavariable, or None for a boolean."""

    name: str
    kind: Optional[str]
    text: str
    effect: bool = True  # whether it changes anything on emulated IPUs


OPTIONS: Dict[str, Tuple[Option, ...]] = {
    "The job": (
        Option("num-replicas", "N", "Replicas of the model in the whole job. Default: 1."),
        Option("num-instances", "N", "Processes, over which the replicas are spread evenly. Default: 1."),
        Option("ipus-per-replica", "N", "IPUs that one replica spans. Default: 1."),
        Option("executable-cache-path", "DIR", "Passed to the program as POPDIST_EXECUTABLE_CACHE_PATH."),
    ),
    "Hosts": (
        Option(
            "host", "LIST",
            "Where the instances run, spread evenly in blocks: h0,h1 or h[0-2,4]; also -H. Default: this host. Other "
            "machines are reached through ssh, or through the command that --mca plm_rsh_agent CMD in "
            "--mpi-global-args or the variable OMPI_MCA_plm_rsh_agent names, and need the same directory and the same "
            "Python at the same places.",
        ),
        Option("host-subnet", "CIDR", "The network between the instances, like 10.1.0.0/16."),
        Option(
            "process-placement", "spreadnuma|disabled",
            "Pins each instance to cores of its own, on one NUMA node if possible. Default: spreadnuma.",
        ),
        Option("numa-aware", None, "The older form of --process-placement."),
        Option(
            "mpi-local-args", "ARGS",
            "For mpirun; of these, -x NAME and -x NAME=VALUE pass variables to the instances.",
        ),
        Option("mpi-global-args", "ARGS", "The same, with --mca plm_rsh_agent CMD and --mca btl_tcp_if_include CIDR."),
    ),
    "Output": (
        Option("only-output-from-instance", "N", "Hides the output of the others, except the last lines of a failure."),
        Option("print-topology", None, "Shows hosts, instances, replicas and IPUs in a table first."),
        Option("verbose", None, "Also -v: shows the commands and variables of the instances, and the exit code."),
        Option("help", None, "Also -h: shows this."),
        Option("version", None, "Shows the version."),
        Option("version-format", "FORMAT", "Shows it as text or json."),
    ),
    "Options in files": (
        Option("import-config", "FILE", "Reads options and program from a file; the command line takes precedence."),
        Option("export-config", "FILE", "Writes them to a file, then starts the job."),
        Option("overwrite-config", None, "Allows --export-config to replace a file."),
    ),
    "About V-IPU partitions and set-up: accepted, without effect on emulated IPUs": (
        Option("num-ilds", "N", "IPU-Link domains; shown in the topology. Default: 1."),
        Option("offline-mode", None, "Starts the instances even if the partition is too small."),
        Option("vipu-server-host", "HOST", "Passed to the program as IPUOF_VIPU_API_HOST.", False),
        Option("vipu-server-port", "PORT", "Passed to the program as IPUOF_VIPU_API_PORT.", False),
        Option("vipu-server-timeout", "S", "Passed to the program as IPUOF_VIPU_API_TIMEOUT.", False),
        Option("vipu-partition", "NAME", "Passed to the program as IPUOF_VIPU_API_PARTITION_ID.", False),
        Option("vipu-partition-attempts", "N", "", False),
        Option("vipu-cluster", "NAME", "", False),
        Option("vipu-allocation", "NAME", "", False),
        Option("update-partition", None, "", False),
        Option("reset-partition", None, "", False),
        Option("remove-partition", None, "", False),
        Option("allow-run-as-root", None, "Root is always allowed."),
        Option("synchronise-python-venv", None, "", False),
        Option("synchronise-poplar-sdk", None, "", False),
        Option("distribute-ssh-key", None, "", False),
    ),
}  # fmt: skip
_BY_NAME = {option.name: option for options in OPTIONS.values() for option in options}
_SHORT = {"-H": "host", "-v": "verbose", "-h": "help"}
# These apply to one call of poprun, not to the job.
_NOT_EXPORTED = ("help", "version", "version-format", "import-config", "export-config", "overwrite-config")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options that were given, and the program."""

    given: Mapping[str, Any]
    program: Sequence[str]

    def text(self, name: str, default: str = "") -> str:
        """Returns an option as it was written."""
        return str(self.given.get(name, default))

    def is_on(self, name: str) -> Optional[bool]:
        """Returns a boolean option, or None if it was not given."""
        return self.given.get(name)

    def number(self, name: str, default: Optional[int], least: int = 1) -> Optional[int]:
        """Returns a whole number."""
        if name not in self.given:
            return default
        text = str(self.given[name]).strip()
        if not re.fullmatch(r"-?[0-9]{1,7}", text):
            raise OptionError(f"--{name} {text} is not a whole number.")
        if int(text) < least:
            raise OptionError(f"--{name} {text} is less than {least}. Use --{name} {least} or more.")
        return int(text)

    def hosts(self) -> List[str]:
        """Returns the names of the hosts; an empty list means this host."""
        return expand_hosts(self.given["host"]) if "host" in self.given else []

    def without_effect(self) -> List[str]:
        """Returns the given options that change nothing on emulated IPUs."""
        return [f"--{name}" for name in self.given if not _BY_NAME[name].effect]

    def mpi(self) -> MpiArguments:
        """Returns the arguments for mpirun."""
        return read_mpi_arguments(self.text("mpi-global-args"), self.text("mpi-local-args"))


@dataclasses.dataclass(frozen=True)
class MpiArguments:
    """The arguments for mpirun that have an effect here, and the rest."""

    variables: Mapping[str, Optional[str]]  # to forward; None for the value that they have here
    remote_shell: Optional[str]
    subnet: Optional[str]
    rest: Sequence[str]


def parse(words: Sequence[str]) -> Options:
    """Reads the options up to the first other word, where the program begins."""
    given: Dict[str, Any] = {}
    left = list(words)
    while left and left[0].startswith("-") and left[0] != "--":
        word = left.pop(0)
        if re.fullmatch("-v+", word):
            given["verbose"] = True
            continue
        name, equals, value = _split(word)
        option = _BY_NAME[name]
        if option.kind is None:
            follows = left and left[0].lower() in _YES_OR_NO and name not in ("verbose", "help", "version")
            text = value if equals else left.pop(0) if follows else "yes"
            given[name] = _read_boolean(name, text)
        elif equals:
            given[name] = value
        elif left:
            given[name] = left.pop(0)
        else:
            raise OptionError(f"--{name} needs a value: --{name} {option.kind}.")
    program = left[1:] if left[:1] == ["--"] else left
    if "import-config" in given:
        imported, imported_program = _import(given["import-config"])
        given, program = {**imported, **given}, program or imported_program
    return Options(given, program)


def export(options: Options) -> None:
    """Writes the options and the program to the file of --export-config, if it is given."""
    if "export-config" not in options.given:
        return
    path = Path(options.text("export-config"))
    kept = {name: value for name, value in options.given.items() if name not in _NOT_EXPORTED}
    text = json.dumps({"options": kept, "program": list(options.program)}, indent=2) + "\n"
    try:
        with path.open("w" if options.is_on("overwrite-config") else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise OptionError(f"--export-config {path} exists already. Add --overwrite-config yes.") from None
    except OSError as error:
        raise OptionError(f"--export-config {path} cannot be written ({error.strerror}).") from error


def expand_hosts(text: str) -> List[str]:
    """Returns the names in a list like a,b or h[0-2,4]; leading zeros are kept."""
    if len(text) > _MAX_HOSTS_TEXT:
        raise OptionError(f"--host has {len(text):,} characters, and takes up to {_MAX_HOSTS_TEXT:,}.")
    names: List[str] = []
    for part in filter(None, (part.strip() for part in re.split(r",(?![^\[]*\])", text))):
        names.extend(_expand(part, text))
        if len(names) > _MAX_HOSTS:
            raise OptionError(f"--host {text} names more than {_MAX_HOSTS} hosts.")
    if not names:
        raise OptionError(f"--host {text!r} names no host. Use --host localhost, or h0,h1 or h[0-2,4].")
    counts = Counter(names)
    twice = next((name for name in names if counts[name] > 1), None)
    if twice is not None:
        raise OptionError(f"--host {text} names {twice} twice. Name it once, and use more --num-instances.")
    odd = next((name for name in names if not re.fullmatch(r"[\w.:%@-]+", name) or name.startswith("-")), None)
    if odd is not None:
        raise OptionError(f"--host {text}: {odd!r} is not the name of a host.")
    return names


def read_mpi_arguments(*texts: str) -> MpiArguments:
    """Reads those of mpirun's arguments that have a meaning without mpirun."""
    variables: Dict[str, Optional[str]] = {}
    mca: Dict[str, str] = {}
    rest: List[str] = []
    for text in texts:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise OptionError(f"The arguments for mpirun {text!r} cannot be read: {error}.") from error
        while words:
            word = words.pop(0)
            if word == "-x" and words:
                name, equals, value = words.pop(0).partition("=")
                variables[name] = value if equals else None
            elif word in ("--mca", "-mca") and len(words) >= 2:
                name, value, *words = words
                mca[name] = value
            elif word not in ("--tag-output", "--allow-run-as-root"):
                rest.append(word)
    rest += [f"--mca {name} {value}" for name, value in mca.items() if name not in _MCA]
    networks = [mca[name] for name in ("btl_tcp_if_include", "oob_tcp_if_include") if "/" in mca.get(name, "")]
    return MpiArguments(variables, mca.get("plm_rsh_agent"), networks[0] if networks else None, rest)


_MCA = ("plm_rsh_agent", "btl_tcp_if_include", "oob_tcp_if_include")


def render_help(columns: int) -> str:
    """Returns the text of --help."""
    width = max(40, columns)
    lines = [
        "usage: python -m tf_ipu_dp.emulator.poprun [OPTIONS] PROGRAM [ARGS]",
        "",
        *textwrap.wrap(
            "Emulates the Poplar SDK's poprun: starts a program as several instances, each with poprun's "
            "variables and with the emulator in place of the SDK, connected through Horovod. Every line of output is "
            "tagged with its instance. The first instance that fails ends the others, and its exit status is poprun's.",
            width,
        ),
    ]
    for title, options in OPTIONS.items():
        lines += ["", f"{title}:"]
        undescribed = [option for option in options if not option.text]
        for option in options:
            if option.text:
                lines.append(f"  --{option.name} {option.kind or 'yes|no'}")
                lines += textwrap.wrap(option.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        if undescribed:
            names = ", ".join(f"--{option.name}" for option in undescribed)
            lines += textwrap.wrap(names, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    lines += [
        "",
        "Examples:",
        "  poprun --num-instances 2 --num-replicas 4 python3 program.py --its-own=flags",
        "  poprun --host node[0-1] --num-instances 4 --num-replicas 8 python3 program.py",
    ]
    return "\n".join(lines) + "\n"


def _split(word: str) -> Tuple[str, str, str]:
    name, equals, value = word.partition("=")
    known = _SHORT.get(name) or (name[2:] if name.startswith("--") else "")
    if known not in _BY_NAME:
        every = [f"--{each}" for each in _BY_NAME]
        near = difflib.get_close_matches(name, [*every, *_SHORT], 1, 0.5)
        advice = f"Did you mean {near[0]}?" if near else "See --help."
        raise OptionError(f"There is no option {name}. {advice}")
    return known, equals, value


def _read_boolean(name: str, text: str) -> bool:
    if text.lower() not in _YES_OR_NO:
        raise OptionError(f"--{name} {text} is neither yes nor no.")
    return _YES_OR_NO[text.lower()]


def _import(path: str) -> Tuple[Dict[str, Any], List[str]]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        options, program = dict(content["options"]), [str(word) for word in content.get("program", [])]
    except OSError as error:
        raise OptionError(f"--import-config {path} cannot be read ({error.strerror}).") from error
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"--import-config {path} is not a file that --export-config wrote.") from error
    given: Dict[str, Any] = {}
    for name, value in options.items():
        known, _, _ = _split(f"--{name}")
        boolean = _BY_NAME[known].kind is None
        given[known] = _read_boolean(known, str(value)) if boolean else str(value)
    return given, program


def _expand(part: str, whole: str) -> List[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if match is None:
        if "[" in part or "]" in part:
            raise OptionError(f"--host {whole} has an unbalanced bracket. Write h[0-2,4].")
        return [part]
    if part.count("[") > _MAX_BRACKETS:
        raise OptionError(f"--host {whole[:60]}... has more than {_MAX_BRACKETS} brackets in one name.")
    head, ranges, tail = match.groups()
    numbers: List[str] = []
    for each in ranges.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})(?:-([0-9]{1,6}))?\s*", each)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise OptionError(f"--host {whole}: {each!r} is not a range like 0-2.")
        first, last = found[1], found[2] or found[1]
        if int(last) - int(first) > _MAX_HOSTS:
            raise OptionError(f"--host {whole} names more than {_MAX_HOSTS} hosts.")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    rests = _expand(tail, whole)
    if len(numbers) * len(rests) > _MAX_HOSTS:
        raise OptionError(f"--host {whole} names more than {_MAX_HOSTS} hosts.")
    return [head + number + rest for number in numbers for rest in rests]
