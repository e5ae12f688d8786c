"""`python -m tf_ipu_dp.collectives report FOLDER ...`: tables and pictures of measurements and simulations."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import calibration, job_prediction, quantities, report_text, results
from tf_ipu_dp.collectives.report_content import Content, make_content, render_size
from tf_ipu_dp.collectives.run_exchanges import RunExchanges
from tf_ipu_dp.monitoring import drawings, panels, terminal
from tf_ipu_dp.runs import run_folder
from tf_ipu_dp.runs.exchange_times import ExchangeTimes

_DRAWN = drawings.FORMATS
_FILES = (*_DRAWN, ".csv", ".json")
_TEXT, _JSON, _CSV = "text", "json", "csv"
_SERIALIZER: Any = flags.ArgumentSerializer()
_EXAMPLES = (
    "python -m tf_ipu_dp.collectives report results/r4",
    "python -m tf_ipu_dp.collectives report results/r4 results/r4_predicted --out=r4.html --out=r4.png",
    "python -m tf_ipu_dp.collectives report results/sweep --ranks=4 --bytes=1MiB..64MiB",
)


class _FileParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    placeholder = "FILE"


class _ListParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    placeholder = "LIST"


def main(words: Sequence[str]) -> int:
    """Shows the report, and writes it to files where asked."""
    if cli.wants_help(words):
        return cli.show(_help())
    fv = _make_flags()
    folders = [Path(word) for word in words if not word.startswith("-")]
    cli.parse([word for word in words if word.startswith("-")], fv)
    if not folders:
        raise cli.UsageError(
            "report needs the folder of a result or of a training run, for example: report results/r4."
        )
    files = [Path(name) for name in _value(fv, "out") or ()]
    for path in files:
        drawings.check_file("out", path, _FILES, _DRAWN)
    form = _value(fv, "format")
    content = _read(folders, fv)
    if not content.entries and (form == _CSV or any(path.suffix.lower() == ".csv" for path in files)):
        raise cli.UsageError("A run has a histogram of its exchanges, but no trials for a CSV. Use json instead.")
    sys.stdout.write(render_for_stdout(content, form))
    for path in files:
        drawings.write_file("out", path, _render_file(content, path.suffix.lower()))
        cli.announce("report", f"wrote {path}")
    return 0


def render_json(content: Content) -> str:
    """Returns the numbers of a report as one JSON object."""
    value: Dict[str, Any] = {"schema": 1, "results": []}
    for key, result in content.results:
        own = [entry for entry in content.entries if entry.key == key]
        about = result.description.to_json()
        about.pop("schema")
        about["series"] = [
            {
                **_without_schema(entry.summary.to_json()),
                "link_bytes_per_s": entry.series.facts.link_bytes_per_s,
                "outliers": dict(report_text.cause_counts(entry)),
            }
            for entry in own
        ]
        value["results"].append({"key": key, **about})
    value["runs"] = [{"name": run.name, **_without_schema(run.times.to_json())} for run in content.runs]
    value["pairs"] = [{**_without_schema(pair.to_json()), "error_pct": pair.error_pct} for pair in content.pairs]
    return json.dumps(value, indent=2) + "\n"


def render_csv(content: Content) -> str:
    """Returns every trial of a report: the columns of the results' own files, with the result in front."""
    rows: List[Dict[str, str]] = []
    names = ["result", "kind", "label"]
    for key, result in content.results:
        reader = csv.DictReader(io.StringIO(results.render_trials(result.series)))
        own = [entry for entry in content.entries if entry.key == key]
        causes = [{each.trial: each.cause for each in entry.outliers} for entry in own]
        names += [name for name in reader.fieldnames or () if name not in names]
        for row in reader:
            number = int(row["series"])
            about = {"result": key, "kind": result.description.kind, "label": own[number].summary.label}
            rows.append({**about, **row, "outlier": causes[number].get(int(row["trial"]), "")})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, [*names, "outlier"], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def render_for_stdout(content: Content, form: str) -> str:
    """Returns a report as text for where standard output goes, or as one of the other forms."""
    if form == _JSON:
        return render_json(content)
    if form == _CSV:
        return render_csv(content)
    return report_text.render(content, terminal.detect_options(sys.stdout))


def _render_file(content: Content, kind: str) -> bytes:
    if kind == ".json":
        return render_json(content).encode()
    if kind == ".csv":
        return render_csv(content).encode()
    from tf_ipu_dp.collectives import charts, report_page

    if kind == ".html":
        return report_page.render_page(content).encode()
    figure, _ = panels.make_figure(charts.make_panels(content), one_file=True)
    return drawings.render_figure(figure, kind[1:], "report")


def _read(folders: Sequence[Path], fv: flags.FlagValues) -> Content:
    """Returns the content of results, and of training runs beside the simulations that are given with them."""
    runs = {folder: times for folder in folders for times in [_read_run(folder)] if times is not None}
    found = [results.read(folder) for folder in folders if folder not in runs]
    found = _select(found, fv) if found else []
    exchanges = [
        RunExchanges(str(folder), times, _prediction(times, found) or _simulate(folder))
        for folder, times in runs.items()
    ]
    return make_content(found, exchanges)


