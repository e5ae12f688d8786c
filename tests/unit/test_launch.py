from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tf_ipu_dp import cli, launch
from tf_ipu_dp.config import schema, train_flags
from tf_ipu_dp.datasets import info
from tf_ipu_dp.distributed import failures, launchers
from tf_ipu_dp.planning import errors, plan

FASHION = info.DATASETS["fashion_mini"]
POWERS = st.integers(0, 4).map(lambda exponent: 2**exponent)


def on_path(*programs):
    return lambda name: f"/usr/bin/{name}" if name in programs else None


def plan_job(*words, **known):
    return launch.plan_job(words, FASHION, **known)


def start(launcher, job, environ=None, extra=(), salt=0, root=False):
    return launchers.make_start(
        launcher, job.plan.topology, ("python", "-m", "x", *job.words), python="/py", environ=environ or {},
        extra=extra, salt=salt, root=root,
    )  # fmt: skip


def failure(step=0, instance=1, status=None, line="boom", final=False, host="a"):
    return launch.Failure(failures.Cause(instance, host, status, (line,), final), step)


@pytest.mark.parametrize(
    ("words", "own", "train"),
    [
        (["--instances=4", "--max_restarts=3", "--", "--ipus=8"], ["--max_restarts=3"], ["--instances=4", "--ipus=8"]),
        (["--max_restarts", "3", "--model", "mlp", "--verify"], ["--max_restarts", "3", "--verify"],
         ["--model", "mlp"]),
        (["--nodry_run", "-launcher=emulator", "--noresume"], ["--nodry_run", "-launcher=emulator"], ["--noresume"]),
        (["--", "--model=mlp", "--dry_run", "--"], ["--dry_run"], ["--model=mlp", "--"]),
        ([], [], []),
    ],
)  # fmt: skip
def test_the_launchers_words_are_told_from_those_of_train_with_and_without_two_dashes(words, own, train):
    assert launch.split(words) == (own, train)


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
        ("auto", "poplar", "poprun, which is not on the PATH"),
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
    one = start("poprun", plan_job("--ipus=8", "--pipeline_stages=2", "--instances=4"), environ)
    assert one.words[:7] == (
        "poprun", "--num-instances", "4", "--num-replicas", "4", "--ipus-per-replica", "2",
    )  # fmt: skip
    assert one.environ == {"GCDA_MONITOR": "1"}
    two = start("emulator", plan_job("--hosts=a,b"), {**environ, "GCDA_MONITOR": "0"}, extra=["-v"])
    assert two.words[:3] == ("/py", "-m", "tf_ipu_dp.emulator.poprun")
    assert two.words[9:13] == (
        "--host", "a,b", "--mpi-local-args=-x GCDA_MONITOR -x IPU_EMULATOR_IPUS -x PYTHONPATH -x TF_POPLAR_FLAGS", "-v",
    )  # fmt: skip
    assert two.environ == {}


def test_mpirun_gets_as_many_slots_as_instances_and_several_hosts_a_place_to_meet():
    one = start("mpirun", plan_job("--instances=4"), {"PATH": "/bin"})
    assert str(one) == (
        "GCDA_MONITOR=1 mpirun -np 4 --host localhost:4 --tag-output --bind-to none -x GCDA_MONITOR -x PATH "
        "python -m x --instances=4 --ipus=4"
    )
    two = start("mpirun", plan_job("--instances=4", "--hosts=a,b"), salt=10_007)
    assert "a:2,b:2" in two.words
    assert two.environ["IPU_EMULATOR_RENDEZVOUS"] == "a:20007"
    assert start("mpirun", plan_job(), root=True).environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_srun_gets_the_nodes_the_tasks_of_each_and_the_cores_that_sbatch_gave():
    job = plan_job("--instances=4", allocation=["n1", "n2", "n3"])
    made = start("srun", job, {"SLURM_CPUS_PER_TASK": "8"}, salt=5)
    assert made.words[:9] == (
        "srun", "--ntasks=4", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--label",
        "--nodelist=n1,n2", "--cpus-per-task=8", "--job-name=tf_ipu_dp-5",
    )  # fmt: skip
    assert made.environ["IPU_EMULATOR_RENDEZVOUS"] == "n1:20005"
    assert "--hosts=n1,n2" in made.words


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1), max_size=4))
def test_the_command_that_is_shown_can_be_pasted(words):
    made = launchers.Start(("python", *words), {"A": "b c"})
    assert shlex.split(str(made)) == ["A=b c", "python", *words]


