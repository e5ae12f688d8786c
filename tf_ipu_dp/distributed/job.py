"""The job that a launch starts: the words for train, their config, and the plan. Planned once, then passed on."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import Hosts
from tf_ipu_dp.datasets.info import DatasetInfo
from tf_ipu_dp.planning import plan, relayout
from tf_ipu_dp.runs import run_folder, saved_flags
from tf_ipu_dp.runs.saved_flags import TrainCommand

DEFAULT_INSTANCES = 2


@dataclasses.dataclass(frozen=True)
class Job:
    """A train command and its plan, ready to be started as several instances."""

    command: TrainCommand
    plan: plan.RunPlan

    @property
    def words(self) -> Tuple[str, ...]:
        return self.command.words

    @property
    def config(self) -> TrainConfig:
        return self.command.config

    def with_flags(self, changes: Dict[str, Any]) -> Job:
        """Returns the job with some flags added that do not change its plan."""
        return Job(self.command.with_flags(changes), self.plan)

    @property
    def layout(self) -> str:
        """Instances and replicas, for a sentence."""
        topology = self.plan.topology
        return f"{cli.count(topology.instances, 'instance')} x {cli.count(topology.local_replicas, 'replica')}"


def plan_job(
    typed: TrainCommand, dataset: DatasetInfo, allocation: Sequence[str] = (), saved: Optional[plan.Batch] = None
) -> Job:
    """Plans a job. Defaults: 2 instances or one per host, one replica per instance, and the saved batch.

    `allocation` are the hosts that a scheduler assigned, `saved` is the batch of the run that is resumed.
    """
    config = typed.config
    instances = config.instances or max(DEFAULT_INSTANCES, config.hosts.count if config.hosts else len(allocation))
    # For 3 instances, 4 replicas: the plan then refuses --instances=3 and not a number of IPUs that was not typed.
    ipus = config.ipus or plan.ipus_per_replica(instances) * plan.ipus_per_replica(config.requested_stages or 1)
    hosts = config.hosts or share_hosts(allocation, instances)
    wanted = dataclasses.replace(config, instances=instances, ipus=ipus, hosts=hosts)
    return replan_job(typed, relayout.keep_global_batch(wanted, dataset, saved) if saved else wanted, dataset)


def replan_job(typed: TrainCommand, wanted: TrainConfig, dataset: DatasetInfo) -> Job:
    """Returns the job of a config that differs from what was typed, with flags added for the differences.

    Added flags cannot remove one, so the batch is set by the same flag that the user typed.
    """
    made = plan.plan_run(wanted, dataset, resumable=saved_flags.resumable_steps(wanted))
    names = (field.name for field in dataclasses.fields(wanted))
    changes = {name: getattr(wanted, name) for name in names if getattr(wanted, name) != getattr(typed.config, name)}
    batch_changes = [changes.pop(name, None) for name in ("gradient_accumulation", "global_batch_size")]
    if typed.config.gradient_accumulation is not None:
        changes["gradient_accumulation"] = made.batch.accumulation
    elif any(batch_changes):
        changes["global_batch_size"] = made.batch.global_batch_size
    changes = {name: value for name, value in changes.items() if value != getattr(typed.config, name)}
    return Job(typed.with_flags(changes), made)


def share_hosts(names: Sequence[str], instances: int) -> Optional[Hosts]:
    """Returns the first of some hosts, as many as can share the instances evenly; None without names."""
    count = 1
    while 2 * count <= min(len(names), instances):
        count *= 2
    return Hosts(count, tuple(names[:count])) if names else None


def read_saved_batch(config: TrainConfig) -> Optional[plan.Batch]:
    """Returns the batch of the run that would be resumed, if there is one."""
    if not saved_flags.is_resumed(config):
        return None
    saved = run_folder.RunFolder(cli.expand_path(config.run_dir or "")).read_saved_plan()
    return saved.job_batch if saved else None
