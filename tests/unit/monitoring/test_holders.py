from __future__ import annotations

import os

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.monitoring import holders
from tf_ipu_dp.monitoring.snapshots import Process

LOOK = "Wait for them, use fewer --ipus, or look with: python -m tf_ipu_dp.monitor"


def process(pid, ipus, **facts):
    return Process(pid, facts.pop("user", "ann"), "train.py", 1.0, tuple(ipus), "running", **facts)


def test_process_user_ipus_and_run_are_named():
    text = holders.render_holders([process(7, range(8), run="first"), process(9, [12], user=None)])
    assert text == f"Process 7 of ann holds IPUs 0-7 for the run first; process 9 holds IPU 12. {LOOK}"


def test_of_many_the_largest_are_named():
    text = holders.render_holders([process(pid, range(pid)) for pid in range(1, 7)])
    assert text.startswith("Process 6 of ann holds IPUs 0-5; ") and "; 3 more processes the others. " in text


def test_where_nobody_can_be_named_the_command_is():
    assert holders.render_holders([process(1, [])]) == LOOK


def test_this_process_is_found_while_it_holds_emulated_ipus(emulator_dir):
    attachment = registry.Partition.from_environment(os.environ).attach(count=4)
    try:
        assert f"Process {os.getpid()} " in holders.describe_holders("emulator")
    finally:
        attachment.release()
    assert holders.describe_holders("emulator") == LOOK
