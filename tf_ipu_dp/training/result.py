"""The result of a run, from what its clock and its meters have measured on all instances."""

from __future__ import annotations

from typing import Optional

from tf_ipu_dp import __version__
from tf_ipu_dp.monitoring import bottleneck, diagnosis
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import BestWeights, RunResult, Scores, StopReason
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.training.clock import RunClock
from tf_ipu_dp.training.meters import RunMeter
from tf_ipu_dp.training.session import TrainingSession


def make_result(
    session: TrainingSession,
    folder: RunFolder,
    clock: RunClock,
    meter: RunMeter,
    *,
    step: int,
    scores: Optional[Scores],
    stopped: Optional[StopReason],
    best: Optional[BestWeights],
) -> RunResult:
    """Returns the result of a run after its last step; called by all instances."""
    cfg, plan = session.cfg, session.plan
    parts = clock.parts(meter.device.input_wait_s, meter.device.collective_s)
    times = clock.slowest_times(session.world.gather_numbers(parts))
    verdict = diagnosis.judge(PlanRecord.of(plan), cfg, meter.records, times)
    if step and not clock.compiled:
        verdict = bottleneck.NOTHING_TRAINED
    timed = meter.timed_samples
    return RunResult(
        run_dir=str(folder.path),
        model=cfg.model,
        dataset=cfg.dataset,
        replicas=plan.topology.replicas,
        updates=step,
        planned_updates=plan.epochs.updates,
        times=times,
        samples_per_s=timed / times.training_s if timed and times.training_s else None,
        utilisation_pct=meter.device.utilisation_pct,
        scores=scores,
        verdict=verdict,
        stopped=stopped,
        version=__version__,
        exchanges=meter.exchanges.times.summary() if meter.exchanges.times else None,
        best=best,
    )
