from __future__ import annotations

import pytest

from tf_ipu_dp import cli
from tf_ipu_dp.distributed import world
from tf_ipu_dp.planning.plan import LaunchedTopology

# Eight replicas of two IPUs in four instances, as seen by the third.
POPRUN = {
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "4",
    "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "1",
    "POPDIST_LOCAL_INSTANCE_INDEX": "0",
}


def test_without_a_launcher_there_is_no_topology():
    assert world.read_launched({"PATH": "/bin"}) is None


def test_poprun_s_variables_give_instances_and_index():
    assert world.read_launched(POPRUN) == LaunchedTopology("poprun", 8, 2, instances=4, instance=2, hosts=None)


def test_open_mpi_s_variables_give_the_hosts():
    launched = world.read_launched({**POPRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert launched and launched.hosts == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"POPDIST_NUM_LOCAL_REPLICAS": None}, "POPDIST_NUM_LOCAL_REPLICAS"),
        ({"POPDIST_NUM_TOTAL_REPLICAS": "many"}, "'many'"),
        ({"POPDIST_NUM_TOTAL_REPLICAS": "9" * 5000}, "POPDIST_NUM_TOTAL_REPLICAS"),
        ({"POPDIST_NUM_IPUS_PER_REPLICA": "0"}, "POPDIST_NUM_IPUS_PER_REPLICA='0'"),
        ({"POPDIST_NUM_LOCAL_REPLICAS": "3"}, "POPDIST_NUM_LOCAL_REPLICAS=3"),
        ({"POPDIST_REPLICA_INDEX_OFFSET": "8"}, "POPDIST_REPLICA_INDEX_OFFSET=8"),
        ({"POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": "0"}, "--num-replicas"),
    ],
)
def test_variables_that_describe_no_job_are_refused_by_name(change, named):
    environ = {name: value for name, value in {**POPRUN, **change}.items() if value is not None}
    with pytest.raises(cli.UsageError) as caught:
        world.read_launched(environ)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"HOROVOD_RANK": "2", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1"}, ("horovodrun", 2, 4, 1)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, ("mpirun", 0, 2, 0)),
        ({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "3"}, ("mpiexec", 3, 4, 3)),
        ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}, ("srun", 5, 8, 1)),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_other_launchers_tell_rank_and_size(environ, ranks):
    assert world.read_ranks(environ) == world.Ranks(*ranks)


@pytest.mark.parametrize(
    "environ",
    [{}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}],
    ids=["nothing", "a batch script", "alone"],
)
def test_a_process_that_is_alone_has_no_rank(environ):
    assert world.read_ranks(environ) is None


def test_a_rank_beyond_the_size_is_refused():
    with pytest.raises(cli.UsageError, match="PMI_RANK=4 and PMI_SIZE=4 do not fit"):
        world.read_ranks({"PMI_RANK": "4", "PMI_SIZE": "4"})


def test_ranks_give_the_variables_that_poprun_would_have_set():
    launched = [
        world.read_launched(world.Ranks("srun", rank, 4, rank % 2).variables(replicas=8, ipus_per_replica=2))
        for rank in range(4)
    ]
    assert launched == [LaunchedTopology("poprun", 8, 2, instances=4, instance=rank) for rank in range(4)]


def test_who_differs_from_most_is_named_with_what_it_has():
    values = [{"host": f"h{rank}", "--seed": "1", "the version of numpy": "1.19"} for rank in range(3)]
    assert world.describe_differences(values) == []
    values[2]["--seed"] = "2"
    del values[0]["the version of numpy"]
    assert world.describe_differences(values) == [
        "instance 2 on h2 has --seed 2 where the others have 1",
        "instance 0 on h0 has the version of numpy nothing where the others have 1.19",
    ]


def test_one_instance_exchanges_with_itself_alone():
    alone = world.World()
    assert alone.sum_over_instances([1.0, 2.5]) == [1.0, 2.5]
    assert alone.gather(b"x") == [b"x"] and alone.broadcast_from_leader("äx") == "äx"
    assert alone.hosts_where(False) == [] and len(alone.hosts_where(True)) == 1
    assert alone.compare_digests([("a", 1), ("b", 2)]) is None
    alone.compare({"--seed": "1"})
