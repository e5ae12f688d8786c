from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta, timezone

import pytest

from tf_ipu_dp.distributed import failures
from tf_ipu_dp.runs.run_folder import InstanceError

NOON = datetime(2026, 1, 5, 12, 0, 0, tzinfo=timezone.utc)
TRACEBACK = "Traceback (most recent call last):\n  File ...\nValueError: the label 11 is not below 10"
LOST_PEER = (
    "Traceback (most recent call last):\n  File ...\nhorovod.common.exceptions.HorovodInternalError: "
    "[gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:3: Connection reset by peer"
)


def error(instance, text, after_ms=0, transient=True):
    return InstanceError(instance, f"host{instance}", 10, NOON + timedelta(milliseconds=after_ms), transient, text)


def report(instance, status, *lines):
    return failures.LauncherReport(instance, f"host{instance}", status, lines)


def test_an_error_comes_before_secondary_failures_that_were_written_earlier():
    first = failures.find_first_failure(
        1, None, [error(0, LOST_PEER), error(2, LOST_PEER, 1), error(1, TRACEBACK, 2)], 4
    )
    assert (first.instance, first.secondary_failures, first.transient) == (1, 2, True)
    assert str(first) == "instance 1 on host1 failed"
    assert first.last_lines[-1] == "ValueError: the label 11 is not below 10"


def test_of_several_errors_the_earliest_is_the_first():
    first = failures.find_first_failure(1, report(3, 1), [error(2, TRACEBACK), error(3, TRACEBACK, 5)], 4)
    assert (first.instance, first.secondary_failures) == (2, 0)


def test_an_instance_that_was_killed_comes_before_every_error():
    first = failures.find_first_failure(137, report(1, 137, "step 8"), [error(0, TRACEBACK), error(2, LOST_PEER)], 3)
    assert str(first) == "instance 1 on host1 was killed by SIGKILL"
    assert first.last_lines == ("step 8",) and first.is_kill and first.transient and first.secondary_failures == 1


def test_an_instance_that_reports_a_stall_is_not_the_first_failure():
    stalled = dataclasses.replace(error(1, "No heartbeat for 7 s from instance 1."), reported_by=0)
    reporter = report(0, 1, "train: No heartbeat for 7 s from instance 1.")
    first = failures.find_first_failure(1, reporter, [stalled], 2)
    assert (first.instance, first.transient) == (1, True)


def test_an_abort_after_a_lost_connection_is_a_secondary_failure():
    aborted = report(0, 134, "terminate called after throwing an instance of 'gloo::IoException'")
    assert failures.find_first_failure(134, aborted, [error(1, TRACEBACK)], 2).instance == 1


def test_the_error_file_is_shown_rather_than_the_last_lines_of_the_output():
    first = failures.find_first_failure(1, report(1, 1, "something else"), [error(1, TRACEBACK, transient=False)], 2)
    assert first.last_lines[-1].startswith("ValueError") and not first.transient


def test_without_a_report_the_instance_that_left_no_error_is_the_one_that_the_others_lost():
    first = failures.find_first_failure(1, None, [error(0, LOST_PEER), error(2, LOST_PEER)], 3)
    assert (first.instance, first.secondary_failures) == (1, 2)
    several = failures.find_first_failure(1, None, [error(0, LOST_PEER)], 4)
    assert several.instance is None
    assert several.last_lines == ("Instance 1, 2 or 3 wrote no error; the others lost their connection to it.",)


def test_where_all_lost_each_other_the_earliest_is_the_first():
    assert failures.find_first_failure(1, None, [error(1, LOST_PEER), error(0, LOST_PEER, 1)], 2).instance == 1


def test_without_evidence_the_status_is_all_that_is_known():
    assert str(failures.find_first_failure(5, None, [], 2)) == "the job exited with status 5"
    assert str(failures.find_first_failure(1, failures.LauncherReport(None, "b", 255), [], 2)) == (
        "host b exited with status 255"
    )


def test_a_lost_host_is_named_in_the_words_of_the_launcher_and_counts_as_a_kill():
    lost = failures.LauncherReport.from_json(
        {
            "instance": 1,
            "host": "b",
            "status": 1,
            "last_lines": [],
            "reason": "Host b: it could not be reached for 15 s.",
        }
    )
    first = failures.find_first_failure(1, lost, [error(0, LOST_PEER)], 2)
    assert str(first) == "Host b: it could not be reached for 15 s"
    assert first.is_kill and first.transient and first.instance == 1


@pytest.mark.parametrize(
    ("status", "lines", "transient"),
    [
        (1, ["train: --ipus=6 is not possible."], False),
        (1, ["Traceback (most recent call last):", "train: x", "ValueError"], True),
        (1, ["train: the device failed (HorovodInternalError: ...)"], True),
        (1, ["train: instance 0 lost its peers: one of them has ended. Start the run again."], True),
        (137, ["train: --ipus=6 is not possible."], True),
        (1, [], True),
    ],
)
def test_a_usage_error_is_not_transient_and_all_else_is(status, lines, transient):
    assert failures.find_first_failure(status, report(0, status, *lines), [], 2).transient is transient


def test_only_the_last_lines_are_kept():
    first = failures.find_first_failure(1, None, [error(0, "\n".join(map(str, range(100))))], 1)
    assert first.last_lines == tuple(map(str, range(80, 100)))


@pytest.mark.parametrize(
    "text",
    [
        "[/tmp/horovod/third_party/gloo/gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer",
        "Horovod has been shut down. This was caused by an exception on one of the ranks",
        "Unknown: Connection closed by peer [Op:HorovodAllgather]",
    ],
)
def test_errors_of_horovod_after_a_peer_is_gone_are_recognised(text):
    assert failures.is_lost_peer(text)
    assert not failures.is_lost_peer("OSError: [Errno 104] Connection reset by peer: '/mnt/data/train.tfrecord'")


def test_what_all_instances_have_found_together_is_blamed_on_none_of_them():
    text = "The loss is not finite after step 40."
    found = [dataclasses.replace(error(number, text, number, transient=False), common=True) for number in (1, 0)]
    for said in (None, report(1, 1), report(3, 1)):
        first = failures.find_first_failure(1, said, found, 4)
        assert (first.instance, first.last_lines, first.transient) == (None, (text,), False)
        assert str(first) == "the job failed"
    killed = failures.find_first_failure(137, report(3, 137), found, 4)
    assert str(killed) == "instance 3 on host3 was killed by SIGKILL"
