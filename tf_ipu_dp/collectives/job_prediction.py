"""What a calibration predicts for a planned job or a run: the time of its all-reduce, and its share of an update."""

from __future__ import annotations

import dataclasses
from typing import Optional, Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import buckets, formulas, predict, quantities, results, simulator, size
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

    def render(self) -> str:
        """Returns the prediction in a sentence."""
        low, middle, high = map(quantities.render_seconds, (self.low_s, self.seconds, self.high_s))
        share = "" if self.largest_share is None else f", at most {100 * self.largest_share:.0f} % of an update"
        return (
            f"One all-reduce of {quantities.render_bytes(self.bytes)} between {cli.count(self.instances, 'instance')} "
            f"takes about {middle} ({low} to {high}){share}; predicted from the calibration of {self.calibrated}."
        )


def predict_job(run: RunPlan, size: JobSize, found: Calibration) -> Optional[JobPrediction]:
    """Returns the prediction of a job; None for one instance, which sends nothing."""
    if size.instances == 1:
        return None
    sizes = [bucket.bytes for bucket in size.buckets]
    predicted = predict.all_reduce_seconds(sizes, size.instances, run.topology.hosts.count, found)
    share = None
    if found.flops_per_s:
        # Every host computes its part of the batch. Real layers are slower than one large multiplication.
        samples = run.batch.global_batch_size / run.topology.hosts.count
        least_s = _FLOPS_PER_MAC * run.model.architecture.macs * samples / found.flops_per_s
        share = predicted.seconds / (predicted.seconds + least_s)
    return JobPrediction(
        predicted.seconds, predicted.low_s, predicted.high_s, size.bytes, size.instances, found.date, share
    )


def simulate_run(words: Sequence[str], found: Calibration, seed: int = 0) -> results.Result:
    """Returns a simulation of the exchanges of a run with these flags; UsageError if it cannot be planned any more."""
    job = size.read_job_size(train_flags.parse(words), buckets.FUSION_THRESHOLD)
    hosts = train_flags.parse(words).hosts
    network = found.topology(job.instances, hosts.count if hosts else 1)
    asked = simulator.Simulation(
        job.instances,
        job.bytes,
        network,
        formulas.RING,
        Disturbances(trial_jitter=found.trial_jitter),
        trials=_TRIALS,
        seed=seed,
        buckets=len(job.buckets),
        horovod=found.horovod,
    )
    outcome = simulator.simulate(asked)
    description = results.Description(
        results.SIMULATED,
        "the run's exchanges",
        f"calibration of {found.date}",
        outcome.algorithm,
        (outcome.series.facts,),
    )
    return results.Result(description, (outcome.series,))
