"""The folder of a study: study.json, cells.jsonl, and a folder for each run. A kill at any moment loses no measurement.

`open_folder` makes or continues it and locks it for one process; `StudyFolder(path)` is enough for readers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, TextIO, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.runs import run_folder, safe_files
from tf_ipu_dp.runs.json_files import parse_object, read_object
from tf_ipu_dp.runs.records import RecordError
from tf_ipu_dp.scaling.records import Measurement, Study

# What a study may have that another start of it has not: what was predicted, how it was typed, how often it repeats.
_MAY_DIFFER = ("repeats", "predictions", "extrapolations", "facts", "command")
# What measurements of one study must have in common besides: those of two machines are not one study.
SAME_FACTS = ("processor", "cores", "sdk")
_LOCK = ".lock"


class StudyFolder:
    """The files of one study."""

    def __init__(self, path: Path, lock: Optional[TextIO] = None) -> None:
        self.path = path
        self._lock = lock
        self.study_json = path / "study.json"
        self.cells_jsonl = path / "cells.jsonl"
        self.runs = path / "runs"

    def close(self) -> None:
        """Unlocks the folder, as the end of this process does."""
        if self._lock:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> StudyFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read_study(self) -> Study:
        """Returns the study; UsageError if this is not a study's folder."""
        if not self.study_json.exists():
            raise cli.UsageError(
                f"{self.path} is not the folder of a study: it has no study.json. Give what --study_dir of a study was."
            )
        try:
            return Study.from_json(read_object(self.study_json))
        except RecordError as error:
            raise cli.UsageError(
                f"{self.path} is not the folder of a study: its study.json cannot be read ({error})."
            ) from None

    def write_study(self, study: Study) -> None:
        """Replaces study.json."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            safe_files.write_durably(self.study_json, run_folder.render_json(study.to_json()))
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def read_measurements(self) -> List[Measurement]:
        """Returns the last measurement of every repeat of a cell; a line that a kill cut off is left out."""
        found: Dict[Tuple[str, int], Measurement] = {}
        for line in self._read_lines():
            value = parse_object(line)
            if value is not None:
                with contextlib.suppress(RecordError):
                    made = Measurement.from_json(value)
                    # A repeat that failed and was measured later is where it was measured.
                    found.pop((made.cell, made.repeat), None)
                    found[made.cell, made.repeat] = made
        return list(found.values())

    def append(self, measurement: Measurement) -> None:
        """Adds a measurement; it is on the disk when this returns."""
        line = (json.dumps(measurement.to_json()) + "\n").encode()
        try:
            with os.fdopen(
                safe_files.open_regular(self.cells_jsonl, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab"
            ) as file:
                # After a line that a kill cut off, a new one begins.
                if file.tell() and not self._ends_with_newline():
                    line = b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def clear_run(self, cell: str, repeat: int) -> Path:
        """Returns an empty folder for one run. What an interrupted run left there is removed, once it has ended."""
        path = self.runs / f"{cell}-repeat{repeat}"
        _require_no_links(str(self.path), self.path, [self.runs, path])
        try:
            if path.exists():
                # A run whose study was killed saves and ends by itself; it holds its own lock until then.
                lock = safe_files.lock_file(path / _LOCK, wait=True)
                shutil.rmtree(path)
                if lock:
                    lock.close()
            path.mkdir(parents=True)
        except OSError as error:
            raise _cannot_write(self.path, error) from error
        return path

    def set_aside(self) -> None:
        """Renames the measurements and runs of an earlier start, so that the study begins again without them."""
        number = 1
        while any(self._aside(path, number).exists() for path in (self.cells_jsonl, self.runs)):
            number += 1
        try:
            for path in (self.cells_jsonl, self.runs):
                if path.exists():
                    path.rename(self._aside(path, number))
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _read_lines(self) -> List[bytes]:
        try:
            return list(safe_files.read_lines(self.cells_jsonl))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise cli.UsageError(f"{self.cells_jsonl} cannot be read: {error.strerror}. Remove it.") from error

    def _aside(self, path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}-{number}{path.suffix}")

    def _ends_with_newline(self) -> bool:
        with self.cells_jsonl.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def open_folder(path: Path, study: Study, *, resume: bool) -> StudyFolder:
    """Makes the folder of a study, or opens it to continue, and locks it; UsageError if it holds anything else.

    Without `resume`, earlier measurements of the same study are set aside and not continued.
    """
    label = f"--study_dir={path}"
    try:
        others = [entry for entry in path.iterdir() if entry.name != _LOCK] if path.is_dir() else []
        if others and not (path / "study.json").exists():
            raise cli.UsageError(f"{label} is a folder of other files. Give a new one.")
        path.mkdir(parents=True, exist_ok=True)
        folder = StudyFolder(path)
        _require_no_links(label, path, [folder.study_json, folder.cells_jsonl, path / _LOCK, folder.runs])
        lock = safe_files.lock_file(path / _LOCK, wait=False)
    except BlockingIOError:
        holder = run_folder.RunFolder(path).read_owner().strip() or "another process"
        raise cli.UsageError(f"{label} is in use by {holder}. Wait until it ends, or choose another folder.") from None
    except OSError as error:
        raise cli.UsageError(f"{label} cannot be used ({error.strerror}). Choose another folder.") from error
    if lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        lock.flush()
    folder = StudyFolder(path, lock)
    try:
        if folder.study_json.exists():
            before = folder.read_study()
            difference = find_difference(before, study)
            if difference:
                raise cli.UsageError(f"{label} holds another study: {difference} Choose another folder.")
            if not resume:
                folder.set_aside()
    except BaseException:
        folder.close()
        raise
    return folder


def _require_no_links(label: str, path: Path, entries: Sequence[Path]) -> None:
    """Refuses the folder of a study in which something leads out of it: what a study writes and removes stays in it."""
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):
            kind = safe_files.describe_irregular(entry.lstat())
            if kind is not None:
                raise cli.UsageError(
                    f"{label} is not used: {entry.relative_to(path)} in it is {kind}, and a study's folder has files "
                    "and folders only. Remove it, or choose another folder with --study_dir."
                )


def find_difference(before: Study, now: Study) -> Optional[str]:
    """Returns a sentence on how two studies differ, so that one cannot continue the other; None if it can."""
    pairs = [
        (field.name, getattr(before, field.name), getattr(now, field.name))
        for field in dataclasses.fields(Study)
        if field.name not in _MAY_DIFFER and field.name != "cells"
    ]
    known = [name for name in SAME_FACTS if name in before.facts]
    pairs += [(name, before.facts[name], now.facts.get(name)) for name in known]
    for name, old, new in pairs:
        if old != new:
            return f"its {_words(name)} {_show(old)}, and not {_show(new)}."
    if before.cells != now.cells:
        old_cells, new_cells = ({cell.key: cell for cell in study.cells} for study in (before, now))
        key = next(
            (each for each in {**new_cells, **old_cells} if old_cells.get(each) != new_cells.get(each)),
            "the order of the cells",
        )
        return f"its cell {key} is not the same."
    return None


def _words(name: str) -> str:
    named = {"words": "flags of train are", "seed": "--order_seed is", "version": "version of tf_ipu_dp is"}
    plain = {"processor": "processor is", "cores": "number of cores is"}
    several = ("sizes", "engines", "updates", "epochs", "hosts")
    return {**named, **plain}.get(name, f"--{name} are" if name in several else f"--{name} is")


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return (" " if value and isinstance(value[0], str) and value[0].startswith("--") else ",").join(
            map(str, value)
        ) or "none"
    return "none" if value in (None, "") else str(value)


def _cannot_write(path: Path, error: OSError) -> cli.UsageError:
    return cli.UsageError(f"The study's folder {path} cannot be written ({error.strerror or error}).")
