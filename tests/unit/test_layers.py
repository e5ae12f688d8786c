"""Imports point downwards, only the seam knows the emulator, and nothing that a user waits for imports TensorFlow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import import_rules
import pytest

import tf_ipu_dp

PACKAGE = Path(tf_ipu_dp.__file__).parent
MODULES = list(import_rules.find_modules(PACKAGE))
HEAVY = {"tensorflow", "keras", "tf_keras", "horovod", "numpy", "tensorflow_datasets", "matplotlib", "torch"}
# Rooms that work on tensors. Their modules that do not are imported by commands, and so are checked with these.
WITH_TENSORFLOW = ("tf_ipu_dp.training", "tf_ipu_dp.datasets", "tf_ipu_dp.emulator", "tf_ipu_dp.prediction.predictor")
# Works on arrays: numpy, but nothing heavier. What plans a job uses of it is light.
WITH_NUMPY = ("tf_ipu_dp.collectives", "tf_ipu_dp.scaling")
LIGHT = (
    "tf_ipu_dp.collectives.__main__",
    "tf_ipu_dp.collectives.buckets",
    "tf_ipu_dp.collectives.calibration_file",
    "tf_ipu_dp.collectives.size",
    "tf_ipu_dp.datasets.info",
    "tf_ipu_dp.datasets.lookup",
    "tf_ipu_dp.emulator",
    "tf_ipu_dp.emulator.poprun",
)


def test_every_module_belongs_to_a_layer():
    assert import_rules.modules_without_a_layer(PACKAGE) == []


def test_imports_point_downwards_and_only_the_seam_imports_the_emulator():
    assert import_rules.layer_violations(PACKAGE) == []


def test_no_modules_import_each_other():
    assert import_rules.import_cycles(PACKAGE) == []


def test_pure_modules_do_not_reach_for_the_outside():
    assert import_rules.outside_uses(PACKAGE) == []


@pytest.fixture
def plant(tmp_path):
    """Returns a function that writes one module into a package with the rooms of ours and nothing else in it."""
    package = tmp_path / "tf_ipu_dp"
    for name in (name for name in import_rules.find_modules(PACKAGE) if name.count(".") <= 2):
        parts = name.split(".")[1:]
        is_package = (PACKAGE / Path(*parts)).is_dir()
        path = package.joinpath(*parts, "__init__.py") if is_package else package.joinpath(*parts).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('"""Empty."""\n', encoding="utf-8")

    def write(name, text):
        (package / name).write_text(text, encoding="utf-8")
        return package

    return write


FORMS = {
    "import": "import tf_ipu_dp.{0}.{1}",
    "import as": "import tf_ipu_dp.{0}.{1} as other",
    "from the package": "from tf_ipu_dp import {0}",
    "from the room": "from tf_ipu_dp.{0} import {1}",
    "from the module": "from tf_ipu_dp.{0}.{1} import something",
    "everything": "from tf_ipu_dp.{0}.{1} import *",
    "relative": "from ..{0} import {1}",
    "relative to the package": "from .. import {0}",
    "in a function": "def f():\n    from tf_ipu_dp.{0} import {1}",
    "for types only": "import typing\nif typing.TYPE_CHECKING:\n    from tf_ipu_dp.{0} import {1}",
    "import_module": "import importlib\nimportlib.import_module('tf_ipu_dp.{0}.{1}')",
    "import_module by its own name": "from importlib import import_module as m\nx = 'tf_ipu_dp.{0}.{1}'\nm(x)",
    "relative import_module": "import importlib\nimportlib.import_module('..{0}.{1}', __package__)",
    "__import__": "__import__('tf_ipu_dp.{0}.{1}')",
    "a name": "NAMES = ('tf_ipu_dp.{0}.{1}',)",
    "a sum": "NAME = 'tf_ipu_dp.' + '{0}.{1}'",
    "the beginning of a name": "PREFIX = 'tf_ipu_dp.{0}.'",
    "an f-string": "def f(name): return f'tf_ipu_dp.{0}.{{name}}'",
    "an f-string of which little is known": "def f(name): return f'tf_ipu_dp.{{name}}'",
    "an f-string in import_module": "import importlib\ndef f(n): importlib.import_module(f'tf_ipu_dp.{0}.{{n}}')",
    "code": "CODE = 'import os; from tf_ipu_dp.{0} import {1}; {1}.main()'",
    "code that imports": "CODE = 'import tf_ipu_dp.{0}.{1}'",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("planted", "target"),
    [
        ("runs/planted.py", ("training", "loop")),
        ("emulator/planted.py", ("config", "values")),
        ("monitoring/planted.py", ("emulator", "refusal")),
    ],
    ids=["upwards", "out of the emulator", "past the seam"],
)
def test_a_planted_violation_is_found(plant, form, planted, target):
    (sentence,) = set(import_rules.layer_violations(plant(planted, FORMS[form].format(*target))))
    assert sentence.startswith(f"tf_ipu_dp.{planted[:-3].replace('/', '.')}:")


@pytest.mark.parametrize(
    ("planted", "text"),
    [
        ("runs/planted.py", "COMMAND = ['python', '-m', 'tf_ipu_dp.train']"),
        ("runs/planted.py", "TEXT = 'Start python -m tf_ipu_dp.launch, which plans as tf_ipu_dp.training.loop does.'"),
        ("runs/planted.py", '"""tf_ipu_dp.training.loop"""\nfrom tf_ipu_dp.config import values'),
        ("emulator/planted.py", "import tf_ipu_dp\nfrom . import refusal\nNAME = 'tf_ipu_dp.emulator.poprun'"),
        ("emulator/planted.py", "import importlib\ndef f(name): importlib.import_module(f'{__name__}.{name}')"),
        ("sdk.py", "from tf_ipu_dp import emulator"),
    ],
    ids=["the name of a command", "a sentence", "a docstring", "own modules", "own submodules", "the seam"],
)
def test_what_is_no_violation_is_not_reported(plant, planted, text):
    assert import_rules.layer_violations(plant(planted, text)) == []


def test_a_command_that_imports_another_is_a_violation(plant):
    (sentence,) = import_rules.layer_violations(plant("doctor.py", "from tf_ipu_dp import train"))
    assert sentence == "tf_ipu_dp.doctor:1 refers to tf_ipu_dp.train: tf_ipu_dp.train is not below tf_ipu_dp.doctor"


def test_an_emulator_that_names_a_command_of_ours_is_a_violation(plant):
    (sentence,) = import_rules.layer_violations(plant("emulator/planted.py", "NAME = 'tf_ipu_dp.train'"))
    assert "tf_ipu_dp.train: the emulator refers to nothing else of the package" in sentence


def test_a_room_without_a_layer_is_found(plant):
    assert import_rules.modules_without_a_layer(plant("utils.py", "")) == ["tf_ipu_dp.utils"]


def test_a_cycle_that_a_function_hides_is_found(plant):
    plant("runs/one.py", "def f():\n    from tf_ipu_dp.runs import two")
    package = plant("runs/two.py", "from . import one")
    assert import_rules.import_cycles(package) == [["tf_ipu_dp.runs.one", "tf_ipu_dp.runs.two"]]


def test_a_cycle_through_a_package_is_found(plant):
    plant("runs/__init__.py", "from tf_ipu_dp.datasets import info")
    package = plant("datasets/info.py", "from tf_ipu_dp.runs import records")
    assert import_rules.import_cycles(package) == [["tf_ipu_dp.datasets.info", "tf_ipu_dp.runs"]]


@pytest.mark.parametrize("text", ["import os.path", "from time import sleep", "print(1)", "def f():\n    open('x')"])
def test_a_pure_module_that_reaches_for_the_outside_is_found(plant, text):
    (sentence,) = import_rules.outside_uses(plant("planning/planted.py", text))
    assert sentence.startswith("tf_ipu_dp.planning.planted:")


IMPORT_ONE_BY_ONE = """
import importlib, json, sys
names, heavy = json.loads(sys.argv[1])
for name in names:
    importlib.import_module(name)
    if set(heavy) & set(sys.modules):
        sys.exit(f"{name} imports {set(heavy) & set(sys.modules)}")
