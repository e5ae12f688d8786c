"""`python -m tf_ipu_dp.emulator.poprun [OPTIONS] PROGRAM [ARGS]` stands in for the SDK's poprun.

It starts the instances of a job on this host or several, each with poprun's variables and with the emulator in place of
the SDK, and connects them through Horovod's Gloo controller. Output is tagged as poprun's; the first failure ends all.
`IPU_EMULATOR_REPORT=FILE` makes it write down the first failure as JSON: instance, host, status, last_lines, reason.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import signal
import socket
import sys
import uuid
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import tf_ipu_dp
from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.launcher import hosts, poprun_options, processes, rendezvous, tagged_output

LayoutError = poprun_options.OptionError

_MOST = 4096
# What a user's own environment may change.
_HOROVOD = {
    # Compilations and slow inputs keep others waiting; that somebody has died is noticed by poprun.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "600",
    # A Horovod with MPI would look for mpirun, even for one instance.
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
}


@dataclasses.dataclass(frozen=True)
class Job:
    """How many of everything, and where."""

    replicas: int
    instances: int
    ipus_per_replica: int
    hosts: Tuple[str, ...] = ("localhost",)
    ilds: int = 1
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex, compare=False)

    @property
    def local_replicas(self) -> int:
        return self.replicas // self.instances

    @property
    def ipus(self) -> int:
        return self.replicas * self.ipus_per_replica

    @property
    def instances_per_host(self) -> int:
        return self.instances // len(self.hosts)

    def host_of(self, instance: int) -> str:
        """Returns where an instance runs."""
        return self.hosts[instance // self.instances_per_host]

    def on_host(self, host: str) -> List[int]:
        """Returns the instances of a host."""
        return [instance for instance in range(self.instances) if self.host_of(instance) == host]

    def ild_of(self, instance: int) -> int:
        """Returns the IPU-Link domain of an instance's first IPU."""
        return instance * self.local_replicas * self.ipus_per_replica * self.ilds // self.ipus

    def variables(self, instance: int) -> Dict[str, str]:
        """Returns what poprun tells an instance about its place."""
        host, local = divmod(instance, self.instances_per_host)
        rank = {"RANK": instance, "SIZE": self.instances, "LOCAL_RANK": local, "LOCAL_SIZE": self.instances_per_host}
        popdist = {
            "POPDIST_NUM_TOTAL_REPLICAS": self.replicas,
            "POPDIST_NUM_IPUS_PER_REPLICA": self.ipus_per_replica,
            "POPDIST_NUM_LOCAL_REPLICAS": self.local_replicas,
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": 1,
            "POPDIST_REPLICA_INDEX_OFFSET": instance * self.local_replicas,
            "POPDIST_LOCAL_INSTANCE_INDEX": local,
        }
        mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in rank.items()}
        mpi.update(OMPI_COMM_WORLD_NODE_RANK=local, OMPI_UNIVERSE_SIZE=self.instances)
        horovod = {f"HOROVOD_{name}": value for name, value in rank.items()}
        horovod.update(HOROVOD_CROSS_RANK=host, HOROVOD_CROSS_SIZE=len(self.hosts))
        return {name: str(value) for name, value in {**popdist, **mpi, **horovod}.items()}


def plan_job(
    replicas: int,
    instances: int,
    ipus_per_replica: int,
    where: Sequence[str] = ("localhost",),
    ilds: int = 1,
    partition: Optional[int] = None,
) -> Job:
    """Returns the job, or refuses what poprun would refuse, and more IPUs than the partition has."""
    if instances % len(where):
        near = _nearest(instances, lambda n: n % len(where) == 0)
        raise LayoutError(
            f"--num-instances {instances} cannot be dealt evenly to {len(where)} hosts. Use --num-instances {near}."
        )
    if replicas % instances:
        near = _nearest(replicas, lambda n: n % instances == 0 and _is_power_of_two(n * ipus_per_replica))
        near = near or _nearest(replicas, lambda n: n % instances == 0)
        raise LayoutError(
            f"--num-replicas {replicas} cannot be dealt evenly to --num-instances {instances}. "
            f"Use --num-replicas {near}."
        )
    job = Job(replicas, instances, ipus_per_replica, tuple(where), ilds)
    asked = f"--num-replicas {replicas} x --ipus-per-replica {ipus_per_replica} = {job.ipus} IPUs"
    if not _is_power_of_two(job.ipus):
        raise LayoutError(f"{asked}, but partitions come in powers of two. {_nearest_job(job)}")
    if partition is not None and job.ipus > partition:
        fits = partition // ipus_per_replica
        fewer = f"--num-replicas {fits} or " if fits >= instances else ""
        raise LayoutError(
            f"{asked}, but the emulated partition has {partition}. Use {fewer}IPU_EMULATOR_IPUS={job.ipus}."
        )
    if job.ipus % ilds:
        near = _nearest(ilds, lambda n: job.ipus % n == 0)
        raise LayoutError(f"--num-ilds {ilds} does not divide {job.ipus} IPUs. Use --num-ilds {near}.")
    return job


