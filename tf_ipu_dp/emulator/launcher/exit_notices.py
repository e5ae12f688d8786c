"""Exit notices: an instance notifies poprun through the rendezvous server that it is about to end.

An instance closes its connections before it has ended, so its peers may fail and end before it does. The notice is sent
first, so that poprun knows which instance began to end first.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import urllib.parse
from typing import Mapping, Optional

_PATH = "/exiting/"
_TIMEOUT_S = 2.0


def send(environ: Mapping[str, str], instance: int) -> None:
    """Notifies the server that Horovod's variables name. Returns when it has answered, or cannot be reached."""
    address, port = (environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}", "") for name in ("ADDR", "PORT"))
    url = urllib.parse.urlsplit(f"http://{address}:{port}{_PATH}{instance}")  # as Horovod does it
    with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
        server = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_S)
        with contextlib.closing(server):
            server.request("PUT", url.path, b"")
            server.getresponse().read()


def parse(path: str) -> Optional[int]:
    """Returns the instance of an exit notice, given the path of a request; None for any other request."""
    found = re.fullmatch(f"{_PATH}([0-9]{{1,7}})", path)
    return int(found[1]) if found else None
