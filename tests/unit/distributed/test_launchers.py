"""How launchers are chosen and called, and what they report at the end of a job."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli
from tf_ipu_dp.datasets import info
from tf_ipu_dp.distributed import failures, job, launchers
from tf_ipu_dp.runs import saved_flags

FASHION = info.DATASETS["fashion_mini"]
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
    report = launchers.read_mpirun_output(KILLED)
    assert str(failures.find_first_failure(137, report, (), 4)) == "instance 3 on node-2 was killed by SIGKILL"
    assert launchers.read_mpirun_output(KILLED.replace(" on node ", "\non node ")) == report


def test_mpirun_reports_nothing_about_an_instance_that_failed_by_itself():
    assert launchers.read_mpirun_output(FAILED) is None
    assert launchers.read_mpirun_output("") is None


def on_path(*programs):
    return lambda name: f"/usr/bin/{name}" if name in programs else None


def plan_job(*words, **known):
    return job.plan_job(saved_flags.complete(words), FASHION, **known)


def make_command(launcher, planned, environ=None, extra=(), job_id=0, root=False):
    return launchers.make_command(
        launcher, planned.plan.topology, ("python", "-m", "x", *planned.words), python="/py", environ=environ or {},
        extra=extra, job_id=job_id, root=root,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "sdk", "programs", "environ", "chosen"),
    [
        ("auto", "auto", ["poprun", "srun", "mpirun"], {"SLURM_JOB_ID": "7"}, "poprun"),
        ("auto", "emulator", ["poprun", "mpirun"], {}, "emulator"),
        ("auto", "emulator", ["poprun", "srun"], {"SLURM_JOB_ID": "7"}, "srun"),
        ("auto", "auto", ["srun", "mpirun"], {}, "emulator"),
        ("auto", "auto", ["mpirun"], {"SLURM_JOB_ID": "7"}, "emulator"),
        ("auto", "poplar", ["poprun"], {}, "poprun"),
        ("mpirun", "auto", ["poprun", "mpirun"], {}, "mpirun"),
        ("emulator", "auto", ["poprun"], {}, "emulator"),
    ],
)
def test_the_launcher_is_chosen_by_what_is_there(asked, sdk, programs, environ, chosen):
    assert launchers.choose(asked, sdk, environ, on_path(*programs)) == chosen


@pytest.mark.parametrize(
    ("asked", "sdk", "sentence"),
    [
        ("auto", "poplar", "--sdk=poplar needs poprun, which is not on the PATH"),
        ("mpirun", "auto", "--launcher=mpirun cannot be used: mpirun is not on the PATH. Use --launcher=auto."),
        ("poprun", "emulator", "Use --launcher=emulator."),
        ("emulator", "poplar", "Use --launcher=poprun."),
    ],
)
def test_a_launcher_that_cannot_be_used_is_refused_in_a_sentence(asked, sdk, sentence):
    with pytest.raises(cli.UsageError, match=r"PATH|Use") as caught:
        launchers.choose(asked, sdk, {}, on_path())
    assert sentence in str(caught.value)


def test_poprun_gets_the_topology_and_on_other_hosts_the_environment_that_matters():
    environ = {"PYTHONPATH": "/p", "HOME": "/root", "TF_POPLAR_FLAGS": "x y", "IPU_EMULATOR_IPUS": "16"}
    one = make_command("poprun", plan_job("--ipus=8", "--pipeline_stages=2", "--instances=4"), environ)
    assert one.words[:7] == (
        "poprun", "--num-instances", "4", "--num-replicas", "4", "--ipus-per-replica", "2",
    )  # fmt: skip
    assert one.environ == {"GCDA_MONITOR": "1"}
    two = make_command("emulator", plan_job("--hosts=a,b"), {**environ, "GCDA_MONITOR": "0"}, extra=["-v"])
    assert two.words[:3] == ("/py", "-m", "tf_ipu_dp.emulator.poprun")
    assert two.words[9:13] == (
        "--host", "a,b", "--mpi-local-args=-x GCDA_MONITOR -x IPU_EMULATOR_IPUS -x PYTHONPATH -x TF_POPLAR_FLAGS", "-v",
    )  # fmt: skip
    assert two.environ == {}


def test_mpirun_gets_as_many_slots_as_instances_and_several_hosts_a_place_to_meet():
    one = make_command("mpirun", plan_job("--instances=4"), {"PATH": "/bin"})
    assert str(one) == (
        "GCDA_MONITOR=1 mpirun -np 4 --host localhost:4 --tag-output --bind-to none -x GCDA_MONITOR -x PATH "
        "python -m x --instances=4 --ipus=4"
    )
    two = make_command("mpirun", plan_job("--instances=4", "--hosts=a,b"), job_id=10_007)
    assert "a:2,b:2" in two.words
    assert two.environ["IPU_EMULATOR_RENDEZVOUS"] == "a:20007"
    assert make_command("mpirun", plan_job(), root=True).environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_srun_gets_the_nodes_the_tasks_of_each_and_the_cores_that_sbatch_gave():
    planned = plan_job("--instances=4", allocation=["n1", "n2", "n3"])
    made = make_command("srun", planned, {"SLURM_CPUS_PER_TASK": "8"}, job_id=5)
    assert made.words[:9] == (
        "srun", "--ntasks=4", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--label",
        "--nodelist=n1,n2", "--cpus-per-task=8", "--job-name=tf_ipu_dp-5",
    )  # fmt: skip
    assert made.environ["IPU_EMULATOR_RENDEZVOUS"] == "n1:20005"
    assert "--hosts=n1,n2" in made.words


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1), max_size=4))
def test_the_command_that_is_shown_can_be_pasted(words):
    made = launchers.LaunchCommand(("python", *words), {"A": "b c"})
    assert shlex.split(str(made)) == ["A=b c", "python", *words]
