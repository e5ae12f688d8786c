import os

import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import results


def _result():
    measured = results.Series(
        results.SeriesFacts(2, 4096, link_bytes_per_s=1.25e8, wrong_sums=1),
        np.array([0.002, 0.003]),
        np.array([[0.002, 0.001], [0.0015, 0.003]]),
        np.array([[0.0, 0.001], [0.0015, 0.0]]),
        np.array([0.0005, np.nan]),
        np.array([0, 2]),
    )
    simulated = results.Series(results.SeriesFacts(65_536, 971_048), np.array([0.25, 0.5, 0.75]))
    description = results.Description(
        results.MEASURED,
        "two",
        "Horovod",
        "ring",
        (measured.facts, simulated.facts),
        facts={"cores": "2"},
        notes=("a",),
    )
    return results.Result(description, (measured, simulated))


def test_a_result_is_read_as_it_was_written(tmp_path):
    written = _result()
    results.write(written, tmp_path / "new")
    found = results.read(tmp_path / "new")
    assert found.description == written.description
    for a, b in zip(found.series, written.series):
        assert a.facts == b.facts
        for name in ("seconds", "rank_seconds", "late_s", "engine_s", "timeouts"):
            if getattr(b, name) is None:
                assert getattr(a, name) is None
            else:
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_a_folder_without_a_result_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(cli.UsageError, match=r"has no collective.json\. Give a folder that measure or simulate wrote"):
        results.read(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "", "series,seconds\n0,abc\n1,1\n", "series,seconds\n0,1\n", "series,seconds\n0,-1\n1,1\n",
        "series,seconds\n0,1e308\n1,1\n", "series,seconds\n0,inf\n1,1\n", "series,seconds,timeouts\n0,1,2\n0,1,\n1,1\n",
        "series,seconds,timeouts\n0,1,inf\n1,1\n", "series,seconds,rank0_s,rank1_s\n0,1,1\n1,1\n",
    ],
)  # fmt: skip
def test_damaged_trials_are_refused_in_a_sentence(tmp_path, damage):
    results.write(_result(), tmp_path)
    (tmp_path / results.TRIALS).write_text(damage)
    with pytest.raises(cli.UsageError, match="cannot be read"):
        results.read(tmp_path)


@pytest.mark.parametrize("kind", ["a pipe", "a link", "a folder"])
def test_trials_that_are_no_file_are_refused_before_they_are_opened(tmp_path, kind):
    results.write(_result(), tmp_path)
    path = tmp_path / results.TRIALS
    path.unlink()
    {"a pipe": lambda: os.mkfifo(path), "a link": lambda: path.symlink_to("/dev/zero"), "a folder": path.mkdir}[kind]()
    with pytest.raises(cli.UsageError, match=f"it is {kind} and not a file"):
        results.read(tmp_path)


def test_a_number_of_ranks_that_the_trials_do_not_have_is_refused_at_once(tmp_path):
    results.write(_result(), tmp_path)
    path = tmp_path / results.DESCRIPTION
    path.write_text(path.read_text().replace('"ranks": 2,', f'"ranks": {2**62},'))
    with pytest.raises(cli.UsageError, match="without the times of all ranks"):
        results.read(tmp_path)
