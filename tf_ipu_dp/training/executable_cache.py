"""Whether the SDK compiled a program or found it in its cache of executables."""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Set

from tf_ipu_dp.training.console import Console


class ExecutableCache:
    """The SDK's folder of compiled programs; None if the SDK does not cache them."""

    def __init__(self, folder: Optional[Path]) -> None:
        self._folder = folder
        self._before = self._programs()

    def report(self, console: Console) -> None:
        """Prints whether there are new programs since this object was made."""
        if self._folder is None:
            return
        if self._programs() - self._before:
            console.info(f"executable cache: miss, compiled and stored in {self._folder}")
        else:
            console.info(f"executable cache: hit in {self._folder}")

    def _programs(self) -> Set[Path]:
        return set(self._folder.glob("**/*.poplar_exec")) if self._folder else set()
