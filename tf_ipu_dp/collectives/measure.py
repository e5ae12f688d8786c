"""`collectives measure`: all-reduces on the engine that training uses, on this host, on others or on emulated ones."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric_flags, measured_result, quantities, rank_job, report, results, size
from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.collectives.network import EmulatedHosts
from tf_ipu_dp.collectives.protocol import Order
from tf_ipu_dp.collectives.report_content import make_content
from tf_ipu_dp.collectives.results import Result
from tf_ipu_dp.config import parsers
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.environment import installation
from tf_ipu_dp.environment.status import SetupError, Status
from tf_ipu_dp.runs import run_folder

DEFAULT_TRIALS = 200
MAX_RANKS = 1024
WARMUP = 5
_CYCLE_VARIABLE = "HOROVOD_CYCLE_TIME"
_OWN_FLAGS = ("bytes", "ranks", "trials", "engine", "hosts", "out", "json")
_EXAMPLES = (
    "python -m tf_ipu_dp.collectives measure --model=mlp --ranks=2",
    "python -m tf_ipu_dp.collectives measure --bytes=4KiB..4MiB --ranks=4",
    "python -m tf_ipu_dp.collectives measure --fabric=r4 --bytes=971048 --trials=100 --out=runs/r4",
)


@dataclasses.dataclass(frozen=True)
class Request:
    """What to measure. A series is a tuple of tensors, in bytes, that are all-reduced together."""

    series: Tuple[Tuple[int, ...], ...]
    ranks: int
    trials: int
    title: str
    engine: str = "gloo"
    hosts: Tuple[str, ...] = ()
    fabric: Optional[Fabric] = None
    warmup: int = WARMUP
    # None: where links limit the ranks. Without a limit they would take all cores of the machine for themselves.
    real_time: Optional[bool] = None


def main(words: Sequence[str]) -> int:
    """Measures, writes every trial to a folder, and shows the table."""
    if cli.wants_help(words):
        return cli.show(_help())
    fv = _make_flags()
    cli.parse(words, fv)
    request = _read_request(fv)
    folder = _out_folder(fv)
    require_horovod(request.ranks)
    with progress(request) as on_trials:
        result = measure(request, on_trials, announce)
    if not result.series:
        raise cli.UsageError("Interrupted before the first trial was complete: there is nothing to report.")
    description = dataclasses.replace(result.description, command=("collectives", "measure", *words))
    folder = folder or run_folder.make_folder("collectives-measure", datetime.now())
    results.write(Result(description, result.series), folder)
    content = make_content([Result(description, result.series)])
    sys.stdout.write(report.render_for_stdout(content, "json" if fv["json"].value else "text"))
    sys.stdout.flush()
    announce(f"every trial is in {folder}. Draw it with: {_report_command(folder)}")
    return {results.INTERRUPTED: 130, results.FAILED: 1}.get(description.ended_early or "", 0)


def measure(
    request: Request,
    on_trials: Optional[Callable[[int, int], None]] = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Result:
    """Starts the ranks, on emulated hosts if a fabric is given, and returns all trials."""
    fabric = request.fabric
    if fabric is None:
        tell(f"starting {cli.count(request.ranks, 'rank')} with Horovod on {request.engine}...")
        order = _order(request, len(request.hosts) or 1, "block", bool(request.hosts))
        answers = rank_job.run(order, request.ranks, engine=request.engine, hosts=request.hosts, on_trials=on_trials)
        return measured_result.make(_about(request), answers, {}, [], None)
    with EmulatedHosts(fabric) as network:
        tell(f"emulated hosts: {fabric.render()}")
        check = network.self_check()
        for line in [*network.notes, *check.lines, *check.problems]:
            tell(line)
        broken = network.why_broken()
        if broken is not None:
            raise cli.UsageError(broken)
        tell(f"starting {cli.count(request.ranks, 'rank')} with Horovod on {request.engine}...")
        order = _order(request, fabric.hosts, fabric.placement, True)
        order = dataclasses.replace(order, emulator_pid=network.emulator_pid)
        answers = rank_job.run(
            order,
            request.ranks,
            engine=request.engine,
            network=network,
            # In a network that is k times slower, Horovod's cycle must be as well.
            cycle_ms=1e3 * fabric.dilation * read_cycle_s(os.environ),
            on_trials=on_trials,
        )
        facts = network.facts()
    facts.update({f"self-check {number}": line for number, line in enumerate(check.lines)})
    median_s = check.links[0].measured_median_s if check.links else None
    round_trip_s = median_s / fabric.dilation if median_s is not None else None
    return measured_result.make(_about(request), answers, facts, list(check.problems), round_trip_s)


def measure_completely(request: Request) -> Result:
    """Returns all trials, or none: KeyboardInterrupt after Ctrl-C, and UsageError if the ranks fail."""
    result = measure(request)
    if result.description.ended_early == results.INTERRUPTED:
        raise KeyboardInterrupt
    if result.description.ended_early is not None:
        raise cli.UsageError(result.description.notes[-1])
    return result


def read_cycle_s(environ: Mapping[str, str]) -> float:
    """Returns Horovod's cycle, as the environment sets it."""
    text = environ.get(_CYCLE_VARIABLE) or "1"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise cli.UsageError(f"{_CYCLE_VARIABLE}={text} is not a number of milliseconds above 0.")
    return value / 1e3


