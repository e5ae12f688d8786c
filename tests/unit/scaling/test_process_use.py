from __future__ import annotations

import os
import subprocess
import sys

from tf_ipu_dp.scaling import process_use
from tf_ipu_dp.scaling.process_use import ProcessUse

# A process with a child that has 60 MB, and itself 40 MB, until its input ends.
PROGRAM = """
import subprocess, sys
data = bytearray(b"x") * (int(sys.argv[1]) << 20)
child = None
if len(sys.argv) > 2:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2], "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
print("ready", flush=True)
sys.stdin.read()
"""


def test_memory_is_that_of_all_processes_at_once(wait_until):
    command = [sys.executable, "-c", PROGRAM, "40", PROGRAM]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert len(process_use.find_tree(process.pid)) == 2
        with ProcessUse(process.pid, period_s=0.01) as use:
            wait_until(lambda: (use.memory_bytes or 0) > 100 << 20)
        process.stdin.close()
    assert use.memory_bytes < 200 << 20


def test_a_process_that_has_ended_uses_nothing():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    with ProcessUse(done.pid, period_s=0.01) as use:
        pass
    assert process_use.find_tree(done.pid) == [] and use.memory_bytes is None


def test_a_process_that_computes_keeps_a_core_busy(wait_until):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        began = process_use.read_core_ticks()
        use = ProcessUse(process.pid, period_s=0.05)
        with use:
            # A core was used for a second: as many ticks as the clock has.
            wait_until(lambda: process_use.read_core_ticks()[0] - began[0] > os.sysconf("SC_CLK_TCK"))
        process.kill()
    assert 0 < use.busy(0, 3600) <= 1
    assert use.busy(7000, 7001) is None


def test_what_a_process_computed_that_was_waited_for_is_not_of_others():
    with ProcessUse(os.getpid(), period_s=0.05) as use:
        began_s = children_s()
        code = "import time; began = time.process_time()\nwhile time.process_time() - began < 1: pass"
        subprocess.run([sys.executable, "-c", code], check=True)
        own_s = children_s() - began_s
    assert own_s >= 0.9
    _, every = process_use.read_core_ticks()
    own = own_s * os.sysconf("SC_CLK_TCK") / (every - use._at_start[1])
    assert 0 <= use.others() <= 1 - own + 0.05  # clocks of the kernel count in ticks


def test_what_nobody_here_computed_is_of_others(wait_until):
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        with ProcessUse(os.getpid(), period_s=0.05) as use:
            began = process_use.read_core_ticks()
            wait_until(lambda: process_use.read_core_ticks()[0] - began[0] > os.sysconf("SC_CLK_TCK"))
        found = use.others()
        other.kill()
    assert found > 0.05


def children_s():
    times = os.times()
    return times.children_user + times.children_system
