from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tf_ipu_dp.environment import installed_packages


@pytest.fixture
def venv(tmp_path):
    """An environment with two packages as pip installs them."""
    for name, version in (("rich", "15.0.0"), ("absl_py", "2.3.1")):
        site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("x = 1\n", encoding="utf-8")
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\n", encoding="utf-8")
        (info / "RECORD").write_text(
            f"{name}/__init__.py,sha256=x,6\n{name}/__pycache__/__init__.cpython-311.pyc,,\n{info.name}/RECORD,,\n",
            encoding="utf-8",
        )
    return tmp_path / "venv"


@pytest.fixture
def site(venv):
    return next(venv.glob("lib/python3*/site-packages"))


def test_whole_packages_stay(venv, site):
    before = sorted(site.rglob("*"))
    assert installed_packages.remove_damaged(venv) == []
    assert sorted(site.rglob("*")) == before


@pytest.mark.parametrize("damage", ["no list", "an empty list", "a file is missing", "a file is cut off"])
def test_a_package_that_was_being_unpacked_is_forgotten(venv, site, damage):
    record, module = site / "rich-15.0.0.dist-info" / "RECORD", site / "rich" / "__init__.py"
    if damage == "no list":
        record.unlink()
    elif damage == "an empty list":
        record.write_text("", encoding="utf-8")
    elif damage == "a file is missing":
        module.unlink()
    else:
        module.write_text("x", encoding="utf-8")
    assert installed_packages.remove_damaged(venv) == ["rich"]
    assert [path.name for path in site.glob("*.dist-info")] == ["absl_py-2.3.1.dist-info"]


def test_what_pip_had_put_aside_is_removed(venv, site):
    (site / "~ich").mkdir()
    (site / "~ix.py").touch()
    assert installed_packages.remove_damaged(venv) == []
    assert not list(site.glob("~*"))


def test_packages_that_other_pins_replace_are_named(venv, tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("# why\nabsl-py==2.3.1\nrich==13.7.0\nnumpy==1.26.4\nabsl-py==9; python_version < '3'\n", "utf-8")
    assert installed_packages.find_replaced(venv, pins) == ["rich"]


def test_a_process_that_uses_an_environment_is_found_until_it_ends(tmp_path):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(os.path.realpath(sys.executable))
    assert installed_packages.find_user(tmp_path / "venv") is None
    code = "print(flush=True); input()"
    with subprocess.Popen([str(python), "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert installed_packages.find_user(tmp_path / "venv") == process.pid
        assert installed_packages.find_user(tmp_path / "ven") is None
        process.communicate(b"\n")
    assert installed_packages.find_user(tmp_path / "venv") is None
