"""Folders that somebody else has prepared: nothing is followed out of them, and nothing but files is opened."""

from __future__ import annotations

import json
import math
import os
import stat
from datetime import datetime

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import checkpoints, heartbeat, json_files, run_folder, safe_files, saved_flags
from tf_ipu_dp.runs.heartbeat import StatusReporter
from tf_ipu_dp.runs.plan_record import PlanRecord

NOW = datetime(2026, 1, 5)
FILES = (".lock", "run.flags", "plan.json", "config.json", "metrics.jsonl", "result.json", "exchange_times.json")
FOLDERS = ("checkpoints", "best", "errors", "status", "tensorboard", "export", ".export", ".export-old")


@pytest.fixture
def run_dir(tmp_path):
    """The folder of a run that has started."""
    path = tmp_path / "run"
    cfg = train_flags.parse(["--ipus=2", "--model=mlp", f"--run_dir={path}"])
    with run_folder.open_folder(str(path), name="x", now=NOW, needed_bytes=0) as folder:
        folder.write_start(cfg, PlanRecord.of(plan.plan_run(cfg, info.DATASETS["fashion_mini"])))
    return path


@pytest.fixture
def secret(tmp_path):
    """A file of the user, outside all folders of runs."""
    path = tmp_path / "secret"
    path.write_text("my thesis")
    return path


def refusal(path):
    sentences = []
    for function in (run_folder.check_folder, run_folder.open_folder):
        with pytest.raises(cli.UsageError) as caught:
            function(str(path), name="x", now=NOW, needed_bytes=0)
        sentences.append(str(caught.value))
    assert sentences[0] == sentences[1]
    return sentences[0]


def replace_by(path, make):
    if path.is_dir():
        path.rmdir()
    elif path.exists():
        path.unlink()
    make(path)


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_run_s_file_is_refused_and_what_it_leads_to_is_not_touched(run_dir, secret, name):
    replace_by(run_dir / name, lambda path: path.symlink_to(secret))
    assert refusal(run_dir) == (
        f"--run_dir={run_dir} is not used: {name} in it is a link and not a file. Remove it, or choose another folder "
        "with --run_dir."
    )
    assert secret.read_text() == "my thesis"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_place_of_a_run_s_folder_or_below_it_is_refused(run_dir, tmp_path, secret, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    replace_by(run_dir / name, lambda path: path.symlink_to(outside))
    assert f"{name} in it is a link, and a run's folder has files and folders only." in refusal(run_dir)
    (run_dir / name).unlink()
    (run_dir / name / "deep").mkdir(parents=True)
    (run_dir / name / "deep" / "link").symlink_to(secret)
    assert f"{name}/deep/link in it is a link" in refusal(run_dir)
    assert list(outside.iterdir()) == []


def bind(path):
    """Makes a socket; its name may be too long for bind itself."""
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(os.mkfifo, "a pipe"), (os.mkdir, "a folder"), (bind, "a socket")],
    ids=["pipe", "folder", "socket"],
)
@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "plan.json", "checkpoints/.lock"])
def test_what_is_no_file_is_refused_before_it_is_opened(run_dir, name, make, kind):
    (run_dir / name).parent.mkdir(exist_ok=True)
    replace_by(run_dir / name, make)
    assert f"{name} in it is {kind} and not a file." in refusal(run_dir)


def test_readers_follow_no_links_and_do_not_wait_for_pipes(run_dir, tmp_path):
    real = tmp_path / "real"
    run_dir.rename(real)
    run_dir.mkdir()
    for each in real.iterdir():
        (run_dir / each.name).symlink_to(each)
    folder = run_folder.RunFolder(run_dir)
    assert folder.read_plan() is None and folder.read_owner() == ""
    assert folder.read_last_metrics(1 << 20) == [] and folder.read_errors() == [] and not folder.has_checkpoints()
    with pytest.raises(cli.UsageError, match=r"its run.flags cannot be read \(it is a link and not a file\)"):
        run_folder.read_run_flags(run_dir)
    for name in FILES:
        replace_by(run_dir / name, os.mkfifo)
    assert folder.read_plan() is None and folder.read_result() is None and folder.read_owner() == ""
    assert folder.read_last_metrics(1 << 20) == []
    with pytest.raises(cli.UsageError, match=r"it is a pipe and not a file"):
        run_folder.read_run_flags(run_dir)