def _about(request: Request) -> measured_result.About:
    return measured_result.About(
        request.title, request.ranks, request.series, request.engine, request.fabric, bool(request.hosts)
    )


def _order(request: Request, hosts: int, placement: str, counts: bool) -> Order:
    real_time = request.real_time
    if real_time is None:
        # MPI polls: ranks at real-time priority would leave nothing to the daemons that started them.
        polls = request.engine == "mpi"
        real_time = not polls and request.fabric is not None and request.fabric.slowest_rate is not None
    return Order(request.series, request.trials, request.warmup, hosts, placement, counts, real_time)


def _read_request(fv: flags.FlagValues) -> Request:
    values: Dict[str, Any] = {name: fv[name].value for name in (*_OWN_FLAGS, "warmup", "real_time")}
    fabric = fabric_flags.from_flags(fv)
    config = TrainConfig.from_flags(fv)
    hosts = config.hosts
    if fabric is not None and hosts is not None:
        raise cli.UsageError(
            "--fabric makes hosts of its own, so --hosts has no place beside it. Leave one of them out."
        )
    if hosts is not None and not hosts.names:
        raise cli.UsageError(f"--hosts={hosts} says how many, but not which. Give names, like --hosts=a,b.")
    job = None if values["bytes"] else size.read_job_size(config, size.fusion_threshold(fv))
    names = hosts.names if hosts is not None else ()
    ranks = values["ranks"] or (fabric.ranks if fabric else len(names)) or (job.instances if job else 2)
    fabric = _fit_ranks(fabric, ranks, len(names))
    if ranks < 2:
        raise cli.UsageError(
            f"An all-reduce needs 2 ranks or more, and this job has {cli.count(ranks, 'instance')}. "
            "Add --ranks=2 or --instances=2."
        )
    series: Tuple[Tuple[int, ...], ...]
    if job is not None:
        series, title = (tuple(each.bytes for each in job.tensors),), f"{config.model}, {cli.count(ranks, 'instance')}"
        trials = values["trials"] or min(job.updates, 1000)
    else:
        sizes = _parse_sizes(values["bytes"])
        series, title = tuple((_whole_floats(each),) for each in sizes), f"{cli.count(ranks, 'rank')}"
        trials = values["trials"] or DEFAULT_TRIALS
    if fabric is not None:
        title += f" on {fabric.name}"
    return Request(
        series, ranks, trials, title, values["engine"], tuple(names), fabric, values["warmup"], values["real_time"]
    )


