"""Checkpoints on disk: folders that are complete or absent, each with a manifest that proves it.

No TensorFlow: the caller writes the state, this module makes it durable. A checkpoint is written into a temporary
folder beside the others, hashed, synced to the disk and renamed, so that a kill or a power cut at any moment leaves the
earlier ones intact. Processes that write to the same store take turns by a lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.runs import safe_files
from tf_ipu_dp.runs.manifest import Manifest, StateFile, Variable
from tf_ipu_dp.runs.records import RecordError

SCHEMA = 1

_MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"
_ASIDE = "set-aside-"
_TEMPORARY_NAME = re.compile(rf"{re.escape(_TEMPORARY)}({re.escape(_ASIDE)})?step-[0-9]+-[0-9a-f]+")
_STEP = re.compile("step-[0-9]{8,15}")
_MAX_VARIABLES_NAMED = 3
# A manifest has a line for each weight; a longer file is something else.
_MAX_MANIFEST_BYTES = 1 << 26


class CheckpointError(Exception):
    """A checkpoint cannot be written or used. The text is shown to the user as is."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose hashes were verified."""

    path: Path
    manifest: Manifest

    @property
    def prefix(self) -> Path:
        """What `tf.train.Checkpoint.read` takes."""
        return _prefix(self.path)


