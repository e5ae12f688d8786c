"""How an instance says to poprun that it is about to end, at the server where the instances have met.

When one has gone the others fail of it, and may be noticed before it is: poprun has to know who was first.
"""

from __future__ import annotations

import contextlib
import http.client
import re
from typing import Mapping, Optional

_PATH = "/leaving/"
_PATIENCE_S = 2.0


def say(environ: Mapping[str, str], instance: int) -> None:
    """Tells the server, which Horovod's variables name. Returns when it knows, or cannot be told."""
    address, port = (environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        server = http.client.HTTPConnection(address, int(port), timeout=_PATIENCE_S)
        with contextlib.closing(server):
            server.request("PUT", f"{_PATH}{instance}", b"")
            server.getresponse().read()


def parse(path: str) -> Optional[int]:
    """Returns the instance that is told by a request for this path, or None if it is about something else."""
    found = re.fullmatch(f"{_PATH}([0-9]+)", path)
    return int(found[1]) if found else None
