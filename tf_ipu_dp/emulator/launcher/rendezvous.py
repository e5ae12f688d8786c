"""How the processes of a job find each other: Horovod's rendezvous server, run by poprun or by instance 0.

poprun and `horovodrun` set all variables that Horovod needs. `mpirun` and `srun` set only rank and size: then instance
0 runs the server, at an address and port that all instances can compute. Under `mpirun` with a Horovod that was built
with MPI none of this is needed, unless the user selects Gloo.
"""

from __future__ import annotations

import contextlib
import errno
import http
import os
import re
import socket
import threading
import time
import zlib
from typing import Any, Callable, Dict, Mapping, MutableMapping, Optional, Sequence, Tuple

from tf_ipu_dp.emulator.launcher import exit_notices, network
from tf_ipu_dp.emulator.launcher.connection_watch import ConnectionWatch

SERVER_VARIABLE = "IPU_EMULATOR_RENDEZVOUS"
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


class Server:
    """Horovod's server, in a thread of this process."""

    def __init__(
        self,
        slots: Sequence[Tuple[str, int]],
        address: str,
        port: int = 0,
        on_exit_notice: Callable[[int], None] = lambda instance: None,
        watch: Optional[ConnectionWatch] = None,
    ) -> None:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        class QuietServer(RendezvousHTTPServer):  # type: ignore[misc]
            request_queue_size = 1024  # all instances connect at once
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Prints nothing when a client closes its connection."""

        class Handler(RendezvousHandler):  # type: ignore[misc]
            def do_PUT(self) -> None:  # noqa: N802
                instance = exit_notices.parse(self.path)
                if instance is not None:
                    on_exit_notice(instance)  # before the answer, for which the instance waits
                if watch is not None:
                    scope, _, key = self.path.lstrip("/").partition("/")
                    watch.written(scope, key)
                super().do_PUT()

            def do_DELETE(self) -> None:  # noqa: N802
                """Removes the addresses of a process group when all its members have connected.

                They may connect again later, at other addresses. Horovod's own handler also removes the members of the
                other groups that have connected so far. So if groups connect at the same time, some are never
                removed, and at the next start instances connect to addresses that are no longer in use.
                """
                scope, _, key = self.path.lstrip("/").partition("/")
                if watch is not None:
                    watch.deleted(scope)
                if scope not in self.server.scope_size:
                    super().do_DELETE()
                    return
                with self.server.finished_list_lock, self.server.cache_lock:
                    connected = self.server.finished_list[scope]
                    if key not in connected:
                        connected.append(key)
                    if len(connected) == self.server.scope_size[scope]:
                        connected.clear()
                        self.server.cache.pop(scope, None)
                self.send_status_code(http.HTTPStatus.OK)

        self._watch = watch
        self._server = QuietServer((address, port), Handler, 0)
        infos = [HostInfo(host, count) for host, count in slots]
        self._server.init(get_host_assignments(infos, sum(count for _, count in slots)))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def stop(self) -> None:
        """Closes the port."""
        if self._watch is not None:
            self._watch.close()
        self._server.shutdown()
        self._server.server_close()


def variables(address: str, port: int, interface: str, host: str) -> Dict[str, str]:
    """Returns the variables by which Horovod finds the server."""
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
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
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return None
    ranks = find_ranks(environ, instance, instances)
    address, port = find_server(environ, ranks)
    server = None
    if ranks["RANK"] == 0:
        slots = [(str(host), ranks["LOCAL_SIZE"]) for host in range(ranks["CROSS_SIZE"])]
        bound = network.LOOPBACK if address == network.LOOPBACK else ""
        try:
            server = Server(slots, bound, port)
        except OSError as error:
            taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise RuntimeError(f"Port {port} {taken}. Set {SERVER_VARIABLE}={address}:PORT to another.") from error
    else:
        _wait_for_server(address, port)
    for name, value in ranks.items():
        environ.setdefault(f"HOROVOD_{name}", str(value))
    found = variables(address, port, network.interface_towards(address), str(ranks["CROSS_RANK"]))
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
    asked = environ.get(SERVER_VARIABLE, "")
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
