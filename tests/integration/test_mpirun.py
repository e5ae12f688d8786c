"""Instances that a real mpirun has started: over MPI where Horovod has it, else over Gloo."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tf_ipu_dp.collectives import results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("mpirun"), reason="needs mpirun on the PATH"),
]

PROGRAM = """
import os, sys
from tf_ipu_dp import emulator; from tf_ipu_dp.distributed import world
emulator.install()
os.environ.update(world.read_ranks(os.environ).variables(replicas=4, ipus_per_replica=1))
import horovod.tensorflow as horovod, popdist, tensorflow as tf
from tensorflow.python.ipu import distributed
expected = horovod.mpi_built() and "HOROVOD_CONTROLLER" not in os.environ
popdist.init()
seen = distributed.allgather(tf.constant(popdist.getInstanceIndex())).numpy().tolist()
sys.stdout.write(f"{seen} {popdist.getNumInstances()} {horovod.mpi_enabled() == expected}\\n")
"""


@pytest.mark.parametrize("asked", [{}, {"HOROVOD_CONTROLLER": "gloo"}], ids=["nothing", "gloo"])
def test_instances_of_mpirun_meet_over_mpi_where_horovod_has_it_unless_gloo_is_asked_for(asked):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = ["mpirun", "-np", "2", "--host", "localhost:2", "--bind-to", "none", sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        words, env={**os.environ, **root, **asked}, capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[0, 1] 2 True\n" * 2), done.stderr


def test_an_instance_of_mpirun_that_is_killed_is_named_and_the_job_goes_on(
    tmp_path, start_command, wait_for_checkpoint, pids_of
):
    run = tmp_path / "run"
    words = [
        "--launcher=mpirun", "--instances=2", "--max_restarts=1", "--", "--sdk=emulator", "--model=mlp",
        "--dataset=synthetic", "--image_size=28", "--epochs=400steps", "--checkpoint_every=20", f"--run_dir={run}",
    ]  # fmt: skip
    job = start_command("launch", *words)
    wait_for_checkpoint(run, job)
    os.kill(pids_of(run)[1], signal.SIGKILL)
    _, err = job.communicate(timeout=200)
    said = [line for line in err.splitlines() if line.startswith("launch: instance 1 on ")]
    assert job.returncode == 0, err
    assert len(said) == 1 and "was killed by SIGKILL; restarting from step " in said[0]


def test_collectives_are_measured_over_mpi(run_command, tmp_path):
    out = tmp_path / "measured"
    done = run_command("collectives", "measure", "--engine=mpi", "--bytes=64KiB", "--trials=300", f"--out={out}")
    if "needs a Horovod that was built with it" in done.stderr:
        pytest.skip("Horovod was built without MPI")
    assert done.returncode == 0, done.stderr
    found = results.read(out)
    assert found.description.engine == "Horovod 0.28.1 on MPI"
    assert found.series[0].rank_seconds.shape == (300, 2) and found.series[0].facts.wrong_sums == 0
