"""`python -m tf_ipu_dp.emulator.poprun [OPTIONS] PROGRAM [ARGS]` stands in for the SDK's poprun.

It starts the instances of a job on this host, each with poprun's variables and with the emulator in place of the SDK,
and connects them through Horovod's Gloo controller. Output is tagged as poprun's; the first failure ends all.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path
from typing import Dict, List, Mapping, NoReturn, Optional, Sequence

from tf_ipu_dp.emulator import processes

_YES = {"1": True, "yes": True, "on": True, "true": True, "0": False, "no": False, "off": False, "false": False}
# About partitions, remote hosts' set-up and mpirun: they have no meaning for emulated IPUs.
_WITHOUT_EFFECT = (
    "--num-ilds", "--vipu-server-host", "--vipu-server-port", "--vipu-server-timeout", "--vipu-partition",
    "--vipu-partition-attempts", "--vipu-cluster", "--vipu-allocation", "--update-partition", "--reset-partition",
    "--remove-partition", "--mpi-global-args", "--process-placement", "--numa-aware", "--offline-mode", "--host-subnet",
)  # fmt: skip


class LayoutError(ValueError):
    """The options describe a job that cannot be. The text is shown to the user as is."""


@dataclasses.dataclass(frozen=True)
class Job:
    """How many of everything."""

    replicas: int
    instances: int
    ipus_per_replica: int

    @property
    def local_replicas(self) -> int:
        return self.replicas // self.instances

    def variables(self, instance: int) -> Dict[str, str]:
        """Returns what poprun tells an instance."""
        rank = {"RANK": instance, "SIZE": self.instances, "LOCAL_RANK": instance, "LOCAL_SIZE": self.instances}
        popdist = {
            "POPDIST_NUM_TOTAL_REPLICAS": self.replicas,
            "POPDIST_NUM_IPUS_PER_REPLICA": self.ipus_per_replica,
            "POPDIST_NUM_LOCAL_REPLICAS": self.local_replicas,
            "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE": 1,
            "POPDIST_REPLICA_INDEX_OFFSET": instance * self.local_replicas,
            "POPDIST_LOCAL_INSTANCE_INDEX": instance,
        }
        mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in rank.items()}
        horovod = {f"HOROVOD_{name}": value for name, value in rank.items()}
        horovod.update(HOROVOD_CROSS_RANK=0, HOROVOD_CROSS_SIZE=1)
        return {name: str(value) for name, value in {**popdist, **mpi, **horovod}.items()}


def plan_job(replicas: int, instances: int, ipus_per_replica: int) -> Job:
    """Returns the job, or refuses what poprun would refuse."""
    for name, number in (("replicas", replicas), ("instances", instances)):
        if number < 1:
            raise LayoutError(f"--num-{name} {number} is less than 1.")
    if replicas % instances:
        near = [n for n in (replicas // instances * instances, (replicas // instances + 1) * instances) if n]
        raise LayoutError(
            f"--num-replicas {replicas} cannot be dealt evenly to --num-instances {instances}. "
            f"Use --num-replicas {' or '.join(map(str, near))}."
        )
    ipus = replicas * ipus_per_replica
    if ipus < 1 or ipus & (ipus - 1):
        raise LayoutError(
            f"--num-replicas {replicas} x --ipus-per-replica {ipus_per_replica} = {ipus} IPUs, but partitions come in "
            "powers of two."
        )
    return Job(replicas, instances, ipus_per_replica)


def main(words: Sequence[str]) -> int:
    """Starts the job and returns the exit status of the first instance that failed."""
    try:
        options = _parse(words)
        job = plan_job(options.num_replicas, options.num_instances, options.ipus_per_replica)
    except LayoutError as error:
        print(f"poprun: {error}", file=sys.stderr)
        return 1
    noted = [name for name in _WITHOUT_EFFECT if getattr(options, name[2:].replace("-", "_")) is not None]
    if noted:
        print(f"poprun: {', '.join(noted)} has no effect on emulated IPUs.", file=sys.stderr)
    if options.print_topology:
        sys.stdout.write(_render_topology(job))
    server = _Rendezvous(job.instances)
    commands = [
        processes.Command(options.program, _environment(job, instance, options, server))
        for instance in range(job.instances)
    ]
    only: Optional[int] = options.only_output_from_instance

    def say(instance: int, name: str, line: str) -> None:
        if only in (None, instance):
            stream = sys.stdout if name == "stdout" else sys.stderr
            stream.write(f"[1,{instance}]<{name}>:{line}\n")
            stream.flush()

    try:
        failure = processes.Group(commands, say).run()
    except OSError as error:
        print(f"poprun: {options.program[0]} cannot be started ({error.strerror}).", file=sys.stderr)
        return 1
    finally:
        server.stop()
    if failure is None:
        return 0
    if failure.index >= 0:
        if only not in (None, failure.index):
            for line in failure.last_lines:
                print(f"[1,{failure.index}]<stderr>:{line}", file=sys.stderr)
        print(f"poprun: instance {failure.index} ended with {failure.status}; the others were ended.", file=sys.stderr)
    return failure.status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LayoutError(f"{message[0].upper()}{message[1:]}.")


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="poprun", description=__doc__, allow_abbrev=False)
    whole = {"--num-replicas": 1, "--num-instances": 1, "--ipus-per-replica": 1}
    for name, default in whole.items():
        parser.add_argument(name, type=int, default=default, metavar="N")
    parser.add_argument("--only-output-from-instance", type=int, metavar="N")
    parser.add_argument("--executable-cache-path", metavar="DIR")
    parser.add_argument("--mpi-local-args", metavar="ARGS", default="")
    parser.add_argument("--print-topology", type=_yes_or_no, default=False, metavar="yes|no")
    parser.add_argument("-v", "--verbose", action="count", default=0)
    parser.add_argument("--allow-run-as-root", nargs="?", const="yes")
    for name in _WITHOUT_EFFECT:
        parser.add_argument(name, metavar="X")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM [ARGS]")
    options = parser.parse_args(list(words))
    if not options.program:
        raise LayoutError("There is no program to run. Name it after the options: poprun --num-replicas 2 python3 x.py")
    return options


def _yes_or_no(text: str) -> bool:
    try:
        return _YES[text.lower()]
    except KeyError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither yes nor no") from None


def _environment(job: Job, instance: int, options: argparse.Namespace, server: _Rendezvous) -> Mapping[str, str]:
    root = Path(__file__).resolve().parents[2]
    path = [str(root / "tf_ipu_dp" / "emulator" / "start"), str(root), os.environ.get("PYTHONPATH", "")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = str(max(cores // job.instances, 1))
    given = {
        **os.environ,
        **job.variables(instance),
        **server.variables(),
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # `python3` is to be this one.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"):
        given.setdefault(name, threads)
    if options.executable_cache_path:
        given["POPDIST_EXECUTABLE_CACHE_PATH"] = options.executable_cache_path
    given.update(_forwarded(options.mpi_local_args.split()))
    return given


def _forwarded(words: List[str]) -> Dict[str, str]:
    """Returns the variables of mpirun's -x NAME=VALUE; those without a value are handed on anyway."""
    pairs = [words[number + 1] for number, word in enumerate(words[:-1]) if word == "-x"]
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def _render_topology(job: Job) -> str:
    lines = ["instance  replicas  IPUs"]
    for instance in range(job.instances):
        first = instance * job.local_replicas
        ipus = (first * job.ipus_per_replica, (first + job.local_replicas) * job.ipus_per_replica - 1)
        lines.append(f"{instance:>8}  {first} to {first + job.local_replicas - 1:<4}  {ipus[0]} to {ipus[1]}")
    return "\n".join(lines) + "\n"


class _Rendezvous:
    """Where Horovod's processes find each other. One instance needs none."""

    def __init__(self, instances: int) -> None:
        self._port: Optional[int] = None
        if instances == 1:
            return
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.http.http_server import RendezvousServer

        self._server = RendezvousServer(0)
        self._port = self._server.start()
        self._server.init(get_host_assignments(parse_hosts(f"localhost:{instances}"), instances))

    def variables(self) -> Dict[str, str]:
        """Returns what Horovod asks of the environment."""
        if self._port is None:
            return {}
        return {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(self._port),
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_IFACE": "lo",
            "HOROVOD_HOSTNAME": "localhost",
        }

    def stop(self) -> None:
        """Closes the port."""
        if self._port is not None:
            self._server.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
