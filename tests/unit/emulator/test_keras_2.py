"""Programs for the SDK mean Keras 2 by `keras`, whatever that name is to the TensorFlow that is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tf_ipu_dp.emulator import keras_2

PROGRAM = """
import keras
from keras.optimizer_v2.learning_rate_schedule import PolynomialDecay
from tensorflow.python import ipu
import tensorflow as tf
assert keras.__version__.startswith("2."), keras.__version__
assert keras.Model is tf.keras.Model and keras.ipu is tf.keras.ipu
assert isinstance(keras.Sequential([keras.layers.Dense(1)]), tf.keras.Model)
for line in ("import keras.ops", "from keras import random", "keras.ops.add"):
    try:
        exec(line)
    except (ImportError, AttributeError) as error:
        print(error)
try:
    keras.nothing
except AttributeError as error:
    print(error)
"""


def test_a_program_gets_keras_2_and_what_only_keras_3_has_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    command = [sys.executable, "-m", "tf_ipu_dp.emulator", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    sentence = (
        "keras.{} is a part of Keras 3, and the Poplar SDK has Keras 2: on the emulator, keras is Keras 2. "
        "Use tf.keras and tf as in TensorFlow 2.6."
    )
    nothing = f"module {keras_2.package_name()!r} has no attribute 'nothing'"
    assert done.stdout.splitlines() == [*map(sentence.format, ("ops", "random", "ops")), nothing]


def test_where_keras_3_is_loaded_the_emulator_is_not_installed():
    has_both = keras_2.package_name() == "tf_keras"
    load = "import keras" if has_both else "keras = type(sys)('keras'); keras.__version__ = '3.15.1'"
    code = f"import sys; {load}; sys.modules['keras'] = keras\nfrom tf_ipu_dp import emulator\nemulator.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    advice = "Call emulator.install() before TensorFlow and Keras are imported, or set TF_USE_LEGACY_KERAS=1."
    assert done.stderr.splitlines()[-1] == (
        "tf_ipu_dp.emulator.keras_2.Keras3Error: The emulator needs Keras 2, as the Poplar SDK has it, and Keras "
        f"3.15.1 is loaded. {advice if has_both else 'Install tf-keras, of the same release as TensorFlow.'}"
    )


@pytest.mark.parametrize("separate", [False, True])
def test_modules_of_keras_2_6_have_aliases_in_the_package_that_is_keras_2(monkeypatch, separate):
    root = "tf_keras" if separate else "keras"
    monkeypatch.setattr(keras_2, "package_name", lambda: root)
    aliases = keras_2.aliases()
    assert aliases["keras.optimizer_v2"] == f"{root}.src.optimizers.legacy"
    assert aliases.get("keras") == ("tf_keras" if separate else None)
