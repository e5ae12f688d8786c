"""PyTorch without CUDA, which the scaling study compares with."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from tf_ipu_dp.environment import versions
from tf_ipu_dp.environment.commands import pip, run
from tf_ipu_dp.environment.status import SetupError, Status

TORCH = "torch==2.13.0" if sys.version_info >= (3, 10) else "torch==2.8.0"
# What PyTorch imports. Its own list has a setuptools too that TensorBoard 2.15 and Horovod cannot use, for extensions.
_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions")


def install(python: Path, log_dir: Path, status: Status) -> None:
    """Installs the CPU build of PyTorch. Installed packages stay as they are."""
    if sys.version_info < (3, 9):
        raise SetupError(
            f"PyTorch cannot be added to Python {versions.python_version()}: it needs newer typing-extensions than "
            "TensorFlow 2.6 takes. Use Python 3.9 or later."
        )
    # On Linux, the build for x86-64 without this label brings several GB of CUDA along.
    with_cuda = sys.platform == "linux" and platform.machine() == "x86_64"
    wanted = f"{TORCH}+cpu" if with_cuda else TORCH
    status.info(f"installing {wanted} (about 190 MB; 850 MB on disk).")
    pins = versions.of_python().constraints
    limits = ["-c", str(pins)] if pins.exists() else []  # a wheel of this package has none
    try:
        pip(python, ["install", "--no-deps", wanted], log_dir, status, "Installing PyTorch")
    except SetupError as problem:
        if "No matching distribution" not in str(problem):
            raise
        raise SetupError(
            f"pip finds no {wanted}, PyTorch's build without CUDA. PyTorch's installation page names the package index "
            "for CPU: set PIP_EXTRA_INDEX_URL to it and repeat this, or install any torch from 2.4 on yourself."
        ) from problem
    pip(python, ["install", *limits, *_NEEDS], log_dir, status, "Installing what PyTorch needs")
    status.progress("testing PyTorch")
    run([str(python), "-c", "import torch.distributed"], log_dir, status, "Importing PyTorch")
