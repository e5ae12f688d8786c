"""All files of a study's report: text, CSV, JSON, pictures and one page. Only `write` touches the disk."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any, Dict, List, Optional

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import drawings, panels
from tf_ipu_dp.monitoring.text_layout import DisplayOptions
from tf_ipu_dp.runs import safe_files
from tf_ipu_dp.runs.json_files import plain
from tf_ipu_dp.scaling import report_tables, report_text
from tf_ipu_dp.scaling.analysis import Analysis, Row

_SCHEMA = 1
_NAME = "report"
_FILE_WIDTH = 120


def render_text(
    analysis: Analysis, verdict: str, width: Optional[int], ascii_only: bool = False, colour: bool = False
) -> str:
    """Returns the tables and sentences of a report; a width of None is that of a pipe."""
    return report_text.render(analysis, verdict, DisplayOptions(width, colour=colour, unicode=not ascii_only))


def render_json(analysis: Analysis, verdict: str) -> str:
    """Returns a report as one JSON object. None is null."""
    value = {
        "schema": _SCHEMA,
        "study": {key: each for key, each in analysis.study.to_json().items() if key != "schema"},
        "baseline": analysis.baseline,
        "verdict": verdict,
        "rows": [{**dataclasses.asdict(row), "parts_error": row.parts_error} for row in analysis.rows],
        "knees": [dataclasses.asdict(knee) for knee in analysis.knees],
        "time_to_accuracy": [dataclasses.asdict(each) for each in analysis.time_to_accuracy],
    }
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def render_csv(analysis: Analysis) -> str:
    """Returns one line per cell. What is not known is empty; units are in the names of the columns."""
    lines = [_csv_line(analysis, row) for row in analysis.rows]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(lines[0]) if lines else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in line.items()} for line in lines)
    return stream.getvalue()


def write(analysis: Analysis, verdict: str, folder: Path) -> List[Path]:
    """Writes a report into a folder and returns its files: the numbers first, for which nothing must be installed."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        f"{_NAME}.txt": render_text(analysis, verdict, _FILE_WIDTH).encode(),
        f"{_NAME}.csv": render_csv(analysis).encode(),
        f"{_NAME}.json": render_json(analysis, verdict).encode(),
    }
    written = [_write(folder / name, content) for name, content in files.items()]
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise cli.UsageError(
            f"The numbers are in {folder}, but pictures and the page need matplotlib ({error}). Install it with: pip "
            "install 'matplotlib>=3.6,<3.10', then draw them with: python -m tf_ipu_dp.scaling report STUDY_DIR"
        ) from error
    from tf_ipu_dp.scaling import charts, report_page

    for panel in charts.make_panels(analysis):
        for kind in ("png", "svg"):
            figure, _ = panels.make_figure([panel], one_file=True)
            written.append(
                _write(folder / f"{panel.name}.{kind}", drawings.render_figure(figure, kind, panel.name))
            )  # fmt: skip
    written.append(_write(folder / f"{_NAME}.html", report_page.render_page(analysis, verdict).encode()))
    return written


def _write(path: Path, content: bytes) -> Path:
    safe_files.write_durably(path, content)
    return path


def _csv_line(analysis: Analysis, row: Row) -> Dict[str, Any]:
    cell, rate, spread, predicted = row.cell, row.samples_per_s, row.efficiency_interval, row.predicted
    line: Dict[str, Any] = {
        "mode": analysis.study.mode,
        "engine": cell.engine,
        "unit": analysis.study.unit,
        "size": cell.size,
        "replicas": cell.replicas,
        "instances": cell.instances,
        "hosts": cell.hosts,
        "micro_batch_size": cell.micro_batch_size,
        "gradient_accumulation": cell.gradient_accumulation,
        "global_batch_size": cell.global_batch_size,
        "repeats": row.repeats,
        "samples_per_s": rate and rate.median,
        "samples_per_s_low": rate and rate.low,
        "samples_per_s_high": rate and rate.high,
        "interval_level": rate and rate.level,
        "samples_per_s_per_replica": row.samples_per_s_per_replica,
        "speedup": row.speedup,
        "efficiency": row.efficiency,
        "efficiency_low": spread and spread.low,
        "efficiency_high": spread and spread.high,
        "core_limited": int(row.core_limited),
        "others_busy": row.others_busy,
        "memory_bytes": row.memory_bytes,
        "input_wait_share": row.input_wait_share,
        "update_s": row.update_s,
        "predicted_update_s": predicted and predicted.update_s,
        "predicted_low_s": predicted and predicted.low_s,
        "predicted_high_s": predicted and predicted.high_s,
        "error": row.error,
    }
    line.update({name: row.parts and getattr(row.parts, name) for name in report_tables.PART_NAMES})
    line["reason"] = row.reason
    return line
