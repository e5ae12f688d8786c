"""`launch/update-pins`: constraints files are read and written, and pip resolves them from a folder of wheels."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zipfile
from pathlib import Path

import pytest
import update_pins
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]

FILE = """# What it is for.
# Reasons.
alpha==1.0
beta==2.0
# gamma 4 breaks beta.
gamma==3.0; python_version < "3.11"
"""


@pytest.mark.parametrize("name", ["default.txt", "modern.txt", "sdk_age.txt"])
def test_the_constraints_files_survive_being_read_and_written(name):
    text = (ROOT / "launch" / "constraints" / name).read_text(encoding="utf-8")
    assert update_pins.Pins.parse(text).render() == text


def test_new_versions_replace_pins_and_leave_what_is_held_and_what_pip_does_not_mention():
    pins = update_pins.Pins.parse(FILE).updated({"alpha": "1.5", "gamma": "4.0", "delta": "0.1"})
    assert pins.render() == FILE.replace("alpha==1.0", "alpha==1.5").replace("beta==2.0", "beta==2.0\ndelta==0.1")


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9._-]{0,8}[A-Za-z0-9]", fullmatch=True))
def test_a_name_is_the_same_however_it_is_spelt(name):
    same = update_pins.normalise(name)
    assert (
        update_pins.normalise(name.upper().replace("_", "-").replace(".", "_")) == same == update_pins.normalise(same)
    )


def make_wheel(folder, name, version, *requires, python=">=3.8"):
    info = f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", f"Requires-Python: {python}"]
    files = {
        f"{info}/METADATA": "\n".join([*lines, *(f"Requires-Dist: {each}" for each in requires), ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = [
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}"
        for path, text in files.items()
    ]
    files[f"{info}/RECORD"] = "\n".join([*digests, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes everything from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_newest_releases_are_found_that_go_together_and_that_this_python_takes(index):
    for version, python in (("1.0", ">=3.6"), ("1.1", ">=3.6"), ("1.2", ">=9.0"), ("2.0", ">=3.6")):
        make_wheel(index, "alpha", version, "beta", python=python)
    for version in ("1.0", "1.1"):
        make_wheel(index, "beta", version, python=">=3.6")
    python = Path(sys.executable)
    assert update_pins.resolve(python, ["alpha<2"], ["beta==1.0"]) == {"alpha": "1.1", "beta": "1.0"}
    assert update_pins.resolve(python, ["alpha<2"], []) == {"alpha": "1.1", "beta": "1.1"}


def test_a_report_of_pip_is_read():
    entry = {"metadata": {"name": "Some_Thing", "version": "1.0", "requires_python": ">=3.9"}}
    other = {"metadata": {"name": "other", "version": "2"}}
    text = json.dumps({"version": "1", "install": [entry, other]})
    assert update_pins.read_report(text) == {"some-thing": "1.0", "other": "2"}


def test_requirements_that_cannot_be_met_are_a_sentence_and_change_nothing(index, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(update_pins, "_make_pip", lambda folder: Path(sys.executable))
    path = tmp_path / "default.txt"
    path.write_text(FILE, encoding="utf-8")
    assert update_pins.main([str(ROOT / "setup.cfg"), str(path)]) == 1
    assert capsys.readouterr().err.startswith("update-pins: pip cannot resolve the requirements: ERROR")
    assert path.read_text(encoding="utf-8") == FILE
