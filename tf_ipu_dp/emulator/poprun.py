"""`python -m tf_ipu_dp.emulator.poprun [OPTIONS] PROGRAM [ARGS]` emulates the SDK's poprun.

It starts the instances of a job on one host or several, each with poprun's variables and with the emulator in place of
the SDK, and connects them through Horovod's Gloo controller. Output is tagged like poprun's. A failure ends the job.
`IPU_EMULATOR_REPORT=FILE` makes it write the first failure as JSON: instance, host, status, last_lines, reason.
"""

from __future__ import annotations

if __name__ == "__main__":  # before other modules are imported, so that a signal during their import is one line
    from tf_ipu_dp.emulator.launcher import stop_signals

    stop_signals.exit_at_once()

import contextlib
import json
import os
import shutil
import sys
from typing import NoReturn, Sequence

import tf_ipu_dp
from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.emulator.launcher import failure_report, poprun_options, stop_signals
from tf_ipu_dp.emulator.launcher.job import Job, plan_job
from tf_ipu_dp.emulator.launcher.network import HostError
from tf_ipu_dp.emulator.launcher.poprun_options import OptionError, Options
from tf_ipu_dp.emulator.launcher.run_job import run_job
from tf_ipu_dp.emulator.launcher.supervisor import Failure


def main(words: Sequence[str]) -> int:
    """Starts the job and returns the exit status of the first instance that failed."""
    try:
        options = poprun_options.parse(words)
        if options.is_on("help"):
            sys.stdout.write(poprun_options.render_help(shutil.get_terminal_size().columns))
            return 0
        if options.is_on("version") or "version-format" in options.given:
            sys.stdout.write(_render_version(options.text("version-format")))
            return 0
        job = _plan(options)
        ignored = [*options.without_effect(), *(f"{word} for mpirun" for word in options.mpi().rest)]
        if ignored:
            print(f"poprun: without effect on emulated IPUs: {', '.join(ignored)}.", file=sys.stderr)
        poprun_options.export(options)
        only = options.number("only-output-from-instance", None, least=0)
        if only is not None and only >= job.instances:
            raise OptionError(
                f"There is no instance {only} for --only-output-from-instance: the last one is {job.instances - 1}."
            )
        return run_job(options, job, only)
    except (OptionError, registry.RegistryError) as error:
        print(f"poprun: {error}", file=sys.stderr)
    except HostError as error:
        print(f"poprun: {error}", file=sys.stderr)
        first = min(job.instances_on(error.host), default=0)
        failure_report.write(first, error.host, Failure(1, reason=str(error)), ())
    except stop_signals.Stopped as stopped:
        sentence = stop_signals.render(stopped.number)
        if sentence:
            print(f"poprun: {sentence}", file=sys.stderr)
        return 128 + stopped.number
    return 1


def find_mistake(words: Sequence[str]) -> str:
    """Returns why options or job would be refused, as a sentence; empty if they would not be. Starts nothing."""
    try:
        options = poprun_options.parse(words)
        if not any(options.is_on(name) for name in ("help", "version")) and "version-format" not in options.given:
            _plan(options)
    except (OptionError, registry.RegistryError) as error:
        return f"poprun: {error}"
    return ""


def _plan(options: Options) -> Job:
    names = ("num-replicas", "num-instances", "ipus-per-replica", "num-ilds")
    replicas, instances, per_replica, link_domains = (options.number(name, 1) or 1 for name in names)
    partition = None if options.is_on("offline-mode") else registry.Partition.from_environment(os.environ).size
    job = plan_job(replicas, instances, per_replica, options.hosts() or ("localhost",), link_domains, partition)
    if not options.program:
        raise OptionError("There is no program to run. Name it after the options: poprun --num-replicas 2 python3 x.py")
    if options.text("process-placement", "spreadnuma") not in ("spreadnuma", "disabled"):
        raise OptionError(
            f"--process-placement {options.text('process-placement')} is not known. Use spreadnuma or disabled."
        )
    return job


def _render_version(style: str) -> str:
    if style == "json":
        return json.dumps({"name": "poprun", "emulator": "tf_ipu_dp", "version": tf_ipu_dp.__version__}) + "\n"
    return f"poprun of the emulator in tf_ipu_dp {tf_ipu_dp.__version__}\n"


def _exit(status: int) -> NoReturn:
    """Ends the process without the interpreter's shutdown: TensorFlow may be imported, or about to be, in a thread."""
    stop_signals.exit_at_once()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    stop_signals.raise_stopped()
    _exit(main(sys.argv[1:]))