"""


@pytest.mark.parametrize(
    ("names", "heavy"),
    [
        ([*(name for name in MODULES if not name.startswith((*WITH_TENSORFLOW, *WITH_NUMPY))), *LIGHT], HEAVY),
        ([name for name in MODULES if name.startswith(WITH_NUMPY)], HEAVY - {"numpy"}),
    ],
    ids=["without arrays", "with arrays"],
)
def test_importing_what_does_not_work_on_tensors_imports_nothing_heavy(names, heavy):
    assert len(names) >= 3
    command = [sys.executable, "-c", IMPORT_ONE_BY_ONE, json.dumps([names, sorted(heavy)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "words",
    [
        ("tf_ipu_dp",),
        ("tf_ipu_dp.train", "--help"),
        ("tf_ipu_dp.train", "--ipus=8", "--dry_run"),
        ("tf_ipu_dp.launch", "--instances=2", "--dry_run", "--launcher=emulator", "--", "--ipus=4", "--sdk=emulator"),
        ("tf_ipu_dp.monitor",),
        ("tf_ipu_dp.doctor", "--help"),
        ("tf_ipu_dp.compare", "--help"),
        ("tf_ipu_dp.predict", "--help"),
        ("tf_ipu_dp.runs", "--help"),
        ("tf_ipu_dp.scaling", "--help"),
        ("tf_ipu_dp.emulator.poprun", "--help"),
    ],
    ids=" ".join,
)
def test_a_command_that_does_not_train_never_imports_tensorflow(words, emulator_dir):
    command = [sys.executable, "-X", "importtime", "-m", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "tf_ipu_dp" in imported and not imported & HEAVY


def test_the_sdk_s_light_modules_import_nothing_heavy():
    code = (
        "import sys; from tf_ipu_dp import emulator; emulator.install(); "
        "import popdist, popdist.tensorflow, gcipuinfo; "
        "print(*{'tensorflow', 'keras', 'horovod', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