def main(words: Sequence[str]) -> int:
    """Starts the job and returns the exit status of the first instance that failed."""
    try:
        options = poprun_options.parse(words)
        if options.says("help"):
            sys.stdout.write(poprun_options.render_help(shutil.get_terminal_size().columns))
            return 0
        if options.says("version") or "version-format" in options.given:
            sys.stdout.write(_render_version(options.text("version-format")))
            return 0
        job = _plan(options)
        poprun_options.export(options)
        only = options.number("only-output-from-instance", None, least=0)
        if only is not None and only >= job.instances:
            raise LayoutError(f"--only-output-from-instance {only} is none of 0 to {job.instances - 1}.")
        return _run(options, job, only)
    except (LayoutError, registry.RegistryError) as error:
        print(f"poprun: {error}", file=sys.stderr)
    except hosts.HostError as error:
        print(f"poprun: {error}", file=sys.stderr)
        first = min(job.on_host(error.host), default=0)
        _report(first, error.host, processes.Failure(1, reason=str(error)), ())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 1


def _plan(options: poprun_options.Options) -> Job:
    numbers = {"num-replicas": 1, "num-instances": 1, "ipus-per-replica": 1, "num-ilds": 1}
    replicas, instances, per_replica, ilds = (options.number(name, usual) or 1 for name, usual in numbers.items())
    partition = None if options.says("offline-mode") else registry.Partition.from_environment(os.environ).size
    job = plan_job(replicas, instances, per_replica, options.hosts() or ("localhost",), ilds, partition)
    if not options.program:
        raise LayoutError("There is no program to run. Name it after the options: poprun --num-replicas 2 python3 x.py")
    if options.text("process-placement", "spreadnuma") not in ("spreadnuma", "disabled"):
        raise LayoutError(
            f"--process-placement {options.text('process-placement')} is not known. Use spreadnuma or disabled."
        )
    noted = [*options.without_effect(), *(f"{word} for mpirun" for word in options.mpi().rest)]
    if noted:
        print(f"poprun: without effect on emulated IPUs: {', '.join(noted)}.", file=sys.stderr)
    return job


def _run(options: poprun_options.Options, job: Job, only: Optional[int]) -> int:
    events = processes.Events()
    streams = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    if options.says("print-topology"):
        sys.stdout.write(_render_topology(job))
        sys.stdout.flush()
    output = tagged_output.TaggedOutput(streams, only, events.unread)
    remote: Dict[str, hosts.Remote] = {}
    server = None
    try:
        others = [host for host in job.hosts if not hosts.is_here(host)]
        if others:
            asked = options.mpi().remote_shell or os.environ.get(hosts.REMOTE_SHELL)
            shell = hosts.find_remote_shell(asked)
            remote = {host: hosts.Remote(host, shell, output, events) for host in others}
            for each in remote.values():
                each.wait()
        network = _Network(job, remote, options.text("host-subnet") or options.mpi().subnet or "")
        server = _start_server(job, events, everywhere=bool(remote))
        groups: List[processes.Processes] = []
        for host in job.hosts:
            place = (network.server_of(host), server.port) if server is not None else None
            connection = rendezvous.variables(*place, network.interface_of(host), host) if place else {}
            task = _host_job(options, job, host, host in remote, connection)
            if host in remote:
                taken = [socket.gethostname(), *(each.hostname for name, each in remote.items() if name != host)]
                own_name = host if len(job.hosts) > 1 and remote[host].hostname in taken else ""
                remote[host].give(dataclasses.replace(task, server=place, own_name=own_name))
                groups.append(remote[host])
            else:
                groups.append(processes.Group(host, task.commands(hosts.own_environment()), output, events))
            if options.says("verbose"):
                sys.stderr.write(_render_commands(host, task))
        failure = processes.supervise(groups, events)
    except OSError as error:
        raise LayoutError(f"{options.program[0]} cannot be started ({error.strerror}).") from error
    finally:
        if server is not None:
            server.stop()
        for each in remote.values():
            each.close(0.0, ask=False)
    status = _tell(job, output, failure)
    if options.says("verbose"):
        print(f"poprun: ended with exit code {status}.", file=sys.stderr)
    return status


