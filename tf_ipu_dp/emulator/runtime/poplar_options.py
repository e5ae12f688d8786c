"""Values of Poplar's options that its libraries refuse when they compile a program. The options change no results."""

from __future__ import annotations

from typing import Any, Mapping, Optional

import tensorflow as tf

_PROPORTION = "availableMemoryProportion"


def check(what: str, options: Optional[Mapping[Any, Any]]) -> None:
    """Raises InternalError, as for errors of Poplar, for a proportion of memory that is negative or not a number."""
    given = (options or {}).get(_PROPORTION, 0)
    try:
        if float(given) >= 0:
            return
    except (TypeError, ValueError):
        pass
    message = f"[Poplar][Build graph] {what}: {_PROPORTION}={given}: Value must be greater than or equal to 0."
    raise tf.errors.InternalError(None, None, message)
