"""A cell of our own engine: starts `train` or `launch` with a folder for the run, and reads its records afterwards."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.collectives.network import EmulatedHosts
from tf_ipu_dp.config.values import Duration
from tf_ipu_dp.distributed.job_process import start_session, stop_session
from tf_ipu_dp.runs.exchange_times import ExchangeTimes
from tf_ipu_dp.runs.records import TrainingRecord, ValidationRecord
from tf_ipu_dp.runs.run_folder import RunFolder
from tf_ipu_dp.scaling.decomposition import Clocks
from tf_ipu_dp.scaling.modes import Length
from tf_ipu_dp.scaling.process_use import ProcessUse
from tf_ipu_dp.scaling.records import Cell, Measurement, UpdateParts, Validated

Decompose = Callable[[Sequence[TrainingRecord], Optional[ExchangeTimes], int, Optional[Clocks]], Optional[UpdateParts]]

MPI_ENGINE = "tf_ipu_dp_mpi"
OUTPUT = "output.log"
# Makes the emulator time the optimizer of a single replica too; the Poplar SDK does not read it.
TIMED_OPTIMIZER = {"IPU_EMULATOR_TIME_OPTIMIZER": "1"}
_REMOTE_SHELL_VARIABLE = "OMPI_MCA_plm_rsh_agent"
_PROGRAMS = ("train: ", "launch: ", "poprun: ")


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the instances of a cell run: on this machine, on hosts by name, or on emulated hosts."""

    hosts: Tuple[str, ...] = ()
    network: Optional[EmulatedHosts] = None

    @property
    def names(self) -> Tuple[str, ...]:
        return self.network.hosts if self.network is not None else self.hosts


def run(
    cell: Cell, words: Sequence[str], length: Length, folder: Path, place: Place, decompose: Decompose,
    *, epochs: Optional[Duration] = None,
) -> Measurement:  # fmt: skip
    """Runs a cell once and returns what it measured, for repeat 0; UsageError with the reason if the run fails.

    With `epochs` it trains so many, with a validation after each, for time to accuracy. Ctrl-C ends all processes.
    """
    command, environ = make_command(cell, [*words, *_run_words(length, folder, epochs)], place)
    began = time.monotonic()
    process = start_session(command, {**os.environ, **environ}, folder / OUTPUT)
    try:
        with ProcessUse(process.pid) as use:
            status = process.wait()
    finally:
        stop_session(process)
    total_s, others = time.monotonic() - began, use.others()
    files = RunFolder(folder)
    result = files.read_result()
    if status != 0 or result is None:
        raise cli.UsageError(find_reason(files, status))
    records = [record for record in files.read_metrics() if isinstance(record, TrainingRecord)]
    # Validations are no part of the updates, but of the time on the wall.
    made = measure(cell, records, length.warmup, on_the_wall=epochs is None)
    timed = [record for record in records if record.step > length.warmup]
    return dataclasses.replace(
        made,
        total_s=total_s,
        parts=decompose(
            timed,
            files.read_exchange_times(),
            made.updates,
            read_clocks(made, records, timed, result.times.between_s) if epochs is None else None,
        ),
        memory_bytes=use.memory_bytes,
        busy=use.busy(timed[0].elapsed_s, timed[-1].elapsed_s),
        others_busy=others,
        validations=read_validations(files) if epochs is not None else (),
    )


def make_command(cell: Cell, words: Sequence[str], place: Place) -> Tuple[List[str], Dict[str, str]]:
    """Returns the command that trains a cell, and the variables to add to the environment."""
    python = [sys.executable, "-m"]
    environ = dict(TIMED_OPTIMIZER)
    if cell.instances == 1 and not place.names:
        return [*python, "tf_ipu_dp.train", *words, *cell.words], environ
    launch = [*python, "tf_ipu_dp.launch"]
    if cell.engine == MPI_ENGINE:
        launch.append("--launcher=mpirun")
        environ.update(HOROVOD_CPU_OPERATIONS="mpi", HOROVOD_CONTROLLER="mpi")
    hosts = [f"--hosts={','.join(place.names[: cell.hosts])}"] if place.names else []
    command = [*launch, "--", *words, *cell.words, *hosts]
    if place.network is None:
        return command, environ
    environ[_REMOTE_SHELL_VARIABLE] = place.network.remote_shell
    return place.network.command_inside(command), environ