def _prediction(times: ExchangeTimes, found: Sequence[results.Result]) -> Optional[results.Result]:
    """Returns the simulation with as many ranks as a run has instances, if it is the only one."""
    matching = [
        results.Result(result.description, (series,))
        for result in found if result.description.kind == results.SIMULATED
        for series in result.series if series.facts.ranks == len(times.arrivals)
    ]  # fmt: skip
    if len(matching) > 1:
        cli.announce(
            "report",
            f"{len(matching)} simulated series have {len(times.arrivals)} ranks; choose one with --bytes to draw it "
            "beside the run.",
        )
    return matching[0] if len(matching) == 1 else None


def _simulate(folder: Path) -> Optional[results.Result]:
    """Returns a simulation of a run's exchanges, if this machine is calibrated and the job can still be planned."""
    try:
        found = calibration.load(calibration.default_path(os.environ))
        return job_prediction.simulate_run(run_folder.read_run_flags(folder), found) if found is not None else None
    except cli.UsageError as error:
        cli.announce("report", f"no prediction for {folder}: {error}")
        return None


def _read_run(folder: Path) -> Optional[ExchangeTimes]:
    """Returns the exchanges of a training run; None for a folder that is not one of a run."""
    if (folder / results.DESCRIPTION).exists():
        return None
    run = run_folder.RunFolder(folder)
    times = run.read_exchange_times()
    if times is None and run.plan_json.exists():
        raise cli.UsageError(
            f"{folder} is a run without {run.exchange_times_json.name}: exchanges are measured between two or more "
            "instances, and not where they take place inside the device."
        )
    return times


def _select(found: Sequence[results.Result], fv: flags.FlagValues) -> List[results.Result]:
    """Returns the results with the series of the chosen ranks and bytes only; those without any are left out."""
    ranks = _numbers(_value(fv, "ranks"))
    sizes = _sizes(_value(fv, "bytes"))
    chosen = []
    for result in found:
        series = tuple(
            each for each in result.series
            if (not ranks or each.facts.ranks in ranks) and (not sizes or each.facts.bytes in sizes)
        )  # fmt: skip
        if series:
            chosen.append(results.Result(result.description, series))
    if not chosen:
        every = [each.facts for result in found for each in result.series]
        there = cli.alternatives(dict.fromkeys(f"{each.ranks:,} ranks of {render_size(each.bytes)}" for each in every))
        raise cli.UsageError(f"No series has the ranks and bytes that are asked for. There is {there}.")
    return chosen


def _numbers(text: Optional[str]) -> List[int]:
    try:
        return [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise cli.UsageError(f"--ranks={text} is not a list of whole numbers like 4 or 2,4,8.") from None


def _sizes(text: Optional[str]) -> Sequence[int]:
    try:
        return quantities.parse_byte_list(text) if text else ()
    except ValueError as error:
        raise cli.UsageError(f"--bytes={text} is not possible: {error}") from None


def _without_schema(value: Dict[str, Any]) -> Dict[str, Any]:
    return {key: each for key, each in value.items() if key != "schema"}


def _value(fv: flags.FlagValues, name: str) -> Any:
    return fv[name].value


def _make_flags() -> flags.FlagValues:
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_multi(_FileParser(), _SERIALIZER, "out", None, "", flag_values=fv)
    # Set afterwards: absl adds a remark of its own to the help of a flag that may be repeated.
    fv["out"].help = (
        "Write the report to this file, by the ending of its name: .png, .svg, .html (one page that loads nothing), "
        ".csv (every trial) or .json (the numbers). May be given several times."
    )
    flags.DEFINE_enum(
        "format", _TEXT, [_TEXT, _JSON, _CSV], "What stdout gets: tables and plots, the numbers, or every trial.",
        flag_values=fv,
    )  # fmt: skip
    for name, text in (
        ("ranks", "Only series of these ranks, like 4 or 2,4,8."),
        ("bytes", "Only series of these sizes, like 971048 or 4KiB..64MiB."),
    ):
        flags.DEFINE(_ListParser(), name, None, text, flag_values=fv, serializer=_SERIALIZER)
    return fv


def _help() -> str:
    return cli.render_help(
        "python -m tf_ipu_dp.collectives report [--flag=value ...] FOLDER|RUN_DIR ...",
        "Shows measurements and simulations side by side: percentiles and bandwidths, the share of trials by time, the "
        "time of each trial with the causes of outliers, who was last, and measured against predicted. Of a training "
        "run: the histogram of its exchanges, beside a simulation that is given with it.",
        {"Report": ("out", "format"), "Choice": ("ranks", "bytes")},
        _make_flags(),
        shutil.get_terminal_size().columns,
        _EXAMPLES,
    )
