"""What a result says about the ranks that made it: engine, busy cores, failures; and TCP's counters."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import cpu_use, fabric_flags, measure, measured_result, mpi_library, rank_job, tcp_counters

ABOUT = measured_result.About("a title", 2, ((4096,),), "gloo", None, False)


def make_answers(facts=None, **fields):
    series = rank_job.SeriesAnswers([[0.01, 0.02]] * 3, [[0.0, 1e-5]] * 3, [[1, 2, 3]] * 3, [0.009] * 3)
    for name, value in fields.items():
        setattr(series, name, value)
    return rank_job.Answers({"horovod": "0.28.1", "operations": "Gloo", **(facts or {})}, (series,))


def make_result(answers, about=ABOUT):
    return measured_result.make(about, answers, {}, [], None)


def test_gloo_is_a_ring_and_mpi_is_named_without_an_algorithm_that_is_not_known():
    assert make_result(make_answers()).description.algorithm == "ring"
    found = make_result(make_answers({"operations": "MPI", "mpi": "Open MPI 4.1.4"})).description
    assert (found.engine, found.algorithm) == ("Horovod 0.28.1 on MPI", "the algorithm that Open MPI 4.1.4 chooses")
    assert found.facts["MPI"] == "Open MPI 4.1.4"
    unknown = make_result(make_answers({"operations": "MPI", "mpi": None})).description
    assert unknown.algorithm == "the algorithm that MPI chooses"
    assert unknown.facts["MPI"] == "of an unknown implementation"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4, repo rev: v4.1.4, May 26, 2022", "Open MPI 4.1.4"),
        ("MPICH Version:\t4.0.2\nMPICH Release date:\tThu Apr  7", "MPICH 4.0.2"),
        ("Intel(R) MPI Library 2021.9 for Linux* OS\n", "Intel(R) MPI 2021.9"),
        ("another one", "another one"),
        ("", None),
    ],
)
def test_mpi_libraries_say_their_name_and_version(text, name):
    assert mpi_library.parse_version(text) == name


def test_a_library_that_is_no_mpi_has_no_version(tmp_path):
    assert mpi_library.read_version("libc.so.6") is None
    assert mpi_library.read_version(str(tmp_path / "libmpi.so")) is None


@pytest.mark.parametrize(
    ("fields", "polls", "sentence"),
    [
        ({"busy": 0.95}, False, "The cores of this machine were busy for 95 % of the time"),
        ({"busy": 0.5, "emulator": 0.97}, False, "The link emulator was busy for 97 % of the time, on one core"),
        ({"busy": 0.5, "threads": [0.1, 0.93]}, False, "A thread of rank 1 was busy for 93 % of the time"),
        ({"busy": 0.5, "threads": [0.1, 0.93]}, True, None),  # an engine that polls is always busy
        ({"busy": 0.5, "emulator": 0.6, "threads": [0.1, 0.2]}, False, None),
    ],
)
def test_a_run_that_the_cores_limited_says_so_also_if_it_is_one_core(fields, polls, sentence):
    notes = measured_result.cpu_notes(make_answers(**fields).series, polls=polls)
    assert [note.split(":")[0] for note in notes] == ([sentence] if sentence else [])


def test_what_threads_and_the_link_emulator_used_is_in_the_facts():
    facts = make_result(make_answers(busy=0.5, emulator=0.6, threads=[0.1, 0.2])).description.facts
    assert facts["busiest thread of a rank"] == "20 % of a core" and facts["link emulator"] == "60 % of a core"


def test_a_thread_that_works_is_found_and_others_are_left_out():
    used = cpu_use.CpuUse(process=None)
    ends = time.thread_time() + 0.1
    while time.thread_time() < ends:
        math.sqrt(2)
    assert used.busiest_thread() > 0 and used.process() is None
    assert 0 <= used.cores() <= 1


def test_missing_times_of_the_engine_are_said():
    assert "The engine's own times are missing" in make_result(make_answers(engine_s=[])).description.notes[0]
    assert make_result(make_answers()).description.notes == ()


def test_what_was_measured_before_a_failure_is_kept_with_its_reason():
    answers = make_answers()
    answers.failure = "The ranks failed: poprun: instance 1 was killed by SIGKILL"
    found = make_result(answers)
    assert found.description.ended_early == "failed" and len(found.series[0].seconds) == 3
    assert found.description.notes == (
        "The ranks failed: poprun: instance 1 was killed by SIGKILL. This is what was measured until then, 3 trials.",
    )


def test_times_and_the_shortest_timeout_are_those_of_the_network_that_was_asked_for():
    about = measured_result.About("t", 2, ((4096,),), "gloo", fabric_flags.load("r4"), False)  # dilated 4 times
    (series,) = make_result(make_answers(), about).series
    assert series.seconds == pytest.approx([0.005] * 3) and series.facts.shortest_timeout_s == pytest.approx(0.2)
    assert [each.tolist() for each in (series.timeouts, series.probes, series.fast_retransmissions)] == [
        [1] * 3,
        [2] * 3,
        [3] * 3,
    ]
    (alone,) = make_result(make_answers()).series
    assert alone.timeouts is None


NETSTAT = b"TcpExt: SyncookiesSent TCPFastRetrans TCPTimeouts TCPLossProbes\nTcpExt: 9 %d %d %d\nIpExt: A\nIpExt: 5\n"


def test_tcp_s_three_counters_are_told_apart():
    texts = [NETSTAT % counts for counts in ((1, 2, 3), (1, 3, 7), (5, 3, 7))]
    assert tcp_counters.between(texts) == ((1, 4, 0), (0, 0, 4))
    assert tcp_counters.parse(b"") == (0, 0, 0)


def test_this_machine_s_counters_are_read_again_and_again():
    counters = tcp_counters.TcpCounters()
    first, second = counters.read(), counters.read()
    counters.close()
    assert first.startswith(b"TcpExt:") and second.startswith(b"TcpExt:")
    assert min(np.array(tcp_counters.parse(second)) - np.array(tcp_counters.parse(first))) >= 0


@pytest.mark.parametrize(("text", "seconds"), [(None, 1e-3), ("", 1e-3), ("2.5", 2.5e-3)])
def test_horovod_s_cycle_is_that_of_the_environment(text, seconds):
    assert measure.read_cycle_s({} if text is None else {"HOROVOD_CYCLE_TIME": text}) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan"])
def test_a_cycle_that_is_no_time_is_refused(text):
    with pytest.raises(cli.UsageError, match=f"HOROVOD_CYCLE_TIME={text} is not a number of milliseconds above 0."):
        measure.read_cycle_s({"HOROVOD_CYCLE_TIME": text})
