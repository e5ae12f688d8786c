"""Where the calibration of this machine is kept. Apart from `calibration`, so that a plan does not import numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping

VARIABLE = "TF_IPU_DP_CALIBRATION"


def path(environ: Mapping[str, str]) -> Path:
    """Returns the file of the calibration, which may be missing."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE]).expanduser()
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return Path(base) / "tf_ipu_dp" / "collectives" / "calibration.json"
