"""Where the processes of a job find each other: Horovod's own server, started by poprun or by instance 0.

poprun tells every instance all that Horovod needs. Under `horovodrun` that is there too. `mpirun` and `srun` tell only
rank and size: then instance 0 serves, at a place that all can work out. Under `mpirun`, and with a Horovod that has
MPI, nothing of this is needed, unless the user asks for Gloo.
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

from tf_ipu_dp.emulator.launcher import exit_notices, hosts

PLACE = "IPU_EMULATOR_RENDEZVOUS"
_PATIENCE_S = 60.0
_FIRST_PORT, _PORTS = 15_000, 17_000  # below those that systems hand out
# The names that launchers have for the same thing, the more specific ones first.
_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
    "SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE"),
    "CROSS_RANK": ("SLURM_NODEID",),
}
# What the mpirun of Open MPI, and those of MPICH and Intel, tell every process; and how MPI reaches them.
_OF_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "MPI_LOCALRANKID")
_TO_MPIRUN = ("PMIX_SERVER_URI", "PMI_FD", "PMI_PORT")
_JOBS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID")


class Server:
    """Horovod's server, in a thread of this process."""

    def __init__(
        self,
        slots: Sequence[Tuple[str, int]],
        address: str,
        port: int = 0,
        on_leaving: Callable[[int], None] = lambda instance: None,
    ) -> None:
        from horovod.runner.common.util.hosts import HostInfo, get_host_assignments
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        class Quiet(RendezvousHTTPServer):  # type: ignore[misc]
            request_queue_size = 1024  # all instances come at once
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Says nothing about somebody who hangs up."""

        class Handler(RendezvousHandler):  # type: ignore[misc]
            def do_PUT(self) -> None:  # noqa: N802
                instance = exit_notices.parse(self.path)
                if instance is not None:
                    on_leaving(instance)  # before the answer, on which the instance goes
                super().do_PUT()

            def do_DELETE(self) -> None:  # noqa: N802
                """Forgets the addresses of a circle when all of it have met: they may meet anew, at others.

                Horovod's own handler forgets with them who else has met. Where circles meet at the same time, some are
                never forgotten then, and at the next meeting instances look for each other where nobody is.
                """
                scope, _, key = self.path.lstrip("/").partition("/")
                if scope not in self.server.scope_size:
                    super().do_DELETE()
                    return
                with self.server.finished_list_lock, self.server.cache_lock:
                    met = self.server.finished_list[scope]
                    if key not in met:
                        met.append(key)
                    if len(met) == self.server.scope_size[scope]:
                        met.clear()
                        self.server.cache.pop(scope, None)
                self.send_status_code(http.HTTPStatus.OK)

        self._server = Quiet((address, port), Handler, 0)
        infos = [HostInfo(host, count) for host, count in slots]
        self._server.init(get_host_assignments(infos, sum(count for _, count in slots)))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def stop(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()


def variables(address: str, port: int, interface: str, host: str) -> Dict[str, str]:
    """Returns what Horovod asks of the environment to find the server."""
    return {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_HOSTNAME": host,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def is_by_mpi(environ: Mapping[str, str], built: bool) -> bool:
    """Whether instances meet through MPI: Horovod was built with it, and mpirun has started them or the user asks."""
    asked = environ.get("HOROVOD_CONTROLLER", "").lower()
    if asked == "mpi" and not built:
        raise RuntimeError(
            "HOROVOD_CONTROLLER=mpi, but this Horovod was built without MPI. Use HOROVOD_CONTROLLER=gloo."
        )
    is_from_mpirun = any(name in environ for name in _OF_MPIRUN) and any(
        name.startswith(_TO_MPIRUN) for name in environ
    )
    return built and (asked == "mpi" or (not asked and is_from_mpirun))


def complete(environ: MutableMapping[str, str], instance: int, instances: int) -> Optional[Server]:
    """Adds what Horovod needs to the environment of an instance whose launcher has not; instance 0 gets the server."""
    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        return None
    ranks = find_ranks(environ, instance, instances)
    address, port = find_place(environ, ranks)
    server = None
    if ranks["RANK"] == 0:
        slots = [(str(host), ranks["LOCAL_SIZE"]) for host in range(ranks["CROSS_SIZE"])]
        bound = hosts.LOOPBACK if address == hosts.LOOPBACK else ""
        try:
            server = Server(slots, bound, port)
        except OSError as error:
            taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise RuntimeError(f"Port {port} {taken}. Set {PLACE}={address}:PORT to another.") from error
    else:
        _wait_for(address, port)
    for name, value in ranks.items():
        environ.setdefault(f"HOROVOD_{name}", str(value))
    found = variables(address, port, _interface_towards(address), str(ranks["CROSS_RANK"]))
    for name, text in found.items():
        environ.setdefault(name, text)
    return server


def find_ranks(environ: Mapping[str, str], instance: int, instances: int) -> Dict[str, int]:
    """Returns rank, size and so on from whatever launcher has told them; else all are on this host."""
    ranks = {"RANK": instance, "SIZE": instances}
    # In a Slurm job, what Slurm says below mpirun is about mpirun's own processes.
    foreign = ("SLURM_",) if any(name in environ for name in _OF_MPIRUN) else ()
    for name, theirs in _NAMES.items():
        for each in (f"HOROVOD_{name}", *(their for their in theirs if not their.startswith(foreign))):
            number = re.match("[0-9]+", environ.get(each, ""))  # Slurm writes 2(x3) for 2 on each of 3 hosts
            if number:
                ranks[name] = int(number[0])
                break
    ranks.setdefault("LOCAL_SIZE", ranks["SIZE"])
    if ranks["SIZE"] % ranks["LOCAL_SIZE"]:
        raise RuntimeError(
            f"{ranks['SIZE']} instances with {ranks['LOCAL_SIZE']} on this host are not dealt evenly. "
            "Start as many on every host."
        )
    local = ranks["RANK"] % ranks["LOCAL_SIZE"]
    if ranks.setdefault("LOCAL_RANK", local) != local and "CROSS_RANK" not in ranks:
        raise RuntimeError(
            f"Instance {ranks['RANK']} is number {ranks['LOCAL_RANK']} of {ranks['LOCAL_SIZE']} on its host, so that "
            "the instances of a host do not follow each other. Start them with mpirun --map-by slot."
        )
    ranks.setdefault("CROSS_RANK", ranks["RANK"] // ranks["LOCAL_SIZE"])
    ranks["CROSS_SIZE"] = ranks["SIZE"] // ranks["LOCAL_SIZE"]
    return ranks


def find_place(environ: Mapping[str, str], ranks: Mapping[str, int]) -> Tuple[str, int]:
    """Returns address and port of the server: as the user says, or on this host, different for every job."""
    asked = environ.get(PLACE, "")
    if asked:
        host, _, port = asked.rpartition(":")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise RuntimeError(f"{PLACE}={asked} is not a place like node0:29400.")
        try:
            return socket.gethostbyname(host), int(port)
        except OSError as error:
            raise RuntimeError(f"{PLACE}={asked}: the name {host} is not known ({error.strerror}).") from error
    if ranks["CROSS_SIZE"] > 1:
        raise RuntimeError(
            f"The {ranks['SIZE']} instances are on {ranks['CROSS_SIZE']} hosts and cannot find each other. "
            f"Set {PLACE}=HOST:PORT on all of them, with the host of instance 0 and a free port."
        )
    job = "/".join(environ[name] for name in _JOBS if name in environ) or f"children of {os.getppid()}"
    return hosts.LOOPBACK, _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _wait_for(address: str, port: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with contextlib.closing(socket.create_connection((address, port), timeout=5.0)):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"Instance 0 did not answer at {address} port {port} within {_PATIENCE_S:.0f} s "
                    f"({error.strerror or error}). See why it has not started, or set {PLACE}=HOST:PORT."
                ) from error
        time.sleep(0.1)


def _interface_towards(address: str) -> str:
    if address.startswith("127."):
        return "lo"
    own = hosts.address_towards(address, address)
    return next((each.name for each in hosts.read_interfaces() if each.address == own), "lo")
