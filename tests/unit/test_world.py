from __future__ import annotations

import pytest

from tf_ipu_dp import cli, world
from tf_ipu_dp.plan import LaunchedTopology

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
