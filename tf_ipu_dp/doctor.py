"""Checks whether this machine can train, and reports what is missing: `python -m tf_ipu_dp.doctor`.

TensorFlow, Horovod and the SDK may crash the interpreter or hang, so each is imported in a child process with a timeout
and never in this one. With `--sdk` it makes the calls of a run into that SDK, in child processes too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from concurrent import futures
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import __version__, cli, missing_packages, sdk_calls
from tf_ipu_dp.distributed import world
from tf_ipu_dp.environment import versions

TIMEOUT_S = 60.0
CALL_LIMIT_S = 900.0  # of one call: compiling takes minutes
_EXAMPLES = (
    "python -m tf_ipu_dp.doctor",
    "python -m tf_ipu_dp.doctor --sdk=poplar -- --ipus=16 --model=resnet50 --dataset=cifar10",
)
GROUPS = {"Check": ("sdk",), "Output": ("json",)}
# Releases that the test suite runs on. Others with Keras 2 may work.
TESTED_TENSORFLOW = ("2.6", "2.15", "2.20")

_PROBES = {
    "tensorflow": """
import json, sys, tensorflow as tf
answer = {"version": tf.__version__, "path": tf.__file__, "poplar": True, "keras": None}
try:
    from tensorflow.python import ipu
except ImportError:
    answer["poplar"] = False
# tf.keras may be another package than keras: tf_keras, from TensorFlow 2.16 on.
answer["keras"] = sys.modules[tf.keras.Model.__module__.split(".")[0]].__version__
print(json.dumps(answer))
""",
    "horovod": """
import json
from importlib import metadata
import horovod.tensorflow as hvd
built = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built()}
print(json.dumps({"version": metadata.version("horovod"), "built": [name for name, has in built.items() if has]}))
""",
    "tensorflow_datasets": """
import json, os
from importlib import metadata
import tensorflow_datasets as tfds
tfds.builder
print(json.dumps({"version": metadata.version("tensorflow-datasets")}))
""",
    "gcipuinfo": """
import json, gcipuinfo
print(json.dumps({"devices": [dict(device) for device in gcipuinfo.gcipuinfo().getDevices()]}))
""",
}
_TOOLS = {
    "poprun": "It comes with the Poplar SDK: source its enable script.",
    "mpirun": "Needed to start instances over MPI only: install Open MPI.",
    "srun": "Available on Slurm clusters only.",
}


_SMALL_RUN = ("--model=mlp", "--dataset=synthetic", "--image_size=28")
# What differs between calls of a run on the SDK: replicas, a pipeline, 16-bit numbers.
_LAYOUTS = (
    ("1 replica", ("--ipus=1",)),
    ("2 replicas", ("--ipus=2",)),
    ("a pipeline of 2 stages", ("--ipus=2", "--pipeline_stages=2")),
    ("2 replicas in 16 bits", ("--ipus=2", "--precision=16.16")),
)


@dataclasses.dataclass(frozen=True)
class Probe:
    """The answer of a child process: a value, or the reason why it has none."""

    value: Optional[Dict[str, Any]]
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table. `ok` is None for an optional part that is missing."""

    name: str
    ok: Optional[bool]
    detail: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings, and the SDK that `train` would use: `poplar`, `emulator`, or None where it cannot start."""

    sdk: Optional[str]
    findings: Tuple[Finding, ...]


def main(words: Sequence[str]) -> int:
    """Runs the probes, checks their answers, shows the findings; with --sdk, makes the calls of a run."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_enum(
        "sdk", None, ["poplar", "emulator"], "Make the calls of a run into this SDK, without training: programs are "
        "compiled and not executed. Flags of train after -- choose the run; else several small ones are checked.",
        flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_bool("json", False, "Print the findings as JSON.", flag_values=fv)
    width = shutil.get_terminal_size().columns
    if cli.wants_help(words):
        about = "Checks whether this machine can train, and reports what is missing. Exit code 0: yes, 1: no."
        usage = "python -m tf_ipu_dp.doctor [--json] [--sdk=poplar [-- flags of train]]"
        sys.stdout.write(cli.render_help(usage, about, GROUPS, fv, width, _EXAMPLES))
        return 0
    end = words.index("--") if "--" in words else len(words)
    own, of_train = words[:end], words[end + 1 :]
    cli.parse(own, fv)
    if fv["sdk"].value:
        return check_calls(fv["sdk"].value, of_train, as_json=bool(fv["json"].value))
    if of_train:
        raise cli.UsageError(f"{of_train[0]} after -- is for a check of the SDK. Add --sdk=poplar or --sdk=emulator.")
    if sys.stderr.isatty():
        sys.stderr.write("checking TensorFlow, Horovod and the SDK (a few seconds) ...")
        sys.stderr.flush()
    diagnosis = diagnose(read_probes(TIMEOUT_S), os.environ, sys.version_info[:2])
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if fv["json"].value:
        sys.stdout.write(render_json(diagnosis))
    else:
        unicode = cli.supports_unicode(sys.stdout, os.environ)
        sys.stdout.write(render(diagnosis, cli.width_of(sys.stdout), ascii_only=not unicode))
    return 0 if diagnosis.sdk else 1


def check_calls(sdk: str, of_train: Sequence[str], *, as_json: bool) -> int:
    """Makes the calls of some runs into an SDK, and shows what it answered. Returns the exit code."""
    missing_packages.require("tensorflow")
    launched = world.read_launched(os.environ)
    layouts: Sequence[Tuple[str, Sequence[str]]] = _LAYOUTS
    if of_train or launched:
        layouts = ((" ".join(of_train) or "the instances of poprun", ()),)
    shows_all = not as_json and not (launched and launched.instance)  # of several instances, the others only failures
    marks = {True: "✓", False: "✗"} if cli.supports_unicode(sys.stdout, os.environ) else {True: "yes", False: "no"}
    found: List[Tuple[str, List[sdk_calls.Call]]] = []
    for name, changes in layouts:
        calls: List[sdk_calls.Call] = []
        found.append((name, calls))
        module = [sys.executable, "-m", "tf_ipu_dp.training.sdk_check"]
        for call in sdk_calls.read_calls([*module, sdk, *(of_train or (*_SMALL_RUN, *changes))], CALL_LIMIT_S):
            if shows_all and not calls:
                print(f"{name}:")
            calls.append(call)
            if shows_all or not (as_json or call.ok):
                print(f"{marks[call.ok]}  {call.name:<42} {cli.printable(call.answer)}".rstrip(), flush=True)
    every = [call for _, calls in found for call in calls]
    failed = sum(not call.ok for call in every)
    if as_json:
        runs = [{"run": name, "calls": [dataclasses.asdict(call) for call in calls]} for name, calls in found]
        print(json.dumps({"schema": 1, "version": __version__, "sdk": sdk, "ok": not failed, "runs": runs}, indent=2))
    elif shows_all:
        print(f"{failed} of {len(every)} calls failed." if failed else f"All {len(every)} calls were accepted.")
    return 1 if failed else 0


def diagnose(probes: Mapping[str, Probe], environ: Mapping[str, str], python: Tuple[int, ...]) -> Diagnosis:
    """Returns the findings, and which SDK `train` would use."""
    tensorflow, keras = _check_tensorflow(probes["tensorflow"])
    sdk = _check_sdk(probes, environ)
    emulator = _check_emulator(tensorflow, keras, probes["tensorflow"])
    supported = any(tuple(python[:2]) in each.pythons for each in versions.ALL)
    findings = [
        Finding(
            "Python",
            supported,
            f"{platform.python_version()}, {sys.executable}",
            "" if supported else "Use Python 3.8 to 3.13: TensorFlow 2.6, 2.15 and 2.20 have no wheels for others.",
        ),
        tensorflow,
        keras,
        sdk,
        emulator,
        _check_horovod(probes["horovod"]),
        *(_check_tool(name, probes[name]) for name in _TOOLS),
        _check_datasets(probes["tensorflow_datasets"], environ),
        _read_machine(),
    ]
    ready = supported and tensorflow.ok and keras.ok
    chosen = "poplar" if ready and sdk.ok else "emulator" if ready and emulator.ok else None
    return Diagnosis(chosen, tuple(findings))


def render(diagnosis: Diagnosis, width: Optional[int], ascii_only: bool = False) -> str:
    """Returns the table, advice for each fault, and the conclusion."""
    marks = {True: "yes", False: "no", None: "-"} if ascii_only else {True: "✓", False: "✗", None: "·"}
    rows = [(marks[finding.ok], finding.name, finding.detail) for finding in diagnosis.findings]
    text = cli.render_table(("", "", ""), rows, width)
    advice = [finding for finding in diagnosis.findings if finding.advice and finding.ok is not True]
    if advice:
        lines = [(f"{finding.name}:", cli.as_started(finding.advice, os.environ)) for finding in advice]
        text += "\n" + cli.render_table(("", ""), lines, width)
    return text + "\n" + cli.wrap(_conclusion(diagnosis), width, indent="") + "\n"


def render_json(diagnosis: Diagnosis) -> str:
    """Returns the findings as JSON text."""
    value = {"schema": 1, "version": __version__, "ready": diagnosis.sdk is not None, **dataclasses.asdict(diagnosis)}
    return json.dumps(value, indent=2) + "\n"


def read_probes(timeout_s: float) -> Dict[str, Probe]:
    """Runs all probes at the same time; those that exceed the timeout are killed."""
    commands = {name: [sys.executable, "-c", code] for name, code in _PROBES.items()}
    with futures.ThreadPoolExecutor() as pool:
        answers = {name: pool.submit(read_probe, command, timeout_s) for name, command in commands.items()}
        answers.update({name: pool.submit(_read_tool, name, timeout_s) for name in _TOOLS})
        return {name: answer.result() for name, answer in answers.items()}


def read_probe(command: Sequence[str], timeout_s: float) -> Probe:
    """Runs a command whose last line on stdout is a JSON object."""
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        code, out, err = _run(command, timeout_s, environ)
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {timeout_s:.0f} s")
    except OSError as error:
        return Probe(None, error.strerror or str(error))
    if code < 0:
        return Probe(None, f"the interpreter was killed by {_signal_name(-code)}")
    if code:
        lines = [line for line in err.splitlines() if line.strip()]
        return Probe(None, lines[-1].strip() if lines else f"exit code {code}")
    try:
        value = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return Probe(None, "it exited without an answer")
    return Probe(value)


