"""Starts a job on its hosts, supervises it to its end, and reports how it ended."""

from __future__ import annotations

import dataclasses
import importlib
import os
import secrets
import shlex
import socket
import sys
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Set, Tuple

from tf_ipu_dp.emulator import popdist_variables
from tf_ipu_dp.emulator.launcher import (
    connection_watch,
    failure_report,
    network,
    poprun_options,
    processes,
    remote_host,
    rendezvous,
    supervisor,
    tagged_output,
)
from tf_ipu_dp.emulator.launcher.connection_watch import ConnectionWatch
from tf_ipu_dp.emulator.launcher.host_job import HostJob, forwarded_variables, inherited_environment
from tf_ipu_dp.emulator.launcher.job import Job, render_topology
from tf_ipu_dp.emulator.launcher.remote_host import RemoteHost
from tf_ipu_dp.emulator.launcher.rendezvous_server import Server

# Defaults, which the user's environment overrides.
_HOROVOD = {
    # A Horovod with MPI would look for mpirun, even for one instance.
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
}
# Compilations and slow inputs keep other instances waiting; poprun itself detects a failed one, or one that is stopped.
_GLOO_TIMEOUT, _GLOO_TIMEOUT_S = "HOROVOD_GLOO_TIMEOUT_SECONDS", 600.0

# The instance whose output has no tags on a terminal; in files all have them.
UNTAGGED_VARIABLE = "IPU_EMULATOR_UNTAGGED"


def run_job(options: poprun_options.Options, job: Job, only_output_from: Optional[int]) -> int:
    """Returns the exit status of the first instance that failed, or 0. Raises HostError for an unreachable host."""
    if options.is_on("print-topology"):
        sys.stdout.write(render_topology(job))
        sys.stdout.flush()
    failure, output = _run_once(options, job, only_output_from)
    if failure is not None and failure.may_start_again:
        print(f"poprun: {failure.reason} All instances are started again.", file=sys.stderr)
        failure, output = _run_once(options, job, only_output_from)
    status = _report_end(job, output, failure)
    if options.is_on("verbose"):
        print(f"poprun: exited with status {status}.", file=sys.stderr)
    return status


def _run_once(
    options: poprun_options.Options, job: Job, only_output_from: Optional[int]
) -> Tuple[Optional[supervisor.Failure], tagged_output.TaggedOutput]:
    """Starts the instances and waits for their end; returns the first failure and their output."""
    events = supervisor.Events()
    # What is written to file descriptor 2 itself is dropped while modules are preloaded.
    own_stderr = os.fdopen(os.dup(sys.stderr.fileno()), "wb")
    streams = {"stdout": sys.stdout.buffer, "stderr": own_stderr}
    untagged = os.environ.get(UNTAGGED_VARIABLE, "")
    output = tagged_output.TaggedOutput(
        streams, only_output_from, events.output_closed, int(untagged) if untagged.isdecimal() else None
    )
    remote: Dict[str, RemoteHost] = {}
    server = None
    try:
        others = [host for host in job.hosts if not network.is_this_machine(host)]
        if others:
            choices = options.mpi().remote_shell or os.environ.get(remote_host.REMOTE_SHELL_VARIABLE)
            shell = remote_host.find_remote_shell(choices)
            remote = {host: RemoteHost(host, shell, output, events) for host in others}
            for each in remote.values():
                each.wait_until_ready()
        addresses = _Addresses(job, remote, options.text("host-subnet") or options.mpi().subnet or "")
        secret = secrets.token_hex(16)
        watch, stall_timeout_s = _watch_connections(job, events)
        server = _start_server(job, events, addresses, secret, watch)
        hosts: List[processes.HostProcesses] = []
        for host in job.hosts:
            address = (addresses.server_of(host), server.port) if server is not None else None
            interface = addresses.interface_of(host)
            connection = rendezvous.variables(*address, interface, host, secret) if address else {}
            task = _make_host_job(options, job, host, host in remote, connection, stall_timeout_s)
            if host in remote:
                taken = [socket.gethostname(), *(each.hostname for name, each in remote.items() if name != host)]
                own_name = host if len(job.hosts) > 1 and remote[host].hostname in taken else ""
                remote[host].assign(dataclasses.replace(task, server=address, own_name=own_name))
                hosts.append(remote[host])
            else:
                hosts.append(
                    processes.LocalProcesses(
                        host, task.commands(inherited_environment()), output, events, stall_timeout_s
                    )
                )
            if options.is_on("verbose"):
                sys.stderr.write(_render_commands(host, task).replace(secret, "SECRET"))
        failure = supervisor.supervise(hosts, events, watch, stall_timeout_s)
    except OSError as error:
        raise poprun_options.OptionError(f"{options.program[0]} cannot be started ({error.strerror}).") from error
    finally:
        if server is not None:
            server.stop()
        for each in remote.values():
            each.close(0.0, terminate=False)
    return failure, output


