"""The flags of a command on a run that is there: those the run has saved, and those on the command line, which win."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Dict, Iterable, Sequence, Set, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.runs import run_folder
from tf_ipu_dp.runs.manifest import Manifest

# What a command asks for itself, whatever the run did.
_OF_THE_COMMAND = ("run_dir", "resume", "json", "time_limit", "dry_run", "format", "evaluate", "input_only")
# Two ways to say the same: a saved one must not contradict a typed one.
_BATCH = ("gradient_accumulation", "global_batch_size")
_STAGES = ("pipeline_stages", "pipeline_splits")
_NAMES = {flag.name for flag in train_flags.FLAGS}
_MAX_NAMED = 6  # flags in a warning


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """The words of a train command, and their config."""

    words: Tuple[str, ...]
    config: TrainConfig
    warnings: Tuple[str, ...] = ()  # what was wrong with the saved flags, and what was taken in their place

    def with_flags(self, changes: Dict[str, Any]) -> TrainCommand:
        """Returns the command with some flags added, which override earlier ones."""
        added = [cli.flag_text(name, value) for name, value in changes.items()]
        return TrainCommand((*self.words, *added), dataclasses.replace(self.config, **changes), self.warnings)


def complete(words: Sequence[str], given_by_launcher: Sequence[str] = ()) -> TrainCommand:
    """Returns a command with the saved flags of the run that it resumes or evaluates, if it names one.

    `given_by_launcher` are flags that are not taken from the run, because a launcher has decided them.
    """
    config = train_flags.parse(words)
    if config.run_dir is None:
        return TrainCommand(tuple(words), config)
    path = cli.expand_path(config.run_dir)
    if config.evaluate:
        dropped = set(train_flags.names_dropped_for_evaluation())
    elif config.resume and not config.input_only and _has_run(path):
        dropped = _names_to_drop(train_flags.typed_names(words), given_by_launcher)
    else:
        return TrainCommand(tuple(words), config)
    saved, warnings = _read_flags(path, dropped)
    completed = (*saved, *words)
    found = TrainCommand(completed, train_flags.parse(completed), warnings)
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
    return run_folder.RunFolder(cli.expand_path(config.run_dir)).has_checkpoints()


def resumable_steps(config: TrainConfig) -> Sequence[int]:
    """Returns the steps from which a command may continue its run: those that have a checkpoint, good or not."""
    if not is_resumed(config):
        return ()
    return run_folder.RunFolder(cli.expand_path(config.run_dir or "")).checkpoint_steps()


def _has_run(path: Path) -> bool:
    folder = run_folder.RunFolder(path)
    return folder.run_flags.is_file() or folder.has_checkpoints()


def _names_to_drop(typed: Iterable[str], given_by_launcher: Sequence[str]) -> Set[str]:
    """Returns the flags that a resumed run does not take from its folder."""
    dropped = {*_OF_THE_COMMAND, *given_by_launcher}
    for group in (_BATCH, _STAGES):
        if not set(group).isdisjoint(typed):
            dropped.update(group)
    return dropped


def _read_flags(path: Path, dropped: Set[str]) -> Tuple[Tuple[str, ...], Tuple[str, ...]]:
    """Returns the saved flags except some, and warnings.

    run.flags is a plain file, and a checkpoint has the same flags under a hash: where run.flags cannot be used, or says
    something else of the model than the checkpoint, those of the newest checkpoint are taken.
    """
    manifest = run_folder.RunFolder(path).read_newest_manifest()
    try:
        lines = run_folder.read_run_flags(path)
        saved = _without(lines, dropped)
        if manifest is None:
            return saved, ()
        train_flags.parse(saved)
    except cli.UsageError as error:
        if manifest is None:
            raise
        taken = _flags_of_checkpoint(manifest, dropped)
        with contextlib.suppress(cli.UsageError):  # then the sentence about run.flags is of more use
            train_flags.parse(taken)
            reason = str(error).split("\n")[0]
            return taken, (
                f"run.flags in {path} cannot be used ({reason.rstrip('.')}); the flags of the checkpoint of step "
                f"{manifest.step:,} are taken.",
            )
        raise
    tied = {name: manifest.flags[name] for name in train_flags.names_tied_to_weights() if name in manifest.flags}
    # A checkpoint has the values that the plan gave to what was asked for as auto.
    wrong = [line for line in saved if _value_of(line) not in ("auto", tied.get(_name_of(line), _value_of(line)))]
    kept = tuple(f"--{_name_of(line)}={tied[_name_of(line)]}" if line in wrong else line for line in saved)
    defaults, present = train_flags.default_texts(), set(map(_name_of, saved))
    # A run saves all its flags, so that one with a default is missing only if it was lost; of the others, an unknown
    # line may be what has become of them.
    is_whole = (set(manifest.flags) & set(defaults)) - dropped <= present and set(map(_name_of, lines)) <= _NAMES
    if not is_whole:
        kept = tuple(line for line in kept if _name_of(line) != "lr_scaling" or "learning_rate" in present)
        found = dropped | set(map(_name_of, kept))
        missing = _flags_of_checkpoint(manifest, found | (set(_BATCH) if found & set(_BATCH) else set()))
        unusual = [line for line in missing if defaults.get(_name_of(line)) not in ("auto", _value_of(line))]
        if unusual:
            more = f" and {len(unusual) - _MAX_NAMED} more" if len(unusual) > _MAX_NAMED else ""
            return (*missing, *kept), (
                f"{' '.join(unusual[:_MAX_NAMED])}{more} {'are' if len(unusual) > 1 else 'is'} missing in "
                f"{path}/run.flags, and taken from the checkpoint of step {manifest.step:,}.",
            )
    return kept, tuple(
        f"{line} in {path}/run.flags is not what the checkpoint of step {manifest.step:,} was trained with; "
        f"--{_name_of(line)}={tied[_name_of(line)]} is taken."
        for line in wrong
    )


def _flags_of_checkpoint(manifest: Manifest, without: Set[str]) -> Tuple[str, ...]:
    """Returns the flags of a checkpoint except some. It has the values that the plan gave to those that were not typed:
    the whole batch, so that accumulation follows from it, and the learning rate after its scaling.
    """
    flags = dict(manifest.flags)
    if "learning_rate" in flags and "learning_rate" not in without:
        flags["lr_scaling"] = "none"
    names = _NAMES - without - {"gradient_accumulation", "pipeline_splits"}
    return tuple(f"--{name}={text}" for name, text in flags.items() if name in names)


def _without(lines: Sequence[str], names: Iterable[str]) -> Tuple[str, ...]:
    """Returns the saved flags of train except some. A later release may have saved others.

    A run saves all its flags itself: a line with --flagfile was added by somebody, and would read any file.
    """
    kept = _NAMES - set(names)
    return tuple(line for line in lines if line.startswith("--") and _name_of(line) in kept)


def _name_of(line: str) -> str:
    """Returns the name of the flag in a line: `export` for --noexport."""
    name = line.partition("=")[0].lstrip("-")
    return name[2:] if name.startswith("no") and name[2:] in _NAMES else name


def _value_of(line: str) -> str:
    """Returns the value of the flag in a line, as a checkpoint has it: `False` for --noexport."""
    name, equals, value = line.partition("=")
    if equals:
        return value
    return str(name.lstrip("-") in _NAMES)
