"""Who has stalled a job."""

from __future__ import annotations

from tf_ipu_dp.runs.heartbeat import INPUT, OTHERS, Status
from tf_ipu_dp.runs.stall import StallDetector


def status(instance, at=0.0, *, still_s=0.0, waits_for=None, phase="training"):
    return Status("run", instance, 3, f"host{instance}", 100 + instance, phase, 40, 99, None, waits_for, still_s, at)


def detector_of(*statuses, now=0.0):
    detector = StallDetector()
    for each in statuses:
        detector.observe(each, now)
    return detector


def test_there_is_no_stall_within_the_limit():
    own = status(0, still_s=9.0, waits_for=OTHERS)
    detector = detector_of(status(1, still_s=9.0), status(2))
    assert detector.find_stall(own, 0.0, 10.0, watched=True) is None


def test_a_missing_heartbeat_counts_in_any_phase():
    own = status(0, phase="compiling")
    detector = detector_of(status(1, waits_for=INPUT), status(2))
    detector.observe(status(2, at=1.0), 11.0)
    found = detector.find_stall(own, 11.0, 10.0, watched=False)
    assert found.culprit.instance == 1 and found.sentence == (
        "No heartbeat for 11 s from instance 1 on host1 (pid 101): it is stopped, or its host or the network to it is "
        "down. It was training after step 40, waiting for input."
    )


def test_the_instance_without_input_is_the_culprit():
    own = status(0, still_s=12.0, waits_for=OTHERS)
    detector = detector_of(status(1, still_s=12.5, waits_for=INPUT), status(2, still_s=12.0, waits_for=OTHERS))
    assert detector.find_stall(own, 0.0, 10.0, watched=True).sentence == (
        "instance 1 on host1 (pid 101) has made no progress for 12 s: it is training after step 40, waiting for input."
    )


def test_an_instance_that_does_not_wait_for_others_is_the_culprit():
    own = status(0, still_s=12.0, waits_for=OTHERS)
    detector = detector_of(status(1, still_s=12.0, waits_for=OTHERS), status(2, still_s=12.0, phase="saving"))
    assert "instance 2 on host2" in detector.find_stall(own, 0.0, 10.0, watched=True).sentence


def test_when_all_wait_for_each_other_the_network_is_named():
    own = status(0, still_s=12.0, waits_for=OTHERS)
    detector = detector_of(*(status(i, still_s=12.0, waits_for=OTHERS) for i in (1, 2)))
    assert (
        "all 3 instances are training after step 40, waiting for other instances"
        in detector.find_stall(own, 0, 10, True).sentence
    )


def test_compiling_takes_as_long_as_it_takes():
    own = status(0, still_s=9999.0, phase="compiling")
    assert detector_of().find_stall(own, 0.0, 10.0, watched=False) is None


def test_clocks_of_other_hosts_do_not_matter():
    own = status(0)
    detector = detector_of(status(1, at=5e9))
    for second in range(1, 30):
        detector.observe(status(1, at=5e9 + second), second)
        assert detector.find_stall(own, second, 10.0, watched=True) is None


def test_neither_an_instance_that_ended_nor_a_pause_of_this_one_is_a_missing_heartbeat():
    own = status(0)
    detector = detector_of(status(1), status(2))
    detector.remove(1)
    detector.discount_pause(100.0)
    assert detector.find_stall(own, 105.0, 10.0, watched=True) is None
    assert "instance" in detector.find_stall(own, 120.0, 10.0, watched=True).sentence
