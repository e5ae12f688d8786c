"""Exit notices: an instance notifies poprun through the rendezvous server that it is about to end.

An instance closes its connections before it has ended, so its peers may fail and end before it does. The notice is sent
first, so that poprun knows which instance began to end first. Every start of Horovod registers it as an exit handler,
whether popdist or the program itself starts Horovod.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import os
import re
import urllib.parse
from typing import Any, Mapping, Optional

from tf_ipu_dp.emulator import patches, popdist_variables
from tf_ipu_dp.emulator.launcher import orphans

_PATH = "/exiting/"
_TIMEOUT_S = 2.0


def send_at_exit_of_horovod(basics: Any) -> None:
    """Makes each start of Horovod, whose module this is, register the notice of a process that poprun started."""
    stock = basics.HorovodBasics.init

    @functools.wraps(stock)
    def init(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        if orphans.JOB_VARIABLE in os.environ:
            # Exit handlers run in reverse order: this one before Horovod's, whose shutdown the other instances notice.
            atexit.unregister(_send_from)
            atexit.register(_send_from, os.getpid())
        return result

    patches.set_attribute("horovod start", basics.HorovodBasics, "init", init)


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


def _send_from(pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        send(os.environ, popdist_variables.instance_index(os.environ))
