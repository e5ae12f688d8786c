"""Studies of every mode for tests: several engines, a failed cell, an engine that is missing, predictions.

Times follow from a small model and are the same at every call. Nothing here was measured.
"""

from __future__ import annotations

import dataclasses

from tf_ipu_dp.scaling import records
from tf_ipu_dp.scaling.records import Cell, CellPrediction, Extrapolation, Measurement, Study, UpdateParts, Validated

CORES = 2
SAMPLE_S = 0.002  # compute of one sample on one core
TRAINING_SAMPLES = 6400
NOISE = (1.0, 1.03, 0.98, 1.01, 0.99, 1.02, 1.0)
SPEED = {"tf_ipu_dp": 1.0, "tf_ipu_dp_mpi": 1.02, "horovod": 1.1, "ddp": 0.9, "keras": 1.05}
FAILED_REASON = "instance 3 was killed by signal 9 (out of memory?)"
MISSING_REASON = "torch is not installed. Install it with: pip install 'tf_ipu_dp[ddp]'"


def make_cell(engine, size, *, replicas=None, instances=None, micro=32, accumulation=1, global_batch=None, key=None):
    """Returns a cell; replicas and instances are its size if they are not given."""
    replicas = size if replicas is None else replicas
    instances = size if instances is None else instances
    accumulated = micro * replicas * accumulation if global_batch is None else global_batch
    words = (f"--ipus={replicas}", f"--micro_batch_size={micro}", f"--global_batch_size={accumulated}")
    return Cell(
        key or f"{engine}-{size}", engine, size, replicas, instances, 1, micro, accumulation, accumulated, words
    )


def make_parts(cell):
    """Returns where one update of a cell goes in the model: processes that are more than the cores take turns."""
    processes = max(cell.instances, cell.replicas)
    compute = SPEED[cell.engine] * (0.004 + SAMPLE_S * cell.global_batch_size / processes)
    compute *= max(1.0, processes / CORES)
    alone = cell.instances == 1
    return UpdateParts(
        compute_s=compute,
        input_wait_s=0.02 * compute,
        collective_s=0.0 if alone else 0.004 * (cell.instances - 1) / cell.instances,
        waiting_s=0.0 if alone else 0.001 * cell.instances,
        optimizer_s=0.001,
        overhead_s=0.002,
    )


