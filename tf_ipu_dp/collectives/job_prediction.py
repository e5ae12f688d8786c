"""What a calibration predicts for a planned job or a run: the time of its all-reduce, and its share of an update."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Sequence, Union

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import buckets, formulas, machine_facts, predict, quantities, results, simulator, size
from tf_ipu_dp.collectives.buckets import JobSize
from tf_ipu_dp.collectives.calibration import Calibration
from tf_ipu_dp.collectives.disturbances import Disturbances
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs.records import Record

_TRIALS = 2000
_FLOPS_PER_MAC = 6  # two of the forward pass, four of the backward pass


@dataclasses.dataclass(frozen=True)
class JobPrediction(Record):
    """One all-reduce of a job, as training sees it. The share is of an update whose arithmetic is as fast as can be."""

    seconds: float
    low_s: float
    high_s: float
    bytes: int
    instances: int
    calibrated: str  # when
    largest_share: Optional[float] = None
    link: Optional[str] = None  # the one between hosts that was assumed, in words
    differences: str = ""  # between the machine that was calibrated and this one, as a sentence

    def render(self) -> str:
        """Returns the prediction in a sentence, and in a second one what speaks against it."""
        low, middle, high = map(quantities.render_seconds, (self.low_s, self.seconds, self.high_s))
        share = "" if self.largest_share is None else f", at most {100 * self.largest_share:.0f} % of an update"
        link = "" if self.link is None else f" if hosts are joined by {self.link}"
        return (
            f"One all-reduce of {quantities.render_bytes(self.bytes)} between {cli.count(self.instances, 'instance')} "
            f"takes about {middle} ({low} to {high}){share}{link}; predicted from the calibration of {self.calibrated}."
            f"{f' {self.differences}' if self.differences else ''}"
        )


@dataclasses.dataclass(frozen=True)
class NoPrediction:
    """Why a job cannot be predicted."""

    reason: str

    def render(self) -> str:
        """Returns the reason in a sentence."""
        return f"No prediction of the all-reduce: {self.reason}"


def predict_job(run: RunPlan, size: JobSize, found: Calibration) -> Union[JobPrediction, NoPrediction, None]:
    """Returns the prediction of a job, or why there is none; None for one instance, which sends nothing."""
    if size.instances == 1:
        return None
    hosts = run.topology.hosts.count
    problem = _why_unknown(hosts, found)
    if problem is not None:
        return NoPrediction(problem)
    sizes = [bucket.bytes for bucket in size.buckets]
    own_cores = predict.Link(emulated=False)
    predicted = predict.all_reduce_seconds(sizes, size.instances, hosts, found, link=own_cores)
    share = None
    if found.flops_per_s:
        # Every host computes its part of the batch. Real layers are slower than one large multiplication.
        samples = run.batch.global_batch_size / hosts
        least_s = _FLOPS_PER_MAC * run.model.architecture.macs * samples / found.flops_per_s
        share = predicted.seconds / (predicted.seconds + least_s)
    return JobPrediction(
        predicted.seconds,
        predicted.low_s,
        predicted.high_s,
        size.bytes,
        size.instances,
        found.date,
        share,
        _describe_link(hosts, found),
        _describe_differences(found),
    )


def simulate_run(words: Sequence[str], found: Calibration, seed: int = 0) -> results.Result:
    """Returns a simulation of the exchanges of a run with these flags.

    UsageError if the run cannot be planned any more, or the link between its hosts is not known.
    """
    job = size.read_job_size(train_flags.parse(words), buckets.FUSION_THRESHOLD)
    given = train_flags.parse(words).hosts
    hosts = given.count if given else 1
    problem = _why_unknown(hosts, found)
    if problem is not None:
        raise cli.UsageError(problem)
    asked = simulator.Simulation(
        job.instances,
        job.bytes,
        found.topology(job.instances, hosts, emulated=False),
        formulas.RING,
        Disturbances(trial_jitter=found.trial_jitter),
        trials=_TRIALS,
        seed=seed,
        horovod=found.horovod,
        bucket_bytes=tuple(bucket.bytes for bucket in job.buckets),
    )
    outcome = simulator.simulate(asked)
    link = _describe_link(hosts, found)
    notes: List[str] = [f"Assumed between hosts: {link}."] if link else []
    notes += [each for each in [_describe_differences(found)] if each]
    description = results.Description(
        results.SIMULATED,
        "the run's exchanges" + (f", over {link}" if link else ""),
        f"calibration of {found.date}",
        outcome.algorithm,
        (outcome.series.facts,),
        notes=tuple(notes),
    )
    return results.Result(description, (outcome.series,))


def _why_unknown(hosts: int, found: Calibration) -> Optional[str]:
    """Returns why a job on so many hosts cannot be predicted, in a sentence; None if it can."""
    if hosts == 1 or found.link_bytes_per_s is not None:
        return None
    return (
        f"the calibration of {found.date} is of one host, and the link between {hosts} hosts is not known. Calibrate "
        "on a fabric like it, for example calibrate --fabric=ethernet-1g --out=link.json, and set "
        "TF_IPU_DP_CALIBRATION=link.json."
    )


def _describe_link(hosts: int, found: Calibration) -> Optional[str]:
    """Returns the link that is assumed between hosts in words; None where no link is used."""
    if hosts == 1 or found.link_bytes_per_s is None:
        return None
    delay = f" and {quantities.render_seconds(found.one_way_delay_s)} one way" if found.one_way_delay_s else ""
    fabric = f", as on the fabric {found.facts['fabric']}" if found.facts.get("fabric") else ""
    return f"links of {quantities.render_rate(found.link_bytes_per_s)}{delay}{fabric}"


def _describe_differences(found: Calibration) -> str:
    """Returns a sentence on what has changed since the calibration, or nothing."""
    changed = machine_facts.differences(found.facts, machine_facts.read())
    return f"It was calibrated with {'; '.join(changed)}. Calibrate again." if changed else ""
