"""The commands of launch/ in a copy of the project that nobody has started before."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

import tf_ipu_dp
from tf_ipu_dp import __main__
from tf_ipu_dp.environment import locks, versions

ROOT = Path(__file__).resolve().parents[2]
# What mypy knows already comes along: checking the types of TensorFlow's callers anew would take a minute.
_CACHES = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis", "*.egg-info"
)
UNREACHABLE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_EXTRA_INDEX_URL": None,
    "PIP_FIND_LINKS": None,
    "PIP_NO_CACHE_DIR": "1",
}
# A run, which needs the environment: plans do without.
TRAINING = ("--model=mlp", "--ipus=8", "--epochs=1steps")
OURS = ("VIRTUAL_ENV", "PYTHONPATH", "POPLAR_SDK_ENABLED", "TF_IPU_DP_VENV", "TF_IPU_DP_PYTHON", "TF_IPU_DP_LAUNCH")


def leave_out(folder, names):
    """Leaves out what a clone does not have: caches, environments, and the runs below its top."""
    return {*_CACHES(folder, names), *({"runs"} if (Path(folder) / "setup.cfg").exists() else ())}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "tf_ipu_dp"
    shutil.copytree(ROOT, path, ignore=leave_out)
    run(path, "train", "--help")  # gets the few packages that plans need, if this machine does not have them yet
    return path


def surroundings(**changes):
    base = {name: value for name, value in os.environ.items() if name not in OURS}
    # The environment under test is made with the Python that runs the test, whichever that is.
    base["TF_IPU_DP_PYTHON"] = os.path.realpath(sys.executable)
    # Most of what is installed is never imported here; what is, Python compiles then.
    base["PIP_COMPILE"] = "0"
    return {name: value for name, value in {**base, **changes}.items() if value is not None}


def start(clone, command, *words, **changes):
    return subprocess.Popen(
        [str(clone / "launch" / command), *words], env=surroundings(**changes), cwd=str(clone.parent), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def run(clone, command, *words, **changes):
    process = start(clone, command, *words, **changes)
    out, err = process.communicate(timeout=1200)
    return process.returncode, out, err


def check_that_another_clone_runs_its_own_code(clone):
    # Another clone may share the environment and still runs its own code; a link to the wrapper does as well.
    other = clone.with_name("other")
    shutil.copytree(clone, other, ignore=leave_out)
    init = other / "tf_ipu_dp" / "__init__.py"
    init.write_text(re.sub('"[0-9.]+"', '"9.9.9"', init.read_text(encoding="utf-8")), encoding="utf-8")
    (other / "link").symlink_to(other / "launch" / "train")
    shared = surroundings(TF_IPU_DP_VENV=str(clone / ".venv"))
    done = subprocess.run(
        [str(other / "link"), "--dry_run"], env=shared, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stdout.startswith("tf_ipu_dp 9.9.9"), done.stderr
    assert run(clone, "train", "--dry_run")[1].startswith(f"tf_ipu_dp {tf_ipu_dp.__version__}")


def check_that_more_than_one_instance_gets_horovod(clone):
    # One instance has needed no Horovod so far; more than one gets it, from the cache or built.
    installed = [
        str(clone / ".venv" / "bin" / "python"),
        "-c",
        "import importlib.util as u; print(u.find_spec('horovod'))",
    ]
    assert subprocess.run(installed, check=True, capture_output=True, text=True).stdout == "None\n"
    code, _, err = run(clone, "train", "--ipus=2", "--instances=2", "--model=mlp", "--epochs=2steps")
    assert code == 0 and "Horovod" in err and "launch: done in" in err, err
    assert subprocess.run(installed, check=True, capture_output=True, text=True).stdout != "None\n"


def check_that_an_interrupted_addition_is_repaired(clone):
    # As if pip had been killed while it unpacked rich.
    site = next(clone.glob(".venv/lib/python3*/site-packages"))
    (site / "rich" / "table.py").unlink()
    (clone / ".venv.installing").touch()
    shutil.rmtree(site / "tqdm")
    (next(site.glob("tqdm-*.dist-info")) / "RECORD").unlink()
    (clone / ".venv" / "ready-run").unlink(missing_ok=True)
    made = (clone / ".venv" / "pyvenv.cfg").stat()
    code, out, err = run(clone, "train", *TRAINING)
    assert code == 0 and "Updates " in out, err
    assert "the last addition to .venv was interrupted; repairing rich, tqdm." in err and "making" not in err
    assert (clone / ".venv" / "pyvenv.cfg").stat().st_mtime_ns == made.st_mtime_ns
    assert run(clone, "train", "--ipus=8", "--dry_run")[::2] == (0, "")


def check_that_what_a_job_uses_is_not_replaced(clone, pins):
    before = pins.read_text(encoding="utf-8")
    pins.write_text(re.sub(r"(?m)^rich==.*", "rich==13.7.0", before), encoding="utf-8")
    python = clone / ".venv" / "bin" / "python"
    with subprocess.Popen([str(python), "-c", "input()"], stdin=subprocess.PIPE) as job:
        code, _, err = run(clone, "train", *TRAINING)
        job.communicate(b"\n")
    assert code == 1 and f"rich would be replaced, but process {job.pid} is using {clone / '.venv'}" in err
    pins.write_text(before, encoding="utf-8")
    assert run(clone, "train", "--ipus=8", "--dry_run")[::2] == (0, "")


ANSWERED_AT_ONCE = {
    "help": (["train", "--help"], 0, "usage: "),
    "a typo": (["train", "--ipuss=8"], 1, "train: --ipuss is not a flag. Did you mean --ipus?\n"),
    "a refused plan": (["train", "--ipus=6"], 1, "train: --ipus=6 is not possible"),
    "a plan": (["train", "--ipus=8", "--dry_run"], 0, "replica 7  IPU 7"),
    "a plan of several instances": (["launch", "--instances=2", "--dry_run", "--", "--ipus=4"], 0, "replica 3  IPU 3"),
    "the IPUs": (["monitor", "--sdk=emulator"], 0, "IPU"),
    "what can be trained": (["tf-ipu-dp", "list"], 0, "resnet50"),
    "sizes": (["collectives", "size", "--model=mlp"], 0, "bytes"),
}


@pytest.mark.slow
def test_what_needs_no_tensorflow_is_answered_before_anything_large_is_installed(clone, tmp_path, emulator_dir):
    other = {"TF_IPU_DP_CACHE": str(tmp_path / "cache"), "TF_IPU_DP_VENV": str(tmp_path / "venv")}
    # The version needs no package at all, so it needs no network either.
    assert run(clone, "train", "--version", **other, **UNREACHABLE)[1] == f"tf_ipu_dp {tf_ipu_dp.__version__}\n"
    code, out, err = run(clone, "train", "--help", **other, **UNREACHABLE)
    assert (code, out) == (1, "") and "launch/train: the package index cannot be reached" in err
    said = ""
    for words, expected, part in ANSWERED_AT_ONCE.values():
        code, out, err = run(clone, *words, **other)
        assert code == expected and part in out + err, (words, out, err)
        said += err
    assert said.count("getting absl-py and rich") == 1
    assert not (tmp_path / "venv").exists()
    assert "tensorflow" not in " ".join(path.name for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("command", __main__.COMMANDS)
def test_every_command_has_help_without_an_environment_and_names_itself_as_it_was_started(clone, tmp_path, command):
    code, out, err = run(clone, "tf-ipu-dp", command, "--help", TF_IPU_DP_VENV=str(tmp_path / "venv"))
    assert (code, err) == (0, "") and out.startswith("usage: ") and "Examples" in out
    own = clone / "launch" / command
    if own.exists():
        assert run(clone, command, "--help", TF_IPU_DP_VENV=str(tmp_path / "venv")) == (code, out, err)
        if command != "emulator":  # it knows nothing of launch/
            assert f"usage: {own}" in out and "python -m" not in out


def test_every_command_that_users_start_has_a_wrapper(clone):
    without = {"list", "completion", "environment", "emulator.poprun"}
    assert [name for name in __main__.COMMANDS if not os.access(clone / "launch" / name, os.X_OK)] == [
        name for name in __main__.COMMANDS if name in without
    ]


@pytest.mark.slow
def test_from_an_interrupted_install_over_two_starts_at_once_to_a_tested_clone(clone):
    # Interrupted while pip is at work: killed, with no chance to clean up.
    first = start(clone, "train", *TRAINING)
    log = clone / ".venv" / "install.log"
    deadline = time.monotonic() + 600
    while not (log.exists() and "Collecting " in log.read_text(errors="replace")):
        assert first.poll() is None and time.monotonic() < deadline, first.communicate()
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    assert not (clone / ".venv" / "ready-run").exists()
    # As if it had been killed while it unpacked packages, and once more while it removed the environment.
    half = next(clone.glob(".venv/lib/python3*/site-packages")) / "tensorflow"
    half.mkdir()
    (half / "__init__.py").write_text("import ", encoding="utf-8")
    shutil.rmtree(clone / ".venv" / "bin")

    # Two starts at once: one repairs, the other waits, both train.
    both = [start(clone, "train", *TRAINING) for _ in range(2)]
    results = [(*process.communicate(timeout=1200), process.returncode) for process in both]
    assert [code for _, _, code in results] == [0, 0], results
    assert all("Updates " in out for out, _, _ in results)
    said = "".join(err for _, err, _ in results)
    assert said.count("did not finish; starting it again") == 1 and said.count("is ready after") == 1
    assert said.count("waiting for it") == 1

    # Nothing changed: nothing is said, from any directory, and no Python is started but the one that trains.
    assert run(clone, "train", "--ipus=8", "--dry_run")[2] == ""
    traced = subprocess.run(
        ["bash", "-x", str(clone / "launch" / "train"), "--help"], env=surroundings(), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert (
        traced.returncode == 0 and "find_python" not in traced.stderr and "-m tf_ipu_dp train --help" in traced.stderr
    )

    # Nor where almost nothing is set.
    bare = subprocess.run(
        [str(clone / "launch" / "train"), "--ipus=8", "--dry_run"], env={"PATH": os.environ["PATH"]}, cwd="/",
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (bare.returncode, bare.stderr) == (0, "")

    # An update that cannot be had leaves the environment as it is.
    pins = clone / versions.of_python().constraints.relative_to(versions.ROOT)
    before = pins.read_text(encoding="utf-8")
    pins.write_text(re.sub(r"(?m)^rich==.*", "rich==13.7.0", before), encoding="utf-8")
    for _ in range(2):
        code, _, err = run(clone, "train", *TRAINING, **UNREACHABLE)
        assert code == 1 and "the package index cannot be reached" in err and "making" not in err
        # Plans need no update.
        assert run(clone, "train", "--ipus=8", "--dry_run", **UNREACHABLE)[::2] == (0, "")
    pins.write_text(before, encoding="utf-8")
    assert run(clone, "train", "--ipus=8", "--dry_run")[::2] == (0, "")

    check_that_another_clone_runs_its_own_code(clone)

    # Nor is it made again where it is activated, whichever other Pythons there are.
    activated = {"VIRTUAL_ENV": str(clone / ".venv"), "PATH": f"{clone}/.venv/bin:{os.environ['PATH']}"}
    assert run(clone, "train", "--ipus=8", "--dry_run", TF_IPU_DP_PYTHON=None, **activated)[::2] == (0, "")

    check_that_more_than_one_instance_gets_horovod(clone)

    check_that_an_interrupted_addition_is_repaired(clone)
    check_that_what_a_job_uses_is_not_replaced(clone, pins)

    # The same environment grows for the tests. The Horovod that works is kept, and neither built nor installed again.
    code, out, err = run(clone, "test", "tests/unit/test_cli.py", "-q")
    assert code == 0, out + err
    assert re.search(r"\d+ passed", out)
    assert "adding the missing packages" in err and "Horovod" not in err and "launch/test: tests" in err

    # A failing test makes launch/test fail.
    (clone / "tests" / "unit" / "test_wrong.py").write_text("def test_wrong():\n    assert 1 == 2\n", encoding="utf-8")
    code, out, err = run(clone, "test", "tests/unit/test_wrong.py", "-q")
    assert code == 1 and "1 failed" in out and "launch/test: failed:" in err and "tests" in err


@pytest.mark.slow
def test_an_unreachable_index_is_one_sentence_and_leaves_nothing_that_would_be_used(clone, tmp_path):
    code, out, err = run(clone, "train", *TRAINING, TF_IPU_DP_VENV=str(tmp_path / "venv"), **UNREACHABLE)
    assert code == 1 and not out
    assert "launch/train: the package index cannot be reached" in err.splitlines()[-1]
    assert not (tmp_path / "venv" / "ready-run").exists()


def test_an_environment_that_is_not_ours_is_left_alone(clone, tmp_path):
    theirs = tmp_path / "venv"
    theirs.mkdir()
    (theirs / "precious").touch()
    code, _, err = run(clone, "train", *TRAINING, TF_IPU_DP_VENV=str(theirs))
    assert code == 1 and "was not made by launch/. Remove it, or set TF_IPU_DP_VENV" in err
    assert [path.name for path in theirs.iterdir()] == ["precious"]


def test_a_place_that_cannot_be_written_is_one_sentence(clone):
    code, _, err = run(clone, "train", *TRAINING, TF_IPU_DP_VENV="/proc/tf_ipu_dp/venv")
    assert code == 1 and len(err.splitlines()) == 1
    assert "/proc/tf_ipu_dp cannot be written" in err and "Set TF_IPU_DP_VENV and TF_IPU_DP_CACHE" in err


def make_tools(folder, python=None, apt=None, **scripts):
    """A PATH with what the wrappers need, a python3 that says which version it is, and other commands."""
    folder.mkdir(exist_ok=True)
    for name in ("bash", "env", "dirname", "cksum", "readlink"):
        (folder / name).symlink_to(shutil.which(name))
    if python:
        scripts["python3"] = f"echo 'is Python {python}'"
    if apt:
        scripts.update({"apt-get": "exit 1", "apt-cache": f"echo '  Candidate: {apt}'"})
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    return {"PATH": str(folder), "TF_IPU_DP_PYTHON": None, "python_places": str(folder / "nothing")}


@pytest.mark.parametrize("command", [["train", "--instances=2"], ["launch", "--instances=2", "--"]])
def test_a_missing_compiler_is_named_before_anything_large_is_installed_for_several_instances(clone, tmp_path, command):
    shutil.copytree(locks.cache_dir() / "packages", tmp_path / "cache" / "packages")  # and no wheel of Horovod
    places = {**make_tools(tmp_path / "bin"), "TF_IPU_DP_PYTHON": os.path.realpath(sys.executable), "CXX": None}
    places.update(TF_IPU_DP_CACHE=str(tmp_path / "cache"), TF_IPU_DP_VENV=str(tmp_path / "venv"))
    for _ in range(2):  # the first one leaves nothing that the second one would have to mend
        code, out, err = run(clone, *command, "--ipus=2", "--model=mlp", **places, **UNREACHABLE)
        assert (code, out) == (1, "")
        assert err == (
            f"launch/{command[0]}: Horovod must be compiled, and there is no C++ compiler "
            "(CXX, c++, g++ and clang++ were tried). Install one, for example with apt-get install g++.\n"
        )
        assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(
    ("python", "apt", "scripts", "advice"),
    [
        ("3.14", "3.12.3-0ubuntu2", {}, "apt-get install python3 python3-venv (Python 3.12)"),
        ("3.14", "3.14.0-1", {"pyenv": ""}, "pyenv install 3.11"),
        ("3.7", None, {}, "uv python install 3.11 (uv: pip install uv, or its installation page)"),
    ],
)
def test_a_machine_without_a_suitable_python_gets_one_sentence_with_how_to_get_one(
    clone, tmp_path, python, apt, scripts, advice
):
    tools = make_tools(tmp_path / "bin", python, apt, **scripts)
    code, out, err = run(clone, "train", "--dry_run", TF_IPU_DP_VENV=str(tmp_path / "venv"), **tools)
    assert (code, out) == (1, "")
    assert err == (
        f"launch/train: no Python 3.8 to 3.13 was found (python3 is Python {python}). Get one with {advice}, "
        "or set TF_IPU_DP_PYTHON to the path of one.\n"
    )


def test_a_python_without_venv_is_named_once_with_the_package_that_has_it(clone, tmp_path):
    lacking = "is Python 3.13 without venv (apt-get install python3.13-venv)"
    says = f"echo '{lacking}'"  # as Debian 13 does before python3-venv is installed
    tools = make_tools(tmp_path / "bin", None, "3.13.5-1", **{"python3": says, "python3.13": says})
    tools["python_places"] = str(tmp_path / "bin")
    code, out, err = run(clone, "train", "--dry_run", TF_IPU_DP_VENV=str(tmp_path / "venv"), **tools)
    assert (code, out) == (1, "")
    assert err == (
        "launch/train: no Python 3.8 to 3.13 was found (python3.13 is Python 3.13 without venv). "
        "Get one with apt-get install python3.13-venv, or set TF_IPU_DP_PYTHON to the path of one.\n"
    )


# Finds nothing until it has installed; then the Python that runs this test.
UV = """
echo "$@" >> "${0%/*}/asked"
case "$2" in
    find) [[ -e ${0%/*}/installed ]] && echo PYTHON ;;
    install) : > "${0%/*}/installed" ;;
esac
"""


def test_where_uv_is_on_the_path_it_gets_a_python_after_that_was_said(clone, tmp_path):
    tools = make_tools(tmp_path / "bin", "3.14", uv=UV.replace("PYTHON", os.path.realpath(sys.executable)))
    for said in ("no Python 3.8 to 3.13 was found; uv is on the PATH and gets Python 3.11 (about 30 MB).", ""):
        code, out, err = run(clone, "train", "--ipus=8", "--dry_run", TF_IPU_DP_VENV=str(tmp_path / "venv"), **tools)
        assert code == 0 and "replica 7  IPU 7" in out, err
        assert err == (f"launch/train: {said}\n" if said else "")
    asked = (tmp_path / "bin" / "asked").read_text(encoding="utf-8").splitlines()
    find = "python find --no-python-downloads 3.11"
    assert asked == [find, "python install --quiet 3.11", find, find]


def test_a_uv_that_cannot_download_ends_in_the_same_sentence(clone, tmp_path):
    tools = make_tools(tmp_path / "bin", "3.14", uv="exit 2")
    code, out, err = run(clone, "train", "--dry_run", TF_IPU_DP_VENV=str(tmp_path / "venv"), **tools)
    assert (code, out) == (1, "")
    assert "uv is on the PATH and gets Python 3.11" in err.splitlines()[0]
    assert err.splitlines()[1:] == [
        "launch/train: no Python 3.8 to 3.13 was found (python3 is Python 3.14). Get one with uv python install 3.11, "
        "which says why uv could not get it, or set TF_IPU_DP_PYTHON to the path of one."
    ]


def test_a_python_that_is_asked_for_and_does_not_fit_gets_one_sentence(clone, tmp_path):
    make_tools(tmp_path / "bin", "3.14")
    for python, reason in (("/bin/false", "does not start"), (tmp_path / "bin" / "python3", "is Python 3.14")):
        code, _, err = run(clone, "train", "--dry_run", TF_IPU_DP_PYTHON=str(python))
        assert code == 1
        assert err == (
            f"launch/train: TF_IPU_DP_PYTHON={python} {reason}; "
            "give a Python 3.8 to 3.13, by version, command or path.\n"
        )


def test_a_version_that_does_not_fit_gets_the_same_sentence(clone):
    code, _, err = run(clone, "train", "--dry_run", TF_IPU_DP_PYTHON="3.14")
    assert code == 1
    assert err == (
        "launch/train: TF_IPU_DP_PYTHON=3.14 is not supported; "
        "give a Python 3.8 to 3.13, by version, command or path.\n"
    )


def make_sdk_environment(path, **options):
    """A virtual environment whose TensorFlow has the Poplar SDK's files; what is asked of it is only where they are."""
    venv.create(path, **options)
    site = next(path.glob("lib/python3*/site-packages"))
    (site / "tensorflow" / "python" / "ipu").mkdir(parents=True)
    (site / "tensorflow" / "__init__.py").touch()
    return site


def test_inside_an_sdk_environment_that_environment_is_used_and_nothing_is_installed(clone, tmp_path):
    sdk = tmp_path / "sdk"
    site = make_sdk_environment(sdk, with_pip=False)
    ours = [path for path in sys.path if path.endswith("site-packages")]
    (site / "ours.pth").write_text("\n".join(ours), encoding="utf-8")
    before = sorted(site.iterdir())
    changes = {"VIRTUAL_ENV": str(sdk), "TF_IPU_DP_PYTHON": None, "PATH": f"{sdk}/bin:{os.environ['PATH']}"}
    code, out, err = run(clone, "train", "--ipus=8", "--dry_run", TF_IPU_DP_VENV=str(tmp_path / "venv"), **changes)
    assert (code, err) == (0, "") and "replica 7  IPU 7" in out
    assert not (tmp_path / "venv").exists()
    assert [path for path in sorted(site.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.slow
def test_what_an_sdk_environment_lacks_is_added_and_what_it_has_is_held(clone, tmp_path):
    sdk = tmp_path / "sdk"
    site = make_sdk_environment(sdk, with_pip=True)
    pip = [str(sdk / "bin" / "python"), "-m", "pip"]
    subprocess.run([*pip, "install", "-q", "absl-py==1.0.0", "six==1.15.0"], check=True, capture_output=True)
    changes = {"VIRTUAL_ENV": str(sdk), "TF_IPU_DP_PYTHON": None, "PATH": f"{sdk}/bin:{os.environ['PATH']}"}
    code, out, err = run(clone, "train", "--ipus=8", "--dry_run", TF_IPU_DP_VENV=str(tmp_path / "venv"), **changes)
    assert code == 0 and "replica 7  IPU 7" in out, err
    assert "lacks prometheus-client, rich, tqdm; adding them without changing installed packages" in err
    listed = subprocess.run([*pip, "list", "--format=freeze"], check=True, capture_output=True, text=True).stdout
    assert "absl-py==1.0.0" in listed and "six==1.15.0" in listed and "rich==" in listed and "tqdm==" in listed
    assert not re.search(r"(?im)^(tensorflow|keras|numpy|protobuf)", listed)
    assert not list(site.glob("tensorflow*.dist-info"))