def _read_tool(name: str, timeout_s: float) -> Probe:
    path = shutil.which(name)
    if not path:
        return Probe(None, "not found on the PATH")
    try:
        _, out, err = _run([path, "--version"], timeout_s, dict(os.environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(None, f"{path} does not answer ({type(error).__name__})")
    lines = (out + err).strip().splitlines()
    return Probe({"path": path, "version": lines[0].strip() if lines else ""})


def _run(command: Sequence[str], timeout_s: float, environ: Mapping[str, str]) -> Tuple[int, str, str]:
    """Runs a command; at the timeout, kills it with all its children."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environ, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, out, err


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _check_tensorflow(probe: Probe) -> Tuple[Finding, Finding]:
    install = "Start with launch/train, which makes an environment, or install it: pip install '.[host]'"
    if not probe.value:
        broken = "It is installed but cannot be imported. Remove this environment and start with launch/train."
        missing = "No module named 'tensorflow'" in probe.failure
        detail = "not installed" if missing else probe.failure
        absent = Finding("TensorFlow", False, detail, install if "No module named" in probe.failure else broken)
        return absent, Finding("Keras", False, "not checked: TensorFlow cannot be imported")
    version, keras = probe.value["version"], probe.value["keras"]
    kind = "of the Poplar SDK" if probe.value["poplar"] else "stock"
    tested = any(version.startswith(f"{release}.") for release in TESTED_TENSORFLOW)
    note = "" if tested else f"; tested with {cli.alternatives(TESTED_TENSORFLOW)}"
    is_keras_2 = keras.startswith("2.")
    return (
        Finding("TensorFlow", True, f"{version}, {kind}{note}"),
        Finding("Keras", is_keras_2, keras, "" if is_keras_2 else f"Keras 2 is needed. {install}"),
    )


def _check_sdk(probes: Mapping[str, Probe], environ: Mapping[str, str]) -> Finding:
    name = "Poplar SDK"
    enabled = "POPLAR_SDK_ENABLED" in environ
    tensorflow, info = probes["tensorflow"].value, probes["gcipuinfo"]
    poplar = bool(tensorflow and tensorflow["poplar"])
    if not enabled and not poplar and not info.value:
        return Finding(
            name, None, "not enabled in this shell", "On a machine with IPUs, source the SDK's enable script."
        )
    if not info.value:
        return Finding(
            name, False, f"enabled, but gcipuinfo failed: {info.failure}", "Source the SDK's enable script again."
        )
    devices: List[Dict[str, str]] = info.value["devices"]
    if not devices:
        advice = "Choose a partition (vipu list partitions): set IPUOF_VIPU_API_HOST and IPUOF_VIPU_API_PARTITION_ID."
        return Finding(name, False, "enabled, but no IPU was found", advice)
    first = devices[0]
    facts = [f"{len(devices)} IPUs"]
    for label, key in (
        ("partition", "ipuof partition id"),
        ("driver", "driver version"),
        ("firmware", "firmware version"),
    ):
        if first.get(key):
            facts.append(f"{label} {first[key]}")
    if not poplar:
        advice = "Install the SDK's tensorflow and keras wheels into this environment."
        return Finding(name, False, ", ".join([*facts, "but TensorFlow is not the SDK's"]), advice)
    return Finding(name, True, ", ".join(facts))


def _check_emulator(tensorflow: Finding, keras: Finding, probe: Probe) -> Finding:
    name = "Emulator"
    if not (tensorflow.ok and keras.ok):
        return Finding(name, False, "needs TensorFlow with Keras 2")
    if probe.value and probe.value["poplar"]:
        return Finding(name, None, "not available with the Poplar SDK's TensorFlow")
    return Finding(name, True, "available with this TensorFlow")


def _check_horovod(probe: Probe) -> Finding:
    if probe.value:
        return Finding("Horovod", True, f"{probe.value['version']} with {' and '.join(probe.value['built'])}")
    advice = "Needed for more than one instance only. Build it with: python -m tf_ipu_dp.environment distributed"
    absent = "No module named 'horovod'" in probe.failure
    return Finding("Horovod", None if absent else False, "not built" if absent else probe.failure, advice)


def _check_tool(name: str, probe: Probe) -> Finding:
    if probe.value:
        return Finding(name, True, ", ".join(filter(None, (probe.value["version"], probe.value["path"]))))
    return Finding(name, None, probe.failure, _TOOLS[name])


def _check_datasets(probe: Probe, environ: Mapping[str, str]) -> Finding:
    name = "tensorflow-datasets"
    if not probe.value:
        absent = "No module named 'tensorflow_datasets'" in probe.failure
        advice = "Only the shipped data sets can be used. Install it with: pip install '.[host]'"
        return Finding(name, False, "not installed" if absent else probe.failure, advice)
    folder = Path(environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets")
    try:
        entries = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    except OSError as error:
        return Finding(name, False, f"{folder}: {error.strerror}", "Set TFDS_DATA_DIR to a readable directory.")
    prepared = [entry for entry in entries if entry not in ("downloads", "manual")]
    return Finding(name, True, f"{probe.value['version']}, data in {folder}: {', '.join(prepared) or 'none yet'}")


def _read_machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("Machine", True, f"{cores} cores, {memory_gib:.1f} GiB, {platform.system()} {platform.machine()}")


def _conclusion(diagnosis: Diagnosis) -> str:
    if diagnosis.sdk is None:
        return "Not ready: train cannot start here."
    where = {"poplar": "on IPUs", "emulator": "on the emulator"}[diagnosis.sdk]
    return f"Ready: train runs here {where}."


if __name__ == "__main__":
    sys.exit(cli.run("doctor", lambda: main(sys.argv[1:]), sys.stderr))