def _fit_ranks(fabric: Optional[Fabric], ranks: int, hosts: int) -> Optional[Fabric]:
    """Returns the fabric with as many ranks on each host as are asked for."""
    count = fabric.hosts if fabric is not None else max(hosts, 1)
    if ranks % count:
        near = [each for each in (ranks // count * count, (ranks // count + 1) * count) if each]
        raise cli.UsageError(
            f"--ranks={ranks} cannot be spread evenly over {cli.count(count, 'host')}. "
            f"Use --ranks={' or '.join(map(str, near))}."
        )
    return dataclasses.replace(fabric, ranks_per_host=ranks // count) if fabric is not None else None


def _parse_sizes(text: str) -> Tuple[int, ...]:
    try:
        return quantities.parse_byte_list(text)
    except ValueError as error:
        raise cli.UsageError(f"--bytes={text}: {error}") from None


def _whole_floats(given: int) -> int:
    return -(-given // 4) * 4


def _out_folder(fv: flags.FlagValues) -> Optional[Path]:
    """Returns --out, which must be new or hold an earlier result; None without it."""
    given: Any = fv["out"].value
    if given is None:
        return None
    folder = cli.expand_path(given)
    with contextlib.suppress(OSError):
        if folder.is_dir() and any(folder.iterdir()) and not (folder / results.DESCRIPTION).exists():
            raise cli.UsageError(f"--out={given} is a folder of other files. Give a new one.")
    if folder.exists() and not folder.is_dir():
        raise cli.UsageError(f"--out={given} is a file. Give a new folder.")
    return folder


def require_horovod(ranks: int) -> None:
    """Installs Horovod into this environment if it is missing; UsageError if that is not possible."""
    try:
        installation.require_horovod(ranks, Status("collectives", sys.stderr))
    except SetupError as error:
        raise cli.UsageError(str(error)) from error


@contextlib.contextmanager
def progress(request: Request) -> Iterator[Callable[[int, int], None]]:
    """Yields what to call with new trials: on a terminal a bar with the time left, in a file a line per series."""
    from tqdm import tqdm

    left = dict.fromkeys(range(len(request.series)), request.trials)
    with tqdm(total=request.trials * len(request.series), unit=" trials", disable=None, leave=False) as bar:

        def on_trials(series: int, trials: int) -> None:
            left[series] -= trials
            name = quantities.render_bytes(sum(request.series[series]))
            bar.set_description(name, refresh=False)
            bar.update(trials)
            if bar.disable and left[series] <= 0:
                announce(f"{name}: {request.trials} trials")

        yield on_trials


def announce(text: str) -> None:
    """Writes a line to stderr, above a progress bar if there is one."""
    from tqdm import tqdm

    tqdm.write(cli.wrap(cli.printable_lines(f"collectives: {text}"), cli.width_of(sys.stderr)), file=sys.stderr)
    sys.stderr.flush()


def _report_command(folder: Path) -> str:
    return f"python -m tf_ipu_dp.collectives report {shlex.quote(str(folder))} --out=report.html"


def _make_flags() -> flags.FlagValues:
    fv = size.make_flags()
    flags.DEFINE_string(
        "bytes", None, "Sizes to all-reduce, like 971048, 4KiB,1MiB or 4KiB..64MiB. Default: the gradients of the job "
        "that the flags of train describe.", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_integer(
        "ranks", None, "Processes. Default: those of the fabric, one per host, or the job's instances.",
        lower_bound=2, upper_bound=MAX_RANKS, flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_integer(
        "trials", None, f"All-reduces of each size. Default: {DEFAULT_TRIALS}, or the job's updates up to 1,000.",
        lower_bound=1, upper_bound=1_000_000, flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_integer(
        "warmup", WARMUP, "All-reduces of each size that are left out first.", lower_bound=0, upper_bound=1000,
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_enum(
        "engine", "gloo", list(rank_job.ENGINES), "What Horovod all-reduces with; mpi needs mpirun and a Horovod that "
        "was built with MPI", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_bool(
        "real_time", None, "Run the ranks at real-time priority where the user may, so that other work on the machine "
        "disturbs them less. Default: on emulated hosts whose links have a rate.", flag_values=fv,
    )  # fmt: skip
    parsers.define_path("out", None, "Folder for the result. Default: a new one in runs/.", flag_values=fv)
    fabric_flags.define_flags(fv)
    return fv


def _help() -> str:
    groups = {
        "Measurement": ("bytes", "ranks", "trials", "warmup", "engine", "hosts", "real_time"),
        "Emulated hosts": fabric_flags.FLAG_NAMES,
        "Job (flags of train; all others are accepted)": size.JOB_FLAGS,
        "Output": ("out", "json"),
    }
    return cli.render_help(
        "python -m tf_ipu_dp.collectives measure [--flag=value ...]",
        "Measures all-reduces on the engine that training uses, on this host, on others or across emulated hosts. The "
        "time of a trial is the maximum over the ranks, after a barrier.",
        groups,
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )
