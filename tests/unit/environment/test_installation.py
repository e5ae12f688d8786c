from __future__ import annotations

import concurrent.futures
import fcntl
import io
import json
import os
import platform
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tf_ipu_dp.environment import __main__ as environment_command
from tf_ipu_dp.environment import commands, horovod, installation, locks, poplar, pytorch, venvs, versions
from tf_ipu_dp.environment.status import SetupError, Status

ROOT = versions.ROOT


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_targets_extras_are_in_setup_cfg_and_the_package_itself_requires_no_tensorflow():
    plain = versions.requirements(ROOT / "setup.cfg", [])
    assert not [line for line in plain if line.startswith(("tensorflow", "keras", "numpy", "protobuf"))]
    for extras in versions.TARGETS.values():
        assert len(versions.requirements(ROOT / "setup.cfg", extras)) > len(plain)


def test_setup_cfg_pins_the_horovod_that_is_built():
    assert horovod.HOROVOD in versions.requirements(ROOT / "setup.cfg", ["distributed"])


@pytest.mark.parametrize("environment", versions.ALL, ids=lambda each: each.name)
def test_every_constraint_is_exact_and_has_the_tensorflow_of_its_environment(environment):
    lines = environment.constraints.read_text(encoding="utf-8").splitlines()
    assert f"tensorflow-cpu=={environment.tensorflow}" in lines
    assert all("==" in line for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("python", [python for each in versions.ALL for python in each.pythons])
def test_the_pins_are_releases_that_the_extra_for_hosts_allows_on_every_python(python):
    # Bounds in setup.cfg spare pip from trying releases for another Python; they must not shut out the tested ones.
    of_this = {"python_version": ".".join(map(str, python)), "sys_platform": "linux", "platform_machine": "x86_64"}
    lines = versions.of_python(python).constraints.read_text(encoding="utf-8").splitlines()
    both = [line for line in lines if line and line[0] != "#"], versions.requirements(ROOT / "setup.cfg", ("host",))
    pins, wanted = (
        [each for each in map(Requirement, part) if not each.marker or each.marker.evaluate(of_this)] for part in both
    )
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert {"absl-py", "setuptools"} < {each.name for each in wanted}
    assert [str(each) for each in wanted if pinned[canonicalize_name(each.name)] not in each.specifier] == []


def test_this_environment_has_the_versions_of_its_constraints():
    from importlib import metadata

    path = versions.of_python().constraints
    pins = dict(line.split(";")[0].strip().split("==") for line in path.read_text(encoding="utf-8").splitlines()
                if "==" in line and "python_version" not in line)  # fmt: skip
    installed = {found.metadata["Name"].lower().replace("_", "-"): found.version for found in metadata.distributions()}
    installed.pop("pip", None)
    assert {name: version for name, version in installed.items() if name in pins and pins[name] != version} == {}
    unpinned = set(installed) - set(pins) - {"horovod", "protobuf", "torch"}
    assert unpinned == set()


def test_the_wrappers_and_the_classifiers_know_the_same_pythons():
    pythons = [".".join(map(str, python)) for each in versions.ALL for python in each.pythons]
    script = (ROOT / "launch" / "environment.sh").read_text(encoding="utf-8")
    assert f'supported_pythons="{" ".join(pythons)}"' in script
    setup_cfg = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    classified = re.findall(r"Programming Language :: Python :: (3\.\d+)", setup_cfg)
    assert sorted(classified) == sorted(pythons)
    numbers = sorted(python for each in versions.ALL for python in each.pythons)
    (first, *_, last) = numbers
    assert f"python_requires = >={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}" in setup_cfg
    assert f'pythons_in_words="{first[0]}.{first[1]} to {last[0]}.{last[1]}"' in script


def test_a_python_belongs_to_one_environment():
    assert [versions.of_python(python).name for python in ((3, 8), (3, 9), (3, 11), (3, 12), (3, 13))] == [
        "sdk_age", "default", "default", "modern", "modern",
    ]  # fmt: skip


def test_keras_2_is_installed_without_the_tensorflow_for_gpus_that_it_asks_for(monkeypatch):
    lines = versions.requirements(ROOT / "setup.cfg", ["host", "distributed"])
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(versions, "of_python", lambda: next(each for each in versions.ALL if each.name == "modern"))
    together, alone = versions.split_requirements(lines)
    assert [versions.name_of(line) for line in alone] == ["tf-keras"]
    assert not {"tensorflow", "tf-keras", "horovod"} & set(map(versions.name_of, together))
    assert 'tensorflow-cpu==2.20.0; python_version >= "3.12"' in together
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    together, alone = versions.split_requirements(lines)
    assert alone == [] and {"tensorflow", "tf-keras"} <= set(map(versions.name_of, together))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the target is missing. Use ddp, distributed, run or test."),
        (["distributd"], "distributd is no target. Use ddp, distributed, run or test."),
        (["run", "--vnv=x"], "unrecognized arguments: --vnv=x. See --help."),
        (["run", "--venv"], "argument --venv: expected one argument. See --help."),
    ],
)
def test_a_mistake_on_the_line_is_one_sentence_and_exit_code_1(words, sentence, capsys):
    assert environment_command.main(words) == 1
    assert capsys.readouterr().err == f"environment: {sentence}\n"


