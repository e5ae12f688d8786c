"""The flags of a command on a run that is there: those the run has saved, and those on the command line, which win."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Dict, Iterable, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.runs import run_folder

# What a command asks for itself, whatever the run did.
_OF_THE_COMMAND = ("run_dir", "resume", "json", "time_limit", "dry_run", "format", "evaluate", "input_only")
# Two ways to say the same: a saved one must not contradict a typed one.
_BATCH = ("gradient_accumulation", "global_batch_size")
_STAGES = ("pipeline_stages", "pipeline_splits")
_NAMES = {flag.name for flag in train_flags.FLAGS}


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """The words of a train command, and their config."""

    words: Tuple[str, ...]
    config: TrainConfig

    def with_flags(self, changes: Dict[str, Any]) -> TrainCommand:
        """Returns the command with some flags added, which override earlier ones."""
        added = [cli.flag_text(name, value) for name, value in changes.items()]
        return TrainCommand((*self.words, *added), dataclasses.replace(self.config, **changes))


def complete(words: Sequence[str], given_by_launcher: Sequence[str] = ()) -> TrainCommand:
    """Returns a command with the saved flags of the run that it resumes or evaluates, if it names one.

    `given_by_launcher` are flags that are not taken from the run, because a launcher has decided them.
    """
    config = train_flags.parse(words)
    if config.run_dir is None:
        return TrainCommand(tuple(words), config)
    path = Path(config.run_dir).expanduser()
    if config.evaluate:
        saved = _without(run_folder.read_run_flags(path), train_flags.names_dropped_for_evaluation())
    elif config.resume and not config.input_only and run_folder.RunFolder(path).run_flags.is_file():
        saved = _read_flags_to_resume(path, train_flags.typed_names(words), given_by_launcher)
    else:
        return TrainCommand(tuple(words), config)
    completed = (*saved, *words)
    found = TrainCommand(completed, train_flags.parse(completed))
    _require_typed_code(found.config, train_flags.typed_names(words), path)
    return found


def _require_typed_code(config: TrainConfig, typed: Sequence[str], path: Path) -> None:
    """Raises a UsageError if a run's folder, and not the command line, names code: a folder never runs any."""
    named = [cli.flag_text(name, text) for name, text in config.own_code.items() if name not in typed]
    if named:
        raise cli.UsageError(
            f"{path} was trained with code of its user, which is loaded only if the command line names it. Add "
            f"{' '.join(named)}."
        )


def is_resumed(config: TrainConfig) -> bool:
    """Whether a command continues a run that has checkpoints."""
    if config.run_dir is None or not config.resume or config.evaluate or config.input_only:
        return False
    return run_folder.RunFolder(Path(config.run_dir).expanduser()).has_checkpoints()


def _read_flags_to_resume(path: Path, typed: Iterable[str], given_by_launcher: Sequence[str]) -> Tuple[str, ...]:
    dropped = {*_OF_THE_COMMAND, *given_by_launcher}
    for group in (_BATCH, _STAGES):
        if not set(group).isdisjoint(typed):
            dropped.update(group)
    saved = _without(run_folder.read_run_flags(path), dropped)
    return tuple(line for line in saved if _name_of(line) in _NAMES)  # a later release may have saved others


def _without(lines: Sequence[str], names: Iterable[str]) -> Tuple[str, ...]:
    dropped = set(names)
    return tuple(line for line in lines if _name_of(line) not in dropped)


def _name_of(line: str) -> str:
    """Returns the name of the flag in a line: `export` for --noexport."""
    name = line.partition("=")[0].lstrip("-")
    return name[2:] if name.startswith("no") and name[2:] in _NAMES else name