class Store:
    """The checkpoints of one run, of which the newest `keep` are kept. `warn` gets a sentence on each damaged one."""

    def __init__(self, folder: Path, keep: int, warn: Callable[[str], None]) -> None:
        self.folder = folder
        self._keep = keep
        self.warn = warn

    def save(self, manifest: Manifest, write: Callable[[Path], None]) -> Checkpoint:
        """Makes a checkpoint of what `write(prefix)` writes, then removes the oldest beyond those to keep.

        A good checkpoint of the same step is kept and nothing is written. If the disk is full, nothing half-written
        stays and the error names the checkpoint to resume from.
        """
        return self.begin(manifest, write)()

    def begin(self, manifest: Manifest, write: Callable[[Path], None]) -> Callable[[], Checkpoint]:
        """Does the part of `save` that needs the state. The caller has to call the result, which does the rest.

        The rest waits for the disk most of the time. It may be done in another thread, while the state changes. Until
        then there is no checkpoint, and other writers wait.
        """
        path = self.folder / folder_name(manifest.step)
        temporary = self._temporary(path.name)
        with self._errors_of(manifest.step):
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as entered:
                entered.enter_context(self._exclusive(wait=True))
                good = self._open_if_good(path)
                if good is None:
                    entered.callback(shutil.rmtree, temporary, ignore_errors=True)
                    temporary.mkdir()
                    write(_prefix(temporary))
                until_saved = entered.pop_all()

        def finish() -> Checkpoint:
            with self._errors_of(manifest.step), until_saved:
                saved = good or self._make_durable(temporary, path, manifest)
                older = [other for other in self._paths() if _step_of(other) < manifest.step]
                self._remove(older[self._keep - 1 :])
                return saved

        return finish

    @contextlib.contextmanager
    def _errors_of(self, step: int) -> Iterator[None]:
        """Raises CheckpointError for what may go wrong while the checkpoint of a step is written."""
        try:
            yield
        except Exception as error:
            # TensorFlow raises its own errors for a full disk and the like; all of them have an error code.
            if not isinstance(error, OSError) and not hasattr(error, "error_code"):
                raise
            raise CheckpointError(
                f"The checkpoint of step {step:,} cannot be written to {self.folder} ({_reason(error)}); "
                f"{self._last_good()}."
            ) from error

    def newest(self) -> Optional[Checkpoint]:
        """Returns the newest good checkpoint; warns of damaged ones, and removes temporary folders of dead writers."""
        with contextlib.suppress(OSError):  # locked by a live writer, or a folder without write access
            if self.folder.is_dir():
                with self._exclusive(wait=False):
                    pass
        gone = False
        for path in self._paths():
            try:
                return _open_and_check_step(path)
            except _DamageError as damage:
                gone = gone or not path.exists()
                if path.exists():
                    self.warn(f"{path} is damaged and skipped: {damage}.")
        return self.newest() if gone else None

    def newest_manifest(self) -> Optional[Manifest]:
        """Returns the newest manifest that is intact, without a look at the state beside it; None without one."""
        for path in self._paths():
            with contextlib.suppress(_DamageError):
                return _read_manifest(path)
        return None

    def steps(self) -> List[int]:
        """Returns the steps that have a checkpoint, good or not, in ascending order."""
        return sorted(map(_step_of, self._paths()))

    def set_aside_after(self, step: int) -> None:
        """Renames the checkpoints of later steps, which a run that resumes from this step will save again."""
        if not self._paths():
            return
        try:
            with self._exclusive(wait=True):
                for path in self._paths():
                    if _step_of(path) > step:
                        aside = path.with_name(f"{_ASIDE}{path.name}")
                        self._remove([aside] if aside.exists() else [])
                        path.rename(aside)
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints after step {step:,} in {self.folder} cannot be set aside ({_reason(error)})."
            ) from error

    @contextlib.contextmanager
    def _exclusive(self, *, wait: bool) -> Iterator[None]:
        """Locks the store. Temporary folders found then belong to a dead writer, and are removed."""
        if self.folder.is_symlink():
            raise OSError(errno.EINVAL, "it is a link and not a folder", str(self.folder))
        lock = safe_files.lock_file(self.folder / ".lock", wait=wait)
        try:
            for path in safe_files.list_folder(self.folder) if lock else ():
                if _TEMPORARY_NAME.fullmatch(path.name):
                    safe_files.remove(path)
            yield
        finally:
            if lock:
                lock.close()

    def _open_if_good(self, path: Path) -> Optional[Checkpoint]:
        try:
            return _open_and_check_step(path)
        except _DamageError:
            return None

    def _make_durable(self, written: Path, path: Path, manifest: Manifest) -> Checkpoint:
        """Makes a checkpoint of a folder with a written state."""
        files = {entry.relative_to(written).as_posix(): entry for entry in written.rglob("*") if entry.is_file()}
        manifest = dataclasses.replace(manifest, files={name: _measure(entry) for name, entry in files.items()})
        safe_files.sync_tree(written)
        safe_files.write_durably(written / _MANIFEST, _seal(manifest.to_json()))
        if path.exists():  # damaged
            self._remove([path])
        written.rename(path)
        safe_files.sync(self.folder)
        return Checkpoint(path, manifest)

    def _remove(self, paths: Iterable[Path]) -> None:
        """Removes folders after a rename, so that a partly removed one never looks like a checkpoint."""
        for path in paths:
            shutil.rmtree(path.rename(self._temporary(path.name)), ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        return self.folder / f"{_TEMPORARY}{name}-{uuid.uuid4().hex}"

    def _paths(self) -> List[Path]:
        """Returns the checkpoints' folders, newest first."""
        entries = safe_files.list_folder(self.folder)
        return sorted((path for path in entries if _STEP.fullmatch(path.name)), key=_step_of, reverse=True)

    def _last_good(self) -> str:
        found = Store(self.folder, self._keep, lambda _: None).newest()
        return f"the last good one is {found.path.name}" if found else "there is no good one before it"


def find(folders: Sequence[Path], warn: Callable[[str], None]) -> Optional[Checkpoint]:
    """Returns the newest good checkpoint of the first folder that has one."""
    stores = [Store(path, 1, warn) for path in folders]
    return next((found for found in (store.newest() for store in stores) if found), None)


def open_checkpoint(path: Path) -> Checkpoint:
    """Returns the checkpoint in a folder; CheckpointError names what is wrong with it."""
    try:
        return _open(path)
    except _DamageError as damage:
        raise CheckpointError(f"{path} is not a good checkpoint: {damage}.") from damage


def folder_name(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def differences(
    saved: Manifest,
    flags: Mapping[str, str],
    variables: Sequence[Variable],
    must_match: Iterable[str],
) -> List[str]:
    """Returns why a checkpoint cannot be used, in parts of a sentence; nothing when it fits.

    `must_match` names the flags that must be unchanged.
    """
    parts = []
    for name in must_match:
        was, now = saved.flags.get(name, "not given"), flags.get(name, "not given")
        if was != now:
            parts.append(f"--{name} was {was} and is {now}")
    before, after = _by_name(saved.variables), _by_name(variables)
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    named = differing[:_MAX_VARIABLES_NAMED]
    parts += [
        f"the variable {name} was {before.get(name, 'missing')} and is {after.get(name, 'missing')}" for name in named
    ]
    if len(differing) > len(named):
        parts.append(f"{len(differing) - len(named)} more variables differ")
    return parts


def layer_differences(before: Sequence[Tuple[str, str]], after: Sequence[Tuple[str, str]]) -> List[str]:
    """Returns which layers of an own model differ from a checkpoint's, in parts of a sentence."""
    was, now = dict(before), dict(after)
    if not was:
        return []
    parts = [f"the layer {name} is missing" for name in was if name not in now]
    parts += [f"the layer {name} is new" for name in now if name not in was]
    parts += [f"the layer {name} was {was[name]} and is {text}" for name, text in now.items()
              if name in was and was[name] != text]  # fmt: skip
    if len(parts) > _MAX_VARIABLES_NAMED:
        rest = len(parts) - _MAX_VARIABLES_NAMED
        parts = [*parts[:_MAX_VARIABLES_NAMED], f"{rest} more layers differ"]
    return parts


class _DamageError(Exception):
    """What is wrong with a checkpoint, as a part of a sentence."""


def _prefix(path: Path) -> Path:
    return path / "state"


def _step_of(path: Path) -> int:
    return int(path.name[len("step-") :])


def _open_and_check_step(path: Path) -> Checkpoint:
    """Opens a checkpoint of a store and checks that its name has its step."""
    found = _open(path)
    if found.manifest.step != _step_of(path):
        raise _DamageError(f"it holds step {found.manifest.step}")
    return found


def _open(path: Path) -> Checkpoint:
    manifest = _read_manifest(path)
    with _damage_on_failure(path):
        for entry in safe_files.list_folder(path):  # TensorFlow opens what the state's index names
            if not stat.S_ISREG(entry.lstat().st_mode):
                raise _DamageError(f"{entry.name} in it is not a file")
        for name, expected in manifest.files.items():
            if name != Path(name).name:
                raise _DamageError(f"{_MANIFEST} names {name!r}, which is not in its folder")
            _check(path / name, name, expected)
    return Checkpoint(path, manifest)


def _read_manifest(path: Path) -> Manifest:
    with _damage_on_failure(path):
        if path.is_symlink():
            raise _DamageError("it is a link, and links in a run's folder are not followed")
        return _parse(safe_files.read_bytes(path / _MANIFEST, _MAX_MANIFEST_BYTES).decode())


@contextlib.contextmanager
def _damage_on_failure(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise _DamageError(f"{Path(error.filename).name} is missing") from error
    except OSError as error:
        raise _DamageError(f"{Path(error.filename or path).name} cannot be read ({_reason(error)})") from error
    except UnicodeDecodeError as error:
        raise _DamageError(f"{_MANIFEST} is not text") from error


def _check(path: Path, name: str, expected: StateFile) -> None:
    size = path.lstat().st_size
    if size != expected.bytes:
        raise _DamageError(f"{name} has {size:,} bytes instead of {expected.bytes:,}")
    if _measure(path) != expected:
        raise _DamageError(f"{name} has other bytes than were written (its SHA-256 differs)")


def _measure(path: Path) -> StateFile:
    digest = hashlib.sha256()
    with os.fdopen(safe_files.open_regular(path, os.O_RDONLY), "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
        return StateFile(handle.tell(), digest.hexdigest())


def _seal(content: Any) -> str:
    """Returns the manifest's text: always the same for the same content, with a hash of it inside."""
    return _render({"schema": SCHEMA, "sha256": _hash(content), "manifest": content})


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _render(sealed: Any) -> str:
    return json.dumps(sealed, sort_keys=True, allow_nan=False, indent=1) + "\n"


def _parse(text: str) -> Manifest:
    try:
        sealed = json.loads(text)
        schema, digest, content = sealed["schema"], sealed["sha256"], sealed["manifest"]
        # The text is rendered again and compared, not only hashed: even a changed blank is a sign of a failing disk.
        # A later release may have added keys beside these.
        intact = _render(sealed) == text and _hash(content) == digest
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _DamageError(f"{_MANIFEST} is not a manifest") from error
    if schema != SCHEMA:
        raise _DamageError(f"{_MANIFEST} is of schema {cli.shorten(repr(schema))}, and this version reads {SCHEMA}")
    if not intact:
        raise _DamageError(f"{_MANIFEST} has other bytes than were written (its SHA-256 differs)")
    try:
        return Manifest.from_json(content)
    except RecordError as error:
        raise _DamageError(f"{_MANIFEST} is not a manifest ({error})") from error


def _by_name(variables: Iterable[Variable]) -> Dict[str, str]:
    """Maps names to shape and type as text; variables that share a name are numbered."""
    seen: Counter[str] = Counter()
    described = {}
    for name, shape, dtype in variables:
        seen[name] += 1
        key = name if seen[name] == 1 else f"{name} (number {seen[name]} of this name)"
        described[key] = f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"
    return described


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    # TensorFlow puts the temporary file's path in front of the reason, and the operation's name after it.
    message = " ".join(str(getattr(error, "message", error)).split())
    return re.sub(r" \[Op:\w+\]$", "", message).split("; ")[-1]
