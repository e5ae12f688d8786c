"""`collectives size`: how many bytes a training job all-reduces, by variable, by bucket and in all. No TensorFlow."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any, Dict, List, Optional, Sequence

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import buckets, quantities
from tf_ipu_dp.collectives.buckets import JobSize
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts
from tf_ipu_dp.planning import plan

# Of the flags of train, those that decide the size of a job.
JOB_FLAGS = (
    "model", "norm", "precision", "deterministic", "dataset", "data_dir", "image_size", "ipus", "instances",
    "pipeline_stages", "micro_batch_size", "gradient_accumulation", "global_batch_size", "epochs", "updates_per_epoch",
)  # fmt: skip
_EXAMPLES = (
    "python -m tf_ipu_dp.collectives size --model=mlp --ipus=4 --instances=4",
    "python -m tf_ipu_dp.collectives size --flagfile=flags/resnet101_16_ipus_4_instances.flags",
)


def main(words: Sequence[str]) -> int:
    """Shows the sizes of the job that the flags describe."""
    if cli.wants_help(words):
        return cli.show(_help())
    fv = make_flags()
    cli.parse(words, fv)
    size = read_job_size(TrainConfig.from_flags(fv), fusion_threshold(fv))
    if fv["json"].value:
        return cli.show(json.dumps(to_json(size), indent=2) + "\n")
    return cli.show(render(size, cli.width_of(sys.stdout)))


def read_job_size(config: TrainConfig, threshold: int) -> JobSize:
    """Plans the job of a config and returns its sizes; UsageError if it cannot be planned."""
    run = plan.plan_run(config, facts.find(config))
    return buckets.job_size(run, precision=config.precision, deterministic=config.deterministic, threshold=threshold)


def make_flags() -> flags.FlagValues:
    """Returns the flags of train, and how the engine fuses."""
    fv = train_flags.make_flags()
    flags.DEFINE_string(
        "fusion_threshold", None,
        f"Largest bucket, like 64MiB. Default: {buckets.FUSION_THRESHOLD_VARIABLE}, or Horovod's own, 128 MiB.",
        flag_values=fv,
    )  # fmt: skip
    return fv


def fusion_threshold(fv: flags.FlagValues) -> int:
    """Returns the largest size of a bucket, from the flag, the environment or Horovod's default."""
    given: Any = fv["fusion_threshold"].value
    variable = os.environ.get(buckets.FUSION_THRESHOLD_VARIABLE)
    for name, text in (("--fusion_threshold", given), (buckets.FUSION_THRESHOLD_VARIABLE, variable)):
        if text:
            try:
                return quantities.parse_bytes(text)
            except ValueError as error:
                raise cli.UsageError(f"{name}={text}: {error}") from error
    return buckets.FUSION_THRESHOLD


def render(size: JobSize, width: Optional[int]) -> str:
    """Returns the gradients, the buckets, and a summary."""
    rows = [
        (each.variable, f"{each.elements:,}", f"{each.elements * size.bytes_per_element:,}") for each in size.gradients
    ]
    total = sum(each.elements for each in size.gradients)
    rows.append(("in all", f"{total:,}", f"{size.bytes:,}"))
    table = cli.render_table(("Gradient of", "Elements", "Bytes"), rows, width, right=(1, 2))
    fused = [
        (str(number), cli.count(len(each.variables), "gradient"), f"{each.bytes:,}")
        for number, each in enumerate(size.buckets)
    ]
    bucket_table = cli.render_table(("Bucket", "Holds", "Bytes"), fused, width, right=(0, 2))
    return f"{table}\n{bucket_table}\n{cli.wrap(_summary(size), width)}"


def to_json(size: JobSize) -> Dict[str, Any]:
    """Returns the sizes as a JSON object."""
    return {
        "schema": 1,
        "bytes": size.bytes,
        "elements": sum(each.elements for each in size.gradients),
        "bytes_per_element": size.bytes_per_element,
        "instances": size.instances,
        "sent_bytes_per_instance": size.sent_bytes,
        "updates_per_epoch": size.updates_per_epoch,
        "trials": size.updates,
        "gradients": [
            {"variable": each.variable, "elements": each.elements, "bytes": each.elements * size.bytes_per_element}
            for each in size.gradients
        ],
        "buckets": [{"bytes": each.bytes, "variables": list(each.variables)} for each in size.buckets],
    }


def _summary(size: JobSize) -> str:
    lines = [
        f"One update all-reduces {size.bytes:,} bytes ({quantities.render_bytes(size.bytes)}) in "
        f"{cli.count(len(size.buckets), 'bucket')}."
    ]
    if size.instances > 1:
        lines.append(
            f"Around a ring of {size.instances} instances each sends {size.sent_bytes:,.0f} bytes per update, "
            f"{quantities.render_bytes(size.sent_bytes * size.updates)} in the whole run."
        )
    else:
        lines.append("With one instance nothing is sent between hosts; --instances=N divides the job.")
    epochs = f"{size.updates / size.updates_per_epoch:.3g}"
    lines.append(
        f"Trials: {size.updates_per_epoch:,} updates per epoch x {epochs} {'epoch' if epochs == '1' else 'epochs'} = "
        f"{size.updates:,} all-reduces."
    )
    return "\n".join([*lines, ""])


def _help() -> str:
    groups: Dict[str, List[str]] = {"Job (flags of train; all others are accepted)": list(JOB_FLAGS)}
    groups["Output"] = ["fusion_threshold", "json"]
    return cli.render_help(
        "python -m tf_ipu_dp.collectives size [--flag=value ...]",
        "Shows how many bytes a training job all-reduces: by variable, by bucket as the engine fuses them, and in all.",
        groups,
        make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )
