"""What launchers say of a job's end."""

from __future__ import annotations

from tf_ipu_dp.distributed import failures, launchers

KILLED = """--------------------------------------------------------------------------
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
--------------------------------------------------------------------------
--------------------------------------------------------------------------
mpirun noticed that process rank 3 with PID 0 on node node-2 exited on signal 9 (Killed).
--------------------------------------------------------------------------
"""
FAILED = """mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[15184,1],1]
  Exit code:    3
"""


def test_mpirun_names_the_instance_that_was_killed_and_its_host():
    told = launchers.read_death(KILLED)
    assert str(failures.find_cause(137, told, (), 4)) == "instance 3 on node-2 ended with 137 (SIGKILL)"
    assert launchers.read_death(KILLED.replace(" on node ", "\non node ")) == told


def test_of_an_instance_that_failed_by_itself_its_own_words_are_better_than_mpiruns():
    assert launchers.read_death(FAILED) is None
    assert launchers.read_death("") is None
