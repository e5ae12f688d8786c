"""The messages between poprun and its agent on another host: lines of JSON with one key each, over a remote shell.

poprun sends the job, signals, a heartbeat and the request to close; the agent sends its addresses, output, exits and a
heartbeat. A side that has received nothing for `HEARTBEAT_TIMEOUT_S` ends what it has started.
"""

from __future__ import annotations

import json
from typing import Any, Tuple

HEARTBEAT_S = 3.0
HEARTBEAT_TIMEOUT_S = 15.0
# The agent's lines begin with this, to distinguish them from output of a login shell.
PREFIX = b"\x1eipu:"
# Exit codes of the remote command line.
NO_DIRECTORY, NO_PYTHON = 81, 82


def encode(kind: str, value: Any) -> bytes:
    """Returns one message as a line."""
    return json.dumps({kind: value}).encode() + b"\n"


def decode(line: bytes) -> Tuple[str, Any]:
    """Returns kind and value of a line; raises if it is not a message."""
    ((kind, value),) = json.loads(line).items()
    return kind, value
