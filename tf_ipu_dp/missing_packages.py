"""What a command does when a package that it needs is not installed: one sentence, or a start in the environment.

Standard library only. `python -m tf_ipu_dp.COMMAND` in a foreign environment says which package is missing and how to
get it. In a clone without an environment, launch/ starts commands with the few packages that plans and help need; a
command that needs more then starts again, in the environment that launch/ makes for it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import List, Optional, Sequence, Type

_ROOT = Path(__file__).resolve().parent.parent
# By the name that is imported: what pip calls it, and the extra of setup.cfg that has it ("" for the package itself).
_PACKAGES = {
    "absl": ("absl-py", ""),
    "prometheus_client": ("prometheus-client", ""),
    "rich": ("rich", ""),
    "tqdm": ("tqdm", ""),
    "numpy": ("numpy", "host"),
    "keras": ("keras", "host"),
    "tensorflow": ("TensorFlow", "host"),
    "tensorflow_datasets": ("tensorflow-datasets", "host"),
    "matplotlib": ("matplotlib", "plots"),
    "wandb": ("W&B", "wandb"),
    "mlflow": ("MLflow", "mlflow"),
    "horovod": ("Horovod", "distributed"),
}
# How launch/ started this process, if that was without an environment.
_restart: List[str] = []


def explain(error: ImportError) -> Optional[str]:
    """Returns the sentence for a package that is not installed; None for any other failure of an import."""
    name = (error.name or "").split(".")[0]
    # A package that is there, but lacks a module, is another fault.
    if not isinstance(error, ModuleNotFoundError) or name not in _PACKAGES or _is_installed(name):
        return None
    package, extra = _PACKAGES[name]
    is_clone = (_ROOT / "launch" / "tf-ipu-dp").exists()
    install = f"{sys.executable} -m pip install "
    if extra == "distributed":
        install = f"{sys.executable} -m tf_ipu_dp.environment distributed"
    elif extra:
        install += f"'{_ROOT if is_clone else 'tf_ipu_dp'}[{extra}]'"
    else:
        install += package
    ways = f"Start {_ROOT}/launch/tf-ipu-dp, which makes its own environment, or run" if is_clone else "Run"
    return f"{package} is needed and {sys.executable} has none. {ways}: {install}"


def require(name: str, target: str = "run") -> None:
    """Raises ModuleNotFoundError for a missing package; without an environment the command starts again in one."""
    restart(target)
    if not _is_installed(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def handle(error: ImportError) -> Optional[str]:
    """Returns the sentence for a missing package, as `explain`; without an environment the command starts again."""
    sentence = explain(error)
    if sentence:
        restart()
    return sentence


def allow_restart(program: str, wrapper: str, words: Sequence[str]) -> None:
    """Sets what `restart` starts: a wrapper of launch/ with these words, under the name of `program`."""
    _restart[:] = ["bash", "-c", 'source "$@"', program, wrapper, *words]


def restart(target: str = "run") -> None:
    """Starts the command again in the environment that launch/ makes, if it was started without; else does nothing.

    `target` is what the environment has to have, see environment/versions.py.
    """
    if _restart:
        sys.stdout.flush()
        sys.stderr.flush()
        os.environ["TF_IPU_DP_TARGET"] = target
        os.execvp(_restart[0], _restart)  # noqa: S606 - it becomes the same command


def explain_at_exit() -> None:
    """Shows a sentence, in place of a traceback, if this process ends because a package is missing or by Ctrl-C."""

    def show(kind: Type[BaseException], error: BaseException, traceback: Optional[TracebackType]) -> None:
        sentence = handle(error) if isinstance(error, ImportError) else None
        if sentence:
            sys.stderr.write(f"tf_ipu_dp: {sentence}\n")
        elif isinstance(error, KeyboardInterrupt):  # before the command itself could handle it
            sys.stderr.write("tf_ipu_dp: interrupted.\n")
        else:
            sys.__excepthook__(kind, error, traceback)

    sys.excepthook = show


def _is_installed(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None
