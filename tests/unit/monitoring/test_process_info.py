"""What Linux knows about processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tf_ipu_dp.monitoring import process_info


def test_a_zombie_is_not_alive_and_pid_1_is():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.kill()
    deadline = time.monotonic() + 60
    while process_info.is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not process_info.is_alive(process.pid) and process_info.is_alive(1)
    process.communicate()


def test_the_command_of_a_younger_process_with_the_same_number_is_not_returned():
    assert process_info.read_command(os.getpid(), time.time()) is not None
    assert process_info.read_command(os.getpid(), time.time() - 10**6) is None
    assert process_info.read_command(2**22 + 1, None) is None


def test_a_command_begins_after_the_installation_and_with_the_import_that_was_done_for_it():
    def age_s(**environ):
        return time.perf_counter() - process_info.began(environ)

    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
    whole = age_s()
    assert whole > 0
    # The installation ended now, long ago (then the process is younger), or in a future that another clock has.
    just_now = age_s(TF_IPU_DP_INSTALLED=f"{since_boot:.2f}")
    assert just_now < whole
    assert age_s(TF_IPU_DP_INSTALLED="0") >= whole
    assert age_s(TF_IPU_DP_INSTALLED=f"{since_boot + 1000:.2f}") < whole
    assert age_s(TF_IPU_DP_INSTALLED="soon", IPU_EMULATOR_PRELOAD_SECONDS="long") >= whole
    # A fork of poprun.
    assert age_s(IPU_EMULATOR_PRELOAD_SECONDS="1000.5") >= whole + 1000


GROWING = """
import os, time
from tf_ipu_dp.monitoring import process_info
before = process_info.read_host_use(os.getpid(), time.time())
kept = bytearray(b"x" * 2**26)
while process_info.read_host_use(os.getpid(), None).cpu_s < before.cpu_s + 0.05:
    sum(range(10**5))
after = process_info.read_host_use(os.getpid(), None)
print(after.memory_gib - before.memory_gib, len(kept))
"""


def test_the_cpu_time_and_the_memory_of_a_process_grow_with_what_it_does():
    # In a fresh process: one that has freed memory before takes that again, and does not grow.
    done = subprocess.run([sys.executable, "-c", GROWING], capture_output=True, text=True, check=True)
    grown, _ = done.stdout.split()
    assert float(grown) > 0.05
    assert process_info.read_host_use(os.getpid(), time.time() - 10**6) is None, "a younger process"
    assert process_info.read_host_use(2**22 + 1, None) is None
