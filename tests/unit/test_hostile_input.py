"""Input that nobody types on purpose: one short sentence, at once, and no traceback."""

from __future__ import annotations

import pytest

from tf_ipu_dp import cli, compare, launch, list, monitor, train
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.emulator.launcher import poprun_options
from tf_ipu_dp.planning import plan

LONG = "x" * 300


def said(capsys, command, *words):
    """Returns the sentence that a command says on stderr, and fails if it has no other exit code than 1."""
    assert cli.run("command", lambda: command.main([*words]), None) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "Traceback" not in printed.err and len(printed.err) < 3000, printed.err[:3000]
    return printed.err


@pytest.mark.parametrize("flag", ["--run_dir", "--data_dir", "--executable_cache"])
def test_a_path_that_no_file_can_have_is_refused(capsys, flag):
    user = "it_is_no_user"
    for value, reason in (
        (f"~{user}/x", f"there is no user {user!r} with a home folder"),
        (LONG, "a name has up to 255 bytes and a path up to 4095"),
        ("ü" * 130, "a name has up to 255 bytes and a path up to 4095"),
        ("a/" * 3000, "a name has up to 255 bytes and a path up to 4095"),
    ):
        for command in (train, launch):
            assert reason in said(capsys, command, f"{flag}={value}", "--dry_run")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (monitor, ("--explain={}",)),
        (monitor, ("--record={}", "--report=x.html")),
        (monitor, ("--record=x.jsonl", "--report={}.html")),
        (list, ("--data_dir={}",)),
        (compare, ("{}", "{}")),
    ],
)
@pytest.mark.parametrize("value", [f"runs/{LONG}", "~it_is_no_user/x"])
def test_paths_of_other_commands_too(capsys, tmp_path, monkeypatch, command, words, value):
    monkeypatch.chdir(tmp_path)
    said(capsys, command, *(word.format(value) for word in words))


@pytest.mark.parametrize(
    "word", [f"--dataset={LONG}", f"--hosts=a,{LONG}", f"--model={LONG}", f"--{LONG}", f"--{LONG * 30}=1"]
)
def test_long_names_are_refused_and_shortened(capsys, word):
    assert len(said(capsys, train, word, "--dry_run")) < 1000


def flag_file(tmp_path, content, name="a.flags"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"--ipus=4\n--run_dir=a\0b\n", "a.flags cannot be read: line 2 is '--run_dir=a\\x00b', and not a flag like"),
        (b"# prose\n" + b"It was a dark and stormy night; the rain fell in torrents.\n" * 30_000, "is longer than"),
        (
            b"It was a dark and stormy night.\n" * 3000,
            "a.flags cannot be read: line 1 is 'It was a dark and stormy night.', and not",
        ),
        (b"\xff\xfe--ipus", "is not text"),
    ],
)
def test_what_is_no_flag_file_is_refused_at_its_first_line(capsys, tmp_path, content, reason):
    assert reason in said(capsys, train, f"--flagfile={flag_file(tmp_path, content)}", "--dry_run")


def test_a_flag_file_with_many_mistakes_is_reported_in_short(capsys, tmp_path):
    text = said(capsys, train, f"--flagfile={flag_file(tmp_path, LINES)}")
    assert "20 problems" in text


LINES = b"".join(b"--mistake_%d=1\n" % number for number in range(5000))


def test_chained_flag_files_are_read_up_to_a_limit_and_circles_are_refused(capsys, tmp_path):
    for number in range(200):
        (tmp_path / f"{number}.flags").write_text(f"--flagfile={tmp_path}/{number + 1}.flags\n")
    (tmp_path / "200.flags").write_text("--ipus=4\n")
    assert "more than 100 flag files are named" in said(capsys, train, f"--flagfile={tmp_path}/0.flags", "--dry_run")
    assert train_flags.parse([f"--flagfile={tmp_path}/150.flags"]).ipus == 4
    (tmp_path / "200.flags").write_text(f"--flagfile={tmp_path}/199.flags\n")
    assert "it reads itself" in said(capsys, train, f"--flagfile={tmp_path}/199.flags", "--dry_run")


def test_saved_flags_name_no_other_flag_file(capsys, tmp_path):
    secret = flag_file(tmp_path, b"my password\n", "secret")
    path = flag_file(tmp_path, f"--ipus=4\n--flagfile={secret}\n".encode(), "run.flags")
    text = said(capsys, train, f"--flagfile={path}", "--dry_run")
    assert "names another flag file" in text and "password" not in text


@pytest.mark.parametrize("text", ["h[0-4000][0-4000]", "h[0-1]" * 5000, "h" + "[0-1]" * 30, "a," * 200_000])
def test_too_many_hosts_are_refused_before_they_are_counted(text):
    with pytest.raises(poprun_options.OptionError):
        poprun_options.expand_hosts(text)
    assert len(poprun_options.expand_hosts("h[0-63]x[0-63]")) == 4096


@pytest.mark.parametrize(
    "words",
    [
        ["--global_batch_size=2147483647", "--micro_batch_size=4", "--ipus=4"],
        ["--gradient_accumulation=2147483647", "--ipus=4", "--pipeline_stages=4", "--model=resnet20"],
        ["--checkpoint_every=2147483647", "--device_iterations=2", "--updates_per_epoch=2"],
        ["--ipus=1048575"],
    ],
)
def test_no_value_is_suggested_that_its_flag_does_not_take(words):
    with pytest.raises(plan.PlanError) as caught:
        plan.plan_run(train_flags.parse(words), info.DATASETS["cifar10"])
    for problem in caught.value.problems:
        for fix in problem.fixes:
            typed = [cli.flag_text(name, value) for name, value in fix.changes if value is not None]
            train_flags.parse([*words, *typed])


def test_what_a_launcher_has_started_is_not_suggested_to_be_changed(capsys, monkeypatch):
    for name, value in {
        "HOROVOD_RANK": "0",
        "HOROVOD_SIZE": "3",
        "HOROVOD_LOCAL_RANK": "0",
        "HOROVOD_LOCAL_SIZE": "3",
    }.items():
        monkeypatch.setenv(name, value)
    for words in ([], ["--ipus=8"], ["--ipus=6"], ["--ipus=4", "--global_batch_size=100"]):
        text = said(capsys, train, *words, "--dry_run")
        assert "Use --instances" not in text and "or --instances" not in text, text
