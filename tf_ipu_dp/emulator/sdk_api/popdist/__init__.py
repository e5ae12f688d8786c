"""`popdist`: the topology from poprun's variables, or one replica without them. No TensorFlow until `init`."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterable, Optional

from tf_ipu_dp.emulator import popdist_variables
from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.refusal import refused
from tf_ipu_dp.emulator.runtime import instances as job

_BACKENDS = "the emulator's instances have one way to communicate"
registerBackend = refused("popdist.registerBackend", _BACKENDS)  # noqa: N816
registerDefaultBackend = refused("popdist.registerDefaultBackend", _BACKENDS)  # noqa: N816
registerCommunicator = refused("popdist.registerCommunicator", _BACKENDS)  # noqa: N816


def isPopdistEnvSet() -> bool:  # noqa: N802
    """Whether poprun started this process."""
    return popdist_variables.TOTAL_REPLICAS in os.environ


def init() -> None:
    """Starts the communication between the instances. Calling it again is harmless."""
    job.connect()


def isBackendInitialized() -> bool:  # noqa: N802
    """Whether `init` has been called."""
    return job.is_connected()


def initializeBackend() -> None:  # noqa: N802
    """The same as `init`."""
    init()


def finalizeBackend() -> None:  # noqa: N802
    """Ends the communication."""
    job.disconnect()


def synchronize() -> None:
    """Waits for the other instances."""
    job.barrier()


def getNumInstances() -> int:  # noqa: N802
    """Returns the number of processes."""
    return getNumTotalReplicas() // getNumLocalReplicas()


def getInstanceIndex() -> int:  # noqa: N802
    """Returns the number of this process."""
    return getReplicaIndexOffset() // getNumLocalReplicas()


def getLocalInstanceIndex() -> int:  # noqa: N802
    """Returns the number of this process on its host."""
    return _read(popdist_variables.LOCAL_INSTANCE, 0)


def getNumTotalReplicas() -> int:  # noqa: N802
    """Returns the replicas of all instances."""
    return _read(popdist_variables.TOTAL_REPLICAS, 1)


def getNumLocalReplicas() -> int:  # noqa: N802
    """Returns the replicas of this instance."""
    return _read(popdist_variables.LOCAL_REPLICAS, 1)


def getReplicaIndexOffset() -> int:  # noqa: N802
    """Returns the number of this instance's first replica."""
    return _read(popdist_variables.REPLICA_OFFSET, 0)


def getNumIpusPerReplica() -> int:  # noqa: N802
    """Returns the IPUs of one replica."""
    return _read(popdist_variables.IPUS_PER_REPLICA, 1)


def checkNumIpusPerReplica(n: int) -> bool:  # noqa: N802
    """Whether a replica has `n` IPUs in this job."""
    return n == getNumIpusPerReplica()


def getDeviceId(ipusPerReplica: int = 0) -> int:  # noqa: N802, N803
    """Returns the id of the device that this instance has to attach."""
    width = getNumLocalReplicas() * (ipusPerReplica or getNumIpusPerReplica())
    partition = registry.Partition.from_environment(os.environ)
    return partition.find(count=width)[partition.block.start // width + getInstanceIndex()].id


def execute_on_instances(
    instances: Iterable[int], func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Optional[Any]:
    """Calls the function on these instances and returns its result; None on others. All instances must call it.

    Collectives inside span these instances only.
    """
    with job.confined_to(frozenset(instances)) as is_one_of_them:
        return func(*args, **kwargs) if is_one_of_them else None


def _read(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdigit():
        raise RuntimeError(f"{name}={text!r} is not a number.")
    return int(text)
