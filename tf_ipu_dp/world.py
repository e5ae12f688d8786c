"""Who am I, and how many are we: the job as the launcher's environment describes it. No TensorFlow."""

from __future__ import annotations

from typing import Mapping, Optional

from tf_ipu_dp import cli
from tf_ipu_dp.plan import LaunchedTopology

_MOST = 2**20
_POPDIST = {
    "replicas": "POPDIST_NUM_TOTAL_REPLICAS",
    "local_replicas": "POPDIST_NUM_LOCAL_REPLICAS",
    "ipus_per_replica": "POPDIST_NUM_IPUS_PER_REPLICA",
    "offset": "POPDIST_REPLICA_INDEX_OFFSET",
}


def read_launched(environ: Mapping[str, str]) -> Optional[LaunchedTopology]:
    """Returns the job that poprun started this process in, or None when nobody did."""
    present = [name for name in _POPDIST.values() if name in environ]
    if not present:
        return None
    missing = [name for name in _POPDIST.values() if name not in environ]
    if missing:
        raise cli.UsageError(
            f"{present[0]} is set but {cli.alternatives(missing)} is not: poprun sets all of them. "
            "Start through poprun, or unset the POPDIST_* variables."
        )
    if environ.get("POPDIST_UNIFORM_REPLICAS_PER_INSTANCE", "1") == "0":
        raise cli.UsageError(
            "poprun gave the instances different numbers of replicas. "
            "Make its --num-replicas a multiple of --num-instances."
        )
    replicas, local, per_replica = (
        _count(environ, _POPDIST[key], 1) for key in ("replicas", "local_replicas", "ipus_per_replica")
    )
    offset = _count(environ, _POPDIST["offset"], 0)
    if replicas % local or offset % local or offset >= replicas:
        raise cli.UsageError(
            f"POPDIST_NUM_TOTAL_REPLICAS={replicas}, POPDIST_NUM_LOCAL_REPLICAS={local} and "
            f"POPDIST_REPLICA_INDEX_OFFSET={offset} do not describe equal instances. Start through poprun."
        )
    return LaunchedTopology(
        launcher="poprun",
        replicas=replicas,
        ipus_per_replica=per_replica,
        instances=replicas // local,
        instance=offset // local,
        hosts=_read_hosts(environ, replicas // local),
    )


def _read_hosts(environ: Mapping[str, str], instances: int) -> Optional[int]:
    """Open MPI, under poprun, tells how many instances share this host; without it the number of hosts is not known."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" not in environ:
        return None
    on_this_host = _count(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    return instances // on_this_host if instances % on_this_host == 0 else None


def _count(environ: Mapping[str, str], name: str, least: int) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 7) or not least <= int(text) <= _MOST:
        shown = environ[name][:20]
        raise cli.UsageError(f"{name}={shown!r} is not a whole number from {least} to {_MOST}. Start through poprun.")
    return int(text)