def _tell(job: Job, output: tagged_output.TaggedOutput, failure: Optional[processes.Failure]) -> int:
    if failure is None:
        return 0
    ended = failure.exit
    if ended is not None:
        output.show_last_lines(ended.index)
        where = f" on host {failure.host}" if len(job.hosts) > 1 else ""
        why = f" ({signal.Signals(ended.by_signal).name})" if ended.by_signal else ""
        others = "; the others were ended" if job.instances > 1 else ""
        sentence = failure.reason or f"instance {ended.index} ended with {ended.status}{why}{where}{others}."
        print(f"poprun: {sentence}", file=sys.stderr)
        _report(ended.index, failure.host, failure, output.last_lines(ended.index))
    return failure.status


def _report(instance: int, host: str, failure: processes.Failure, last_lines: Sequence[str]) -> None:
    """Writes down the first failure, for whoever started us."""
    if not os.environ.get(hosts.REPORT):
        return
    path = Path(os.environ[hosts.REPORT])
    name = socket.gethostname() if host in ("", "localhost") else host
    record = {"instance": instance, "host": name, "status": failure.status, "last_lines": list(last_lines)}
    record["reason"] = failure.reason
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(record), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        print(f"poprun: {hosts.REPORT}={path} cannot be written ({error.strerror}).", file=sys.stderr)


def _host_job(
    options: poprun_options.Options, job: Job, host: str, is_remote: bool, connection: Mapping[str, str]
) -> hosts.HostJob:
    start = str(Path(__file__).resolve().parent / "start")
    own = hosts.own_environment()
    asked = options.mpi().variables
    given = {
        **_HOROVOD,
        **(hosts.forwarded(own, list(asked)) if is_remote else {}),
        **{name: own[name] for name in _HOROVOD if name in own},
        **connection,
        **_partition_variables(options),
        # The start-up hook adds the package's own directory, behind the standard library.
        "PYTHONPATH": os.pathsep.join(filter(None, [start, own.get("PYTHONPATH", "")])),
        # `python3` is to be this one.
        "PATH": os.pathsep.join(filter(None, [str(Path(sys.executable).parent), own.get("PATH", "")])),
        "PYTHONUNBUFFERED": "1",
    }
    if "executable-cache-path" in options.given:
        given["POPDIST_EXECUTABLE_CACHE_PATH"] = options.text("executable-cache-path")
    given.update({name: value for name, value in asked.items() if value is not None})
    instances = {
        instance: {**job.variables(instance), "IPUOF_VIPU_API_GCD_ID": str(instance)} for instance in job.on_host(host)
    }
    numa = options.text("process-placement", "spreadnuma") != "disabled" and options.says("numa-aware") is not False
    ipus = 0 if options.says("offline-mode") else job.ipus
    return hosts.HostJob(list(options.program), str(Path.cwd()), given, instances, numa, ipus=ipus, name=job.name)


def _partition_variables(options: poprun_options.Options) -> Dict[str, str]:
    if options.says("offline-mode"):
        return {}
    usual = {
        "IPUOF_VIPU_API_HOST": ("vipu-server-host", "localhost"),
        "IPUOF_VIPU_API_PORT": ("vipu-server-port", "8090"),
        "IPUOF_VIPU_API_TIMEOUT": ("vipu-server-timeout", "120"),
        "IPUOF_VIPU_API_PARTITION_ID": ("vipu-partition", "emulated"),
    }
    given = {name: options.text(option, os.environ.get(name, value)) for name, (option, value) in usual.items()}
    return {"IPUOF_LOG_LEVEL": os.environ.get("IPUOF_LOG_LEVEL", "WARN"), **given}


