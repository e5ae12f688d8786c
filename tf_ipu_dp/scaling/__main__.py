"""`python -m tf_ipu_dp.scaling`: trains at several sizes, and says how well it scales. `report` draws a study again."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shlex
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence

from absl import flags

from tf_ipu_dp import __version__, cli, sdk
from tf_ipu_dp.collectives.fabric import Fabric
from tf_ipu_dp.collectives.network import EmulatedHosts
from tf_ipu_dp.runs import run_folder
from tf_ipu_dp.scaling import modes, parts, study_flags
from tf_ipu_dp.scaling.our_runs import Place
from tf_ipu_dp.scaling.parts import Parts
from tf_ipu_dp.scaling.records import Measurement, Study
from tf_ipu_dp.scaling.runner import Runner, Settings
from tf_ipu_dp.scaling.study_flags import Options
from tf_ipu_dp.scaling.study_folder import StudyFolder, open_folder

_REPORT = "report"
_PACKAGES = ("tensorflow", "tensorflow-cpu", "horovod", "torch")


def main(words: Sequence[str], given: Optional[Parts] = None) -> int:
    """Runs a study, or draws one that is there. `given` are its parts; without them the package's own."""
    if cli.wants_help(words):
        return cli.show(study_flags.render_help())
    if words and words[0] == _REPORT:
        return _report(words[1:], given or parts.load())
    if words and not words[0].startswith("-"):
        raise cli.UsageError(f"{words[0]} is not a subcommand. Use {_REPORT} STUDY_DIR, or flags only to run a study.")
    found = given or parts.load()
    options = study_flags.parse(words, found)
    study = plan_study(options, found, words)
    if options.dry_run:
        return cli.show(_render_cells(study, options.json))
    name = f"scaling-{study.mode}-{options.config.model}"
    path = cli.expand_path(options.study_dir) if options.study_dir else run_folder.make_folder(name, datetime.now())
    with open_folder(path, study, resume=options.resume) as folder:
        return _run(study, options, found, folder)


def _run(study: Study, options: Options, found: Parts, folder: StudyFolder) -> int:
    study = _predict(study, options, found, folder)
    folder.write_study(study)
    runs = len(study.cells) * study.repeats
    announce(f"{cli.count(len(study.cells), 'cell')} x {cli.count(study.repeats, 'repeat')} = {cli.count(runs, 'run')}")
    was_interrupted = False
    try:
        with _place(options) as place:
            if place.network is not None:
                study = dataclasses.replace(study, facts={**study.facts, **place.network.facts()})
                folder.write_study(study)
            settings = Settings(options.config, options.request.dataset, options.updates, place)
            Runner(study, settings, folder, found, announce).run()
    except KeyboardInterrupt:
        was_interrupted = True
    measurements = folder.read_measurements()
    done = sum(each.is_done for each in measurements)
    if was_interrupted:
        again = " ".join(map(shlex.quote, ["python", "-m", "tf_ipu_dp.scaling", *_with_folder(study, folder)]))
        announce(f"interrupted: {done} of {cli.count(runs, 'run')} are measured and kept. Continue with: {again}")
    if measurements:
        try:
            _show(study, measurements, found, folder, parts.JSON if options.json else parts.TEXT)
        except cli.UsageError as error:  # the study is complete without its pictures
            announce(str(error))
    return 130 if was_interrupted else 0 if done else 1


