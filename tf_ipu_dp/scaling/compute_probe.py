"""A short measurement of what predictions of a study start from, before any of its cells is measured.

Each shape of the cells is trained for a moment by the trainer itself: as many processes at once as a machine of the
cell has, with their share of the cores, but as jobs of their own, which exchange nothing. Its time is the median of
windows (`record_windows`). The result is kept in the user's cache, so that later studies of the same model on the same
machine and versions take no time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import os
import platform
from datetime import date
from pathlib import Path
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import __version__, cli, sdk
from tf_ipu_dp.collectives import buckets, calibrate, calibration, calibration_file, measure, size
from tf_ipu_dp.collectives.calibration import Calibration
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.config.values import Duration, TimeSpan
from tf_ipu_dp.planning import topology
from tf_ipu_dp.runs import json_files, safe_files
from tf_ipu_dp.runs.records import RecordError, TrainingRecord
from tf_ipu_dp.scaling import record_windows
from tf_ipu_dp.scaling.compute_calibration import (
    OURS,
    ComputeCalibration,
    Shape,
    ShapeTime,
    SharedExchange,
    jobs_to_measure,
    shape_of,
    shapes_to_measure,
)
from tf_ipu_dp.scaling.probe_processes import LIMIT_S, ProbeProcesses
from tf_ipu_dp.scaling.records import Cell

Announce = Callable[[str], None]

_RECORD_S = 0.25  # between two records, once the time of an update is known
_EPOCHS = 1_000_000  # more than any measurement takes
_COLLECTIVE_TRIALS = 15
# Flags that decide what an update computes. All others change how a run is started, kept or shown.
_LAYOUT = ("ipus", "instances", "micro_batch_size", "gradient_accumulation", "global_batch_size", "hosts")
_VERSIONS = ("tensorflow", "tensorflow-cpu", "numpy")
_EXCHANGE, _HOROVOD = "IPU_EMULATOR_EXCHANGE", "horovod"  # gradients do not go through shared memory
# As poprun sets them, so that the processes of a machine divide its cores.
_THREADS = ("IPU_EMULATOR_CORES", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")


def probe(
    words: Sequence[str], cells: Sequence[Cell], announce: Announce, *, on_one_machine: bool = False
) -> ComputeCalibration:
    """Returns the times of the shapes of our own engines' cells, from the cache where they were measured before.

    `words` are the flags of train that all cells have in common. `on_one_machine`: the cells' hosts are emulated.
    """
    ours = _our_cells(cells)
    config = train_flags.parse([*words, *ours[0].words])
    epochs = {
        shape_of(cell, on_one_machine=on_one_machine): _job_size([*words, *cell.words]).updates_per_epoch
        for cell in ours
    }
    facts = facts_of(config)
    path = cache_path(os.environ, facts)
    kept = load(path)
    known = {each.shape: each for each in kept.times} if kept else {}
    cores = _cores() if _is_emulated(config) else None
    missing = [shape for shape in shapes_to_measure(list(epochs), cores=cores) if shape not in known]
    sizes = jobs_to_measure([shape.processes for shape in epochs], _cores()) if _is_emulated(config) else []
    if missing:
        layouts = "1 layout" if len(missing) == 1 else f"{len(missing)} layouts"
        announce(f"calibrating the compute of {layouts}, about {_guess_seconds(missing)} s, kept in {path}")
    # As the cells do: emulated hosts have a network between them.
    in_memory = not on_one_machine and all(cell.hosts <= 1 for cell in ours) and os.environ.get(_EXCHANGE) != _HOROVOD
    exchanges = (
        {each.shape.processes: each for each in kept.shared_exchanges if each.in_memory == in_memory} if kept else {}
    )
    new_sizes = [each for each in sizes if each not in exchanges] if sizes and _has_horovod() else []
    with ProbeProcesses(emulated=_is_emulated(config)) as processes:
        for shape in missing:
            fastest = min(known.values(), key=lambda each: each.total_s / each.shape.samples, default=None)
            times = [measure_shape(processes, config, shape, epochs[shape], fastest) for _ in range(_starts(shape))]
            known[shape] = min(times, key=lambda each: each.total_s)
        for instances in new_sizes:
            announce(f"calibrating the exchange of {instances} instances that share the cores, about 10 s")
            smallest = min(known, key=lambda shape: shape.samples)
            exchanges[instances] = measure_shared_exchange(
                processes, config, known[smallest], instances, in_memory=in_memory
            )
    is_new = bool(missing) or bool(new_sizes)
    found = ComputeCalibration(
        date=kept.date if kept and not is_new else date.today().isoformat(),
        model=config.model,
        cores=_cores(),
        emulated=_is_emulated(config),
        bucket_bytes=read_bucket_bytes(words, ours),
        times=tuple(sorted(known.values(), key=lambda each: dataclasses.astuple(each.shape))),
        facts=facts,
        shared_exchanges=tuple(exchanges[each] for each in sorted(exchanges)),
    )
    if is_new:
        save(found, path, announce)
    return found


def read_bucket_bytes(words: Sequence[str], cells: Sequence[Cell]) -> Tuple[int, ...]:
    """Returns the bytes that one update all-reduces, in the buckets of Horovod."""
    return tuple(bucket.bytes for bucket in _job_size([*words, *_our_cells(cells)[0].words]).buckets)


def _our_cells(cells: Sequence[Cell]) -> List[Cell]:
    ours = [cell for cell in cells if cell.engine.startswith(OURS)]
    if not ours:
        raise cli.UsageError("A prediction needs a cell of tf_ipu_dp: other engines are not predicted.")
    return ours


def collective_calibration(announce: Announce) -> Optional[Calibration]:
    """Returns the calibration of this machine's collectives; measured now, in short, if there is none.

    None where Horovod is missing: then nothing between instances can be predicted.
    """
    path = calibration_file.path(os.environ)
    kept = calibration.load(path)
    if kept is not None:
        return kept
    if not _has_horovod():
        return None
    announce(f"calibrating the collectives of this machine at 2 ranks, kept in {path}")
    found = calibrate.calibrate(None, trials=_COLLECTIVE_TRIALS)
    calibration.save(found, path)
    return found


def _has_horovod() -> bool:
    try:
        measure.require_horovod(2)
    except cli.UsageError:
        return False
    return True


def measure_shape(
    processes: ProbeProcesses,
    config: TrainConfig,
    shape: Shape,
    updates_per_epoch: int,
    known: Optional[ShapeTime] = None,
) -> ShapeTime:
    """Trains a shape for a moment in processes of their own, and returns its time. `known`: that of another shape."""
    guess_s = None
    if known is not None:
        slower = max(shape.processes / known.shape.processes, 1.0) if _is_emulated(config) else 1.0
        guess_s = known.total_s / known.shape.samples * shape.samples * slower
    words = shape_words(config, shape, updates_per_epoch, guess_s)
    environ = {}
    if _is_emulated(config) and shape.processes > 1:
        environ = dict.fromkeys(_THREADS, str(max(_cores() // shape.processes, 1)))
    records = processes.measure(words, shape.processes, environ)
    return time_of_records(shape, records, config.device_iterations or 1)


def measure_shared_exchange(
    processes: ProbeProcesses, config: TrainConfig, known: ShapeTime, instances: int, *, in_memory: bool
) -> SharedExchange:
    """Trains so many instances on this machine for a moment, and returns what an update and its exchange took."""
    shape = dataclasses.replace(known.shape, processes=instances)
    lines = shape_words(config, shape, None, max(instances / known.shape.processes, 1.0) * known.total_s)
    replicas = shape.replicas * shape.processes
    ipus = replicas * topology.ipus_per_replica(config.requested_stages or 1)
    words = [*lines, f"--instances={shape.processes}", f"--ipus={ipus}", "--novalidate"]
    records = processes.measure_job(words, {} if in_memory else {_EXCHANGE: _HOROVOD})
    rows = [each for record in records for each in record.instances]
    updates = sum(record.executions or 0 for record in records) * (config.device_iterations or 1) * shape.processes
    if not updates or any(each.program_collective_s is None for each in rows):
        raise cli.UsageError("The calibration of the exchange has no record that was timed.")
    return SharedExchange(
        shape,
        math.fsum(each.program_collective_s or 0.0 for each in rows) / updates,
        record_windows.median_execution_s([records]) / (config.device_iterations or 1),
        in_memory,
    )


def shape_words(
    config: TrainConfig, shape: Shape, updates_per_epoch: Optional[int], update_s: Optional[float] = None
) -> List[str]:
    """Returns the flags of one process: the job's own, with the layout of the shape and no end. Pure.

    Its epochs are as long as the job's, where that is given. `update_s`, about the time of an update, decides how often
    it writes a record.
    """
    ipus = shape.replicas * topology.ipus_per_replica(config.requested_stages or 1)
    iterations = config.device_iterations or 1
    log_every = None
    if update_s:
        log_every = iterations * max(1, round(_RECORD_S / (update_s * iterations)))
    alone = dataclasses.replace(
        config,
        ipus=ipus,
        instances=1,
        hosts=None,
        micro_batch_size=shape.micro_batch_size,
        gradient_accumulation=shape.micro_batches // shape.replicas,
        global_batch_size=None,
        updates_per_epoch=updates_per_epoch,
        epochs=Duration(_EPOCHS),
        log_every=log_every,
        checkpoint_every=_EPOCHS * (updates_per_epoch or 1),
        run_dir=None,
        time_limit=TimeSpan(LIMIT_S),  # also if this process is killed
        json=False,
    )
    return list(alone.flag_lines())


def time_of_records(shape: Shape, processes: Sequence[Sequence[TrainingRecord]], iterations: int) -> ShapeTime:
    """Returns the time of an update from the records of all processes: the median of their windows. Pure.

    The shares of its parts are those of all records together. A part that the device does not report counts as compute.
    """
    rows: List[Tuple[float, int, float, float, float]] = []
    for records in processes:
        for record in records:
            updates = (record.executions or 0) * iterations
            if updates and record.instances:
                own = record.instances[0]
                waited, optimizer = own.input_wait_s or 0.0, own.optimizer_s or 0.0
                rows.append((own.seconds / updates, updates, waited, optimizer, own.seconds - own.executing_s))
    if not rows:
        raise cli.UsageError("The calibration of compute has no record that was timed.")
    updates = sum(row[1] for row in rows)
    total = record_windows.median_execution_s(processes) / iterations
    mean = math.fsum(row[0] * row[1] for row in rows) / updates
    waited, optimizer, overhead = (math.fsum(column) / updates * total / mean for column in list(zip(*rows))[2:])
    factors = sorted(row[0] / total for row in rows)
    deviations = [(row[0] - total) ** 2 * row[1] for row in rows]
    return ShapeTime(
        shape,
        max(total - waited - optimizer - overhead, 0.0),
        waited,
        optimizer,
        overhead,
        # A record's mean of u updates scatters sqrt(u) times less than single updates.
        math.sqrt(math.fsum(deviations) / max(len(rows) - 1, 1)),
        min(quantile(factors, 0.1), 1.0),
        max(quantile(factors, 0.9), 1.0),
    )


def cache_path(environ: Mapping[str, str], facts: Mapping[str, str]) -> Path:
    """Returns the file of a calibration with these facts."""
    key = hashlib.sha256(json.dumps(dict(sorted(facts.items()))).encode()).hexdigest()[:16]
    base = environ.get("XDG_CACHE_HOME") or cli.expand_path(environ.get("HOME") or "~") / ".cache"
    return Path(base) / "tf_ipu_dp" / "scaling" / f"compute-{key}.json"


def load(path: Path) -> Optional[ComputeCalibration]:
    """Returns the calibration in a file; None if there is none that can be read."""
    if not path.exists():
        return None
    try:
        return ComputeCalibration.from_json(json_files.read_object(path, follow_links=True))
    except RecordError:
        return None


def save(found: ComputeCalibration, path: Path, announce: Announce) -> None:
    """Keeps a calibration in a file; says so if that is not possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.write_durably(path, json.dumps(found.to_json(), indent=2) + "\n")
    except OSError as error:
        announce(f"the calibration cannot be kept in {path}: {error.strerror}")


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value that a share of the sorted values is below."""
    place = share * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def _job_size(words: Sequence[str]) -> buckets.JobSize:
    return size.read_job_size(train_flags.parse(words), buckets.FUSION_THRESHOLD)


def facts_of(config: TrainConfig) -> Dict[str, str]:
    """Returns what the calibration depends on: the work of an update, versions, machine."""
    free = {*_LAYOUT, *_UNRELATED}
    lines = [line for line in config.flag_lines() if line.lstrip("-").split("=")[0] not in free]
    versions = {"tf_ipu_dp": __version__}
    for name in _VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "flags": " ".join(lines),
        "machine": f"{platform.node()}, {platform.machine()}, {_processor()}, {cli.count(_cores(), 'core')}",
        "python": platform.python_version(),
        "sdk": "emulator" if _is_emulated(config) else "poplar",
        **versions,
    }


# Flags that change neither what an update computes nor how fast.
_UNRELATED = (
    "epochs", "updates_per_epoch", "log_every", "checkpoint_every", "keep_checkpoints", "run_dir", "time_limit", "json",
    "seed", "resume", "early_stop", "export", "check_weights_every", "stall_timeout", "executable_cache",
    "learning_rate", "lr_scaling", "lr_base_batch", "lr_schedule", "lr_drop_epochs", "warmup_epochs", "dry_run",
    "format", "evaluate", "input_only",
)  # fmt: skip


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_emulated(config: TrainConfig) -> bool:
    return config.sdk == "emulator" or sdk.explain_missing_gcipuinfo() is not None


def _guess_seconds(shapes: Sequence[Shape]) -> int:
    return 3 + sum((2 + shape.processes) * _starts(shape) for shape in shapes)


def _starts(shape: Shape) -> int:
    """Returns how often a shape is measured; the fastest start counts.

    Now and then a process alone is a fifth slower than the others, from its start to its end. Of several processes at
    once the mean is taken.
    """
    return 2 if shape.processes == 1 else 1
