"""README.md, CONTRIBUTING.md and docs/ tell the truth: links, commands and their output, messages, rooms, variables.

Each check is a function that returns the problems of a text, so that a planted mistake shows that it finds one.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple, Type

import pytest

from tf_ipu_dp import cli, launch, monitor, train
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.emulator.launcher import poprun_options
from tf_ipu_dp.runs import exchange_times, heartbeat, manifest, plan_record, records

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tf_ipu_dp"
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MOST_README_LINES = 200
RECORDS = (
    records.TrainingRecord,
    records.ValidationRecord,
    records.RunResult,
    plan_record.PlanRecord,
    manifest.Manifest,
    heartbeat.Status,
)

_FENCE = re.compile(r"^```(.*)$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(.+?) *$")
_OPERATORS = ("|", ">", ">>", "<", "&", "&&", ";")
_MODES = ("--evaluate", "--input_only")
_VERSION = re.compile(r"tf_ipu_dp \d+\.\d+\.\d+")


class Block(NamedTuple):
    """A fenced code block: what follows the fence, and its lines."""

    language: str
    lines: List[str]


class Command(NamedTuple):
    """A command of ours in a code block, and the output that is shown below it."""

    text: str
    program: str  # a file of launch/ or benchmarks/, or a module
    words: Tuple[str, ...]  # after the program
    output: Tuple[str, ...]
    piped: bool


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def ids(page: Path) -> str:
    return page.name


# Reading markdown.


def split_blocks(text: str) -> Tuple[List[str], List[Block]]:
    """Returns the lines outside of fenced code, and the fenced blocks."""
    prose: List[str] = []
    blocks: List[Block] = []
    inside = False
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if fence:
            inside = not inside
            if inside:
                blocks.append(Block(fence[1].strip(), []))
        elif inside:
            blocks[-1].lines.append(line)
        else:
            prose.append(line)
    return prose, blocks


def json_blocks(text: str) -> List[Block]:
    return [block for block in split_blocks(text)[1] if block.language == "json"]


def anchors_of(text: str) -> Set[str]:
    """Returns the anchors that GitHub and mkdocs make of the headings."""
    found: Set[str] = set()
    for line in split_blocks(text)[0]:
        heading = _HEADING.match(line)
        if heading:
            words = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading[1]).lower()
            anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
            repeats = sum(1 for each in found if re.fullmatch(re.escape(anchor) + r"(-\d+)?", each))
            found.add(f"{anchor}-{repeats}" if repeats else anchor)
    return found


def commands_of(text: str) -> List[Command]:
    """Returns our own commands in the fenced blocks, with the output that is shown for them."""
    found = []
    for block in split_blocks(text)[1]:
        lines = iter(_joined(block.lines))
        shown: List[Tuple[str, List[str]]] = []
        for line in lines:
            typed = line[2:] if line.startswith("$ ") else re.split(r"\s{3,}", line)[0]  # what follows explains it
            if line.startswith("$ ") or _program(_words(typed)):
                shown.append((typed, []))
            elif shown:
                shown[-1][1].append(line)
        for typed, output in shown:
            words = _words(typed)
            program = _program(words)
            if program:
                piped = any(word in _OPERATORS for word in words)
                found.append(Command(typed, program[0], tuple(program[1]), tuple(output), piped))
    return found


def _joined(lines: Sequence[str]) -> Iterator[str]:
    """Joins lines that end with a backslash with their continuation."""
    pending = ""
    for line in lines:
        if line.endswith("\\"):
            pending += line[:-1].rstrip() + " "
        else:
            yield pending + (line.lstrip() if pending else line)
            pending = ""


def _words(line: str) -> List[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        return list(lexer)
    except ValueError:  # a line of output, with a single quote
        return []


def _program(words: Sequence[str]) -> Optional[Tuple[str, List[str]]]:
    """Returns which of our programs a line starts, and its words; None for other lines."""
    for number, word in enumerate(words):
        following = words[number + 1] if number + 1 < len(words) else ""
        rest = list(words[number + 1 :])
        if word in _OPERATORS:
            break
        if re.fullmatch(r"launch/\w[\w.-]*", word):
            return word, _own(rest)
        if re.fullmatch(r"(\S*/)?python3?", word) and following.startswith("benchmarks/"):
            return following, _own(rest[1:])
        if re.fullmatch(r"(\S*/)?python3?", word) and following == "-m" and rest[1:]:
            return (rest[1], _own(rest[2:])) if rest[1].split(".")[0] == "tf_ipu_dp" else None
        if word == "tf-ipu-dp" and following:
            return f"tf_ipu_dp.{following}", _own(rest[1:])
        if not re.fullmatch(r"[A-Z_]+=.*", word) and number == 0 and word not in ("sbatch", "mpirun"):
            break
    return None


def _own(words: Sequence[str]) -> List[str]:
    """Returns the words before a pipe or the like, without what stands for something else (`[ARGS]`, `...`)."""
    ends = [number for number, word in enumerate(words) if word in _OPERATORS]
    own = words[: ends[0]] if ends else words
    return [word for word in own if not word.startswith("[") and not word.endswith(("]", "..."))]


# The checks.


def find_broken_links(page: Path, text: str) -> List[str]:
    problems = []
    for target in _LINK.findall("\n".join(split_blocks(text)[0])):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if path and not file.exists():
            problems.append(f"{target}: there is no {path}")
        elif anchor and anchor not in anchors_of(text if file == page else read(file)):
            problems.append(f"{target}: there is no heading for #{anchor}")
    return problems


def find_broken_command(command: Command, capsys) -> str:
    """Returns why a command would be refused by its own parser and planner; nothing if it would not."""
    program, words = command.program, list(command.words)
    if "/" in program:
        if not (ROOT / program).is_file():
            return f"there is no {program}"
        script = program.split("/")[1]
        name = {"train": "train", "horovodrun.sh": "train", "poprun.sh": "launch", "slurm.sbatch": "launch"}.get(script)
        return _try(name, words, command, capsys) if name else ""
    parts = program.split(".")
    file = ROOT.joinpath(*parts)
    if not file.with_suffix(".py").is_file() and not (file / "__main__.py").is_file():
        return f"there is no module {program}"
    return _try(".".join(parts[1:]), words, command, capsys)


def _try(name: str, words: List[str], command: Command, capsys) -> str:
    refusals = [line for line in command.output if re.match(r"(train|launch|monitor): ", line)]
    refused = bool(refusals) and command.output[0] == refusals[0] and name == "train"
    try:
        if name == "train":
            train_flags.parse(words)
            planned = [word for word in words if word not in _MODES]
            code = cli.run("train", lambda: train.main([*planned, "--dry_run"]), None)
        elif name == "launch":
            code = cli.run("launch", lambda: launch.main([*words, "--dry_run"]), None)
        elif name == "monitor":
            monitor.parse(words)
            code = 0
        elif name == "emulator.poprun":
            poprun_options.parse(words)
            code = 0
        else:
            code = 0
    except ValueError as error:
        return str(error)
    said = capsys.readouterr()
    if refused:
        return _compare(said.err, command.output)
    if code:
        return said.err or said.out
    if "--dry_run" in words and command.output[:1] not in ((), ("...",)) and not command.piped:
        return _compare(said.out, command.output)
    return ""


def _compare(said: str, shown: Sequence[str]) -> str:
    lines = [_VERSION.sub("", line) for line in said.rstrip("\n").split("\n")]
    for number, line in enumerate(_VERSION.sub("", text) for text in shown):
        if number >= len(lines) or lines[number] != line:
            there = lines[number] if number < len(lines) else "nothing"
            return f"it prints {there!r} where {line!r} is shown"
    return ""


def find_unknown_messages(text: str, texts: Sequence[str]) -> List[str]:
    """Returns the messages in the first column of the tables that no text of the package has; `...` is anything."""
    problems = []
    for line in split_blocks(text)[0]:
        cell = re.match(r"\| `([^`]+)` \|", line)
        if cell and " " in cell[1]:
            parts = [part.strip() for part in cell[1].split("...")]
            if not any(_has_in_order(each, parts) for each in texts):
                problems.append(cell[1])
    return problems


def _has_in_order(text: str, parts: Sequence[str]) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def texts_of_the_package() -> List[str]:
    """Returns the strings of the package's code and of launch/; what is filled in is left empty."""
    found = [read(path) for path in (ROOT / "launch").iterdir() if path.is_file()]
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def find_unnamed_rooms(text: str) -> List[str]:
    rooms = [path.parent for top in (PACKAGE, PACKAGE / "emulator") for path in top.glob("*/__init__.py")]
    return [room.name for room in rooms if f"`{room.name}/`" not in text]


