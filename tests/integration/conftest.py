"""Two hosts on one machine: network namespaces with addresses of their own, joined by a bridge."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

AGENT = """#!/bin/sh
host=$1
shift
exec env -i HOME="$HOME" PATH="$PATH" ip netns exec "$host" sh -c "$*"
"""


_NUMBERS = itertools.count()


class TwoHosts:
    """Hosts that `agent` runs commands on. Each is named by its address."""

    def __init__(self, folder):
        # What is removed may take the kernel a moment, so that nothing has the name of anything before.
        number, unique = os.getpid() % 250 + 1, f"{os.getpid() % 100_000}n{next(_NUMBERS)}"
        self._bridge = f"ipu{unique}"
        self._links = [f"ipu{unique}{letter}" for letter in "ab"]
        self.names = [f"10.213.{number}.{last}" for last in (1, 2)]
        self.gateway = f"10.213.{number}.254"  # of the machine that both are on
        self.agent = str(folder / "agent")
        Path(self.agent).write_text(AGENT, encoding="utf-8")
        Path(self.agent).chmod(0o755)

    def make(self):
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for name, link in zip(self.names, self._links):
            _ip("netns", "add", name)
            _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", link, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{name}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", name, "link", "set", interface, "up")
        deadline = time.monotonic() + 60
        while any(not self._is_up(name) for name in self.names) and time.monotonic() < deadline:
            time.sleep(0.05)

    def remove(self):
        for name in self.names:
            _ip("netns", "del", name, check=False)
        for link in self._links:
            _ip("link", "del", link, check=False)
        _ip("link", "del", self._bridge, check=False)

    def cut(self, host):
        """Takes the network from a host."""
        _ip("-n", host, "link", "set", "eth0", "down")

    def restore(self, host):
        """Gives it back."""
        _ip("-n", host, "link", "set", "eth0", "up")

    def pids(self, host):
        """Returns the processes that run on a host."""
        done = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    def _is_up(self, name):
        return "state UP" in _ip("-n", name, "link", "show", "eth0")


def _ip(*words, check=True):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


@pytest.fixture
def two_hosts(tmp_path):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip (package iproute2)")
    allowed = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"this machine does not let root make network namespaces: {allowed.stderr.strip()}")
    hosts = TwoHosts(tmp_path)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.remove()