def test_a_hard_link_to_the_user_s_file_is_not_written_to(run_dir, secret):
    (run_dir / ".lock").unlink()
    os.link(secret, run_dir / ".lock")
    with pytest.raises(cli.UsageError, match="is a hard link to another file"):
        run_folder.open_folder(str(run_dir), name="x", now=NOW, needed_bytes=0)
    (run_dir / ".lock").unlink()
    (run_dir / "checkpoints" / "step-00000008").mkdir(parents=True)
    os.link(secret, run_dir / "checkpoints" / ".lock")
    with pytest.raises(
        checkpoints.CheckpointError, match=r"cannot be set aside \(.lock is a hard link to another file"
    ):
        checkpoints.Store(run_dir / "checkpoints", 1, pytest.fail).set_aside_after(4)
    os.link(secret, run_dir / "metrics.jsonl")
    with run_folder.open_folder(str(run_dir), name="x", now=NOW, needed_bytes=0) as folder:
        assert folder.metrics.stat().st_nlink == 1
    assert secret.read_text() == "my thesis"


def test_flag_files_that_saved_flags_name_are_not_read(run_dir, tmp_path):
    other = tmp_path / "other.flags"
    other.write_text("--ipus=64\n--no_such_flag\n")
    text = (run_dir / "run.flags").read_text()
    (run_dir / "run.flags").write_text(f"{text}--flagfile={other}\n-flagfile={other}\n--flagfile\n{other}\nipus=4\n")
    for word in ("--evaluate", "--resume"):
        found = saved_flags.complete([f"--run_dir={run_dir}", word])
        assert found.config.ipus == 2 and not any("flagfile" in each for each in found.words)


def test_a_file_that_is_too_long_is_not_read_into_memory(run_dir):
    for name in ("run.flags", ".lock", "plan.json"):
        with (run_dir / name).open("r+b") as file:
            file.truncate(1 << 40)  # a hole: it has no blocks
    assert run_folder.RunFolder(run_dir).read_plan() is None and run_folder.RunFolder(run_dir).read_owner() == ""
    with pytest.raises(cli.UsageError, match=r"its run.flags cannot be read \(it is longer than 1,048,576 bytes\)"):
        run_folder.read_run_flags(run_dir)


def test_a_line_that_is_too_long_is_left_out_and_the_others_are_kept(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(
        b"a\n" + b"x" * (3 * safe_files.MAX_LINE_BYTES) + b"\nb\n" + b"y" * safe_files.MAX_LINE_BYTES + b"\nc"
    )
    assert list(safe_files.read_lines(path)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 50_000, "{", ""], ids=["lists", "objects", "cut", "empty"])
def test_nested_json_is_no_object(text):
    assert json_files.parse_object(text.encode()) is None


@pytest.mark.parametrize("digits", ["9" * 400, "1" + "0" * 20_000, str(2**63), f"-{2**64}"], ids=len)
def test_a_number_of_many_digits_fits_no_record(digits):
    assert math.isinf(json_files.parse_object(f'{{"step": {digits}}}'.encode())["step"])


