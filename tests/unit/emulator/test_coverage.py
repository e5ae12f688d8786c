"""Every public name of the SDK is there, works or refuses by name, and the table says which."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tf_ipu_dp import emulator
from tf_ipu_dp.emulator import coverage

emulator.install()
NAMES = [(module, name) for module, names in coverage.SDK.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_every_name_of_the_sdk_is_there_and_a_refusal_says_its_name_and_why(module, name):
    found = coverage.find(module, name)
    why = coverage.reason_of(found)
    if why is not None:
        with pytest.raises(NotImplementedError) as refused:
            found()
        assert name in str(refused.value) and why in str(refused.value)


def test_the_table_is_what_the_code_says():
    table = Path(coverage.__file__).with_name("COVERAGE.md")
    assert table.read_text(encoding="utf-8") == coverage.as_markdown(), "python -m tf_ipu_dp.emulator.coverage > it"


def test_modules_of_ops_are_attributes_of_ipu_too():
    ipu = importlib.import_module("tensorflow.python.ipu")
    for module in coverage.SDK:
        if module.startswith("tensorflow.python.ipu.ops."):
            name = module.rsplit(".", 1)[1]
            assert getattr(ipu, name) is getattr(ipu.ops, name)
    assert ipu.outlined_function is ipu.functional_ops.outlined_function


def test_modules_are_reached_as_attributes_or_imported_for_their_effect():
    ipu = importlib.import_module("tensorflow.python.ipu")
    assert ipu.data.ops.dataset_ops.BufferDataset
    assert ipu.popfloat_cast_to_gfloat is ipu.ops.experimental.popfloat_cast_to_gfloat
    assert "popfloat_cast_to_gfloat" in dir(ipu)
    for name in ("cross_replica_ops_grad", "functional_ops_grad", "within_replica_ops_grad"):
        assert importlib.import_module(f"tensorflow.python.ipu.ops.{name}").__doc__
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("tensorflow.python.ipu.ops.nothing_grad")
    distributed = importlib.import_module("tensorflow.python.ipu.distributed")
    assert distributed.allreduce is distributed.host_collective_ops.allreduce
    extensions = importlib.import_module("keras.ipu.extensions")
    assert extensions.model_extensions.ModelExtension is extensions.ModelExtension
    with pytest.raises(NotImplementedError, match="inside fit, evaluate and predict"):
        extensions.data_adapter.IPUDataHandler()


def test_the_module_has_one_identity_under_both_names():
    ipu = importlib.import_module("tensorflow.python").ipu
    by_name = importlib.import_module("tensorflow.python.ipu.config")
    assert ipu.config is by_name and ipu.config.IPUConfig is by_name.IPUConfig
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tensorflow\.python\.ipu\.nothing'"):
        importlib.import_module("tensorflow.python.ipu.nothing")


def test_distributed_must_be_imported_by_itself():
    code = (
        "from tf_ipu_dp import emulator; emulator.install(); from tensorflow.python import ipu\n"
        "try: ipu.distributed\nexcept AttributeError: print('not yet')\n"
        "from tensorflow.python.ipu import distributed; print(ipu.distributed is distributed)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["not yet", "True"]


@pytest.mark.parametrize(
    "first", ["import keras.ipu", "import tensorflow.keras.ipu", "from tensorflow.python import ipu"]
)
def test_keras_has_the_ipu_names_wherever_programs_look_for_them(first):
    code = (
        f"from tf_ipu_dp import emulator; emulator.install()\n{first}\n"
        "import keras, tensorflow as tf, keras.ipu.optimizers, keras.ipu.layers\n"
        "from tensorflow import keras as other\n"
        "from tensorflow.keras.ipu import PipelineStage\n"
        "from tensorflow.python import ipu\n"
        "print(len({id(k.ipu.PipelineStage) for k in (keras, tf.keras, other)} | {id(PipelineStage)}))\n"
        "print(tf.keras.ipu.__ipu__built__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "1"], done.stderr[-2000:]
