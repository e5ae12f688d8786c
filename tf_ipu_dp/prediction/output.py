"""Predictions as CSV, JSON or arrays. Pure except `write`: takes arrays, returns bytes. Imports numpy."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.prediction.inputs import PROBABILITIES
from tf_ipu_dp.runs import safe_files
from tf_ipu_dp.runs.json_files import plain

SCHEMA = 1
FILES = (".csv", ".json", ".npy", ".npz")
_MAX_COLUMNS = 256


@dataclasses.dataclass(frozen=True)
class Predictions:
    """The outputs for all inputs, in their order."""

    run_dir: str
    weights: str  # the checkpoint or export
    names: List[str]  # of the inputs
    outputs: Dict[str, Any]  # arrays with a row for each input, by the output's name
    class_names: Tuple[str, ...]  # in the order of the probabilities; empty: not known

    @property
    def is_classification(self) -> bool:
        return list(self.outputs) == [PROBABILITIES]

    def class_name(self, number: int) -> str:
        """Returns the name of a class; its number where names are not known."""
        return self.class_names[number] if number < len(self.class_names) else str(number)


def render(predictions: Predictions, kind: str, top: int) -> bytes:
    """Returns the file of a type."""
    if kind == ".csv":
        return _render_csv(predictions, top).encode("utf-8", "surrogateescape")
    if kind == ".json":
        return _render_json(predictions, top).encode()
    return _render_arrays(predictions, kind)


def write(predictions: Predictions, path: Path, top: int) -> None:
    """Writes a file of the type that its name ends in: the old one or the new one, never a part."""
    try:
        safe_files.write_durably(path, render(predictions, path.suffix.lower(), top))
    except OSError as error:
        raise cli.UsageError(f"--out={path} cannot be written ({error.strerror}). Use another path.") from error


def check_file(path: Path) -> None:
    """Raises a UsageError for a file that cannot be written, before anything is predicted."""
    if path.suffix.lower() not in FILES:
        raise cli.UsageError(f"--out={path} has an unknown file type. Use one of {', '.join(FILES)}.")
    if not path.absolute().parent.is_dir():
        raise cli.UsageError(f"--out={path} cannot be written: there is no folder {path.absolute().parent}. Make it.")


def _render_csv(predictions: Predictions, top: int) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    if predictions.is_classification:
        ranks = _top(predictions, top)
        marks = ["", *(f"_{place}" for place in range(2, len(ranks[0]) + 1))] if ranks else [""]
        names = ("class", "name", "probability")
        writer.writerow(["input", *(f"{name}{mark}" for mark in marks for name in names)])
        for name, row in zip(predictions.names, ranks):
            cells = [cell for number, share in row for cell in (number, predictions.class_name(number), f"{share:.6g}")]
            writer.writerow([name, *cells])
        return stream.getvalue()
    columns = _columns(predictions)
    writer.writerow(["input", *columns])
    for place, name in enumerate(predictions.names):
        values = [value for output in predictions.outputs.values() for value in output[place].reshape(-1).tolist()]
        writer.writerow([name, *(f"{value:.9g}" if isinstance(value, float) else value for value in values)])
    return stream.getvalue()


def _render_json(predictions: Predictions, top: int) -> str:
    value: Dict[str, Any] = {
        "schema": SCHEMA,
        "run_dir": predictions.run_dir,
        "weights": predictions.weights,
        "class_names": list(predictions.class_names),
    }
    if predictions.is_classification:
        value["predictions"] = [
            {
                "input": name,
                "class": row[0][0],
                "name": predictions.class_name(row[0][0]),
                "probability": row[0][1],
                "top": [
                    {"class": number, "name": predictions.class_name(number), "probability": share}
                    for number, share in row
                ],
            }
            for name, row in zip(predictions.names, _top(predictions, top))
        ]
    else:
        value["predictions"] = [
            {"input": name, **{key: output[place].tolist() for key, output in predictions.outputs.items()}}
            for place, name in enumerate(predictions.names)
        ]
    return json.dumps(plain(value), indent=1, allow_nan=False) + "\n"


def _render_arrays(predictions: Predictions, kind: str) -> bytes:
    import numpy as np

    stream = io.BytesIO()
    if kind == ".npz":
        texts = {"inputs": np.array(predictions.names), "class_names": np.array(predictions.class_names, dtype=str)}
        np.savez(stream, **texts, **predictions.outputs)
    elif len(predictions.outputs) == 1:
        np.save(stream, next(iter(predictions.outputs.values())), allow_pickle=False)
    else:
        raise cli.UsageError(
            f"The model has the outputs {', '.join(predictions.outputs)}, and a .npy file has one array. Use .npz."
        )
    return stream.getvalue()


def _top(predictions: Predictions, count: int) -> List[Sequence[Tuple[int, float]]]:
    """Returns the most probable classes of each input, the best first; of equal ones the first."""
    import numpy as np

    shares = predictions.outputs[PROBABILITIES]
    order = np.argsort(-shares, axis=1, kind="stable")[:, :count]
    found = np.take_along_axis(shares, order, axis=1)
    return [list(zip(row.tolist(), values.tolist())) for row, values in zip(order, found)]


def _columns(predictions: Predictions) -> List[str]:
    """Returns a title for each number of an output."""
    titles = []
    for name, output in predictions.outputs.items():
        count = int(output[0].size)
        titles += [name] if count == 1 else [f"{name}_{place}" for place in range(count)]
    if len(titles) > _MAX_COLUMNS:
        raise cli.UsageError(f"A prediction has {len(titles):,} numbers, too many for a CSV. Use --out=FILE.npz.")
    return titles
