from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from tf_ipu_dp.distributed import failures
from tf_ipu_dp.runs.run_folder import InstanceError

NOON = datetime(2026, 1, 5, 12, 0, 0, tzinfo=timezone.utc)
TRACEBACK = "Traceback (most recent call last):\n  File ...\nValueError: the label 11 is not below 10"
ECHO = (
    "Traceback (most recent call last):\n  File ...\nhorovod.common.exceptions.HorovodInternalError: "
    "[gloo/transport/tcp/pair.cc:589] Read error [127.0.0.1]:3: Connection reset by peer"
)


def error(instance, text, after_ms=0, final=False):
    return InstanceError(instance, f"host{instance}", 10, NOON + timedelta(milliseconds=after_ms), final, text)


def report(instance, status, *lines):
    return {"instance": instance, "host": f"host{instance}", "status": status, "last_lines": list(lines)}


def test_an_error_beats_the_echoes_that_were_written_before_it():
    cause = failures.find_cause(1, None, [error(0, ECHO), error(2, ECHO, 1), error(1, TRACEBACK, 2)], 4)
    assert (cause.instance, cause.echoes, cause.final) == (1, 2, False)
    assert str(cause) == "instance 1 on host1 failed"
    assert cause.lines[-1] == "ValueError: the label 11 is not below 10"


def test_of_several_errors_the_earliest_is_the_first():
    cause = failures.find_cause(1, report(3, 1), [error(2, TRACEBACK), error(3, TRACEBACK, 5)], 4)
    assert (cause.instance, cause.echoes) == (2, 0)


def test_a_death_without_a_word_beats_every_error():
    cause = failures.find_cause(137, report(1, 137, "step 8"), [error(0, TRACEBACK), error(2, ECHO)], 3)
    assert str(cause) == "instance 1 on host1 ended with 137 (SIGKILL)"
    assert cause.lines == ("step 8",) and cause.is_death and not cause.final and cause.echoes == 1


def test_one_that_died_of_a_lost_connection_is_an_echo_although_it_was_a_signal():
    aborted = report(0, 134, "terminate called after throwing an instance of 'gloo::IoException'")
    assert failures.find_cause(134, aborted, [error(1, TRACEBACK)], 2).instance == 1


def test_what_the_first_one_wrote_is_told_rather_than_its_last_lines():
    cause = failures.find_cause(1, report(1, 1, "something else"), [error(1, TRACEBACK, final=True)], 2)
    assert cause.lines[-1].startswith("ValueError") and cause.final


def test_without_a_report_the_silent_one_is_the_one_that_the_others_lost():
    cause = failures.find_cause(1, None, [error(0, ECHO), error(2, ECHO)], 3)
    assert (cause.instance, cause.echoes) == (1, 2)
    several = failures.find_cause(1, None, [error(0, ECHO)], 4)
    assert several.instance is None
    assert several.lines == ("Of instance 1, 2 or 3 there is no word; the others have lost their connection to it.",)


def test_where_all_have_lost_each_other_the_earliest_is_told():
    assert failures.find_cause(1, None, [error(1, ECHO), error(0, ECHO, 1)], 2).instance == 1


def test_nothing_known_is_said_so():
    assert str(failures.find_cause(5, None, [], 2)) == "the job ended with 5"
    assert str(failures.find_cause(1, {"instance": None, "host": "b", "status": 255}, [], 2)) == (
        "host b ended with 255"
    )


def test_a_lost_host_is_told_in_the_words_of_who_lost_it_and_counts_as_a_death():
    lost = {**report(1, 1), "reason": "Host b: it could not be reached for 15 s."}
    cause = failures.find_cause(1, lost, [error(0, ECHO)], 2)
    assert str(cause) == "Host b: it could not be reached for 15 s"
    assert cause.is_death and not cause.final and cause.instance == 1


@pytest.mark.parametrize(
    ("status", "lines", "final"),
    [
        (1, ["train: --ipus=6 is not possible."], True),
        (1, ["Traceback (most recent call last):", "train: x", "ValueError"], False),
        (1, ["train: the device failed (HorovodInternalError: ...)"], False),
        (1, ["train: instance 0 has lost the others: one of them has ended. Go on ..."], False),
        (137, ["train: --ipus=6 is not possible."], False),
        (1, [], False),
    ],
)
def test_a_sentence_to_the_user_would_come_again_and_nothing_else_is_sure_to(status, lines, final):
    assert failures.find_cause(status, report(0, status, *lines), [], 2).final is final


def test_only_the_last_lines_are_kept():
    cause = failures.find_cause(1, None, [error(0, "\n".join(map(str, range(100))))], 1)
    assert cause.lines == tuple(map(str, range(80, 100)))