def find_invented_rooms(text: str) -> List[str]:
    named = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    return [name for name in named if not any((top / name).is_dir() for top in (PACKAGE, PACKAGE / "emulator"))]


def find_unnamed_commands(text: str) -> List[str]:
    """Returns the commands that are missing in the first column of the table of commands."""
    named = set(re.findall(r"^\| \[`([\w.]+)", text, re.MULTILINE))
    return [
        path.stem
        for path in PACKAGE.glob("[!_]*.py")
        if '__name__ == "__main__"' in read(path) and path.stem not in named
    ]


def find_unnamed_variables(text: str) -> List[str]:
    files = [*PACKAGE.rglob("*.py"), *(path for path in (ROOT / "launch").iterdir() if path.is_file())]
    used = {name for path in files for name in re.findall(r"\b(?:IPU_EMULATOR|TF_IPU_DP)_[A-Z]+\b", read(path))}
    return sorted(name for name in used if name not in text)


def find_unexplained_keys(text: str, kinds: Sequence[Type[records.Record]]) -> List[str]:
    keys = {
        field.name: kind.JSON_KEYS.get(field.name, field.name) for kind in kinds for field in dataclasses.fields(kind)
    }
    return sorted(key for key in keys.values() if not re.search(rf'[`"]{key}[`"]', text))