def test_what_the_words_leave_open_is_resolved_and_said_to_train():
    assert plan_job().words == ("--ipus=2", "--instances=2")
    assert plan_job("--hosts=a,b,c,d").plan.topology.instances == 4
    job = plan_job("--pipeline_stages=3", "--instances=2")
    assert job.words == ("--pipeline_stages=3", "--instances=2", "--ipus=8")
    assert job.layout == "2 instances x 1 replica"
    with pytest.raises(errors.PlanError) as caught:
        plan_job("--instances=3")
    assert str(caught.value) == "--instances=3 cannot share 4 replicas evenly. Use --instances=1, 2 or 4."


def test_a_saved_run_keeps_its_global_batch_with_the_flag_that_was_typed():
    saved = plan.Batch(32, 2, 8)
    assert plan_job("--ipus=8", "--gradient_accumulation=2", saved=saved).words[2:] == ("--instances=2",)
    assert "--gradient_accumulation=4" in plan_job("--ipus=4", "--gradient_accumulation=2", saved=saved).words
    assert "--global_batch_size=512" in plan_job("--ipus=4", saved=saved).words
    assert "--global_batch_size=512" not in plan_job("--ipus=16", "--instances=4", saved=saved).words
    with pytest.raises(errors.PlanError, match=r"--ipus=4, 8 or 16, or --micro_batch_size=4, 8 or 16\."):
        plan_job("--ipus=32", saved=saved)


@settings(max_examples=150)
@given(
    instances=POWERS, local=POWERS, micro=st.sampled_from([1, 3, 8]), accumulation=st.integers(1, 6),
    stages=st.integers(1, 3), typed=st.sampled_from(["accumulation", "batch", "none"]),
)  # fmt: skip
def test_fewer_instances_keep_the_global_batch_and_what_each_instance_has(
    instances, local, micro, accumulation, stages, typed
):
    unit = plan.accumulation_unit(stages, "grouped")
    ipus = instances * local * plan.ipus_per_replica(stages)
    total = micro * instances * local * unit * (1 if typed == "none" else accumulation)
    words = [f"--ipus={ipus}", f"--instances={instances}", f"--micro_batch_size={micro}", f"--pipeline_stages={stages}"]
    if typed == "accumulation":
        words.append(f"--gradient_accumulation={accumulation * unit}")
    elif typed == "batch":
        words.append(f"--global_batch_size={total}")
    try:
        job = plan_job(*words)
    except errors.PlanError:
        assert total > FASHION.train_samples
        return
    wanted = launch.plan_fewer(job, FASHION, ())
    if instances == 1:
        assert wanted is None
        return
    fewer = launch.make_job(words, wanted, FASHION)
    assert fewer.plan.batch.global_batch_size == job.plan.batch.global_batch_size == total
    assert fewer.plan.topology.instances == instances // 2
    assert fewer.plan.topology.local_replicas == job.plan.topology.local_replicas
    assert fewer.plan.batch.micro_batch_size == micro
    assert fewer.plan.epochs == job.plan.epochs
    assert train_flags.parse(fewer.words) == fewer.config


def test_a_lost_host_is_left_out_and_the_hosts_that_stay_share_the_instances():
    job = plan_job("--hosts=a,b,c,d", "--instances=8", "--ipus=8")
    wanted = launch.plan_fewer(job, FASHION, ["b"])
    assert (wanted.instances, wanted.ipus, str(wanted.hosts)) == (4, 4, "a,c")
    assert launch.plan_fewer(job, FASHION, ["a", "b", "c"]).hosts == schema.Hosts(1, ("d",))
    assert launch.plan_fewer(job, FASHION, ["a", "b", "c", "d"]) is None
    assert launch.plan_fewer(plan_job("--hosts=2"), FASHION, ()).hosts == schema.Hosts(1)


