"""How the processes of a job find each other: at a rendezvous server, run by poprun or by instance 0.

poprun and `horovodrun` set all variables that Horovod needs. `mpirun` and `srun` set only rank and size: then instance
0 runs the server, at an address and port that all instances can compute. Under `mpirun` with a Horovod that was built
with MPI none of this is needed, unless the user selects Gloo.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import time
import zlib
from typing import Dict, Mapping, MutableMapping, Optional, Tuple

from tf_ipu_dp.emulator.launcher import network
from tf_ipu_dp.emulator.launcher.rendezvous_server import Server

SERVER_VARIABLE = "IPU_EMULATOR_RENDEZVOUS"
ADDRESS_VARIABLE = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_TIMEOUT_S = 60.0
_FIRST_PORT, _PORTS = 15_000, 17_000  # below the ephemeral ports of Linux
# The variables of launchers for each of Horovod's, the more specific ones first.
_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
    "SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"),
    "CROSS_RANK": ("SLURM_NODEID",),
}
# What the mpirun of Open MPI, and those of MPICH and Intel, set for every process; and how MPI reaches mpirun.
_MPIRUN_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID")
_MPIRUN_SERVERS = ("PMIX_SERVER_URI", "PMI_FD", "PMI_PORT")
_JOB_IDS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


def variables(address: str, port: int, interface: str, host: str, secret: str = "") -> Dict[str, str]:
    """Returns the variables by which Horovod finds the server, and the secret that the server asks for."""
    return {
        # Horovod asks http://ADDR:PORT/..., so that what stands here behind the address comes first in every path.
        ADDRESS_VARIABLE: f"{address}:{port}/{secret}" if secret else address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def connects_by_mpi(environ: Mapping[str, str], built: bool) -> bool:
    """Whether instances connect through MPI: Horovod was built with it, and mpirun or the user selects it."""
    asked = environ.get("HOROVOD_CONTROLLER", "").lower()
    if asked == "mpi" and not built:
        raise RuntimeError(
            "HOROVOD_CONTROLLER=mpi, but this Horovod was built without MPI. Use HOROVOD_CONTROLLER=gloo."
        )
    is_from_mpirun = any(name in environ for name in _MPIRUN_VARIABLES) and any(
        name.startswith(_MPIRUN_SERVERS) for name in environ
    )
    return built and (asked == "mpi" or (not asked and is_from_mpirun))


def complete(environ: MutableMapping[str, str], instance: int, instances: int) -> Optional[Server]:
    """Adds the variables that Horovod needs and the launcher has not set; returns the server that instance 0 starts."""
    if ADDRESS_VARIABLE in environ:
        return None
    ranks = find_ranks(environ, instance, instances)
    address, port = find_server(environ, ranks)
    secret = environ.get(SERVER_VARIABLE, "").partition("/")[2]
    server = None
    if ranks["RANK"] == 0:
        slots = [(str(host), ranks["LOCAL_SIZE"]) for host in range(ranks["CROSS_SIZE"])]
        try:
            server = Server(slots, [address], port, secret=secret)
        except OSError as error:
            taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise RuntimeError(f"Port {port} {taken}. Set {SERVER_VARIABLE}={address}:PORT to another.") from error
    else:
        _wait_for_server(address, port)
    for name, value in ranks.items():
        environ.setdefault(f"HOROVOD_{name}", str(value))
    found = variables(address, port, network.interface_towards(address), str(ranks["CROSS_RANK"]), secret)
    for name, text in found.items():
        environ.setdefault(name, text)
    return server


def find_ranks(environ: Mapping[str, str], instance: int, instances: int) -> Dict[str, int]:
    """Returns Horovod's ranks and sizes from the launcher's variables; without any, all instances are on this host."""
    ranks = {"RANK": instance, "SIZE": instances}
    # Below mpirun, Slurm's variables describe the processes of mpirun itself.
    foreign = ("SLURM_",) if any(name in environ for name in _MPIRUN_VARIABLES) else ()
    for name, theirs in _NAMES.items():
        for each in (f"HOROVOD_{name}", *(their for their in theirs if not their.startswith(foreign))):
            number = re.match("[0-9]+", environ.get(each, ""))  # Slurm has 2(x3) for 2 on each of 3 hosts
            if number:
                ranks[name] = int(number[0])
                break
    ranks.setdefault("LOCAL_SIZE", ranks["SIZE"])
    if ranks["SIZE"] % ranks["LOCAL_SIZE"]:
        raise RuntimeError(
            f"{ranks['SIZE']} instances with {ranks['LOCAL_SIZE']} on this host are not spread evenly. "
            "Start the same number on every host."
        )
    local = ranks["RANK"] % ranks["LOCAL_SIZE"]
    if ranks.setdefault("LOCAL_RANK", local) != local and "CROSS_RANK" not in ranks:
        raise RuntimeError(
            f"Instance {ranks['RANK']} is number {ranks['LOCAL_RANK']} of {ranks['LOCAL_SIZE']} on its host: the "
            "instances of a host are not consecutive. Start them with mpirun --map-by slot."
        )
    ranks.setdefault("CROSS_RANK", ranks["RANK"] // ranks["LOCAL_SIZE"])
    ranks["CROSS_SIZE"] = ranks["SIZE"] // ranks["LOCAL_SIZE"]
    return ranks


def find_server(environ: Mapping[str, str], ranks: Mapping[str, int]) -> Tuple[str, int]:
    """Returns address and port of the server: what the user set, or a port of this host that depends on the job."""
    asked = environ.get(SERVER_VARIABLE, "").partition("/")[0]  # a secret may follow
    if asked:
        host, _, port = asked.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise RuntimeError(f"{SERVER_VARIABLE}={asked} is not an address like node0:29400.")
        try:
            return socket.gethostbyname(host), int(port)
        except OSError as error:
            raise RuntimeError(
                f"{SERVER_VARIABLE}={asked}: the name {host} cannot be resolved ({error.strerror})."
            ) from error
    if ranks["CROSS_SIZE"] > 1:
        raise RuntimeError(
            f"The {ranks['SIZE']} instances are on {ranks['CROSS_SIZE']} hosts and cannot find each other. "
            f"Set {SERVER_VARIABLE}=HOST:PORT on all of them, with the host of instance 0 and a free port."
        )
    job = "/".join(environ[name] for name in _JOB_IDS if name in environ) or f"children of {os.getppid()}"
    return network.LOOPBACK, _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _wait_for_server(address: str, port: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            with contextlib.closing(socket.create_connection((address, port), timeout=5.0)):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"Instance 0 did not answer at {address} port {port} within {_TIMEOUT_S:.0f} s "
                    f"({error.strerror or error}). Check why it has not started, or set {SERVER_VARIABLE}=HOST:PORT."
                ) from error
        time.sleep(0.1)
