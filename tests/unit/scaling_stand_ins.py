"""The scaling study with stand-ins for what it is put together from. `python scaling_stand_ins.py FLAGS` runs it.

Runs of our engine are real. The other engine is a process that answers without training; prediction and report are a
few lines. SCALING_TEST_FAIL names a cell of the other engine that fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tf_ipu_dp import cli
from tf_ipu_dp.scaling import __main__ as command
from tf_ipu_dp.scaling.engines.protocol import Answer
from tf_ipu_dp.scaling.parts import Parts
from tf_ipu_dp.scaling.records import CellPrediction, Extrapolation, UpdateParts

NO_PARTS = UpdateParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
NAMES = ("tf_ipu_dp", "tf_ipu_dp_mpi", "horovod", "ddp", "keras")
INSTALL = {"keras": "Plain Keras is not here. Install it with pip."}


def run_engine(cell, order, folder, place, on_process):
    process = subprocess.Popen([sys.executable, "-c", "print('trained')"], stdout=subprocess.DEVNULL)
    on_process(process.pid)
    process.wait()
    (folder / "order.json").write_text(json.dumps(order.to_json()), encoding="utf-8")
    if cell.key == os.environ.get("SCALING_TEST_FAIL"):
        raise cli.UsageError("Process 1 failed:\nit was asked to.")
    samples = order.batch_size * order.updates
    return [Answer(rank, cell.engine, 0.5 + rank, samples, 2.3) for rank in range(order.processes)]


def predict(study, fabric, announce):
    announce(f"predicting {len(study.cells)} cells")
    return [CellPrediction(cell.key, 0.01, 0.009, 0.011, NO_PARTS) for cell in study.cells]


def extrapolate(study, extent, announce):
    return [Extrapolation(name, size, 1.0, 1.0, 1.0, 1.0, NO_PARTS) for name in extent.fabrics for size in extent.sizes]


def decompose(records, exchanges, updates, clocks):
    seconds = sum(max(each.seconds for each in record.instances) for record in records)
    return UpdateParts(seconds / updates, 0.0, 0.0, 0.0, 0.0, 0.0)


def render(study, measurements, form, width, ascii_only):
    if form == "json":
        return json.dumps([each.to_json() for each in measurements]) + "\n"
    return "".join(f"{each.cell} {each.state}\n" for each in measurements)


def write(study, measurements, folder):
    path = folder / "report.txt"
    path.write_text(f"{len(measurements)}\n", encoding="utf-8")
    return [path]


PARTS = Parts(
    NAMES, lambda name: name.startswith("tf_ipu_dp"), INSTALL.get, run_engine, predict, extrapolate, decompose, render,
    write,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(cli.run("scaling", lambda: command.main(sys.argv[1:], PARTS), sys.stderr))
