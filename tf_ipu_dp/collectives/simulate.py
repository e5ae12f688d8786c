"""`python -m tf_ipu_dp.collectives simulate`: what an all-reduce takes on any number of replicas."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import (
    calibration,
    fitting,
    machine_facts,
    quantities,
    results,
    simulate_flags,
    simulator,
)
from tf_ipu_dp.collectives.simulate_flags import get
from tf_ipu_dp.runs import json_files

_EXAMPLES = (
    "python -m tf_ipu_dp.collectives simulate --replicas=65536 --bytes=971048 --topology=pod64x1024 --trials=10000 "
    "--seed=1",
    "python -m tf_ipu_dp.collectives simulate --replicas=2..64 --bytes=4KiB..64MiB --bandwidth=10Gbit --latency=20us "
    "--algorithm=ring",
    "python -m tf_ipu_dp.collectives simulate --replicas=4 --bytes=971048 --bandwidth=1Gbit --latency=50us "
    "--jitter=lognormal:0.1 --loss=0.01",
    "python -m tf_ipu_dp.collectives simulate --fit=points.csv --replicas=32 --bytes=8",
)


def main(words: Sequence[str]) -> int:
    """Simulates what the flags ask for, shows it, and writes it to a folder if one is given."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    simulate_flags.define_flags(fv)
    if cli.wants_help(words):
        return cli.show(_help(fv))
    cli.parse(words, fv)
    sizes, ranks = simulate_flags.read_sizes(fv), get(fv, "replicas")
    if get(fv, "fit") is not None:
        found, text = _fit(fv)
        if isinstance(found, fitting.SaturationFit) or not (sizes and ranks):
            return cli.show(text + (_predict_efficiency(found, ranks or (), sizes or ())))
        sys.stderr.write(text)
        network = simulate_flags.Network(found.topology())
        fv["algorithm"].value = found.algorithm if isinstance(found, fitting.PiecewiseFit) else fitting.RING
    else:
        missing = [f"--{name}" for name, value in (("replicas", ranks), ("bytes", sizes)) if value is None]
        if missing or ranks is None or sizes is None:
            raise cli.UsageError(f"{' and '.join(missing)} must be given, for example --replicas=64 --bytes=971048.")
        network = simulate_flags.read_network(fv, _read_calibration)
    asked = [simulate_flags.read_simulation(fv, count, size, network) for count in ranks for size in sizes]
    outcomes = [simulator.simulate(each) for each in asked]
    result = _make_result(asked[0], outcomes, words)
    if get(fv, "out") is not None:
        _write(result, Path(str(get(fv, "out"))))
    rows = [_row(each) for each in outcomes]
    return cli.show(_render_json(result, rows) if get(fv, "json") else _render(result, rows))


def _write(result: results.Result, folder: Path) -> None:
    try:
        results.write(result, folder)
    except OSError as error:
        raise cli.UsageError(f"The trials cannot be written to {folder}: {error.strerror}.") from error
    cli.announce("simulate", f"wrote {results.DESCRIPTION} and {results.TRIALS} to {folder}")


def _make_result(
    first: simulator.Simulation, outcomes: Sequence[simulator.Outcome], words: Sequence[str]
) -> results.Result:
    modes = sorted({each.mode for each in outcomes})
    network, disturbed = first.topology, first.disturbances
    facts = {
        "topology": network.name,
        "seed": str(first.seed),
        "mode": ", ".join(modes),
        "jitter": str(disturbed.jitter),
        "loss": f"{disturbed.loss} ({disturbed.loss.transport})",
    }
    notes = [network.note] if network.note else []
    if simulator.CLOSED in modes and not disturbed.are_none:
        notes.append("The closed form leaves out jitter, slow ranks and loss.")
    description = results.Description(
        results.SIMULATED,
        f"Simulated all-reduce on {network.name}",
        f"simulator ({', '.join(modes)})",
        ", ".join(dict.fromkeys(each.algorithm for each in outcomes)),
        tuple(each.series.facts for each in outcomes),
        facts=facts,
        notes=tuple(notes),
        command=("simulate", *words),
    )
    return results.Result(description, tuple(each.series for each in outcomes))