def _report(words: Sequence[str], found: Parts) -> int:
    """Draws the study in a folder again: all files, and the table."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_bool("json", False, "Print the result as JSON.", flag_values=fv)
    flags.DEFINE_bool("csv", False, "Print the table as CSV.", flag_values=fv)
    cli.parse([word for word in words if word.startswith("-")], fv)
    folders = [word for word in words if not word.startswith("-")]
    if len(folders) != 1:
        raise cli.UsageError(f"{_REPORT} takes the folder of one study: python -m tf_ipu_dp.scaling report STUDY_DIR.")
    folder = StudyFolder(cli.expand_path(folders[0]))
    study = folder.read_study()
    form = parts.JSON if fv["json"].value else parts.CSV if fv["csv"].value else parts.TEXT
    _show(study, folder.read_measurements(), found, folder, form)
    return 0


def _show(study: Study, measured: Sequence[Measurement], found: Parts, folder: StudyFolder, form: str) -> None:
    ascii_only = not cli.supports_unicode(sys.stdout, os.environ)
    width = cli.width_of(sys.stdout)
    sys.stdout.write(found.render(study, measured, form, width, ascii_only))
    sys.stdout.flush()
    written = found.write(study, measured, folder.path)
    if written:
        announce(f"written: {', '.join(str(path) for path in written)}")


def plan_study(options: Options, found: Parts, words: Sequence[str]) -> Study:
    """Returns the study that a command line asks for, without predictions."""
    request = options.request
    is_compared = not all(map(found.is_ours, request.engines))
    return Study(
        mode=request.mode,
        unit=request.axis,
        sizes=request.sizes,
        engines=request.engines,
        repeats=options.repeats,
        seed=options.order_seed,
        seconds=options.seconds,
        words=modes.common_words(options.config, is_compared=is_compared),
        cells=modes.plan_cells(request, found.is_ours),
        fabric=options.fabric.render() if options.fabric is not None else "",
        target_accuracy=options.target_accuracy,
        facts=read_facts(options.config.sdk, options.fabric),
        command=tuple(words),
        version=__version__,
        updates=options.updates,
        epochs=str(options.config.epochs) if options.target_accuracy is not None else "",
        hosts=options.config.hosts.names if options.config.hosts is not None else (),
    )


def _predict(study: Study, options: Options, found: Parts, folder: StudyFolder) -> Study:
    """Returns the study with its predictions: those made before its first run, if it is continued."""
    if folder.study_json.exists() and options.resume:
        before = folder.read_study()
        study = dataclasses.replace(study, predictions=before.predictions, extrapolations=before.extrapolations)
    try:
        if not study.predictions:
            made = found.predict(study, options.fabric, announce)
            study = dataclasses.replace(study, predictions=tuple(made))
        if options.extent is not None:
            further = found.extrapolate(study, options.extent, announce)
            study = dataclasses.replace(study, extrapolations=tuple(further))
    except cli.UsageError as error:
        if options.extent is not None:  # asked for by the user, and not only good to have
            raise
        announce(f"no prediction: {error}")
    return study


@contextlib.contextmanager
def _place(options: Options) -> Iterator[Place]:
    """Yields where the cells run: emulated hosts are made for all of them at once."""
    if options.fabric is None:
        yield Place(options.config.hosts.names if options.config.hosts is not None else ())
        return
    with EmulatedHosts(options.fabric) as network:
        announce(f"emulated hosts: {options.fabric.render()}")
        announce("all of them share the cores of this machine: their links are studied, and not their speed.")
        check = network.self_check()
        for line in [*network.notes, *(link.render() for link in check.links), *check.problems]:
            announce(line)
        yield Place(network=network)


def read_facts(chosen_sdk: str, fabric: Optional[Fabric]) -> Dict[str, str]:
    """Returns what is known of this machine and of the installed packages."""
    facts = {
        "sdk": "emulator" if _is_emulated(chosen_sdk) else "poplar",
        "processor": _read_processor(),
        "cores": str(os.cpu_count() or 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
        "load average at the start": f"{os.getloadavg()[0]:.2f}",
    }
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[name] = metadata.version(name)
    return {**facts, **({} if fabric is None else fabric.facts())}


def announce(text: str) -> None:
    """Writes a line to stderr."""
    cli.announce("scaling", text)


def _with_folder(study: Study, folder: StudyFolder) -> List[str]:
    """Returns the words that continue a study: those that were typed, and its folder if it was not."""
    named = any(word.lstrip("-").split("=")[0] == "study_dir" for word in study.command)
    return [*study.command] if named else [*study.command, f"--study_dir={folder.path}"]


def _render_cells(study: Study, as_json: bool) -> str:
    if as_json:
        return json.dumps(study.to_json(), indent=2) + "\n"
    header = ("Cell", "Size", "Replicas", "Instances", "Hosts", "Micro batch", "Accumulation",
              "Global batch")  # fmt: skip
    rows = [
        (cell.key, *map(str, (cell.size, cell.replicas, cell.instances, cell.hosts, cell.micro_batch_size,
                              cell.gradient_accumulation, cell.global_batch_size)))
        for cell in study.cells
    ]  # fmt: skip
    table = cli.render_table(header, rows, cli.width_of(sys.stdout), right=range(1, len(header)))
    runs = cli.count(len(study.cells) * study.repeats, "run")
    return f"{table}\n{cli.count(len(study.cells), 'cell')} x {cli.count(study.repeats, 'repeat')} = {runs}\n"


def _is_emulated(chosen_sdk: str) -> bool:
    return chosen_sdk == "emulator" or sdk.explain_missing_gcipuinfo() is not None


def _read_processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(cli.run("scaling", lambda: main(sys.argv[1:]), sys.stderr))