def test_a_missing_compiler_is_named_in_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SetupError, match=r"no C\+\+ compiler .* apt-get install g\+\+"):
        horovod._require_compiler()


def test_the_cache_is_outside_the_clone_and_configurable(monkeypatch, tmp_path):
    monkeypatch.delenv("TF_IPU_DP_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert locks.cache_dir() == tmp_path / "tf_ipu_dp"
    monkeypatch.setenv("TF_IPU_DP_CACHE", "/elsewhere")
    assert locks.cache_dir() == Path("/elsewhere")


def test_stock_tensorflow_is_not_taken_for_the_sdk_s(monkeypatch, tmp_path):
    assert not poplar.has_poplar_tensorflow()
    (tmp_path / "tensorflow" / "python" / "ipu").mkdir(parents=True)
    (tmp_path / "tensorflow" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    assert poplar.has_poplar_tensorflow()


def test_a_long_line_is_broken_between_words_on_a_terminal():
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(main, "rb") as reader, os.fdopen(other, "w") as terminal:
        Status("launch/train", terminal).info(
            "installing TensorFlow and its dependencies (about 250 MB; 1 to 3 minutes)."
        )
        assert reader.readline().endswith(b"(about 250 MB; 1 to 3\r\n")
        assert reader.readline() == b"  minutes).\r\n"


def test_progress_is_one_line_on_a_terminal_and_few_lines_in_a_file():
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        status = Status("launch/train", stream)
        status.progress("collecting numpy")
        commands.show_progress("Downloading tensorflow_cpu-2.15.1.whl (207.2 MB)", status)
        commands.show_progress("Downloading https://x/six-1.17.0.whl (11 kB)", status)
        commands.show_progress("[40/160] Building CXX object a.o", status)
        status.info("done.")
    assert "\n" not in terminal.getvalue().rstrip("\n") and "compiling 40 of 160" in terminal.getvalue()
    assert file.getvalue() == (
        "  downloading tensorflow_cpu-2.15.1.whl (207.2 MB)\n  compiling 40 of 160\nlaunch/train: done.\n"
    )


def test_a_failing_command_becomes_a_sentence_with_the_last_error_and_the_log(tmp_path):
    status = Status("x", io.StringIO())
    command = [sys.executable, "-c", "import sys; print('chatter'); sys.exit('ERROR: No matching distribution found.')"]
    with pytest.raises(SetupError) as caught:
        commands.run(command, tmp_path, status, "Installing")
    log = tmp_path / "install.log"
    assert (
        str(caught.value) == f"Installing failed: ERROR: No matching distribution found. The whole output is in {log}."
    )
    assert "chatter" in log.read_text(encoding="utf-8")


def test_a_missing_horovod_in_a_foreign_environment_is_a_sentence_with_the_command(tmp_path):
    # A bare environment that knows only where this package is.
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    program = (
        "import sys; from tf_ipu_dp.environment import installation, status\n"
        "try: installation.require_horovod(4, status.Status('x', sys.stderr))\n"
        "except status.SetupError as error: print(error)"
    )
    done = subprocess.run([str(python), "-c", program], cwd=str(ROOT), capture_output=True, text=True, check=True)
    assert done.stdout == (
        f"--instances=4 needs Horovod, and {python} has none. "
        "Build it with: python -m tf_ipu_dp.environment distributed\n"
    )


@pytest.fixture
def complete_venv(tmp_path, monkeypatch):
    """An environment that counts as complete for `run`; what would be installed into it is only written down."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "lib" / "python3" / "site-packages").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    state = {"fingerprint": versions.fingerprint(), "extras": ["host", "plots"]}
    locks.write(folder / "tf_ipu_dp.json", json.dumps({**state, "python": versions.python_version()}))
    calls = []
    monkeypatch.setattr(venvs, "_install", lambda _, extras, present, __: calls.append((extras, present)))
    return folder, calls


def test_a_complete_environment_is_used_as_it_is(complete_venv):
    folder, calls = complete_venv
    status = Status("x", io.StringIO())
    assert installation.make("run", folder, "", status) == folder / "bin" / "python"
    assert calls == []


def test_an_interrupted_addition_is_finished_and_nothing_is_made_again(complete_venv):
    folder, calls = complete_venv
    (folder.parent / "venv.installing").touch()
    said = io.StringIO()
    installation.make("run", folder, "", Status("x", said))
    assert calls == [(["host", "plots"], ["host", "plots"])]
    assert said.getvalue() == "x: the last addition to venv was interrupted; finishing it.\n"
    assert not (folder.parent / "venv.installing").exists()


def test_a_repair_that_fails_is_tried_again_by_the_next_start(complete_venv, monkeypatch):
    folder, _ = complete_venv
    (folder.parent / "venv.installing").touch()

    def fail(*_):
        raise SetupError("no network")

    monkeypatch.setattr(venvs, "_install", fail)
    with pytest.raises(SetupError):
        installation.make("run", folder, "", Status("x", io.StringIO()))
    assert (folder.parent / "venv.installing").exists()


@pytest.mark.parametrize(
    ("tensorflow", "imported", "expected"),
    [("2.15.1", "json", []), ("2.15.2", "json", ["horovod"]), ("2.15.1", "no_such_module", ["horovod"])],
)
def test_an_addition_keeps_a_horovod_that_can_be_imported_with_the_same_tensorflow(
    tmp_path, monkeypatch, tensorflow, imported, expected
):
    site = tmp_path / "venv" / "lib" / "python3" / "site-packages"
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(sys.executable)
    for name in ("horovod-0.28.1", "tensorflow_cpu-2.15.1"):
        (site / f"{name}.dist-info").mkdir(parents=True)

    def install(*_):
        former = site / "tensorflow_cpu-2.15.1.dist-info"
        former.rename(former.with_name(f"tensorflow_cpu-{tensorflow}.dist-info"))

    built = []
    monkeypatch.setattr(venvs, "pip", install)
    monkeypatch.setattr(venvs.versions, "split_requirements", lambda lines: (lines, []))
    monkeypatch.setattr(venvs, "run", lambda *_: None)
    monkeypatch.setattr(venvs.horovod, "_IMPORT", f"import {imported}")
    monkeypatch.setattr(venvs.horovod, "install", lambda *_: built.append("horovod"))
    extras = ["distributed", "host"]
    venvs._install(tmp_path / "venv", [*extras, "lint"], extras, Status("x", io.StringIO()))
    assert built == expected


def test_a_first_installation_that_ends_while_horovod_is_built_is_not_started_again(tmp_path, monkeypatch):
    folder, made = tmp_path / "venv", []

    def run(command, *_):
        made.append(command[1:3])
        if command[1:3] == ["-m", "venv"]:
            (folder / "bin").mkdir()
            (folder / "bin" / "python").symlink_to(sys.executable)
            (folder / "lib" / "python3" / "site-packages").mkdir(parents=True)

    def end(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(venvs, "run", run)
    monkeypatch.setattr(venvs, "pip", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(horovod, "require_compiler_or_wheel", lambda: None)
    monkeypatch.setattr(horovod, "install", end)
    with pytest.raises(KeyboardInterrupt):
        venvs.make("distributed", folder, Status("x", io.StringIO()))
    assert not venvs.is_complete(folder, "run")
    said = io.StringIO()
    monkeypatch.setattr(horovod, "install", lambda *_: None)
    venvs.make("distributed", folder, Status("x", said))
    assert said.getvalue().startswith("x: the last addition to venv was interrupted; finishing it.\n")
    assert [words for words in made if words == ["-m", "venv"]] == [["-m", "venv"]]
    assert venvs.is_complete(folder, "distributed")


def test_an_environment_in_use_is_not_made_again_for_another_python(complete_venv):
    folder, calls = complete_venv
    state = json.loads((folder / "tf_ipu_dp.json").read_text(encoding="utf-8"))
    locks.write(folder / "tf_ipu_dp.json", json.dumps({**state, "python": "3.7"}))
    command = [str(folder / "bin" / "python"), "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        job.stdout.readline()
        with pytest.raises(SetupError) as caught:
            installation.make("run", folder, "", Status("x", io.StringIO()))
        job.communicate(b"\n")
    assert str(caught.value) == (
        f"venv was made with Python 3.7 and would be made again with {versions.python_version()}, but process "
        f"{job.pid} is using {folder}. Start again when it has ended, or set TF_IPU_DP_VENV to another directory."
    )
    assert calls == []


@pytest.mark.skipif(sys.version_info < (3, 9), reason="PyTorch cannot be added to this Python")
def test_without_a_cpu_build_of_pytorch_a_sentence_says_where_to_find_one(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_IPU_DP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SetupError, match=r"pip finds no torch==.*installation page.*PIP_EXTRA_INDEX_URL"):
        installation.make("ddp", None, "", Status("x", io.StringIO()))


@pytest.mark.skipif(sys.version_info >= (3, 9), reason="PyTorch can be added to this Python")
def test_pytorch_is_not_added_to_the_python_of_the_sdk(monkeypatch, tmp_path):
    monkeypatch.setenv("TF_IPU_DP_CACHE", str(tmp_path))
    with pytest.raises(SetupError, match=r"Use Python 3\.9 or later"):
        installation.make("ddp", None, "", Status("x", io.StringIO()))


def test_pytorch_is_added_to_the_running_environment_alone(tmp_path):
    with pytest.raises(SetupError, match="Leave --venv out"):
        installation.make("ddp", tmp_path, "", Status("x", io.StringIO()))


def test_the_extra_for_pytorch_takes_the_release_that_is_installed():
    (line,) = set(versions.requirements(ROOT / "setup.cfg", ["ddp"])) - set(
        versions.requirements(ROOT / "setup.cfg", [])
    )
    least, below = (int(part.split(".")[0]) for part in line.split(";")[0].replace("torch>=", "").split(",<"))
    assert least <= int(pytorch.TORCH.partition("==")[2].split(".")[0]) < below


def test_a_tensorflow_without_a_wheel_is_a_sentence_that_names_the_page(tmp_path, monkeypatch):
    def fail(*_):
        raise SetupError(
            "Installing the packages failed: ERROR: No matching distribution found for tensorflow==2.20.0."
        )

    monkeypatch.setattr(venvs, "pip", fail)
    with pytest.raises(SetupError) as caught:
        installation.make("run", tmp_path / "venv", "", Status("x", io.StringIO()))
    assert str(caught.value) == (
        f"TensorFlow {versions.of_python().tensorflow} has no wheel for Python {versions.python_version()} on "
        f"{platform.system()} {platform.machine()}, or the package index does not have it. "
        "docs/platforms.md says which Pythons have one; TF_IPU_DP_PYTHON chooses another."
    )


def test_horovod_is_compiled_with_the_header_that_it_misses_beside_the_flags_of_the_user(tmp_path, monkeypatch):
    built = []

    def build(python, words, log_dir, status, what, settings=None):
        if words[0] == "wheel":
            built.append(settings)
            out = Path(words[words.index("--wheel-dir") + 1])
            out.mkdir()
            (out / "horovod-0.28.1-x.whl").touch()

    monkeypatch.setattr(horovod, "pip", build)
    (tmp_path / "scratch").mkdir()
    for given, expected in (("-O1", "-O1 -include stdexcept"), ("", "-include stdexcept")):
        monkeypatch.setenv("CXXFLAGS", given)
        wheel = horovod._build(Path("python"), tmp_path / "scratch", tmp_path, Status("x", io.StringIO()))
        assert wheel.parent == tmp_path and built.pop()["CXXFLAGS"] == expected
        shutil.rmtree(tmp_path / "scratch" / "out")


def test_what_configures_horovod_makes_its_flatbuffers_compile_and_hands_the_words_on(tmp_path):
    header = tmp_path / "sources" / "third_party" / "flatbuffers" / "include" / "flatbuffers" / "stl_emulation.h"
    header.parent.mkdir(parents=True)
    header.write_text("  pointer const data_;\n  const size_type count_;\n", encoding="utf-8")
    for name, text in (("wrapper", horovod._CMAKE), ("cmake", '#!/bin/sh\nprintf "<%s>" "$@"\nexit 7\n')):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    for words, handed_on in (
        ([str(tmp_path / "sources"), "-DA=b c"], f"<{tmp_path}/sources><-DA=b c>"),
        (["--build", ".", "--", "VERBOSE=1"], "<--build><.><-->"),
    ):
        command = [str(tmp_path / "wrapper"), *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (7, handed_on, "")
        assert header.read_text(encoding="utf-8") == "  pointer const data_;\n  size_type count_;\n"


def test_a_wheel_that_another_clone_is_building_is_waited_for_and_not_built_twice(tmp_path, monkeypatch, wait_until):
    monkeypatch.setenv("TF_IPU_DP_CACHE", str(tmp_path))
    monkeypatch.setattr(horovod, "_tensorflow_version", lambda _: "2.15.1")
    monkeypatch.setattr(horovod, "_require_compiler", lambda: None)
    monkeypatch.setattr(horovod, "_build", lambda *_: pytest.fail("built twice"))
    folder = tmp_path / "wheels" / horovod._cache_key("2.15.1")
    said = io.StringIO()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with locks.lock(locks.sibling(folder, "lock"), Status("other", io.StringIO())):
            found = pool.submit(horovod._wheel, Path("python"), tmp_path, Status("x", said))
            wait_until(lambda: "waiting for it" in said.getvalue())
            folder.mkdir()
            (folder / "horovod-0.28.1-x.whl").touch()
        assert found.result() == folder / "horovod-0.28.1-x.whl"
    assert said.getvalue().splitlines() == [
        "x: another process is installing the same; waiting for it.", f"x: using the Horovod wheel in {folder}."
    ]  # fmt: skip