def _row(outcome: simulator.Outcome) -> Dict[str, Any]:
    seconds = outcome.series.seconds
    median = float(np.median(seconds))
    row: Dict[str, Any] = {
        "ranks": outcome.series.facts.ranks,
        "bytes": outcome.series.facts.bytes,
        "algorithm": outcome.algorithm,
        "mode": outcome.mode,
        "p50_s": median,
        # The order statistic itself, no interpolation.
        "p99_s": float(np.sort(seconds)[max(0, -(-99 * len(seconds) // 100) - 1)]),
        "max_s": float(seconds.max()),
        "undisturbed_s": outcome.cost.total_s,
        "latency_s": outcome.cost.latency_s,
        "bandwidth_s": outcome.cost.bandwidth_s,
        "reduction_s": outcome.cost.reduction_s,
        "noise_s": outcome.noise_s,
    }
    if outcome.step is not None:
        row["step_p50_s"] = float(np.median(outcome.step.step_s))
        row["exposed_p50_s"] = float(np.median(outcome.step.exposed_s))
    return row


def _render(result: results.Result, rows: Sequence[Dict[str, Any]]) -> str:
    header = ["Replicas", "Size", "Algorithm", "p50", "p99", "max", "Ideal", "Latency", "Bandwidth", "Adding", "Noise"]
    has_step = "step_p50_s" in rows[0]
    header += ["Step", "Exposed"] if has_step else []
    cells: List[Tuple[str, ...]] = []
    for row in rows:
        times = [quantities.render_seconds(row[name]) for name in ("p50_s", "p99_s", "max_s", "undisturbed_s")]
        shares = [_percent(row[f"{name}_s"], row["p50_s"]) for name in ("latency", "bandwidth", "reduction", "noise")]
        step = [quantities.render_seconds(row[name]) for name in ("step_p50_s", "exposed_p50_s")] if has_step else []
        size = quantities.render_bytes(row["bytes"])
        cells.append((f"{row['ranks']:,}", size, row["algorithm"], *times, *shares, *step))
    table = cli.render_table(header, cells, cli.width_of(sys.stdout), right=(0, 1, *range(3, len(header))))
    notes = [
        "Ideal is the time without noise; the shares are parts of p50.",
        f"Topology {result.description.facts['topology']}, {result.description.engine}.",
        *result.description.notes,
    ]
    return f"{table}\n" + "\n".join(notes) + "\n"


def _render_json(result: results.Result, rows: Sequence[Dict[str, Any]]) -> str:
    value = {"schema": 1, "facts": dict(result.description.facts), "notes": list(result.description.notes)}
    return json.dumps(json_files.plain({**value, "series": list(rows)}), indent=2) + "\n"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole + 0.0:.1f} %".replace("-0.0", "0.0") if whole > 0 else "-"


def _fit(fv: flags.FlagValues) -> Tuple[fitting.Fit, str]:
    column, points = _read_points(Path(str(get(fv, "fit"))))
    form = str(get(fv, "fit_form"))
    if (column == "efficiency") != (form == fitting.SATURATION):
        wanted = "an efficiency column" if form == fitting.SATURATION else "a seconds column"
        raise cli.UsageError(f"--fit_form={form} needs points with {wanted}; {fv['fit'].value} has {column}.")
    algorithm = str(get(fv, "algorithm"))
    found = fitting.fit(points, form, "ring" if algorithm == "auto" else algorithm)
    lines = [f"Fitted {form}: {found.describe()}; mean error {100 * fitting.mean_error(found, points):.1f} %."]
    if get(fv, "check") is not None:
        path = Path(str(get(fv, "check")))
        others = _read_points(path)[1]
        lines.append(f"Mean error on {path}: {100 * fitting.mean_error(found, others):.1f} %.")
    return found, "\n".join(lines) + "\n"


def _predict_efficiency(found: fitting.Fit, ranks: Sequence[int], sizes: Sequence[int]) -> str:
    rows = [
        (f"{count:,}", quantities.render_bytes(size), f"{found.predict(count, size):.4g}")
        for count in ranks
        for size in sizes
    ]
    return (
        "\n" + cli.render_table(("Replicas", "Size", "Efficiency"), rows, cli.width_of(sys.stdout), right=(0, 1, 2))
        if rows
        else ""
    )


def _read_points(path: Path) -> Tuple[str, List[fitting.Point]]:
    try:
        return fitting.read_points(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise cli.UsageError(f"{path} cannot be read: {error}.") from error


def _read_calibration(path: Path) -> calibration.Calibration:
    found = calibration.load(path)
    if found is None:
        raise cli.UsageError(f"{path} does not exist. Measure at 2 ranks first, or give a topology.")
    changed = machine_facts.differences(found.facts, machine_facts.read())
    if changed:
        cli.announce("simulate", f"{path} was calibrated with {'; '.join(changed)}.")
    return found


def _help(fv: flags.FlagValues) -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.collectives simulate [--flag=value ...]",
        "Simulates all-reduces on any number of replicas: time without noise, and under jitter, stragglers and loss.",
        simulate_flags.GROUPS,
        fv,
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )


if __name__ == "__main__":
    sys.exit(cli.run("simulate", lambda: main(sys.argv[1:]), sys.stderr))
