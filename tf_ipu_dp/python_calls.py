"""Calls from Python: `tf_ipu_dp.train(...)` and `tf_ipu_dp.plan(...)`, whose keywords are the flags.

Functions and data that are given as objects stand in this process only; several instances are processes of their own,
which load functions from their files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, Callable, Dict, List, Mapping, Sequence

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config import train_flags
from tf_ipu_dp.config.train_flags import TrainConfig
from tf_ipu_dp.datasets import facts, info
from tf_ipu_dp.planning import plan as planning
from tf_ipu_dp.runs import saved_flags
from tf_ipu_dp.runs.plan_record import PlanRecord
from tf_ipu_dp.runs.records import RecordError, RunResult

_LAUNCH = "tf_ipu_dp.launch"


def train(
    train_here: Callable[[TrainConfig, Sequence[Any]], RunResult],
    model: Any,
    data: Any,
    callbacks: Any,
    flags: Mapping[str, Any],
) -> RunResult:
    """Trains with the flags of a call: in this process, or as several instances. `train_here` does the former."""
    user_code.require_not_loading()
    words = _words(model, data, flags)
    if isinstance(callbacks, str) or (callable(callbacks) and not isinstance(callbacks, Sequence)):
        words.append(cli.flag_text("callbacks", user_code.refer_to(callbacks, "callbacks")))
        callbacks = ()
    elif not isinstance(callbacks, Sequence):
        callbacks = [callbacks]
    cfg = saved_flags.complete(words).config
    _refuse_modes(cfg)
    if (cfg.instances or 1) == 1:
        return train_here(cfg, callbacks)
    if callbacks:
        raise cli.UsageError(
            f"instances={cfg.instances} starts other processes, which do not have these callbacks. Give the function "
            "of a file that makes them, like callbacks=make_callbacks or callbacks='FILE.py:function'."
        )
    _refuse_objects(cfg)
    return _launch(words)


def plan(model: Any = None, data: Any = None, **flags: Any) -> PlanRecord:
    """Returns the plan of a run as a record: `tf_ipu_dp.plan(ipus=16, pipeline_stages=2, dataset="cifar10")`.

    Keywords are the flags of `python -m tf_ipu_dp.train`. A plan that is impossible is a `tf_ipu_dp.UsageError` with
    what would work.
    """
    user_code.require_not_loading()
    cfg = train_flags.parse(_words(model, data, flags))

    def learn(config: TrainConfig) -> info.DatasetInfo:
        from tf_ipu_dp.training import own_models  # imports TensorFlow

        return own_models.learn(config)

    return PlanRecord.of(planning.plan_run(cfg, facts.find(cfg, learn_here=learn)))


def _words(model: Any, data: Any, flags: Mapping[str, Any]) -> List[str]:
    """Returns the flags of a call as one would type them."""
    values: Dict[str, Any] = dict(flags)
    if data is not None and "dataset" in values:
        raise cli.UsageError("data and dataset both name the data. Leave one out.")
    if model is not None:
        values["model"] = user_code.refer_to(model, "model")
    if data is not None:
        values["dataset"] = user_code.refer_to(data, "data")
    return [cli.flag_text(name, _typed(value)) for name, value in values.items() if value is not None]


def _typed(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _refuse_modes(cfg: TrainConfig) -> None:
    named = [name for name in ("dry_run", "evaluate", "input_only") if getattr(cfg, name)]
    if named:
        use = "tf_ipu_dp.plan(...)" if named[0] == "dry_run" else f"python -m tf_ipu_dp.train --{named[0]}"
        raise cli.UsageError(f"{named[0]}=True does not train. Use {use}.")


def _refuse_objects(cfg: TrainConfig) -> None:
    for name, reference in cfg.own_code.items():
        if user_code.is_only_in_this_process(reference):
            what = "data" if name == "dataset" else name
            raise cli.UsageError(
                f"instances={cfg.instances} starts other processes, which cannot load what {what} is here. Put the "
                f"function into a file, and give {what}='FILE.py:function'."
            )


def _launch(words: Sequence[str]) -> RunResult:
    """Starts the instances as the command does, shows what they print, and returns their result."""
    command = [sys.executable, "-m", _LAUNCH, "--", *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    last: List[str] = []
    assert process.stderr and process.stdout
    try:
        for line in process.stderr:
            sys.stderr.write(line)
            last = [*last[-20:], line.rstrip()]
        printed = process.stdout.read()
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    try:
        return RunResult.from_json(json.loads(printed.strip().splitlines()[-1]))
    except (IndexError, ValueError, RecordError) as error:
        sentences = [line.partition(": ")[2] for line in last if line.startswith(("launch: ", "train: "))]
        raise cli.UsageError(sentences[-1] if sentences else "\n".join(last[-3:])) from error