def _report_end(job: Job, output: tagged_output.TaggedOutput, failure: Optional[supervisor.Failure]) -> int:
    """Reports which instance or host failed, if one did, and returns the exit status."""
    if failure is None:
        return 0
    if failure.exit is None and failure.reason:
        print(f"poprun: {failure.reason}", file=sys.stderr)
    elif failure.exit is not None:
        instance = failure.exit.index
        output.show_last_lines(instance)
        sentence = failure_report.render(failure, instances=job.instances, hosts=len(job.hosts))
        print(f"poprun: {sentence}", file=sys.stderr)
        failure_report.write(instance, failure.host, failure, output.last_lines(instance))
    return failure.status


class _Addresses:
    """The addresses that the hosts use for the job. Within one machine that is the loopback."""

    def __init__(self, job: Job, remote: Mapping[str, RemoteHost], subnet: str) -> None:
        self._interface = dict.fromkeys(job.hosts, network.LOOPBACK_INTERFACE)
        self._server = dict.fromkeys(job.hosts, network.LOOPBACK)
        self._announced = {each.address for host in remote.values() for each in host.interfaces}
        if not remote:
            return
        ours = network.read_interfaces()
        for host, each in remote.items():
            chosen = network.choose_interface(host, each.interfaces, ours, subnet)
            self._interface[host] = chosen.name
            self._server[host] = network.address_towards(host, chosen.address)
        for host in (host for host in job.hosts if host not in remote):
            towards = next(iter(self._server[name] for name in remote))
            found = (each.name for each in ours if each.address == towards)
            self._interface[host] = next(found, network.LOOPBACK_INTERFACE)

    def server_of(self, host: str) -> str:
        """Returns the address of this machine as seen from a host."""
        return self._server[host]

    @property
    def of_server(self) -> List[str]:
        """Returns the addresses of this machine that the instances of the job connect to."""
        return sorted(set(self._server.values()))

    @property
    def of_job(self) -> Set[str]:
        """Returns the addresses that instances of the job may connect from."""
        return {*self._server.values(), *self._announced}

    def interface_of(self, host: str) -> str:
        """Returns the interface that the host's instances use."""
        return self._interface[host]


def _watch_connections(job: Job, events: supervisor.Events) -> Tuple[ConnectionWatch, float]:
    """Returns the watch that notices instances which do not connect to each other, and the stall timeout."""
    try:
        timeout_s = connection_watch.read_timeout_s(os.environ)
        stall_timeout_s = connection_watch.read_stall_timeout_s(os.environ)
    except ValueError as error:
        raise poprun_options.OptionError(str(error)) from error

    def on_timeout(was_connected: bool) -> None:
        reason = (
            f"the {job.instances} instances have not connected to each other within {timeout_s:g} s, although all "
            f"have started Horovod. On a slow or busy machine set {connection_watch.TIMEOUT_VARIABLE} to more seconds."
        )
        first = processes.Exit(0, 1)
        events.stalled(supervisor.Failure(1, first, job.host_of(0), reason, may_start_again=not was_connected))

    def on_missing(missing: List[int]) -> None:
        others = f" and {len(missing) - 1} more" if missing[1:] else ""
        host = job.host_of(missing[0])
        where = f" on host {host}" if len(job.hosts) > 1 else ""
        reason = (
            f"instance {missing[0]}{where}{others} has not begun to connect to the other instances within "
            f"{stall_timeout_s:g} s of its start: it is stopped, or hangs before Horovod's init."
        )
        events.stalled(supervisor.Failure(1, processes.Exit(missing[0], 1), host, reason, may_start_again=True))

    watch = ConnectionWatch(job.instances, timeout_s, on_timeout, on_missing)
    return watch, stall_timeout_s if job.instances > 1 else 0.0


