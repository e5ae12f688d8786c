"""Where Keras 2 is, which programs for the SDK mean by `keras`. Imports neither TensorFlow nor Keras.

Up to TensorFlow 2.15 it is the package `keras`. From 2.16 on that is Keras 3; Keras 2 is then the package `tf_keras`,
which TensorFlow takes as `tf.keras` if TF_USE_LEGACY_KERAS is set when it is imported.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from typing import Dict

_SWITCH = "TF_USE_LEGACY_KERAS"
# What Keras 3 has and Keras 2 has not. A program that uses one means Keras 3.
_ONLY_IN_KERAS_3 = ("distillation", "distribution", "dtype_policies", "ops", "quantizers", "random", "tree")


class Keras3Error(ImportError):
    """A program uses Keras 3, or has loaded it before the emulator."""


@functools.lru_cache(maxsize=None)
def package_name() -> str:
    """Returns the name of the package that is Keras 2 here."""
    return "tf_keras" if _is_separate() else "keras"


def aliases() -> Dict[str, str]:
    """Returns names by which programs import modules of Keras, with those that the modules have here.

    Keras has moved modules after release 2.10; programs for Keras 2.6 import them by their old names.
    """
    root = package_name()
    schedules, utils = f"{root}.src.optimizers.schedules.learning_rate_schedule", f"{root}.src.optimizers.utils"
    moved = {
        "keras.optimizer_v2.learning_rate_schedule": schedules,
        "keras.optimizer_v2.utils": utils,
        "keras.optimizer_v2": f"{root}.src.optimizers.legacy",
        # `from keras.optimizer_v2 import utils` looks the module up by the package's real name.
        f"{root}.src.optimizers.legacy.learning_rate_schedule": schedules,
        f"{root}.src.optimizers.legacy.utils": utils,
    }
    return {**moved, "keras": root} if root != "keras" else moved


def require() -> None:
    """Raises Keras3Error if Keras 3 is loaded: what is imported from it already would not run on the device."""
    version = getattr(sys.modules.get("keras"), "__version__", "")
    if version.startswith("3."):
        advice = (
            f"Call emulator.install() before TensorFlow and Keras are imported, or set {_SWITCH}=1."
            if importlib.util.find_spec("tf_keras")
            else "Install tf-keras, of the same release as TensorFlow."
        )
        raise Keras3Error(
            f"The emulator needs Keras 2, as the Poplar SDK has it, and Keras {version} is loaded. {advice}"
        )


def refuse_keras_3(module: str) -> None:
    """Raises Keras3Error for a module that only Keras 3 has."""
    package, _, rest = module.partition(".")
    if package in ("keras", package_name()) and rest.split(".")[0] in _ONLY_IN_KERAS_3:
        raise Keras3Error(
            f"keras.{rest} is a part of Keras 3, and the Poplar SDK has Keras 2: on the emulator, keras is Keras 2. "
            "Use tf.keras and tf as in TensorFlow 2.6."
        )


def _is_separate() -> bool:
    wanted = os.environ.get(_SWITCH, "").lower() in ("1", "true")
    return wanted and importlib.util.find_spec("tf_keras") is not None
