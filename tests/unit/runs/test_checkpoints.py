from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import sample_records
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp.runs import checkpoints, safe_files

VARIABLES = (("dense/kernel", (784, 10), "float32"), ("dense/bias", (10,), "float32"), ("step", (), "int64"))

# What the programs below run as another process: the state of a step is a function of the step alone.
PROGRAM = """
import io, os, random, shutil, signal, sys, time
from pathlib import Path
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.planning import plan
from tf_ipu_dp.runs import checkpoints, plan_record

PLAN = plan_record.PlanRecord.of(plan.plan_run(train_flags.parse([]), info.DATASETS["fashion_mini"]))

def manifest(step):
    return checkpoints.Manifest(
        step=step, epoch=0, samples_into_epoch=8 * step, flags={"model": "cnn"}, plan=PLAN, variables=(),
        random_state={"update": step}, versions={"python": "3"}, time="2026-01-05T10:00:00Z",
    )

def write(step):
    def fill(prefix):
        for number, suffix in enumerate((".index", ".data-00000-of-00001")):
            with open(f"{prefix}{suffix}", "wb", buffering=0) as handle:
                for _ in range(4):
                    handle.write(f"{step}/{number};".encode() * 200)
    return fill

def is_consistent(found):
    step = found.manifest.step
    texts = [Path(f"{found.prefix}{suffix}").read_text() for suffix in (".index", ".data-00000-of-00001")]
    return texts == [f"{step}/{number};" * 800 for number in (0, 1)] and found.manifest == checkpoints.Manifest(
        **{**vars(manifest(step)), "files": found.manifest.files}
    )

def in_child(body):
    child = os.fork()
    if not child:
        try:
            body()
        finally:
            os._exit(9)
    return child
"""


def manifest(step, **changes):
    values = {
        "step": step,
        "epoch": 1,
        "samples_into_epoch": 32 * step,
        "flags": {"model": "cnn", "data_dir": "Größe"},
        "plan": sample_records.make_plan("--ipus=8"),
        "variables": VARIABLES,
        "random_state": {"seed": 42, "update": 2**63},
        "versions": {"tensorflow": "2.15.1"},
        "time": "2026-01-05T10:00:00Z",
    }
    return checkpoints.Manifest(**{**values, **changes})


def write_state(text):
    def write(prefix):
        prefix.with_suffix(".index").write_bytes(b"index of " + text)
        prefix.with_suffix(".data-00000-of-00001").write_bytes(text * 100)

    return write


class Heard(list):
    def __call__(self, sentence):
        self.append(sentence)


def make_store(folder, keep=3, steps=()):
    heard = Heard()
    store = checkpoints.Store(folder / "checkpoints", keep, heard)
    for step in steps:
        store.save(manifest(step), write_state(f"{step}".encode()))
    return store, heard


def leftovers(store):
    """What is in the folder besides checkpoints and the lock."""
    return [path.name for path in store.folder.iterdir() if not path.name.startswith("step-") and path.name != ".lock"]


def run_program(body, *arguments, **options):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + body, *map(str, arguments)],
        capture_output=True, text=True, check=False, timeout=240, **options,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_saved_checkpoint_is_found_again_with_all_that_was_put_into_it(tmp_path):
    store, heard = make_store(tmp_path)
    assert store.newest() is None
    saved = store.save(manifest(160), write_state(b"weights"))
    found = checkpoints.Store(store.folder, 3, heard).newest()
    assert found == saved == checkpoints.open_checkpoint(store.folder / "step-00000160")
    assert found.prefix == store.folder / "step-00000160" / "state"
    assert sorted(found.manifest.files) == ["state.data-00000-of-00001", "state.index"]
    assert checkpoints.Manifest(**{**vars(found.manifest), "files": {}}) == manifest(160)
    assert found.prefix.with_suffix(".index").read_bytes() == b"index of weights"
    assert not heard
    assert not leftovers(store)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept_and_older_ones_removed(tmp_path, keep):
    store, _ = make_store(tmp_path, keep, [8, 16, 100_000_000, 24, 32])
    assert store.steps() == [8, 16, 24, 32, 100_000_000][-keep - 1 :]
    assert store.newest().manifest.step == 100_000_000
    assert not leftovers(store)


