"""`collectives calibrate`: measures at 2 ranks what predictions for this machine start from, and keeps it in a file."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from datetime import date
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import (
    calibration,
    calibration_file,
    fabric_flags,
    machine_facts,
    measure,
    quantities,
    timeout_fit,
)
from tf_ipu_dp.collectives.calibration import Calibration, Measurement
from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.collectives.horovod_model import HorovodModel
from tf_ipu_dp.collectives.measure import Request
from tf_ipu_dp.collectives.results import Result

SIZES = (4 << 10, 64 << 10, 256 << 10, 971_048, 4 << 20)
# One number, which is one packet alone; few and many packets per message.
LOSS_SIZES = (4, 64 << 10, 512 << 10)
LOSS_TRIALS = 1000
_FACTS = ("priority of the ranks", "load average at the start")

_EXAMPLES = (
    "python -m tf_ipu_dp.collectives calibrate",
    "python -m tf_ipu_dp.collectives calibrate --fabric=ethernet-100m",
    "python -m tf_ipu_dp.collectives calibrate --fabric=ethernet-100m --delays=1ms,5ms --out=delays.json",
    "python -m tf_ipu_dp.collectives calibrate --fabric=ethernet-100m --loss=1%",
)


def main(words: Sequence[str]) -> int:
    """Measures, writes the calibration, and shows it."""
    if cli.wants_help(words):
        return cli.show(_help())
    fv = _make_flags()
    cli.parse(words, fv)
    values: Dict[str, Any] = {name: fv[name].value for name in ("trials", "loss_trials", "delays", "out", "json")}
    fabric = fabric_flags.from_flags(fv)
    delays = _parse_delays(values["delays"], fabric)
    measure.require_horovod(2)
    name = fabric.name if fabric is not None else None
    path = cli.expand_path(values["out"]) if values["out"] else calibration_file.path(os.environ, name)
    measure.announce(_announcement(fabric, values["loss_trials"]))
    found = calibrate(fabric, delays, trials=values["trials"], loss_trials=values["loss_trials"])
    calibration.save(found, path)
    text = json.dumps(found.to_json(), indent=2) + "\n" if values["json"] else render(found)
    sys.stdout.write(text)
    sys.stdout.flush()
    measure.announce(f"kept in {path}")
    return 0


def render(found: Calibration) -> str:
    """Returns what the calibration says, in a few lines."""
    link = "no limit" if found.link_bytes_per_s is None else quantities.render_rate(found.link_bytes_per_s)
    rows = [
        ("engine", found.engine),
        ("link", f"{link}, {100 * found.wire_efficiency:.1f} % of it payload"),
        (
            "delay",
            f"{quantities.render_seconds(found.one_way_delay_s)} one way, {found.handshake:.2f} of them per step",
        ),
        *(
            (
                f"message of {quantities.render_bytes(each.bytes)}",
                f"{quantities.render_seconds(each.seconds)} of software",
            )
            for each in found.messages
        ),
        (
            "Horovod",
            f"{quantities.render_seconds(found.horovod_fixed_s)} + {found.horovod_rounds:.2f} small all-reduces",
        ),
        *(_loss_rows(found) if found.timeout_per_message is not None else ()),
    ]
    return cli.render_table(("Calibration", found.date), rows, cli.width_of(sys.stdout))


def _loss_rows(found: Calibration) -> List[Tuple[str, str]]:
    return [
        (
            f"timeouts at a loss of {100 * (found.loss or 0.0):.3g} %",
            f"{100 * found.timeout_per_single_packet:.2g} % of single packets, "
            f"{100 * (found.timeout_per_message or 0.0):.2g} % of messages, "
            f"{100 * found.timeout_per_packet:.2g} % of their packets",
        )
    ]


def calibrate(
    fabric: Optional[Fabric],
    delays_s: Sequence[float] = (),
    *,
    trials: int,
    sizes: Sequence[int] = SIZES,
    loss_trials: int = LOSS_TRIALS,
) -> Calibration:
    """Measures at 2 ranks on a network of two hosts, or on this host without one, and returns the calibration.

    With delays, each is measured in turn: the first one decides, all of them give the handshake. On a network that
    loses packets, times are measured without loss, and then timeouts are counted with it.
    """
    measured = []
    for delay in delays_s or (None,):
        network = None if fabric is None else _two_hosts(fabric, delay, has_loss=False)
        # Short, and of an undisturbed machine: also without a link that limits the ranks. In two rounds, of which the
        # faster one counts for each size: other work on the machine comes and goes, and only adds.
        series = tuple((size,) for size in (*sizes, *sizes))
        request = Request(series, 2, -(-trials // 2), "calibration", fabric=network, real_time=True)
        result, one_way_s = measure_with_delay(request)
        measured.append(Measurement(result, one_way_s))
    about = measured[0].result.description
    facts = {name: value for name, value in about.facts.items() if name in _FACTS}
    found = calibration.fit(
        measured,
        date=date.today().isoformat(),
        facts={**machine_facts.read(), **facts, "fabric": about.fabric or "this host"},
        model=HorovodModel(cycle_s=measure.read_cycle_s(os.environ)),
        shared_cores=os.cpu_count(),
        flops_per_s=_measure_flops_per_s(),
    )
    return found if fabric is None or not fabric.link.loss else count_timeouts(found, fabric, loss_trials)


def count_timeouts(found: Calibration, fabric: Fabric, trials: int) -> Calibration:
    """Measures at 2 ranks on a network that loses packets, and returns the calibration with its timeouts."""
    series = tuple((size,) for size in LOSS_SIZES)
    lossy = _two_hosts(fabric, None, has_loss=True)
    result = measure.measure_completely(Request(series, 2, trials, "timeouts", fabric=lossy))
    return timeout_fit.fit_timeouts(found, result.series, loss=fabric.link.loss, packet_bytes=fabric.packet_bytes)


def measure_with_delay(request: Request) -> Tuple[Result, float]:
    """Measures, and returns the one-way delay between hosts as the self-check found it: 0 where none was asked for."""
    result = measure.measure_completely(request)
    fabric = request.fabric
    if fabric is None or not fabric.link.delay_s:
        return result, 0.0
    return result, (result.description.round_trip_s or 2 * fabric.link.delay_s) / 2


def _measure_flops_per_s() -> float:
    """Returns the rate of a large matrix multiplication: the most that training could reach on these cores."""
    size = 1024
    matrix: Any = np.ones((size, size), np.float32)
    np.dot(matrix, matrix)
    best = min(_seconds_of(lambda: np.dot(matrix, matrix)) for _ in range(5))
    return 2 * size**3 / best


def _seconds_of(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _announcement(fabric: Optional[Fabric], loss_trials: int) -> str:
    if fabric is None or not fabric.link.loss:
        return "measuring at 2 ranks, which takes a minute or two..."
    return (
        f"measuring at 2 ranks, first without loss, then {loss_trials:,} trials of {len(LOSS_SIZES)} sizes with it, "
        "which takes several minutes..."
    )


def _two_hosts(fabric: Fabric, delay_s: Optional[float], *, has_loss: bool) -> Fabric:
    link = fabric.link if delay_s is None else dataclasses.replace(fabric.link, delay_s=delay_s)
    link = link if has_loss else dataclasses.replace(link, loss=0.0, loss_burst=None)
    return dataclasses.replace(fabric, hosts=2, ranks_per_host=1, host_changes=(), link=link)


def _parse_delays(text: Optional[str], fabric: Optional[Fabric]) -> List[float]:
    if not text:
        return []
    if fabric is None:
        raise cli.UsageError(f"--delays={text} needs emulated hosts. Add --fabric=ethernet-100m.")
    try:
        return [quantities.parse_seconds(each) for each in text.split(",")]
    except ValueError as error:
        raise cli.UsageError(f"--delays={text}: {error}") from None


def _make_flags() -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_integer("trials", 25, "All-reduces of each size.", lower_bound=5, upper_bound=100_000, flag_values=fv)
    flags.DEFINE_integer(
        "loss_trials", LOSS_TRIALS, "All-reduces of each size to count timeouts in, on a fabric that loses packets.",
        lower_bound=20, upper_bound=1_000_000, flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string(
        "delays", None, "One-way delays to measure with, like 1ms,5ms: they show how often messages are announced.",
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_string(
        "out",
        None,
        "File for the calibration. Default: in ~/.cache, one for this machine and one for each fabric.",
        flag_values=fv,
    )
    flags.DEFINE_bool("json", False, "Print the calibration as JSON.", flag_values=fv)
    fabric_flags.define_flags(fv)
    return fv


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.collectives calibrate [--flag=value ...]",
        "Measures at 2 ranks what predictions for this machine start from, and keeps it: simulate --calibration, "
        "train --dry_run and validate use it.",
        {"Calibration": ("trials", "loss_trials", "delays", "out", "json"), "Emulated hosts": fabric_flags.FLAG_NAMES},
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )
