"""What TCP has counted in a network namespace: timeouts, probes and fast retransmissions. Linux only.

Linux counts the three apart. A timeout is the timer of last resort, at least 200 ms. A probe asks for the end of a
message that may be lost: after two round trips, or after the time of a timeout if one packet alone is on its way. A
fast retransmission answers packets that arrived behind a lost one.
"""

from __future__ import annotations

import os
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

_FILE = "/proc/net/netstat"
_MAX_BYTES = 1 << 16


class TcpCounts(NamedTuple):
    """How often each of them happened."""

    timeouts: int
    probes: int
    fast_retransmissions: int


class TcpCounters:
    """The counters of the namespace of this process. Reading is fast: the text is parsed when it is asked for."""

    def __init__(self) -> None:
        try:
            self._file: Optional[int] = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None

    def read(self) -> bytes:
        """Returns the counters as the kernel writes them; nothing where it does not."""
        return b"" if self._file is None else os.pread(self._file, _MAX_BYTES, 0)

    def close(self) -> None:
        """Gives the file back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def between(texts: Sequence[bytes]) -> Tuple[TcpCounts, ...]:
    """Returns what was counted between each text of the counters and the next."""
    counts = [parse(text) for text in texts]
    return tuple(TcpCounts(*(b - a for a, b in zip(*pair))) for pair in zip(counts, counts[1:]))


def parse(text: bytes) -> TcpCounts:
    """Returns the counters in a text of the kernel; 0 for what it does not have."""
    lines = text.decode("ascii", "replace").splitlines()
    found: Dict[str, int] = {}
    for names, values in zip(lines[::2], lines[1::2]):
        if names.startswith("TcpExt:"):
            found.update(zip(names.split()[1:], map(int, values.split()[1:])))
    return TcpCounts(*(found.get(name, 0) for name in ("TCPTimeouts", "TCPLossProbes", "TCPFastRetrans")))