class TestPointerToTheHeartbeat:
    """Without XDG_RUNTIME_DIR it is in the temporary directory, which all users share."""

    @pytest.fixture
    def shared(self, tmp_path, monkeypatch):
        path = tmp_path / "shared"
        path.mkdir()
        monkeypatch.setattr(heartbeat.tempfile, "gettempdir", lambda: str(path))
        return path / f"tf_ipu_dp-{os.getuid()}"

    def beat(self, tmp_path):
        reporter = StatusReporter(tmp_path / "run", environ={})
        reporter.start()
        found = heartbeat.find(os.getpid(), {})
        reporter.stop()
        return found

    def test_it_is_written_to_a_private_folder(self, tmp_path, shared):
        assert self.beat(tmp_path) is not None
        assert shared.stat().st_mode & 0o777 == 0o700 and list(shared.iterdir()) == []

    def test_a_folder_that_others_can_write_to_is_not_used(self, tmp_path, shared):
        shared.mkdir()
        shared.chmod(0o777)
        assert self.beat(tmp_path) is None and list(shared.iterdir()) == []

    def test_a_link_to_a_folder_is_not_used(self, tmp_path, shared):
        target = tmp_path / "target"
        target.mkdir(mode=0o700)
        shared.symlink_to(target)
        assert self.beat(tmp_path) is None and list(target.iterdir()) == []

    @pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
    def test_a_folder_of_another_user_is_not_used(self, tmp_path, shared):
        shared.mkdir(mode=0o700)
        os.chown(shared, 12345, 12345)
        assert self.beat(tmp_path) is None and list(shared.iterdir()) == []

    def test_links_in_it_are_replaced_and_not_followed(self, tmp_path, shared, secret):
        shared.mkdir(mode=0o700)
        for name in (f"{os.getpid()}.json", f".{os.getpid()}.json.{os.getpid()}", f".{os.getpid()}.json"):
            (shared / name).symlink_to(secret)
        assert self.beat(tmp_path) is not None and secret.read_text() == "my thesis"

    def test_a_pointer_with_a_name_that_no_file_can_have_is_none(self, shared):
        shared.mkdir(mode=0o700)
        (shared / "7.json").write_text(json.dumps({"status": "a\0b"}))
        assert heartbeat.find(7, {}) is None


def test_a_heartbeat_is_not_written_through_a_link(tmp_path, secret):
    status = tmp_path / "run" / "status"
    target = tmp_path / "target"
    target.mkdir()
    status.parent.mkdir()
    status.symlink_to(target)
    (target / "instance-000.json").write_text("kept")
    reporter = StatusReporter(tmp_path / "run", environ={"XDG_RUNTIME_DIR": str(tmp_path / "runtime")})
    reporter.start()
    reporter.stop()
    assert [path.name for path in target.iterdir()] == ["instance-000.json"]
    assert (target / "instance-000.json").read_text() == "kept"
    status.unlink()
    status.mkdir()
    (status / "instance-000.json").symlink_to(secret)
    reporter.write()
    assert secret.read_text() == "my thesis" and heartbeat.read_run(tmp_path / "run")


def test_a_file_is_replaced_with_a_temporary_name_that_nobody_can_guess(tmp_path, secret):
    for pid in range(os.getpid() - 5, os.getpid() + 5):
        (tmp_path / f".report.html.{pid}.tmp").symlink_to(secret)
    safe_files.write_durably(tmp_path / "report.html", "new")
    long_name = tmp_path / ("ü" * 120)
    safe_files.write_durably(long_name, "new")
    assert (tmp_path / "report.html").read_text() == long_name.read_text() == "new"
    assert secret.read_text() == "my thesis"


def test_a_checkpoint_with_a_link_or_a_name_outside_its_folder_is_damaged(tmp_path, secret):
    store = checkpoints.Store(tmp_path / "checkpoints", 3, lambda _: None)
    folder = tmp_path / "checkpoints" / "step-00000004"
    folder.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkpoints" / "step-00000005").symlink_to(tmp_path / "elsewhere")
    (folder / "manifest.json").symlink_to(secret)
    warnings = []
    store.warn = warnings.append
    assert store.newest() is None
    assert "step-00000005 is damaged and skipped: it is a link" in warnings[0]
    assert "manifest.json cannot be read (it is a link and not a file)" in warnings[1]