@pytest.mark.parametrize(
    ("past", "unreachable", "most", "action"),
    [
        ([failure()], [], 0, "stop"),
        ([failure()], [], 1, "again"),
        ([failure(final=True)], [], 3, "stop"),
        ([failure()], ["b"], 3, "fewer"),
        ([failure(status=137, step=8), failure(status=137, step=16)], [], 3, "fewer"),
        ([failure(status=137, instance=0), failure(status=137, instance=1, step=8)], [], 3, "again"),
        ([failure(status=137, instance=0), failure(status=137, instance=1)], [], 3, "fewer"),
        ([failure(step=8), failure(step=8)], [], 3, "stop"),
        ([failure(step=8, line="at 0x7f step 9"), failure(step=8, line="at 0x1c step 8")], [], 3, "stop"),
        ([failure(step=8), failure(step=8, line="other", instance=0)], [], 3, "again"),
        ([failure(step=8), failure(step=16, instance=0)], [], 1, "stop"),
    ],
)
def test_a_failure_is_answered_by_what_happened_before(past, unreachable, most, action):
    assert launch.judge(past, unreachable, most)[0] == action


def test_the_restart_is_told_in_one_line_with_what_changes():
    job = plan_job("--ipus=8", "--gradient_accumulation=2")
    fewer = launch.make_job(job.words, launch.plan_fewer(job, FASHION, ()), FASHION)
    last = failure(step=120, status=137, host="b")
    assert launch._restart_words(last, "", job, fewer, "Restart 1 of 3.") == (
        "instance 1 on b ended with 137 (SIGKILL); starting again from step 120 on 1 instance x 4 replicas, "
        "accumulation 4 in place of 2 (global batch 512 kept). Restart 1 of 3."
    )
    assert launch._restart_words(dataclasses.replace(last, step=0), "c cannot be reached", job, job, "") == (
        "instance 1 on b ended with 137 (SIGKILL); c cannot be reached; starting again from the beginning on "
        "2 instances x 4 replicas. "
    )
    hosts = plan_job("--ipus=8", "--instances=4", "--hosts=a,b", "--micro_batch_size=8")
    other = launch.make_job(
        hosts.words, dataclasses.replace(hosts.config, instances=1, hosts=None, micro_batch_size=16), FASHION
    )
    assert (
        launch._restart_words(last, "", hosts, other, "")
        .split("on 1 instance x 8 replicas")[1]
        .startswith(" without a and b, micro batch 16 in place of 8")
    )


def run(*words, **environ):
    import os

    given_environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    done = subprocess.run(
        [sys.executable, "-m", "tf_ipu_dp.launch", *words], env={**given_environ, **environ}, capture_output=True,
        text=True, check=False, timeout=240,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_dry_run_shows_the_plan_and_the_command_and_starts_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("--instances=2", "--dry_run", "--sdk=emulator", "--", "--ipus=4", "--model=mlp")
    assert (code, err) == (0, "")
    assert "replica 3  IPU 3" in out
    assert out.splitlines()[-1].endswith("--instances=2 --sdk=emulator --ipus=4 --model=mlp")
    code, out, _ = run("--dry_run", "--json", "--sdk=emulator", "--ipus=4")
    value = json.loads(out)
    assert value["plan"]["topology"]["instances"] == 2 and value["command"][2] == "tf_ipu_dp.emulator.poprun"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "environ", "sentence"),
    [
        (["--instances=2", "--max_restart=3"], {}, "--max_restart is not a flag. Did you mean --max_restarts?"),
        (["--instances=2", "--ipus=6"], {}, "--ipus=6 is not possible: IPUs come in powers of two. Use --ipus=4 or 8."),
        (["--hosts=2", "--sdk=emulator"], {}, "--hosts=2 can be planned; to start on them takes their names"),
        (["--dry_run", "--evaluate", "--run_dir=x"], {}, "--run_dir=x is not the folder of a run"),
        (["--verify", "--instances=1", "--sdk=emulator"], {}, "--verify compares one instance with several"),
        (["--launcher_args=it's"], {}, "--launcher_args=it's cannot be cut into words (No closing quotation)."),
        ([], {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
         "launch starts the instances, but mpirun has started it as instance 1 of 2."),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_and_leaves_nothing_behind(tmp_path, monkeypatch, words, environ, sentence):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*words, **environ)
    assert (code, out) == (1, "")
    assert err.startswith(f"launch: {sentence}") and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