def find_pages_without_navigation(configuration: str, pages: Sequence[str]) -> List[str]:
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", configuration, re.MULTILINE)
    return sorted({*pages} ^ {*listed})


@pytest.fixture
def in_a_clone(tmp_path, monkeypatch):
    """Is as in a clone without runs, on a machine that has every launcher."""
    for name in ("poprun", "mpirun", "srun"):
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    for name in ("flags", "docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


def test_the_readme_is_short():
    assert len(read(ROOT / "README.md").splitlines()) <= MOST_README_LINES


def test_the_readme_has_every_command():
    assert find_unnamed_commands(read(ROOT / "README.md")) == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_to_files_and_headings(page):
    assert find_broken_links(page, read(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_commands_are_accepted_and_plans_and_refusals_are_those_that_are_shown(page, in_a_clone, capsys):
    problems = [(each.text, find_broken_command(each, capsys)) for each in commands_of(read(page))]
    assert [problem for problem in problems if problem[1]] == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_that_are_named_in_the_text_exist(page):
    named = re.findall(r"(?<![\w/.-])((?:launch|benchmarks|flags|tests|tf_ipu_dp)/[\w./-]*\w)", read(page))
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS], ids=ids)
def test_a_page_begins_with_a_command(page):
    text = read(page)
    body = [line for line in text.splitlines()[1:] if line.strip() and not line.startswith("<!--")]
    assert body[0].startswith("```")
    assert commands_of("\n".join(["```", *split_blocks(text)[1][0].lines, "```"]))


def test_every_page_is_in_the_navigation_of_the_site():
    pages = [page.name for page in DOCS.glob("*.md")]
    assert find_pages_without_navigation(read(ROOT / "mkdocs.yml"), pages) == []


def test_the_architecture_names_every_room_and_no_other():
    text = read(DOCS / "architecture.md")
    assert find_unnamed_rooms(text) == []
    assert find_invented_rooms(text) == []


def test_the_run_folders_page_has_every_key_of_its_records():
    kinds = [*RECORDS, records.InstanceTimes, records.Scores, records.RunTimes, records.Verdict, records.StopReason]
    assert find_unexplained_keys(read(DOCS / "run-folder.md"), kinds) == []


def test_the_run_folders_page_shows_records_as_they_are_written():
    samples = [json.loads("\n".join(block.lines)) for block in json_blocks(read(DOCS / "run-folder.md"))]
    shown = [*map(records.metrics_record, samples[:2]), records.RunResult.from_json(samples[2])]
    shown += [exchange_times.ExchangeTimes.from_json(samples[3]), heartbeat.Status.from_json(samples[4])]
    assert [set(record.to_json()) for record in shown] == [set(sample) for sample in samples]


def test_the_emulators_page_names_every_variable():
    assert find_unnamed_variables(read(DOCS / "emulator.md")) == []


def test_the_emulators_page_has_the_list_of_patches():
    from tf_ipu_dp.emulator import patches

    assert patches.as_markdown() in read(DOCS / "emulator.md")


def test_messages_in_troubleshooting_are_those_of_the_code():
    assert find_unknown_messages(read(DOCS / "troubleshooting.md"), texts_of_the_package()) == []


class TestPlantedMistakes:
    """Shows that each check finds what it is there for."""

    def test_a_dead_link_and_a_dead_anchor(self):
        page = DOCS / "page.md"
        text = "# One\n[a](gone.md) [b](#two) [c](#one) [d](../README.md#quick-start) [e](https://example.com)"
        assert find_broken_links(page, text) == [
            "gone.md: there is no gone.md",
            "#two: there is no heading for #two",
        ]

    def test_links_in_code_are_not_links(self):
        assert find_broken_links(DOCS / "page.md", "```\n[a](gone.md)\n```") == []

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            ("$ launch/gone --ipus=8", "there is no launch/gone"),
            ("$ python -m tf_ipu_dp.gone", "there is no module tf_ipu_dp.gone"),
            ("$ .venv/bin/python benchmarks/gone.py", "there is no benchmarks/gone.py"),
            ("$ launch/train --ipuz=8", "--ipuz is not a flag"),
            ("$ X=1 python -m tf_ipu_dp.train --ipus=6", "--ipus=6"),
            ("$ tf-ipu-dp train --ipus=6", "--ipus=6"),
            ("$ launch/train \\\n    --epochs=never", "--epochs=never"),
            ("launch/train --ipus=6   without a prompt", "--ipus=6"),
            ("$ launch/train --evaluate --run_dir=r --ipus=6", "--ipus=6"),
            ("$ launch/poprun.sh --instances=3 --ipus=8", "--instances=3"),
            ("$ sbatch --nodes=2 launch/slurm.sbatch --maximum_restarts=3", "--maximum_restarts is not a flag"),
            ("$ mpirun -np 4 python -m tf_ipu_dp.train --ipus=7", "--ipus=7"),
            ("$ python -m tf_ipu_dp.launch --instances=2 -- --ipus=5 | tail -1", "--ipus=5"),
            ("$ python -m tf_ipu_dp.monitor --need=4", "--need=4"),
            ("$ python -m tf_ipu_dp.monitor --explain runs/a --watch", "--explain"),
            ("$ python -m tf_ipu_dp.emulator.poprun --num-instance 2 x", "--num-instance"),
            ("$ launch/train --flagfile=flags/gone.flags", "--flagfile"),
        ],
    )
    def test_a_command_that_is_refused(self, line, problem, in_a_clone, capsys):
        (command,) = commands_of(f"```\n{line}\n```")
        assert problem in find_broken_command(command, capsys)

    @pytest.mark.parametrize(
        "block",
        [
            "$ launch/train --ipus=8 --dry_run\ntf_ipu_dp 9.9.9: plan for 7 replicas on 8 IPUs",
            "$ launch/train --ipus=6\ntrain: --ipus=6 is fine.",
        ],
    )
    def test_output_that_is_not_what_is_printed(self, block, in_a_clone, capsys):
        (command,) = commands_of(f"```\n{block}\n```")
        assert "it prints" in find_broken_command(command, capsys)

    def test_a_message_that_nobody_prints(self):
        table = "| `--ipus=... is odd` | a | b |\n| `--ipus=... is gone.` | a | b |"
        assert find_unknown_messages(table, ["--ipus= is odd."]) == ["--ipus=... is gone."]

    def test_a_room_that_is_not_named_and_one_that_is_not_there(self):
        assert "planning" in find_unnamed_rooms("`config/`")
        assert find_invented_rooms("| `attic/` | x |") == ["attic"]

    def test_a_command_that_is_not_in_the_table(self):
        assert "launch" in find_unnamed_commands("| [`train`](docs/training.md) | trains |\n`launch`")

    def test_a_key_that_is_not_explained(self):
        assert find_unexplained_keys("`samples` and `loss`, `top1`", [records.Scores]) == ["metrics", "top5"]

    def test_a_variable_that_is_not_named(self):
        assert "IPU_EMULATOR_DIR" in find_unnamed_variables("IPU_EMULATOR_IPUS")

    def test_a_page_without_navigation_and_navigation_without_a_page(self):
        assert find_pages_without_navigation("nav:\n  - A: a.md\n  - B: b.md", ["a.md", "c.md"]) == ["b.md", "c.md"]
