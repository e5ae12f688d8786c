"""Whether tests on emulated hosts are skipped: without root, and not where the machine should have all they need.

CI runs as root, so that there a missing command or a kernel without namespaces is a failure and no reason to skip.
"""

from __future__ import annotations

import os

import pytest

from tf_ipu_dp.collectives import namespaces


def decide(reason, environ, is_root):
    """Returns what to do with the tests: run, skip or fail."""
    if reason is None:
        return "run"
    return "fail" if is_root and environ.get("CI", "").lower() in ("1", "true") else "skip"


def require_emulated_hosts():
    """Skips the test that calls it, or lets it fail, if this machine cannot make emulated hosts."""
    reason = namespaces.why_not()
    decision = decide(reason, os.environ, os.geteuid() == 0)
    if decision == "fail":
        pytest.fail(f"CI=true, and this machine is root's: {reason} Install it (Debian: apt-get install iproute2).")
    if decision == "skip":
        pytest.skip(str(reason))
