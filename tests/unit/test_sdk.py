"""Which SDK the application gets. Processes of their own: the choice is made once, and modules stay imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tf_ipu_dp import sdk

LOAD = """
import sys
from tf_ipu_dp import sdk
try:
    found = [sdk.load(sys.argv[1]) for _ in range(2)][1]
except sdk.SdkError as error:
    sys.exit(f"refused: {error}")
print(found.name, found.ipu.__name__, found.popdist.__name__, found.gcipuinfo.__name__)
print(found.ipu.config.IPUConfig().auto_select_ipus, found.waits_for())
"""


@pytest.fixture
def load(tmp_path):
    def start(choice, gcipuinfo=None):
        if gcipuinfo is not None:
            (tmp_path / "gcipuinfo.py").write_text(gcipuinfo, encoding="utf-8")
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environ = {**os.environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run(
            [sys.executable, "-c", LOAD, choice], capture_output=True, text=True, check=False, env=environ
        )

    return start


SERVED = [f"tf_ipu_dp.emulator.sdk_api.{name}" for name in ("ipu", "popdist", "gcipuinfo")]
EMULATOR = f"emulator {' '.join(SERVED)}\n[] nothing\n"


def test_without_an_sdk_auto_takes_the_emulator_and_says_so_once(load):
    done = load("auto")
    assert (done.returncode, done.stdout) == (0, EMULATOR), done.stderr
    line = "sdk: the Poplar SDK is not enabled here (no module gcipuinfo); using the emulator on this host's CPU."
    assert done.stderr.count(line) == 1


def test_an_installed_emulator_is_not_taken_for_the_sdk():
    code = "from tf_ipu_dp import emulator; emulator.install()\n" + LOAD
    auto, poplar = (
        subprocess.run([sys.executable, "-c", code, choice], capture_output=True, text=True, check=False)
        for choice in ("auto", "poplar")
    )
    assert auto.stdout == EMULATOR, auto.stderr
    assert (
        poplar.returncode == 1 and "--sdk=poplar cannot be used: the emulator replaces the Poplar SDK" in poplar.stderr
    )


def test_the_emulator_by_name_says_nothing(load):
    done = load("emulator")
    assert (done.stdout, "sdk:" in done.stderr) == (EMULATOR, False)


def test_poplar_by_name_is_refused_where_it_is_not(load):
    done = load("poplar")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "refused: --sdk=poplar cannot be used: the Poplar SDK is not enabled here (no module gcipuinfo). "
        "Source the Poplar SDK's enable script, or use --sdk=emulator."
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("class gcipuinfo:\n    def getDevices(self): return []\n", "gcipuinfo finds no IPU;"),
        ("def gcipuinfo(): raise OSError('no driver')\n", "gcipuinfo finds no IPU (OSError: no driver);"),
        (
            "class gcipuinfo:\n    def getDevices(self): return [{'id': '0'}]\n",
            "there are 1 IPUs, but tensorflow.python.ipu cannot be imported",
        ),
    ],
    ids=["no devices", "no driver", "no TensorFlow for IPUs"],
)
def test_an_sdk_without_ipus_or_without_its_tensorflow_is_not_taken(load, source, said):
    done = load("auto", source)
    assert said in done.stderr
    assert done.stdout.startswith("emulator tf_ipu_dp.emulator.sdk_api.ipu") or "cannot be installed" in done.stderr


def test_who_only_compiles_needs_no_ipus(tmp_path, monkeypatch):
    (tmp_path / "gcipuinfo.py").write_text("def gcipuinfo(): raise OSError('no driver')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    code = "from tf_ipu_dp import sdk; sdk.load('poplar', needs_ipus=False)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "cannot be used: the SDK is enabled, but tensorflow.python.ipu cannot be imported" in done.stderr


def explain(*lines):
    code = "\n".join(["from tf_ipu_dp import emulator, sdk", *lines, "print(sdk.explain_missing_gcipuinfo())"])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_the_sdks_gcipuinfo_is_missing_where_it_is_not_enabled_or_replaced_by_the_emulator():
    assert explain() == "the Poplar SDK is not enabled here (no module gcipuinfo)\n"
    replaced = "the emulator replaces the Poplar SDK in this process\n"
    assert explain("emulator.install()") == replaced
    left_behind = ["import sys", "sys.modules['gcipuinfo'] = sdk.load_emulated_gcipuinfo()"]
    assert explain(*left_behind) == replaced


def test_a_gcipuinfo_of_the_sdk_is_found_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "gcipuinfo.py").write_text("raise RuntimeError", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert explain() == "None\n"


def test_device_information_is_read_without_tensorflow_and_without_installing_the_emulator():
    code = (
        "import sys; from tf_ipu_dp import emulator, sdk\n"
        "sdk.load_emulated_gcipuinfo(); sdk.explain_missing_gcipuinfo()\n"
        "print('tensorflow' in sys.modules, emulator.is_installed(), sdk.skips_interpreter_shutdown())\n"
        "emulator.install(); print(sdk.skips_interpreter_shutdown())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False False\nTrue\n"


@pytest.mark.parametrize(
    ("choice", "given", "level"),
    [("emulator", None, "3"), ("auto", None, "3"), ("poplar", None, "2"), ("emulator", "0", "0")],
)
def test_tensorflow_logs_nothing_of_its_own_on_the_emulator_unless_the_user_wants_it(choice, given, level):
    environ = {} if given is None else {"TF_CPP_MIN_LOG_LEVEL": given}
    sdk.quieten_tensorflow(choice, environ)
    assert environ == {"TF_CPP_MIN_LOG_LEVEL": level}