class _Network:
    """Which addresses the hosts use. Within one machine that is the loopback."""

    def __init__(self, job: Job, remote: Mapping[str, hosts.Remote], subnet: str) -> None:
        self._interface = dict.fromkeys(job.hosts, "lo")
        self._server = dict.fromkeys(job.hosts, hosts.LOOPBACK)
        if not remote:
            return
        ours = hosts.read_interfaces()
        for host, each in remote.items():
            chosen = hosts.choose_interface(host, each.interfaces, ours, subnet)
            self._interface[host] = chosen.name
            self._server[host] = hosts.address_towards(host, chosen.address)
        for host in (host for host in job.hosts if host not in remote):
            towards = next(iter(self._server[name] for name in remote))
            self._interface[host] = next((each.name for each in ours if each.address == towards), "lo")

    def server_of(self, host: str) -> str:
        """Returns the address of this machine that a host sees."""
        return self._server[host]

    def interface_of(self, host: str) -> str:
        """Returns the interface that the host's instances use."""
        return self._interface[host]


def _start_server(job: Job, events: processes.Events, everywhere: bool) -> Optional[rendezvous.Server]:
    """Returns where Horovod's processes find each other. One instance needs no such place."""
    if job.instances == 1:
        return None
    try:
        slots = [(host, job.instances_per_host) for host in job.hosts]
        return rendezvous.Server(slots, "" if everywhere else hosts.LOOPBACK, on_leaving=events.leaving)
    except ImportError as error:
        raise LayoutError(
            f"--num-instances {job.instances} needs Horovod, which cannot be imported ({error}). "
            "Use --num-instances 1, or install it with python -m tf_ipu_dp.environment distributed."
        ) from error


def _nearest(number: int, is_possible: Callable[[int], bool]) -> str:
    below = next((n for n in range(min(number, _MOST) - 1, 0, -1) if is_possible(n)), None)
    above = next((n for n in range(number + 1, max(2 * number, _MOST) + 1) if is_possible(n)), None)
    return " or ".join(str(n) for n in (below, above) if n is not None)


def _nearest_job(job: Job) -> str:
    """Returns what to change: all numbers must be powers of two, so that one change is not always enough."""
    options = {"--num-replicas": job.replicas, "--ipus-per-replica": job.ipus_per_replica}
    options.update({"--num-instances": job.instances})
    odd = {name: number for name, number in options.items() if not _is_power_of_two(number)}
    advice = [f"{name} {_nearest(number, _is_power_of_two)}" for name, number in odd.items()]
    if not _is_power_of_two(len(job.hosts)):
        advice.append(f"{_nearest(len(job.hosts), _is_power_of_two)} hosts")
    return f"Use {', and '.join(advice)}."


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _render_version(style: str) -> str:
    if style == "json":
        return json.dumps({"name": "poprun", "emulator": "tf_ipu_dp", "version": tf_ipu_dp.__version__}) + "\n"
    return f"poprun of the emulator in tf_ipu_dp {tf_ipu_dp.__version__}\n"


def _render_topology(job: Job) -> str:
    rows = [("host", "ILD", "instance", "replicas", "IPUs")]
    width = job.local_replicas * job.ipus_per_replica
    for instance in range(job.instances):
        first = instance * job.local_replicas
        replicas = _span(first, first + job.local_replicas - 1)
        ipus = _span(instance * width, (instance + 1) * width - 1)
        rows.append((job.host_of(instance), str(job.ild_of(instance)), str(instance), replicas, ipus))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _render_commands(host: str, task: hosts.HostJob) -> str:
    lines = []
    for instance, own in task.instances.items():
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted({**task.environ, **own}.items())]
        words = ["env", *variables, *map(shlex.quote, task.program)]
        lines.append(f"poprun: instance {instance} on {host}: {' '.join(words)}\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