def _start_server(
    job: Job, events: supervisor.Events, addresses: _Addresses, secret: str, watch: ConnectionWatch
) -> Optional[Server]:
    """Returns the rendezvous server; None for a single instance, which needs none."""
    if job.instances == 1:
        return None
    try:
        importlib.import_module("horovod")
    except ImportError as error:
        raise poprun_options.OptionError(
            f"--num-instances {job.instances} needs Horovod, which cannot be imported ({error}). "
            "Use --num-instances 1, or install it with python -m tf_ipu_dp.environment distributed."
        ) from error
    slots = [(host, job.instances_per_host) for host in job.hosts]
    return Server(
        slots, addresses.of_server, secret=secret, peers=addresses.of_job, on_exit_notice=events.exiting, watch=watch
    )


def _make_host_job(
    options: poprun_options.Options,
    job: Job,
    host: str,
    is_remote: bool,
    connection: Mapping[str, str],
    stall_timeout_s: float,
) -> HostJob:
    startup_hook = str(Path(__file__).resolve().parents[1] / "start")
    inherited = inherited_environment()
    mpi_variables = options.mpi().variables
    given = {
        **_HOROVOD,
        _GLOO_TIMEOUT: f"{_GLOO_TIMEOUT_S + stall_timeout_s:.0f}",
        **(forwarded_variables(inherited, list(mpi_variables)) if is_remote else {}),
        **{name: inherited[name] for name in (*_HOROVOD, _GLOO_TIMEOUT) if name in inherited},
        **connection,
        **_partition_variables(options),
        # The start-up hook adds the package's own directory, behind the standard library.
        "PYTHONPATH": os.pathsep.join(filter(None, [startup_hook, inherited.get("PYTHONPATH", "")])),
        # `python3` must be this Python.
        "PATH": os.pathsep.join(filter(None, [str(Path(sys.executable).parent), inherited.get("PATH", "")])),
        "PYTHONUNBUFFERED": "1",
    }
    if "executable-cache-path" in options.given:
        given[popdist_variables.EXECUTABLE_CACHE] = options.text("executable-cache-path")
    given.update({name: value for name, value in mpi_variables.items() if value is not None})
    instances = {
        instance: {**job.variables(instance), "IPUOF_VIPU_API_GCD_ID": str(instance)}
        for instance in job.instances_on(host)
    }
    pins = options.text("process-placement", "spreadnuma") != "disabled" and options.is_on("numa-aware") is not False
    ipus = 0 if options.is_on("offline-mode") else job.ipus
    return HostJob(
        list(options.program),
        str(Path.cwd()),
        given,
        instances,
        pins,
        ipus=ipus,
        name=job.name,
        stall_timeout_s=stall_timeout_s,
    )


def _partition_variables(options: poprun_options.Options) -> Dict[str, str]:
    if options.is_on("offline-mode"):
        return {}
    defaults = {
        "IPUOF_VIPU_API_HOST": ("vipu-server-host", "localhost"),
        "IPUOF_VIPU_API_PORT": ("vipu-server-port", "8090"),
        "IPUOF_VIPU_API_TIMEOUT": ("vipu-server-timeout", "120"),
        "IPUOF_VIPU_API_PARTITION_ID": ("vipu-partition", "emulated"),
    }
    given = {name: options.text(option, os.environ.get(name, value)) for name, (option, value) in defaults.items()}
    return {"IPUOF_LOG_LEVEL": os.environ.get("IPUOF_LOG_LEVEL", "WARN"), **given}


def _render_commands(host: str, task: HostJob) -> str:
    lines = []
    for instance, own in task.instances.items():
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted({**task.environ, **own}.items())]
        words = ["env", *variables, *map(shlex.quote, task.program)]
        lines.append(f"poprun: instance {instance} on {host}: {' '.join(words)}\n")
    return "".join(lines)
