"""`--input_only`: how fast the input is loaded and prepared, how fast the model computes, and which is slower."""

from __future__ import annotations

import json
import math
import os
from typing import List, TextIO

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import sources
from tf_ipu_dp.monitoring import bottleneck
from tf_ipu_dp.planning.plan import RunPlan
from tf_ipu_dp.runs.json_files import plain
from tf_ipu_dp.sdk import Sdk
from tf_ipu_dp.training.console import make_console, make_result_console
from tf_ipu_dp.training.executions import Execution, TrainingCallback
from tf_ipu_dp.training.run import attach_session, leader_reports_first
from tf_ipu_dp.training.session import TrainingSession

_MEASURED_S = 3.0
_MAX_EXECUTIONS = 50
_MIN_ELEMENTS = 200


def measure_input(cfg: TrainConfig, plan: RunPlan, sdk: Sdk, instance: int, stdout: TextIO, stderr: TextIO) -> int:
    """Prints the speed of the input and of the model, per instance. Returns the exit code."""
    with leader_reports_first(instance):
        console = make_console(stderr, instance, os.environ)
        session = attach_session(cfg, plan, sdk, instance)
        plan = session.plan
        per_update = plan.batch.accumulation * plan.topology.local_replicas
        dataset = session.make_training(0, plan.epochs.updates)
        elements = min(plan.epochs.updates * per_update, max(_MIN_ELEMENTS, 2 * per_update))
        with console.waiting("loading"):
            speed = sources.measure(
                dataset, sdk.ipu, elements=elements, samples_per_element=plan.batch.micro_batch_size
            )
        with console.waiting("computing"):
            needed = _measure_model(session, plan, dataset.take(1).cache().repeat())
        if not session.world.is_leader:
            return 0
        facts = bottleneck.Facts(plan.epochs.device_iterations, prefetch=cfg.prefetch, eight_bit_io=cfg.eight_bit_io)
        verdict = bottleneck.predict_input(speed.samples_per_s, needed, facts)
        if cfg.json:
            value = {
                "schema": 1,
                "input_samples_per_s": speed.samples_per_s,
                "input_bytes_per_s": speed.bytes_per_s,
                "model_samples_per_s": needed,
                "feeds": verdict.kind != bottleneck.INPUT,
                "verdict": verdict.to_json(),
            }
            stdout.write(f"{json.dumps(plain(value))}\n")
            return 0
        text = (
            f"input  {speed.samples_per_s:,.0f} samples/s  {speed.bytes_per_s / 1e6:,.1f} MB/s\n"
            f"model  {needed:,.0f} samples/s\n{verdict.sentence}\n"
        )
        stdout.write(cli.wrap(text, make_result_console(stdout, instance, os.environ).width))
        return 0


def _measure_model(session: TrainingSession, plan: RunPlan, dataset: object) -> float:
    """Returns this instance's samples/s with input that is always ready; the first execution compiles."""
    times: List[float] = []

    def should_continue(done: Execution) -> bool:
        times.append(done.seconds)
        return max(seconds for (seconds,) in session.world.gather_numbers([sum(times[1:])])) < _MEASURED_S

    steps = _MAX_EXECUTIONS * plan.keras.steps_per_execution * plan.topology.local_replicas
    session.model.fit(
        dataset, epochs=1, steps_per_epoch=steps, callbacks=[TrainingCallback(should_continue)], verbose=0
    )
    samples = plan.batch.global_batch_size // plan.topology.instances * plan.epochs.device_iterations
    return samples * len(times[1:]) / sum(times[1:]) if times[1:] else math.nan
