"""Every change that the emulator makes to Keras, TensorFlow and Python's import system, and how it is undone.

`PATCHES` is the list. The replacements themselves are in the modules that the list names; they are put in place with
`set_attribute` or `on_undo`, which refuse a patch that is not listed and remember the previous value.
`emulator.uninstall()` restores all of it. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from typing import Any, Callable, Dict, List, Tuple

_ABSENT = object()


@dataclasses.dataclass(frozen=True)
class Patch:
    """One change: what it touches, why and when it is made, which module makes it, and how it is undone."""

    name: str
    what: str
    why: str
    when: str
    module: str
    undone: str = "uninstall() puts the stock attribute back"


_ON_IMPORT = "when tensorflow.python.ipu, keras.ipu or ipu_tensorflow_addons is imported"
_ON_STRATEGY = "when an IPU strategy is made, or ipu_compiler.compile is called for several IPUs"
_ON_KERAS_STRATEGY = "when an IPU strategy with Keras extensions is made"

PATCHES: Tuple[Patch, ...] = (
    Patch(
        "import finder",
        "sys.meta_path",
        "the SDK's modules can be imported although no SDK is installed",
        "in emulator.install()",
        "tf_ipu_dp.emulator",
        "uninstall() removes the finder",
    ),
    Patch(
        "served modules",
        "sys.modules, and the attribute of the parent package that an import sets",
        "programs import the SDK's modules by the SDK's names",
        "when one of them is imported",
        "tf_ipu_dp.emulator",
        "uninstall() removes the names; modules that a program has already imported stay loaded",
    ),
    Patch(
        "keras names",
        "the attribute ipu of keras, tensorflow.keras and tf.keras",
        "programs use the name keras.ipu",
        _ON_IMPORT,
        "tf_ipu_dp.emulator.keras.names",
    ),
    Patch(
        "keras optimizers",
        "the optimizer classes and deserialize in keras.optimizers, where Keras has legacy optimizers",
        "programs for the SDK subclass the optimizers of Keras 2.6 and pass arguments that later ones refuse",
        _ON_IMPORT,
        "tf_ipu_dp.emulator.keras.names",
    ),
    Patch(
        "device lists",
        "Context.list_physical_devices and list_logical_devices",
        "tf.config lists IPU devices when a program asks for them",
        _ON_IMPORT,
        "tf_ipu_dp.emulator.devices.device_lists",
    ),
    Patch(
        "device scopes",
        "Graph.device and Context.device",
        "tf.device() accepts an IPU device; its operations are placed on the host's CPU",
        _ON_IMPORT,
        "tf_ipu_dp.emulator.devices.device_scopes",
    ),
    Patch(
        "random numbers",
        "four functions of tensorflow.python.ops.gen_random_ops",
        "random numbers differ between replicas and restart with reset_ipu_seed",
        _ON_STRATEGY,
        "tf_ipu_dp.emulator.runtime.random_numbers",
    ),
    Patch(
        "input wait",
        "tensorflow.python.ops.gen_dataset_ops.iterator_get_next",
        "a program's input is distributed to its replicas, and the time spent waiting for it is measured",
        _ON_STRATEGY,
        "tf_ipu_dp.emulator.runtime.feeds",
    ),
    Patch(
        "batch normalisation",
        "tensorflow.python.ops.gen_nn_ops.fused_batch_norm_v3",
        "groups of replicas share batch statistics if the configuration asks for it, and its parameters may be float16",
        _ON_STRATEGY,
        "tf_ipu_dp.emulator.runtime.batch_norm",
    ),
    Patch(
        "jit compilation",
        "the attribute _jit_compile of tf.function objects",
        "jit_compile=True must have no effect on the device: a function that XLA compiled cannot reach the host",
        _ON_STRATEGY,
        "tf_ipu_dp.emulator.runtime.device_functions",
    ),
    Patch(
        "function cache",
        "the key under which tf.function caches its traces",
        "a function that programs call is traced for the replicas of each program",
        _ON_STRATEGY,
        "tf_ipu_dp.emulator.runtime.device_functions",
    ),
    Patch(
        "concrete functions",
        "tf.function's get_concrete_function",
        "a concrete function is traced again, from the function it was made from, for the replicas of a program",
        _ON_STRATEGY,
        "tf_ipu_dp.emulator.runtime.device_functions",
    ),
    Patch(
        "dataset iterators",
        "tf.data.Dataset.__iter__",
        "iter(dataset) gives an iterator for functions of the device in the scope of an IPU strategy",
        "when an IPU strategy with dataset iterators is made",
        "tf_ipu_dp.emulator.sdk_api.ipu.ipu_infeed_queue",
    ),
    Patch(
        "keras models",
        "methods of tf.keras.Model: compile, fit, evaluate, predict, their functions, and the SDK's additional ones",
        "models made in the scope of an IPU strategy are replicated, accumulated and pipelined",
        _ON_KERAS_STRATEGY,
        "tf_ipu_dp.emulator.keras.models",
    ),
    Patch(
        "saved options",
        "build, get_config and from_config of models, and Keras' loader of SavedModels",
        "pipeline stages and IPU options are saved and loaded with a model",
        _ON_KERAS_STRATEGY,
        "tf_ipu_dp.emulator.keras.saved_options",
    ),
    Patch(
        "layer calls",
        "__init__ and __call__ of tf.keras.layers.Layer",
        "layers made or called in a PipelineStage belong to it",
        "while a PipelineStage is open, or a Model subclass is traced for its stages",
        "tf_ipu_dp.emulator.keras.stages",
        "undone when the last of them closes",
    ),
    Patch(
        "metric archives",
        "tf.keras.metrics.Metric.save_own_variables",
        "one instance can save a model although reading a metric adds up over all instances",
        "when a PopDistStrategy of several instances is made",
        "tf_ipu_dp.emulator.sdk_api.ipu.distributed.popdist_strategy",
    ),
    Patch(
        "configured devices",
        "emulated IPUs held by this process, and the thread that writes their heartbeat",
        "a program has attached them",
        "in configure_ipu_system()",
        "tf_ipu_dp.emulator.sdk_api.ipu.config",
        "uninstall() releases the IPUs; the thread ends with its next heartbeat",
    ),
    Patch(
        "horovod settings",
        "HOROVOD_DYNAMIC_PROCESS_SETS and OMPI_MCA_mpi_yield_when_idle in os.environ",
        "subsets of instances can communicate, and a process that waits for MPI yields its core",
        "when instances connect over MPI, or when a subset of them communicates",
        "tf_ipu_dp.emulator.runtime.instances",
        "uninstall() restores the variables; a running Horovod keeps its settings",
    ),
    Patch(
        "horovod start",
        "init of horovod.common.basics.HorovodBasics",
        "an instance tells poprun that it ends before its peers lose it, so that the first failure is named",
        "when Horovod is imported",
        "tf_ipu_dp.emulator.launcher.exit_notices",
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class _Change:
    """One change that was made for a patch, and how to undo it."""

    patch: str
    undo: Callable[[], None]


_lock = threading.RLock()
_changes: List[_Change] = []  # in the order in which they were made
_names = {patch.name for patch in PATCHES}


def is_applied(name: str) -> bool:
    """Whether a patch is in place now."""
    with _lock:
        return any(change.patch == name for change in _changes)


def set_attribute(name: str, owner: Any, attribute: str, value: Any) -> None:
    """Sets an attribute of a module or class for a patch.

    Undoing it does not change an attribute that other code has replaced in the meantime.
    """
    before = vars(owner).get(attribute, _ABSENT)

    def undo() -> None:
        if vars(owner).get(attribute, _ABSENT) is not value:
            return
        if before is _ABSENT:
            delattr(owner, attribute)
        else:
            setattr(owner, attribute, before)

    with _lock:
        on_undo(name, undo)
        setattr(owner, attribute, value)


def set_environment(name: str, values: Dict[str, str]) -> None:
    """Sets environment variables for a patch."""
    for variable, value in values.items():
        before = os.environ.get(variable)

        def undo(variable: str = variable, before: Any = before) -> None:
            if before is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = before

        on_undo(name, undo)
        os.environ[variable] = value


def on_undo(name: str, undo: Callable[[], None]) -> None:
    """Registers the function that undoes a change made for a patch."""
    if name not in _names:
        raise ValueError(f"{name!r} is not in PATCHES: every patch must be listed there.")
    with _lock:
        _changes.append(_Change(name, undo))


def undo(name: str) -> None:
    """Undoes one patch."""
    with _lock:
        to_undo = [change for change in _changes if change.patch == name]
        _changes[:] = [change for change in _changes if change.patch != name]
        _undo_in_reverse(to_undo)


def undo_all() -> None:
    """Undoes all patches, the last one first."""
    with _lock:
        changes = list(_changes)
        _changes.clear()
        _undo_in_reverse(changes)


def _undo_in_reverse(changes: List[_Change]) -> None:
    with contextlib.ExitStack() as stack:  # calls all of them, even if one raises
        for change in changes:
            stack.callback(change.undo)


def as_markdown() -> str:
    """Returns the list as a table for the documentation."""
    lines = ["| Patch | What changes | Why | When | Undone |", "|---|---|---|---|---|"]
    for patch in PATCHES:
        lines.append(f"| {patch.name} | {patch.what} | {patch.why} | {patch.when} | {patch.undone} |")
    return "\n".join(lines) + "\n"
