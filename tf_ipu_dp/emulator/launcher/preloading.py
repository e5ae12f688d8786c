"""Preloads in a thread, so that poprun handles signals and failures of other hosts meanwhile. See `preload`."""

from __future__ import annotations

import os
import threading
import time
from typing import Mapping, Sequence

from tf_ipu_dp.emulator.launcher import preload


class Preloading:
    """One import of the modules that the instances of this host share. It cannot be stopped, only abandoned."""

    def __init__(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        self._stderr = os.dup(2)
        self._can_fork = False
        self.seconds = 0.0  # that the import took, once it is done
        self._thread = threading.Thread(target=self._run, args=(words, environ), name="preloading", daemon=True)
        self._thread.start()

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def can_fork(self) -> bool:
        """Whether instances can be forked from this process now, after the import is done."""
        self._thread.join()  # a fork has the thread that calls it only
        return self._can_fork

    def abandon(self) -> None:
        """Gives stderr back, which is silent during the import. The process has to end with os._exit."""
        os.dup2(self._stderr, 2)

    def _run(self, words: Sequence[str], environ: Mapping[str, str]) -> None:
        began = time.perf_counter()
        self._can_fork = preload.preload(words, environ)
        self.seconds = time.perf_counter() - began
