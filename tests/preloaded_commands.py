"""Runs commands in forks of this process, which has imported TensorFlow: half of what a small run costs is that import.

A fork looks to a command like a fresh Python, as to the instances of poprun (`emulator/launcher/forked_program.py`).
`run_command` in `tests/conftest.py` starts this program, and decides which commands may be forks.

The socket whose descriptor is the only argument carries one message for each command: its words, variables and
directory. The answers are its process id, its stdout and stderr, and its exit code.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from multiprocessing import reduction

from tf_ipu_dp.emulator.launcher import forked_program, preload

MESSAGE_BYTES = 1 << 20


def main(descriptor: int) -> int:
    os.set_inheritable(descriptor, False)
    with socket.socket(fileno=descriptor) as connection:
        if not preload.preload([sys.executable, "-m", "tf_ipu_dp.train"], dict(os.environ)):
            return 1
        connection.send(b"ready")
        while message := connection.recv(MESSAGE_BYTES):
            words, environ, directory = json.loads(message)
            fork = forked_program.fork(words, environ, directory, prepare_child=lambda: None)
            with fork.stdout, fork.stderr:
                connection.send(str(fork.pid).encode())
                reduction.sendfds(connection, [fork.stdout.fileno(), fork.stderr.fileno()])
            connection.send(str(fork.wait()).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
