"""The engines of a study: ours, and those that it is compared with. No engine is imported here."""

from __future__ import annotations

import dataclasses
import importlib.util
import mmap
import shutil
import sys
from pathlib import Path
from typing import Dict, Optional, Tuple

_HOROVOD = "python -m tf_ipu_dp.environment distributed"
# Names of libraries in what Open MPI and MPICH are linked with.
_MPI_LIBRARIES = (b"libmpi.so", b"libmpich.so")
_TORCH = "python -m tf_ipu_dp.environment ddp"


@dataclasses.dataclass(frozen=True)
class Engine:
    """What trains: its name as a flag's value, its name in a report, and what it needs."""

    name: str
    title: str
    needs: Tuple[str, ...]  # modules that must be installed
    program: str = ""  # the module that is started in every process; empty: ours
    most_processes: Optional[int] = None  # None: as many as there are instances
    installed_by: str = ""  # a command; empty: it comes with TensorFlow


ENGINES: Dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine("tf_ipu_dp", "tf_ipu_dp on Horovod/Gloo", ("tensorflow",)),
        Engine("tf_ipu_dp_mpi", "tf_ipu_dp on Horovod/MPI", ("tensorflow", "horovod"), installed_by=_HOROVOD),
        Engine(
            "horovod", "Horovod's recipe for Keras", ("tensorflow", "horovod"),
            "tf_ipu_dp.scaling.engines.horovod_keras", installed_by=_HOROVOD,
        ),
        Engine("ddp", "PyTorch DDP on Gloo", ("torch",), "tf_ipu_dp.scaling.engines.torch_ddp", installed_by=_TORCH),
        Engine("keras", "plain Keras", ("tensorflow",), "tf_ipu_dp.scaling.engines.keras_fit", most_processes=1),
    )
}  # fmt: skip


def is_ours(name: str) -> bool:
    """Whether an engine is `tf_ipu_dp.train`, which a study starts through its own commands."""
    return not ENGINES[name].program


def missing(name: str) -> Optional[str]:
    """Returns one sentence that says what to install for an engine; None if it can run here."""
    engine = ENGINES[name]
    absent = [module for module in engine.needs if importlib.util.find_spec(module) is None]
    if absent:
        how = f"Install it with: {engine.installed_by}" if engine.installed_by else "Install tf_ipu_dp[host]."
        return f"{engine.title} needs {' and '.join(absent)}, and {sys.executable} has none. {how}"
    if name == "tf_ipu_dp_mpi" and not shutil.which("mpirun"):
        return (
            f"{engine.title} needs mpirun, which is not on the PATH. Install Open MPI with its headers, "
            f"then build Horovod again with: {_HOROVOD}"
        )
    if name == "tf_ipu_dp_mpi" and not _horovod_has_mpi():
        return (
            f"{engine.title} needs a Horovod that is built with MPI, and that of {sys.executable} is not. With Open "
            f"MPI's headers installed, build it again with: {_HOROVOD}"
        )
    return None


def _horovod_has_mpi() -> bool:
    """Whether Horovod's library is linked with an MPI; to ask Horovod itself, TensorFlow would be imported."""
    spec = importlib.util.find_spec("horovod")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in Path(folder).glob("tensorflow/mpi_lib*.so"):
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return any(content.find(library) >= 0 for library in _MPI_LIBRARIES)
    return False
