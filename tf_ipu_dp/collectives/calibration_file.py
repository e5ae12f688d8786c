"""Where calibrations are kept. Apart from `calibration`, so that a plan does not import numpy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Mapping, Optional

from tf_ipu_dp import cli

VARIABLE = "TF_IPU_DP_CALIBRATION"


def path(environ: Mapping[str, str], fabric: Optional[str] = None) -> Path:
    """Returns the file of this machine's calibration, or of one on a fabric, beside it. It may be missing."""
    if environ.get(VARIABLE):
        own = cli.expand_path(environ[VARIABLE])
    else:
        base = environ.get("XDG_CACHE_HOME") or cli.expand_path(environ.get("HOME") or "~") / ".cache"
        own = Path(base) / "tf_ipu_dp" / "collectives" / "calibration.json"
    if fabric is None:
        return own
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(fabric).stem)
    return own.with_name(f"{own.stem}-{name}{own.suffix or '.json'}")
