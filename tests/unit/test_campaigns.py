"""The campaigns under benchmarks/ fit the package: the first cases of those that need no training pass."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(("name", "cases"), [("flags", 60), ("telemetry", 12), ("names", 6)])
def test_the_first_cases_of_a_campaign_pass(name, cases, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    campaign = importlib.import_module(f"robustness_{name}")
    robustness = importlib.import_module("robustness")
    options = argparse.Namespace(out=tmp_path, count=cases, seed=0, resumes=0)
    with campaign.prepare(options) as state:
        part = robustness.try_part(campaign, state, 1, cases, 0, limit_s=600.0)
    assert part["failures"] == []
    assert sum(part["outcomes"].values()) == cases and set(part["outcomes"]) != {"refused"}


def test_a_campaign_continues_after_its_last_whole_part(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    robustness, kills = (importlib.import_module(name) for name in ("robustness", "kills"))
    path = tmp_path / "x.jsonl"
    path.write_text('{"count": 2}\n{"count": 3}\n{"cou')  # it was killed while it wrote
    assert [part["count"] for part in robustness.read_parts(path)] == [2, 3]
    assert [line["count"] for line in kills.read_lines(path)] == [2, 3]
