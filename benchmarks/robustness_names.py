"""Hostile names of runs, users, hosts, programs and boards, in every form that the commands print or start.

Terminal: no control character. JSON and Prometheus: the name comes back as it was. HTML: the page has no kind of
element that it has not with a plain name. Remote command lines: a shell runs the command and nothing that is in the
name; whether it does is seen by a file that the name would make.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html.parser
import io
import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tf_ipu_dp import cli, train
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.distributed import launchers
from tf_ipu_dp.emulator.launcher import poprun_options, remote_host
from tf_ipu_dp.monitoring import devices, exporter, recorder, recording_report, snapshots, tables
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.planning import plan
from tf_ipu_dp.training.console import Console

LIMIT_S = 30.0
PIECES = (
    "$(touch {canary})",
    "`touch {canary}`",
    "; touch {canary} ;",
    "| touch {canary}",
    "&& touch {canary}",
    "\ntouch {canary}\n",
    "'; touch {canary}; '",
    '"; touch {canary}; "',
    "-oProxyCommand=touch {canary}",
    "--",
    "-rf",
    "~",
    "*",
    "{{a,b}}",
    "\\",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "</td></table>",
    "&lt;",
    "'\"><svg onload=x>",
    "javascript:x",
    "\x1b[2J",
    "\x1b]0;owned\x07",
    "\x9b31m",
    "\u202e",
    "\r",
    "\x08",
    "\x00",
    "\x7f",
    "\u2028",
    "\ud800",
    "\u65e5\u672c",
    "\xfc",
    "a b",
    '"}} 1\nipu_fake{{x="',
    "\\n",
    '\\"',
    "# HELP",
    "[red]x[/red]",
    "%s%n",
    "$HOME",
    "../..",
    "/",
    "x" * 200,
    ",",
    "=",
    "name",
)


class Tags(html.parser.HTMLParser):
    """Counts the elements of a page, and attributes that run code."""

    def __init__(self, text):
        super().__init__()
        self.found = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        code = [name for name, value in attrs if name.startswith("on") or str(value).startswith("javascript:")]
        self.found.append((tag, *code))


@contextlib.contextmanager
def prepare(options):
    """Works in a folder in which the file of an executed name would be seen."""
    del options
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as top:
        os.chdir(top)
        try:
            yield Path(top)
        finally:
            os.chdir(before)


def make_snapshot(name):
    """Returns a snapshot in which everything has this name."""
    ipu = devices.Ipu(id=0, board_serial=name, user=name, pid=7, executable=name, error_state=name, board_type=name)
    process = snapshots.Process(
        7, name, name, 1.0, (0,), "running", run_dir=f"runs/{name}", run=name, instance=0, instances=1, phase=name,
        step=1, planned_steps=9, host=name,
    )  # fmt: skip
    return snapshots.Snapshot(1.7e9, "emulator", (ipu,), (process,), name, name)


def draw(top, name):
    """Returns the page of a recording of a snapshot."""
    path = top / "r.jsonl"
    path.unlink(missing_ok=True)
    writer = recorder.Recorder(path, 1.0)
    for second in range(2):
        writer.write(dataclasses.replace(make_snapshot(name), time=1.7e9 + second))
    writer.close()
    return recording_report.render_page(recorder.read(path))


def try_case(number, chance, top):
    """Sends one name everywhere."""
    canary = top / "canary"
    name = "".join(chance.choice(PIECES).format(canary=canary) for _ in range(chance.randrange(1, 4)))
    snapshot = make_snapshot(name)
    shown = tables.render(snapshot, DisplayOptions(chance.choice((None, 80))))
    shown += cli.render_problems("train", [name, f"--run_dir={name} cannot be used."])
    stream = io.StringIO()
    Console(stream).warning(name)
    out = io.StringIO()
    if "\0" not in name:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            cli.run("train", lambda: train.main(["--dry_run", f"--run_dir={name}", f"--hosts={name}"]), out)
            cli.run("train", lambda: train.main(["--dry_run", f"--data_dir={name}", name]), out)
    shown += stream.getvalue() + out.getvalue()
    if not shown.replace("\n", "").isprintable():
        return "terminal", repr(name)
    back = json.loads(json.dumps(snapshot.to_json()))
    if back["processes"][0]["run"] != name or back["ipus"][0]["board_serial"] != name:
        return "JSON", repr(name)
    collector, registry = exporter.Collector(), CollectorRegistry()
    collector.update(snapshot)
    registry.register(collector)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    labels = {sample.labels.get("run") for family in families for sample in family.samples} - {None, ""}
    if any(not family.name.startswith("ipu_") or "fake" in family.name for family in families) or len(labels) > 1:
        return "Prometheus", f"{name!r}: {labels}"
    if number % 5 == 0 and not set(Tags(draw(top, name)).found) <= set(Tags(draw(top, "name")).found) | {("br",)}:
        return "HTML", repr(name)
    problem = try_command_lines(number, name, top)
    if problem is None and canary.exists():
        canary.unlink()
        problem = "the name was executed"
    return "shown, scraped, drawn and quoted", None if problem is None else f"{name!r}: {problem}"


def try_command_lines(number, name, top):  # noqa: PLR0911 - one for each thing that is tried
    """Builds the command lines for other hosts, and lets a shell read them."""
    with contextlib.suppress(poprun_options.OptionError):
        if any(each.startswith("-") for each in poprun_options.expand_hosts(name)):
            return "a host's name is an option"
    with contextlib.suppress(cli.UsageError):
        if any(each.startswith("-") for each in train_flags.parse([f"--hosts={name}"]).hosts.names):
            return "a host's name is an option"
    if "\0" in name or "\ud800" in name:
        return None
    topology = plan.plan_run(train_flags.parse(["--ipus=2", "--instances=2"]), info.DATASETS["fashion_mini"]).topology
    command = launchers.make_command(
        "emulator", topology, ["printf", "%s\\0", f"--run_dir={name}"], python="true", environ={}, extra=[name]
    )
    if shlex.split(str(command)) != [*(f"{key}={value}" for key, value in command.environ.items()), *command.words]:
        return f"the command is {command}"
    resumed = cli.resume_command(Path(name), {}, {})
    if shlex.split(resumed)[-1] != f"--run_dir={Path(name)}":
        return f"the command to resume is {resumed}"
    done = subprocess.run(
        ["sh", "-c", str(command)], capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        return f"a shell says {done.stderr!r}"
    if number % 20 == 0 and "/" not in name and name not in (".", "..") and len(os.fsencode(name)) < 256:
        folder = top / name
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        try:
            line = remote_host._agent_command_line()
        finally:
            os.chdir(top)
        # The agent ends when its input ends; its first message shows that it has started in that folder.
        agent = subprocess.run(
            ["sh", "-c", line], capture_output=True, check=False, timeout=60, stdin=subprocess.DEVNULL
        )
        if b"hello" not in agent.stdout:
            return f"the agent says {agent.stdout!r} {agent.stderr!r}"
    return None