def make_measurement(cell, repeat=0, *, updates=40, validations=(), **changes):
    """Returns one repeat of a cell that is done."""
    parts = make_parts(cell)
    factor = NOISE[repeat % len(NOISE)]
    parts = UpdateParts(**{field.name: factor * getattr(parts, field.name) for field in dataclasses.fields(parts)})
    ours = cell.engine.startswith("tf_ipu_dp")
    made = Measurement(
        cell.key, repeat, Measurement.DONE, samples=updates * cell.global_batch_size, updates=updates,
        seconds=updates * parts.total_s, total_s=updates * parts.total_s + 4, parts=parts if ours else None,
        input_wait_s=updates * parts.input_wait_s if ours else None,
        memory_bytes=(300 + 150 * cell.instances + cell.micro_batch_size) * 2**20,
        busy=min(1.0, 0.97 * cell.replicas / CORES), validations=tuple(validations),
        run_dir=f"runs/{cell.key}-{repeat}",
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def make_failure(cell, repeat=0, state=Measurement.FAILED, reason=FAILED_REASON):
    """Returns one repeat of a cell that is not done."""
    return Measurement(cell.key, repeat, state, reason)


def make_prediction(cell, error=0.04):
    """Returns a prediction that is off by a share of the model's time."""
    parts = make_parts(cell)
    total = parts.total_s * (1 + error)
    scaled = {field.name: (1 + error) * getattr(parts, field.name) for field in dataclasses.fields(parts)}
    limited = max(cell.instances, cell.replicas) > CORES
    return CellPrediction(cell.key, total, 0.93 * total, 1.08 * total, UpdateParts(**scaled), limited)


def make_extrapolations(sizes=(16, 64, 256, 4096, 65536)):
    """Returns predictions on two fabrics, of which one falls off much earlier."""
    found = []
    for fabric, fall in (("POD256", 0.03), ("ethernet-10g", 0.2)):
        for place, size in enumerate(sizes):
            efficiency = 1 / (1 + fall * (place + 1))
            parts = UpdateParts(0.064, 0.001, 0.064 * (1 / efficiency - 1), 0.002, 0.001, 0.002)
            rate = 480 * size * efficiency
            found.append(Extrapolation(fabric, size, rate, 0.85 * rate, 1.1 * rate, efficiency, parts))
    return tuple(found)


def make_study(mode=records.WEAK, *, engines=("tf_ipu_dp", "horovod", "ddp"), repeats=3, **changes):
    """Returns a study of a mode with its predictions."""
    made = Study(
        mode, "samples" if mode == records.BATCH else "instances", tuple(_SIZES[mode]), tuple(engines), repeats, 1,
        8.0, ("--model=mlp", "--dataset=synthetic"), tuple(cell for each in engines for cell in _CELLS[mode](each)),
        facts={"processor": "Sample <CPU> at 2.0 GHz", "cores": str(CORES), "sdk": "emulator", "TensorFlow": "2.15.1"},
        command=(f"--mode={mode}", "--model=mlp"), version="0.0.0",
    )  # fmt: skip
    ours = [cell for cell in made.cells if cell.engine.startswith("tf_ipu_dp")]
    predictions = tuple(make_prediction(cell, 0.03 * (place % 3) + 0.02) for place, cell in enumerate(ours))
    extrapolations = make_extrapolations() if mode == records.WEAK else ()
    return dataclasses.replace(made, **{"predictions": predictions, "extrapolations": extrapolations, **changes})


def make_measurements(study):
    """Returns all repeats: the largest cell of Horovod fails, DDP is not installed."""
    largest = max(study.cells, key=lambda cell: (cell.engine == "horovod", cell.instances, cell.size))
    found = []
    for repeat in range(study.repeats):
        for cell in study.cells:
            if cell.engine == "ddp":
                found.append(make_failure(cell, repeat, Measurement.MISSING, MISSING_REASON))
            elif cell is largest and cell.engine == "horovod":
                found.append(make_failure(cell, repeat))
            else:
                found.append(make_measurement(cell, repeat))
    return found


def make_accuracy_study(sizes=(1, 2, 4), target=0.9):
    """Returns a study with a target accuracy, and its measurements: the largest size does not reach it."""
    study = make_study(records.WEAK, engines=("tf_ipu_dp",), repeats=1, sizes=tuple(sizes), target_accuracy=target)
    cells = tuple(make_cell("tf_ipu_dp", size) for size in sizes)
    study = dataclasses.replace(study, cells=cells, predictions=(), extrapolations=())
    measurements = []
    for place, cell in enumerate(cells):
        update_s = make_parts(cell).total_s
        epoch_steps = TRAINING_SAMPLES // cell.global_batch_size
        best = target - 0.02 if place == len(cells) - 1 and len(cells) > 1 else target + 0.01
        reached = 4 + place  # epochs: a larger batch needs more of them
        validations = [
            Validated(
                epoch * epoch_steps, epoch * epoch_steps * update_s + 0.5 * epoch + 1, best * epoch / reached, epoch
            )
            for epoch in range(1, reached + 1)
        ]
        measurements.append(make_measurement(cell, validations=validations))
    return study, measurements


def _batch_cells(engine):
    return [
        make_cell(engine, size, replicas=1, instances=1, micro=size, global_batch=size)
        for size in _SIZES[records.BATCH]
    ]


def _weak_cells(engine):
    return [make_cell(engine, size) for size in _SIZES[records.WEAK]]


def _strong_cells(engine):
    sizes = _SIZES[records.STRONG]
    return [make_cell(engine, size, micro=32, accumulation=8 // size, global_batch=256) for size in sizes]


def _compare_cells(engine):
    layouts = ((1, 1), (4, 1), (4, 2), (4, 4))
    return [
        make_cell(engine, replicas, replicas=replicas, instances=instances, key=f"{engine}-{replicas}x{instances}")
        for replicas, instances in layouts
    ]


def _instance_cells(engine):
    return [make_cell(engine, size, replicas=4, instances=size) for size in _SIZES[records.INSTANCES]]


_SIZES = {
    records.BATCH: (1, 2, 4, 8, 16, 32, 64, 128, 256),
    records.WEAK: (1, 2, 4),
    records.STRONG: (1, 2, 4),
    records.COMPARE: (1, 4),
    records.INSTANCES: (1, 2, 4),
}
_CELLS = {
    records.BATCH: _batch_cells,
    records.WEAK: _weak_cells,
    records.STRONG: _strong_cells,
    records.COMPARE: _compare_cells,
    records.INSTANCES: _instance_cells,
}
