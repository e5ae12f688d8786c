"""What the ranks of a measurement have answered, as a result: series, facts, and sentences for the reader. Pure."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import rank_job, results
from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.collectives.results import Description, Result, Series, SeriesFacts

_BUSY = 0.9  # share of the cores from which on they and not the link decide
_SATURATED = 0.9  # share of one core from which on a single thread or process decides
_NO_ENGINE_TIMES = (
    "The engine's own times are missing: Horovod's timeline has them, and it could not be read to its end."
)


@dataclasses.dataclass(frozen=True)
class About:
    """What was asked for."""

    title: str
    ranks: int
    series: Tuple[Tuple[int, ...], ...]
    engine: str
    fabric: Optional[Fabric]
    on_hosts: bool  # other than this one


def make(
    about: About,
    answers: rank_job.Answers,
    facts: Dict[str, str],
    notes: List[str],
    round_trip_s: Optional[float],
) -> Result:
    """Returns the trials that the ranks have answered, with what is known about them."""
    made = [
        _make_series(about, tensors, found)
        for tensors, found in zip(about.series, answers.series)
        if found.rank_seconds
    ]
    operations = answers.facts.get("operations", "")
    mpi = answers.facts.get("mpi")
    busy = [found.busy for found in answers.series if found.busy is not None]
    notes += cpu_notes(answers.series, polls=about.engine == "mpi")
    if any(each.engine_s is None for each in made):
        notes.append(_NO_ENGINE_TIMES)
    ended_early = None
    count = cli.count(sum(len(each.seconds) for each in made), "trial")
    if answers.was_interrupted:
        ended_early = results.INTERRUPTED
        notes.append(f"Interrupted: this is what was measured until then, {count}.")
    elif answers.failure is not None:
        ended_early = results.FAILED
        notes.append(f"{answers.failure.rstrip('.')}. This is what was measured until then, {count}.")
    known = {
        **({"MPI": str(mpi or "of an unknown implementation")} if operations == "MPI" else {}),
        "TensorFlow": str(answers.facts.get("tensorflow", "")),
        "kernel": str(answers.facts.get("kernel", "")),
        "cores": f"{answers.facts.get('cores', 0)} for {cli.count(about.ranks, 'rank')}",
        "priority of the ranks": str(answers.facts.get("priority", "")),
        "load average at the start": f"{answers.facts.get('load', 0.0):.2f}",
        "cores busy": ", ".join(f"{100 * share:.0f} %" for share in busy) or "-",
        **_thread_facts(answers.series),
        "Horovod's cycle": f"{answers.facts.get('cycle_ms', 0):g} ms",
        "hosts": ", ".join(dict.fromkeys(answers.facts.get("hosts", []))),
    }
    description = Description(
        results.MEASURED,
        about.title,
        f"Horovod {answers.facts.get('horovod', '')} on {operations}",
        # Horovod calls Gloo's ring. MPI chooses by size and ranks, and does not say what.
        f"the algorithm that {mpi or 'MPI'} chooses" if operations == "MPI" else "ring",
        tuple(each.facts for each in made),
        fabric=about.fabric.name if about.fabric is not None else None,
        facts={**known, **facts},
        notes=tuple(notes),
        round_trip_s=round_trip_s,
        ended_early=ended_early,
    )
    return Result(description, tuple(made))


def cpu_notes(series: Sequence[rank_job.SeriesAnswers], *, polls: bool) -> List[str]:
    """Returns a sentence for each way in which cores and not links have decided the times.

    All cores may be busy, or one alone: with the link emulator, or with a thread of a rank. A thread of an engine that
    polls is always busy, and says nothing.
    """
    notes = []
    busy = max((found.busy for found in series if found.busy is not None), default=0.0)
    if busy >= _BUSY:
        notes.append(
            f"The cores of this machine were busy for {100 * busy:.0f} % of the time: these times are bound by the "
            "CPU, not by the link alone."
        )
    emulator = max((found.emulator for found in series if found.emulator is not None), default=0.0)
    if emulator >= _SATURATED:
        notes.append(
            f"The link emulator was busy for {100 * emulator:.0f} % of the time, on one core: these times are bound by "
            "it, not by the link alone. Lower the rate, or raise the MTU or the dilation."
        )
    share, rank = max(((share, rank) for found in series for rank, share in enumerate(found.threads)), default=(0.0, 0))
    if share >= _SATURATED and not polls:
        notes.append(
            f"A thread of rank {rank} was busy for {100 * share:.0f} % of the time: these times are bound by one core, "
            "not by the link alone."
        )
    return notes


def _thread_facts(series: Sequence[rank_job.SeriesAnswers]) -> Dict[str, str]:
    """Returns how busy the busiest thread of a rank and the link emulator were, in each series."""
    threads = [max(found.threads) for found in series if found.threads]
    emulator = [found.emulator for found in series if found.emulator is not None]
    shares = {"busiest thread of a rank": threads, "link emulator": emulator}
    return {
        name: ", ".join(f"{100 * share:.0f} %" for share in values) + " of a core"
        for name, values in shares.items()
        if values
    }


def _make_series(about: About, tensors: Sequence[int], found: rank_job.SeriesAnswers) -> Series:
    # In a network that was built k times slower, everything took k times as long.
    dilation = about.fabric.dilation if about.fabric is not None else 1.0
    rank_seconds = np.array(found.rank_seconds) / dilation
    engine_s = found.engine_times()
    several_hosts = about.fabric is not None or about.on_hosts
    facts = SeriesFacts(about.ranks, sum(tensors), wrong_sums=found.wrong)
    if about.fabric is not None:
        facts = dataclasses.replace(facts, shortest_timeout_s=about.fabric.tcp_min_timeout_s / dilation)
    if about.fabric is not None and about.fabric.slowest_rate is not None:
        slowest = min((link for link in about.fabric.links if link.rate), key=lambda link: link.rate or 0.0)
        facts = dataclasses.replace(
            facts, link_bytes_per_s=slowest.rate, link_burst_bytes=about.fabric.burst_of(slowest)
        )
    return Series(
        facts,
        rank_seconds.max(axis=1),
        rank_seconds,
        np.array(found.late_s) / dilation,
        None if engine_s is None else engine_s / dilation,
        *(np.array(found.tcp).T if several_hosts else (None, None, None)),
    )