def test_steps_later_than_the_one_a_run_goes_on_from_are_set_aside(tmp_path):
    store, _ = make_store(tmp_path, 9, [8, 16, 24, 32])
    for _ in range(2):
        store.set_aside_after(16)
    assert store.steps() == [8, 16]
    assert checkpoints.open_checkpoint(store.folder / "set-aside-step-00000032").manifest.step == 32


def test_a_good_checkpoint_of_the_same_step_is_kept_and_a_damaged_one_replaced(tmp_path):
    store, _ = make_store(tmp_path, 3, [8])

    def never(prefix):
        raise AssertionError(f"{prefix} is written though the checkpoint is there")

    assert store.save(manifest(8), never) == store.newest()
    (store.folder / "step-00000008" / "state.index").unlink()
    store.save(manifest(8), write_state(b"again"))
    assert store.newest().prefix.with_suffix(".index").read_bytes() == b"index of again"
    assert not leftovers(store)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    store, _ = make_store(tmp_path_factory.mktemp("pristine"), 3, [8, 16])
    return store


NAMES = ["manifest.json", "state.index", "state.data-00000-of-00001"]


@settings(max_examples=150)
@given(name=st.sampled_from(NAMES), where=st.floats(0, 1), change=st.integers(0, 255), data=st.data())
def test_any_changed_or_missing_byte_is_noticed_and_the_checkpoint_before_is_used(pristine, name, where, change, data):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(pristine.folder, Path(folder) / "checkpoints")
        store, heard = make_store(Path(folder))
        path = store.folder / "step-00000016" / name
        content = bytearray(path.read_bytes())
        offset = min(int(where * len(content)), len(content) - 1)
        if change:
            content[offset] ^= change
        else:
            content = data.draw(st.sampled_from([content[:offset], content + b"\0"]))
        path.write_bytes(content)
        assert store.newest().manifest.step == 8
        assert len(heard) == 1
        assert heard[0].startswith(f"{path.parent} is damaged and skipped: ")
        with pytest.raises(checkpoints.CheckpointError, match="step-00000016 is not a good checkpoint: "):
            checkpoints.open_checkpoint(path.parent)


def put_schema_2(folder):
    sealed = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**sealed, "schema": 2}))


def cut_short(folder):
    (folder / "state.index").write_bytes(b"abc")


def flip(folder):
    content = (folder / "state.index").read_bytes()
    (folder / "state.index").write_bytes(content[:-1] + b"x")


def change_a_line_end(folder):
    content = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(content.replace(b"\n", b"\r", 1))


def take_another_step(folder):
    shutil.copy(folder.parent / "step-00000008" / "manifest.json", folder)
    for path in (folder.parent / "step-00000008").glob("state*"):
        shutil.copy(path, folder)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: (folder / "state.index").unlink(), "state.index is missing"),
        (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "manifest.json").write_bytes(b""), "manifest.json is not a manifest"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is not text"),
        (put_schema_2, "manifest.json is of schema 2, and this version reads 1"),
        (cut_short, "state.index has 3 bytes instead of 11"),
        (flip, "state.index has other bytes than were written (its SHA-256 differs)"),
        (change_a_line_end, "manifest.json has other bytes than were written (its SHA-256 differs)"),
        (take_another_step, "it holds step 8"),
    ],
)
def test_what_is_wrong_with_a_damaged_checkpoint_is_said(tmp_path, damage, sentence):
    store, heard = make_store(tmp_path, 3, [8, 16])
    damage(store.folder / "step-00000016")
    assert store.newest().manifest.step == 8
    assert heard == [f"{store.folder / 'step-00000016'} is damaged and skipped: {sentence}."]


def test_without_a_good_checkpoint_there_is_none_and_every_damaged_one_is_named(tmp_path):
    store, heard = make_store(tmp_path, 3, [8, 16])
    for path in store.folder.glob("step-*/state.index"):
        path.unlink()
    assert store.newest() is None
    assert [sentence.split(" is ")[0][-8:] for sentence in heard] == ["00000016", "00000008"]


def test_a_kill_before_any_call_into_the_system_leaves_a_good_checkpoint_and_the_next_save_leaves_no_rest(tmp_path):
    # The child kills itself before the n-th call of a function of os, or method of an open file, for every n.
    results = run_program(
        """
def killing_itself_at(count, body):
    left = [count]
    def before(frame, event, called):
        if event != "c_call":
            return
        owner = getattr(called, "__self__", None)
        if called.__module__ in ("posix", "fcntl") or isinstance(owner, io.IOBase):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
    def run():
        sys.setprofile(before)
        body()
        sys.setprofile(None)
        os._exit(0)
    return os.waitpid(in_child(run), 0)[1] != 0

base = checkpoints.Store(Path(sys.argv[1]) / "base", 2, print)
for step in (1, 2):
    base.save(manifest(step), write(step))
killed, steps, good, rests = 0, set(), True, 0
while True:
    folder = Path(sys.argv[1]) / str(killed)
    shutil.copytree(base.folder, folder)
    store = checkpoints.Store(folder, 2, print)
    if not killing_itself_at(killed, lambda: store.save(manifest(3), write(3))):
        break
    killed += 1
    found = store.newest()
    steps.add(found.manifest.step)
    good = good and all(is_consistent(checkpoints.open_checkpoint(path)) for path in folder.glob("step-*"))
    store.save(manifest(4), write(4))
    rests += sorted(os.listdir(folder))[-2:] != [f"step-0000000{n}" for n in (found.manifest.step, 4)]
    rests += len(os.listdir(folder)) != 3
print(f'{{"killed": {killed}, "steps": {sorted(steps)}, "good": {int(good)}, "rests": {rests}}}')
""",
        tmp_path,
    )
    assert results["killed"] > 50
    assert {**results, "killed": 0} == {"killed": 0, "steps": [2, 3], "good": 1, "rests": 0}


def test_kills_at_random_moments_never_cost_a_checkpoint_that_was_reported_as_saved(tmp_path):
    results = run_program(
        """
store = checkpoints.Store(Path(sys.argv[1]), 2, print)
store.save(manifest(0), write(0))
seen, good, lost = [0], True, 0
for round in range(25):
    reader, writer = os.pipe()
    def save_for_ever():
        step = seen[-1]
        while True:
            step += 1
            store.save(manifest(step), write(step))
            os.write(writer, b"%d\\n" % step)
    child = in_child(save_for_ever)
    os.close(writer)
    time.sleep(random.uniform(0.002, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with open(reader) as reports:
        reported = [int(line) for line in reports] or [seen[-1]]
    found = store.newest()
    good = good and is_consistent(found)
    lost += found.manifest.step < reported[-1]
    seen.append(found.manifest.step)
rests = [name for name in os.listdir(store.folder) if name.startswith(".tmp")]
print(f'{{"good": {int(good)}, "lost": {lost}, "rests": {len(rests)}, "steps": {seen[-1]}}}')
""",
        tmp_path,
    )
    assert results["steps"] > 0
    assert {**results, "steps": 0} == {"good": 1, "lost": 0, "rests": 0, "steps": 0}


def test_everything_is_on_the_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, Path.rename

    def noted_sync(handle):
        events.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        sync(handle)

    def noted_rename(path, target):
        events.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    store, _ = make_store(tmp_path, 3, [8])
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    names = [path.name.split(".tmp")[0] for path in before]
    assert sorted(names[:3]) == sorted(["state.index", "state.data-00000-of-00001", names[2]])
    assert before[-2].name.startswith(".manifest.json")
    assert before[-1].name.startswith(".tmp-step-00000008")
    assert after == [store.folder]


def fail_with(error):
    def write(prefix):
        prefix.with_suffix(".index").write_bytes(b"half of it")
        (prefix.parent / "state_temp").mkdir()
        raise error

    return write


class ResourceExhaustedError(Exception):
    """Looks like TensorFlow's error of this name."""

    error_code = 8
    message = "{{function_node save}} /tmp/state_temp/part-00000; No space left on device [Op:SaveV2]"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ResourceExhaustedError()], ids=["os", "tensorflow"]
)
def test_a_refused_write_is_one_sentence_and_leaves_the_last_good_checkpoint_and_no_rest(tmp_path, error):
    store, _ = make_store(tmp_path)
    with pytest.raises(checkpoints.CheckpointError, match="there is no good one before it"):
        store.save(manifest(8), fail_with(error))
    store.save(manifest(8), write_state(b"8"))
    with pytest.raises(checkpoints.CheckpointError) as caught:
        store.save(manifest(1600), fail_with(error))
    assert str(caught.value) == (
        f"The checkpoint of step 1,600 cannot be written to {store.folder} (No space left on device); "
        "the last good one is step-00000008."
    )
    assert store.steps() == [8]
    assert store.newest().manifest.step == 8
    assert not leftovers(store)


def test_a_checkpoint_that_was_begun_is_none_until_it_is_finished_and_other_writers_wait(tmp_path):
    store, heard = make_store(tmp_path, 3, [8])
    finish = store.begin(manifest(16), write_state(b"16"))
    other = checkpoints.Store(store.folder, 3, heard)
    assert other.newest().manifest.step == 8
    assert len(leftovers(other)) == 1  # of a living writer: not removed
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        safe_files.lock_file(store.folder / ".lock", wait=False)
    assert finish() == other.newest()
    assert other.newest().prefix.with_suffix(".index").read_bytes() == b"index of 16"
    assert not leftovers(store)
    other.save(manifest(24), write_state(b"24"))
    assert not heard


def test_a_disk_that_is_full_only_when_a_checkpoint_is_finished_is_told_in_the_same_way(tmp_path, monkeypatch):
    store, _ = make_store(tmp_path, 3, [8])
    finish = store.begin(manifest(16), write_state(b"16"))

    def refuse(path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safe_files, "sync_tree", refuse)
    with pytest.raises(
        checkpoints.CheckpointError, match=r"No space left on device.*the last good one is step-00000008"
    ):
        finish()
    monkeypatch.undo()
    assert not leftovers(store)
    store.save(manifest(16), write_state(b"16"))
    assert store.steps() == [8, 16]


def test_a_mistake_in_the_program_is_not_told_as_a_full_disk_and_leaves_no_rest(tmp_path):
    store, _ = make_store(tmp_path, 3, [8])
    for error in (TypeError("wrong"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            store.save(manifest(16), fail_with(error))
        assert not leftovers(store)


def test_a_disk_that_is_really_full_costs_the_new_checkpoint_only(tmp_path):
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f'mount -t tmpfs -o size=256k tmpfs {tmp_path} && exec "$@"'
    try:
        possible = subprocess.run([*private, mount, "sh", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("a small file system cannot be mounted here")
    body = """
store = checkpoints.Store(Path(sys.argv[1]) / "checkpoints", 99, print)
try:
    for step in range(1, 99):
        store.save(manifest(step), write(step))
except checkpoints.CheckpointError as error:
    names = sorted(os.listdir(store.folder))
    found = store.newest()
    import json
    print(json.dumps([str(error), step, names, found.manifest.step, is_consistent(found)]))
"""
    done = subprocess.run(
        [*private, mount, "sh", sys.executable, "-c", PROGRAM + body, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    sentence, step, names, newest, consistent = json.loads(done.stdout)
    assert sentence == (
        f"The checkpoint of step {step} cannot be written to {tmp_path / 'checkpoints'} (No space left on device); "
        f"the last good one is step-{step - 1:08d}."
    )
    assert step > 2
    assert names == [".lock", *(f"step-{number:08d}" for number in range(1, step))]
    assert (newest, consistent) == (step - 1, True)


def test_two_processes_that_save_into_one_store_wait_for_each_other(tmp_path):
    results = run_program(
        """
store = checkpoints.Store(Path(sys.argv[1]), 2, lambda sentence: os._exit(3))
def save_all(first):
    def body():
        for step in range(first, 60, 2):
            store.save(manifest(step), write(step))
            if not is_consistent(store.newest()):
                os._exit(4)
        os._exit(0)
    return body
children = [in_child(save_all(first)) for first in (0, 1)]
codes = [os.waitpid(child, 0)[1] for child in children]
print(f'{{"codes": {codes}, "newest": {store.newest().manifest.step}}}')
""",
        tmp_path,
    )
    assert results["codes"] == [0, 0]
    assert results["newest"] == 59


def test_the_temporary_folder_of_a_live_writer_stays_and_that_of_a_dead_one_goes(tmp_path):
    store, _ = make_store(tmp_path, 3, [8])

    def look_around(prefix):
        write_state(b"16")(prefix)
        assert checkpoints.Store(store.folder, 3, print).newest().manifest.step == 8
        assert prefix.parent.is_dir()

    store.save(manifest(16), look_around)
    dead = store.folder / ".tmp-step-00000024-0123"
    dead.mkdir()
    (dead / "state.index").write_bytes(b"half of it")
    assert store.newest().manifest.step == 16
    assert not dead.exists()


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(checkpoints.CheckpointError) as caught:
        checkpoints.open_checkpoint(tmp_path)
    assert str(caught.value) == f"{tmp_path} is not a good checkpoint: manifest.json is missing."


def test_a_checkpoint_that_fits_has_no_differences():
    saved = manifest(8)
    assert checkpoints.differences(saved, {"model": "cnn", "epochs": "9"}, VARIABLES, ["model", "norm"]) == []


def test_differences_name_the_flags_and_variables_with_what_was_and_what_is():
    saved = manifest(8, flags={"model": "resnet20", "epochs": "5"})
    current = (("dense/kernel", (784, 100), "float32"), ("step", (), "float32"), ("dense/bias", (10,), "float32"))
    assert checkpoints.differences(saved, {"model": "cnn", "norm": "group"}, current, ["model", "norm"]) == [
        "--model was resnet20 and is cnn",
        "--norm was not given and is group",
        "the variable dense/kernel was 784x10 float32 and is 784x100 float32",
        "the variable step was scalar int64 and is scalar float32",
    ]


def test_of_many_differing_variables_the_first_are_named_and_the_rest_counted():
    current = [(f"extra_{number}", (1,), "float32") for number in range(40)]
    parts = checkpoints.differences(manifest(8), {}, [*VARIABLES, *current], [])
    assert parts[0] == "the variable extra_0 was missing and is 1 float32"
    assert parts[-1] == "37 more variables differ"
    assert len(parts) == 4


def test_variables_that_share_a_name_are_compared_each():
    twice = (("kernel", (1,), "float32"), ("kernel", (2,), "float32"))
    saved = manifest(8, variables=twice)
    assert checkpoints.differences(saved, {}, twice, []) == []
    assert checkpoints.differences(saved, {}, twice[:1], []) == [
        "the variable kernel (number 2 of this name) was 2 float32 and is missing"
    ]


def test_where_the_file_system_has_no_locks_saving_works_and_nothing_temporary_is_taken_for_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(safe_files, "lock_file", lambda path, wait: None)
    store, _ = make_store(tmp_path, 2, [8])
    (store.folder / ".tmp-step-00000024-0123").mkdir()
    store.save(manifest(16), write_state(b"16"))
    assert store.newest().manifest.step == 16
    assert leftovers(store) == [".tmp-step-00000024-0123"]


def test_a_link_in_place_of_the_store_is_neither_read_nor_written(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "checkpoints").symlink_to(outside)
    store = checkpoints.Store(tmp_path / "checkpoints", 2, print)
    assert store.newest() is None and store.newest_manifest() is None and store.steps() == []
    assert list(outside.iterdir()) == []
