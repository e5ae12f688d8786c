"""The environment variables that describe an instance's place in the job. poprun sets them, `popdist` reads them."""

from __future__ import annotations

from typing import Mapping

TOTAL_REPLICAS = "POPDIST_NUM_TOTAL_REPLICAS"
LOCAL_REPLICAS = "POPDIST_NUM_LOCAL_REPLICAS"
IPUS_PER_REPLICA = "POPDIST_NUM_IPUS_PER_REPLICA"
REPLICA_OFFSET = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE = "POPDIST_LOCAL_INSTANCE_INDEX"
IS_UNIFORM = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
EXECUTABLE_CACHE = "POPDIST_EXECUTABLE_CACHE_PATH"


def instance_index(environ: Mapping[str, str]) -> int:
    """Returns which instance of its job a process with these variables is; 0 without a job."""
    offset, local = (int(environ.get(name, "0")) for name in (REPLICA_OFFSET, LOCAL_REPLICAS))
    return offset // (local or 1)
