"""A measurement and its prediction, as results and as folders."""

from __future__ import annotations

import pytest
import sample_results

from tf_ipu_dp.collectives import results


@pytest.fixture
def measured():
    return sample_results.make_measured()


@pytest.fixture
def simulated():
    return sample_results.make_simulated()


@pytest.fixture
def folders(tmp_path, measured, simulated):
    """Returns the folders of a measurement and of its prediction."""
    results.write(measured, tmp_path / "a")
    results.write(simulated, tmp_path / "b")
    return [str(tmp_path / "a"), str(tmp_path / "b")]