def measure(cell: Cell, records: Sequence[TrainingRecord], warmup: int, *, on_the_wall: bool = False) -> Measurement:
    """Returns samples and seconds of the updates after the warm-up, on the slowest instance. Pure.

    `on_the_wall`: with the time between epochs, as the clocks of other engines count it.
    """
    timed = [record for record in records if record.step > warmup]
    before_s = [record.elapsed_s for record in records if record.step == warmup]
    if not timed or not before_s:
        raise cli.UsageError(f"The run has no record after its warm-up of {cli.count(warmup, 'update')}.")
    seconds: Dict[int, float] = {}
    waited: Dict[int, Optional[float]] = {}
    for record in timed:
        for each in record.instances:
            seconds[each.instance] = seconds.get(each.instance, 0.0) + each.seconds
            before = waited.get(each.instance, 0.0)
            known = before is not None and each.input_wait_s is not None
            waited[each.instance] = before + each.input_wait_s if known else None  # type: ignore[operator]
    slowest = max(seconds, key=lambda instance: seconds[instance])
    updates = timed[-1].step - warmup
    return Measurement(
        cell=cell.key,
        repeat=0,
        state=Measurement.DONE,
        samples=updates * cell.global_batch_size,
        updates=updates,
        seconds=timed[-1].elapsed_s - before_s[-1] if on_the_wall else seconds[slowest],
        input_wait_s=waited[slowest],
    )


def read_clocks(
    made: Measurement, records: Sequence[TrainingRecord], timed: Sequence[TrainingRecord], between_s: float
) -> Optional[Clocks]:
    """Returns what clocks besides those of the records say, from `between_s` of the whole run. Pure."""
    of_all, of_timed = (sum(record.executions or 0 for record in each) for each in (records, timed))
    if not of_timed:
        return None
    updates = made.updates / of_timed  # of an execution
    return Clocks(made.seconds, between_s / of_all / updates)


def read_validations(files: RunFolder) -> Tuple[Validated, ...]:
    """Returns the validations of a run, with the time from its start until each was done."""
    elapsed_s = 0.0
    found = []
    for record in files.read_metrics():
        if isinstance(record, ValidationRecord):
            if record.accuracy is not None:
                found.append(Validated(record.step, elapsed_s + record.seconds, record.accuracy, record.epoch))
        else:
            elapsed_s = record.elapsed_s
    return tuple(found)


def find_reason(files: RunFolder, status: int) -> str:
    """Returns why a run failed, in one sentence: what the first error says, else what its programs said last."""
    lines = _last_lines(files.path / OUTPUT)
    said = [line for line in lines if line.startswith(_PROGRAMS)]
    errors = files.read_errors()
    if errors:
        return f"Instance {errors[0].instance} failed: {errors[0].text.strip().splitlines()[-1]}"
    if said:
        return said[-1].split(": ", 1)[1]
    if status < 0:
        return f"The run was ended by signal {-status} ({signal.Signals(-status).name})."
    last = lines[-1] if lines else "it said nothing"
    return f"The run exited with status {status}: {last}"


def _run_words(length: Length, folder: Path, epochs: Optional[Duration]) -> List[str]:
    # Checkpoints are no part of a study: one at the end is the least that a run makes.
    duration = [f"--epochs={length.total}steps", "--novalidate", f"--checkpoint_every={length.total}"]
    if epochs is not None:
        duration = [f"--epochs={epochs}"]
    return [*duration, f"--log_every={length.warmup}", f"--run_dir={folder}", "--keep_checkpoints=1"]


def _last_lines(path: Path, most_bytes: int = 20_000) -> List[str]:
    try:
        text = path.read_bytes()[-most_bytes:].decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.replace("\r", "\n").splitlines() if line.strip()]
