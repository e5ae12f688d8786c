"""The parts that a study is put together from, so that the runner knows none of them: engines, prediction, report.

`load` imports the real ones, late: a command line with a mistake is refused before numpy is imported.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple

from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.scaling.analysis import Analysis
from tf_ipu_dp.scaling.engines import registry
from tf_ipu_dp.scaling.engines.protocol import Answer, Order
from tf_ipu_dp.scaling.our_runs import Decompose, Place
from tf_ipu_dp.scaling.records import Cell, CellPrediction, Extrapolation, Measurement, Study

TEXT, JSON, CSV = "text", "json", "csv"
Announce = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Extent:
    """What to extrapolate: sizes that are not measured, on named fabrics."""

    sizes: Tuple[int, ...]
    fabrics: Tuple[str, ...] = ()  # none: those that `extrapolation` takes by itself
    compute_ms: Optional[float] = None  # of one micro batch on the device to predict for; None: as calibrated here


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a study calls. Every field is a function of the module that it is named after."""

    engines: Tuple[str, ...]
    is_ours: Callable[[str], bool]
    missing: Callable[[str], Optional[str]]  # one sentence on how to install an engine; None if it can run
    run_engine: Callable[[Cell, Order, Path, Place, Callable[[int], None]], List[Answer]]
    predict: Callable[[Study, Optional[Fabric], Announce], Sequence[CellPrediction]]
    extrapolate: Callable[[Study, Extent, Announce], Sequence[Extrapolation]]
    decompose: Decompose
    render: Callable[[Study, Sequence[Measurement], str, Optional[int], bool], str]  # form, width, ASCII only or not
    write: Callable[[Study, Sequence[Measurement], Path], Sequence[Path]]


def load() -> Parts:
    """Returns the parts that the command uses."""
    from tf_ipu_dp.scaling import decomposition

    return Parts(
        engines=tuple(registry.ENGINES),
        is_ours=registry.is_ours,
        missing=registry.missing,
        run_engine=_run_engine,
        predict=_predict,
        extrapolate=_extrapolate,
        decompose=decomposition.decompose,
        render=_render,
        write=_write,
    )


def _run_engine(
    cell: Cell, order: Order, folder: Path, place: Place, on_process: Callable[[int], None]
) -> List[Answer]:
    from tf_ipu_dp.scaling.engines import starter

    return starter.run(cell, order, folder, place.network, on_process, hosts=place.hosts)


def _predict(study: Study, fabric: Optional[Fabric], announce: Announce) -> Sequence[CellPrediction]:
    from tf_ipu_dp import cli
    from tf_ipu_dp.scaling import compute_probe, engine_probe, prediction

    # A calibration that is missing is measured, which takes longer than to predict cells that exchange nothing.
    exchanges = any(cell.instances > 1 for cell in study.cells)
    collective = compute_probe.collective_calibration(announce) if exchanges else None
    emulated = fabric is not None
    found: List[CellPrediction] = []
    if any(map(registry.is_ours, study.engines)):
        compute = compute_probe.probe(study.words, study.cells, announce, on_one_machine=emulated)
        found += prediction.predict(study.cells, compute, collective, fabric)
    for engine in study.engines:
        if registry.is_ours(engine) or registry.missing(engine):
            continue
        cells = [cell for cell in study.cells if cell.engine == engine]
        try:
            compute = engine_probe.probe(engine, study.words, cells, announce, on_one_machine=emulated)
            found += prediction.predict_others(cells, compute, collective, fabric)
        except cli.UsageError as error:  # the others are predicted all the same
            announce(f"no prediction of {engine}: {error}")
    return found


def _extrapolate(study: Study, extent: Extent, announce: Announce) -> Sequence[Extrapolation]:
    from tf_ipu_dp.scaling import compute_probe, extrapolation

    named = [extent.fabrics] if extent.fabrics else []
    if extent.compute_ms is not None:
        buckets = compute_probe.read_bucket_bytes(study.words, study.cells)
        return extrapolation.extrapolate(
            study, None, extent.sizes, *named, compute_ms=extent.compute_ms, bucket_bytes=buckets
        )
    compute = compute_probe.probe(study.words, study.cells, announce, on_one_machine=bool(study.fabric))
    return extrapolation.extrapolate(study, compute, extent.sizes, *named)


def _render(
    study: Study, measurements: Sequence[Measurement], form: str, width: Optional[int], ascii_only: bool
) -> str:
    from tf_ipu_dp.scaling import report

    analysis, sentences = _analyse(study, measurements)
    if form == JSON:
        return report.render_json(analysis, sentences)
    if form == CSV:
        return report.render_csv(analysis)
    return report.render_text(analysis, sentences, width, ascii_only)


def _write(study: Study, measurements: Sequence[Measurement], folder: Path) -> Sequence[Path]:
    from tf_ipu_dp.scaling import report

    return report.write(*_analyse(study, measurements), folder)


def _analyse(study: Study, measurements: Sequence[Measurement]) -> Tuple[Analysis, str]:
    from tf_ipu_dp.scaling import analysis, verdict

    found = analysis.analyse(study, measurements)
    return found, verdict.render(found)
