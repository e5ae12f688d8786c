"""Compares the trained weights of two runs, layer by layer: `python -m tf_ipu_dp.compare runs/a runs/b`.

It reads the newest valid checkpoint of each, and imports TensorFlow to do so.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.runs import checkpoints

_LIMIT = 1e-5
_EXAMPLES = (
    "python -m tf_ipu_dp.compare runs/a runs/b",
    "python -m tf_ipu_dp.compare --limit=0 runs/a runs/b",
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How much the weights of one layer differ between two runs."""

    layer: str
    weights: int
    largest: float
    relative: float  # over the largest weight of the same variable; infinite for NaN


def main(words: Sequence[str]) -> int:
    """Shows the differences; returns 1 if one of them exceeds the limit."""
    if cli.wants_help(words):
        sys.stdout.write(_help())
        return 0
    fv = _make_flags()
    folders = [Path(word) for word in words if not word.startswith("-")]
    cli.parse([word for word in words if word.startswith("-")], fv)
    if len(folders) != 2:
        raise cli.UsageError(f"two run folders are needed, for example runs/a runs/b, not {len(folders)}.")
    limit: float = fv["limit"].value  # type: ignore[assignment, unused-ignore]
    first, second = (_newest_checkpoint(folder) for folder in folders)
    if first.manifest.step != second.manifest.step:
        raise cli.UsageError(
            f"{folders[0]} is at step {first.manifest.step:,} and {folders[1]} at {second.manifest.step:,}. "
            "Compare runs of the same number of steps."
        )
    found = compare_weights(read_weights(first.prefix), read_weights(second.prefix))
    sys.stdout.write(
        render(found, limit, first.manifest.step, [_layout(each) for each in (first, second)], cli.width_of(sys.stdout))
    )
    return 0 if all(each.relative <= limit for each in found) else 1


def compare_weights(first: Dict[str, Any], second: Dict[str, Any]) -> List[Difference]:
    """Returns the difference of each layer, in the model's order; infinite for a variable that only one run has."""
    import numpy as np

    layers: Dict[str, List[Difference]] = {}
    for name in {**first, **second}:
        layer = name.rpartition("/")[0] or name
        a, b = first.get(name), second.get(name)
        if a is None or b is None or a.shape != b.shape:
            present: Any = b if a is None else a
            each = Difference(layer, int(present.size), math.inf, math.inf)
        else:
            largest = float(np.abs(np.subtract(a, b, dtype=np.float64)).max()) if a.size else 0.0
            scale = float(np.abs(a).max()) if a.size else 0.0
            relative = largest / scale if scale else (0.0 if largest == 0 else math.inf)
            each = Difference(layer, int(a.size), largest, math.inf if math.isnan(relative) else relative)
        layers.setdefault(layer, []).append(each)
    return [
        Difference(
            layer,
            sum(each.weights for each in parts),
            max(each.largest for each in parts),
            max(each.relative for each in parts),
        )
        for layer, parts in layers.items()
    ]


def read_weights(prefix: Path) -> Dict[str, Any]:
    """Returns the floating-point weights of a checkpoint by their names, in the model's order."""
    import tensorflow as tf
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    reader = tf.train.load_checkpoint(str(prefix))
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    keys = [(each.checkpoint_key, each.full_name) for node in graph.nodes for each in node.attributes]
    weights = [(key, name) for key, name in keys if key.startswith("model/") and "/.OPTIMIZER_SLOT/" not in key]
    tensors = {name: reader.get_tensor(key) for key, name in sorted(weights, key=_layer_order)}
    return {name: value for name, value in tensors.items() if value.dtype.kind == "f"}


def render(found: Sequence[Difference], limit: float, step: int, layouts: Sequence[str], width: Optional[int]) -> str:
    """Returns the table of the layers and, below it, the conclusion."""
    rows = [(each.layer, f"{each.weights:,}", f"{each.largest:.1e}", f"{each.relative:.1e}") for each in found]
    table = cli.render_table(("Layer", "Weights", "Difference", "Relative"), rows, width, right=(1, 2, 3))
    worst = max(found, key=lambda each: each.relative)
    what = f"{layouts[0]} and {layouts[1]} after {cli.count(step, 'update')}"
    distance = f"{worst.relative:.1e} of {cli.printable(worst.layer)} (limit {limit:g})"
    if worst.largest == 0:
        end = "identical weights, bit for bit"
    else:
        are = "equal" if worst.relative <= limit else "different"
        end = f"{are} weights. The largest relative difference is {distance}"
    return f"{table}\n{cli.wrap(f'{what}: {end}.', width, indent='')}\n"


def _newest_checkpoint(folder: Path) -> checkpoints.Checkpoint:
    store = checkpoints.Store(folder / "checkpoints", 1, functools.partial(cli.announce, "compare"))
    found = store.newest()
    if found is None:
        raise cli.UsageError(f"{folder} has no valid checkpoint. Give the folder of a run that has saved one.")
    return found


def _layout(checkpoint: checkpoints.Checkpoint) -> str:
    topology = checkpoint.manifest.plan.topology
    replicas = cli.count(topology.replicas_per_instance, "replica")
    return f"{cli.count(topology.instances, 'instance')} x {replicas}"


def _layer_order(pair: Any) -> Any:
    """Returns a sort key that puts `layer_with_weights-10` after `layer_with_weights-9`."""
    return [int(part) if part.isdigit() else part for part in pair[0].replace("-", "/").split("/")][:3], pair[0]


def _make_flags() -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_float(
        "limit", _LIMIT, "Largest relative difference between equal weights.", lower_bound=0.0, flag_values=fv
    )
    return fv


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.compare [--flag=value ...] RUN_DIR RUN_DIR",
        "Shows how much the weights of two runs differ, layer by layer. Exit code 1 when one differs by more than "
        "--limit.",
        {"Comparison": ("limit",)},
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(cli.run("compare", lambda: main(sys.argv[1:]), sys.stderr))
