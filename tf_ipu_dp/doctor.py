"""Says what this machine can do, and why not: `python -m tf_ipu_dp.doctor`.

It imports neither TensorFlow nor Horovod nor the SDK itself: these may crash the interpreter or hang, so each is asked
in a child process with a time limit.
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

from tf_ipu_dp import __version__, cli

TIME_LIMIT_S = 60.0
GROUPS = {"Output": ("json",)}
# Releases that the test suite runs on. Others with Keras 2 may do.
TESTED_TENSORFLOW = ("2.6", "2.15")

_PROBES = {
    "tensorflow": """
import json, tensorflow as tf
found = {"version": tf.__version__, "path": tf.__file__, "poplar": True, "keras": None}
try:
    from tensorflow.python import ipu
except ImportError:
    found["poplar"] = False
import keras
found["keras"] = keras.__version__
print(json.dumps(found))
""",
    "horovod": """
import json
from importlib import metadata
import horovod.tensorflow as hvd
built = {"Gloo": hvd.gloo_built(), "MPI": hvd.mpi_built()}
print(json.dumps({"version": metadata.version("horovod"), "built": [name for name, there in built.items() if there]}))
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
    "mpirun": "Only needed to start instances over MPI: install Open MPI.",
    "srun": "Only there on Slurm clusters.",
}


@dataclasses.dataclass(frozen=True)
class Probe:
    """What a child process found out: a value, or the reason why there is none."""

    value: Optional[Dict[str, Any]]
    failure: str = ""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table. `ok` is None for what is absent and not needed."""

    name: str
    ok: Optional[bool]
    detail: str
    advice: str = ""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """All findings, and where `train` would run: `poplar`, `emulator` or nowhere."""

    sdk: Optional[str]
    findings: Tuple[Finding, ...]


def main(words: Sequence[str]) -> int:
    """Asks, judges, shows."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    flags.DEFINE_bool("json", False, "Print the findings as JSON.", flag_values=fv)
    width = shutil.get_terminal_size().columns
    if cli.wants_help(words):
        about = "Says what this machine can do, and why not. Exit code 0 when train would start, 1 when not."
        sys.stdout.write(cli.render_help("python -m tf_ipu_dp.doctor [--json]", about, GROUPS, fv, width))
        return 0
    cli.parse(words, fv)
    if sys.stderr.isatty():
        sys.stderr.write("asking TensorFlow, Horovod and the others (a few seconds) ...")
        sys.stderr.flush()
    diagnosis = judge(read_probes(TIME_LIMIT_S), os.environ, sys.version_info[:2])
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
    if fv["json"].value:
        sys.stdout.write(render_json(diagnosis))
    else:
        unicode = cli.speaks_unicode(sys.stdout)
        sys.stdout.write(render(diagnosis, width if sys.stdout.isatty() else 200, ascii_only=not unicode))
    return 0 if diagnosis.sdk else 1


def judge(probes: Mapping[str, Probe], environ: Mapping[str, str], python: Tuple[int, ...]) -> Diagnosis:
    """Makes the findings of what was read, and decides where `train` would run."""
    tensorflow, keras = _judge_tensorflow(probes["tensorflow"])
    sdk = _judge_sdk(probes, environ)
    emulator = _judge_emulator(tensorflow, keras, probes["tensorflow"])
    supported = (3, 8) <= python <= (3, 11)
    findings = [
        Finding(
            "Python",
            supported,
            f"{platform.python_version()}, {sys.executable}",
            "" if supported else "Use Python 3.8 to 3.11: TensorFlow 2.6 and 2.15 have wheels for no others.",
        ),
        tensorflow,
        keras,
        sdk,
        emulator,
        _judge_horovod(probes["horovod"]),
        *(_judge_tool(name, probes[name]) for name in _TOOLS),
        _judge_datasets(probes["tensorflow_datasets"], environ),
        _read_machine(),
    ]
    able = supported and tensorflow.ok and keras.ok
    where = "poplar" if able and sdk.ok else "emulator" if able and emulator.ok else None
    return Diagnosis(where, tuple(findings))


def render(diagnosis: Diagnosis, width: int, ascii_only: bool = False) -> str:
    """Returns the table, what to do about each fault, and the verdict."""
    marks = {True: "yes", False: "no", None: "-"} if ascii_only else {True: "✓", False: "✗", None: "·"}
    rows = [(marks[finding.ok], finding.name, finding.detail) for finding in diagnosis.findings]
    text = cli.render_table(("", "", ""), rows, width)
    advice = [finding for finding in diagnosis.findings if finding.advice and finding.ok is not True]
    if advice:
        text += "\n" + cli.render_table(("", ""), [(f"{finding.name}:", finding.advice) for finding in advice], width)
    return text + "\n" + _verdict(diagnosis) + "\n"


def render_json(diagnosis: Diagnosis) -> str:
    """Returns the same for a program."""
    value = {"schema": 1, "version": __version__, "ready": diagnosis.sdk is not None, **dataclasses.asdict(diagnosis)}
    return json.dumps(value, indent=2) + "\n"


def read_probes(limit_s: float) -> Dict[str, Probe]:
    """Asks all of them at the same time; what does not answer within the limit is stopped."""
    commands = {name: [sys.executable, "-c", code] for name, code in _PROBES.items()}
    with futures.ThreadPoolExecutor() as pool:
        answers = {name: pool.submit(read_probe, command, limit_s) for name, command in commands.items()}
        answers.update({name: pool.submit(_read_tool, name, limit_s) for name in _TOOLS})
        return {name: answer.result() for name, answer in answers.items()}


def read_probe(command: Sequence[str], limit_s: float) -> Probe:
    """Runs a program whose last line on stdout is JSON."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        code, out, err = _run(command, limit_s, environment)
    except subprocess.TimeoutExpired:
        return Probe(None, f"no answer within {limit_s:.0f} s")
    except OSError as error:
        return Probe(None, error.strerror or str(error))
    if code < 0:
        return Probe(None, f"the interpreter was ended by {_signal_name(-code)}")
    if code:
        lines = [line for line in err.splitlines() if line.strip()]
        return Probe(None, lines[-1].strip() if lines else f"exit code {code}")
    try:
        value = json.loads(out.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return Probe(None, "it ended without an answer")
    return Probe(value)


def _read_tool(name: str, limit_s: float) -> Probe:
    path = shutil.which(name)
    if not path:
        return Probe(None, "not found on the PATH")
    try:
        _, out, err = _run([path, "--version"], limit_s, dict(os.environ))
    except (OSError, subprocess.TimeoutExpired) as error:
        return Probe(None, f"{path} does not answer ({type(error).__name__})")
    lines = (out + err).strip().splitlines()
    return Probe({"path": path, "version": lines[0].strip() if lines else ""})


def _run(command: Sequence[str], limit_s: float, environment: Mapping[str, str]) -> Tuple[int, str, str]:
    """Runs a program with all its children, and ends them all when the time is over."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        env=environment, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit_s)
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


def _judge_tensorflow(probe: Probe) -> Tuple[Finding, Finding]:
    install = "Start through launch/train, which makes an environment, or install it: pip install '.[host]'"
    if not probe.value:
        broken = (
            "It is there but does not start. Remove this environment and start through launch/train, which makes one."
        )
        absent = Finding("TensorFlow", False, probe.failure, install if "No module named" in probe.failure else broken)
        return absent, Finding("Keras", False, "asked together with TensorFlow, which does not start")
    version, keras = probe.value["version"], probe.value["keras"]
    kind = "of the Poplar SDK" if probe.value["poplar"] else "stock"
    tested = any(version.startswith(f"{release}.") for release in TESTED_TENSORFLOW)
    note = "" if tested else f"; tested are {cli.alternatives(TESTED_TENSORFLOW)}"
    old_enough = keras.startswith("2.")
    return (
        Finding("TensorFlow", True, f"{version}, {kind}{note}"),
        Finding("Keras", old_enough, keras, "" if old_enough else f"Keras 2 is needed. {install}"),
    )


def _judge_sdk(probes: Mapping[str, Probe], environ: Mapping[str, str]) -> Finding:
    name = "Poplar SDK"
    enabled = "POPLAR_SDK_ENABLED" in environ
    tensorflow, info = probes["tensorflow"].value, probes["gcipuinfo"]
    poplar = bool(tensorflow and tensorflow["poplar"])
    if not enabled and not poplar and not info.value:
        return Finding(
            name, None, "not enabled in this shell", "On a machine with IPUs: source the SDK's enable script."
        )
    if not info.value:
        return Finding(
            name, False, f"enabled, but gcipuinfo fails: {info.failure}", "Source the SDK's enable script again."
        )
    devices: List[Dict[str, str]] = info.value["devices"]
    if not devices:
        advice = "Ask for a partition (vipu list partitions), and set IPUOF_VIPU_API_HOST and _PARTITION_ID."
        return Finding(name, False, "enabled, but no IPU is found", advice)
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
        return Finding(name, False, ", ".join([*facts, "but this TensorFlow is not the SDK's"]), advice)
    return Finding(name, True, ", ".join(facts))


def _judge_emulator(tensorflow: Finding, keras: Finding, probe: Probe) -> Finding:
    name = "Emulator"
    if not (tensorflow.ok and keras.ok):
        return Finding(name, False, "needs TensorFlow with Keras 2")
    if probe.value and probe.value["poplar"]:
        return Finding(name, None, "not needed beside the Poplar SDK's TensorFlow")
    return Finding(name, True, "this TensorFlow can carry it")


def _judge_horovod(probe: Probe) -> Finding:
    if probe.value:
        return Finding("Horovod", True, f"{probe.value['version']} with {' and '.join(probe.value['built'])}")
    advice = "Only needed for more than one instance. To build it: python -m tf_ipu_dp.environment distributed"
    absent = "No module named 'horovod'" in probe.failure
    return Finding("Horovod", None if absent else False, "not built" if absent else probe.failure, advice)


def _judge_tool(name: str, probe: Probe) -> Finding:
    if probe.value:
        return Finding(name, True, ", ".join(filter(None, (probe.value["version"], probe.value["path"]))))
    return Finding(name, None, probe.failure, _TOOLS[name])


def _judge_datasets(probe: Probe, environ: Mapping[str, str]) -> Finding:
    name = "tensorflow-datasets"
    if not probe.value:
        return Finding(
            name, False, probe.failure, "Only the package's own data can be used. To install it: pip install '.[host]'"
        )
    folder = Path(environ.get("TFDS_DATA_DIR") or Path.home() / "tensorflow_datasets")
    try:
        entries = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    except OSError as error:
        return Finding(name, False, f"{folder}: {error.strerror}", "Set TFDS_DATA_DIR to a directory that can be read.")
    prepared = [entry for entry in entries if entry not in ("downloads", "manual")]
    return Finding(name, True, f"{probe.value['version']}, data in {folder}: {', '.join(prepared) or 'none yet'}")


def _read_machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("Machine", True, f"{cores} cores, {memory_gib:.1f} GiB, {platform.system()} {platform.machine()}")


def _verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.sdk is None:
        return "Train would not start here."
    where = {"poplar": "on IPUs", "emulator": "on the emulator"}[diagnosis.sdk]
    return f"Train would start here, {where}."


if __name__ == "__main__":
    sys.exit(cli.run("doctor", lambda: main(sys.argv[1:]), sys.stderr))
