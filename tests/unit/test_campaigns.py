"""The campaigns under benchmarks/ fit the package: the first cases of those that need no training pass."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("name", "cases"), [("flags", 60), ("telemetry", 12), ("names", 6)])
def test_the_first_cases_of_a_campaign_pass(name, cases, tmp_path):
    # In a process of its own, as users run it: the campaign of flags empties and refills the environment, and a thread
    # of tf.data that reads it at that moment (getenv) crashes. Tests before this one may have left such threads.
    words = [name, f"--count={cases}", f"--out={tmp_path / 'out'}", "--limit_s=600"]
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "robustness.py", *words],
        capture_output=True, text=True, check=False, timeout=900, env=environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{name}: {cases} of {cases} cases, 0 failed")
    part = json.loads((tmp_path / "out" / f"{name}-0.jsonl").read_text())
    assert sum(part["outcomes"].values()) == cases and set(part["outcomes"]) != {"refused"}


def test_a_campaign_continues_after_its_last_whole_part(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    robustness, kills = (importlib.import_module(name) for name in ("robustness", "kills"))
    path = tmp_path / "x.jsonl"
    path.write_text('{"count": 2}\n{"count": 3}\n{"cou')  # it was killed while it wrote
    assert [part["count"] for part in robustness.read_parts(path)] == [2, 3]
    assert [line["count"] for line in kills.read_lines(path)] == [2, 3]
