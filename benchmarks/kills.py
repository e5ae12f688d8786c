"""Kills and signals of all kinds to all processes of two-instance runs: nothing may be lost, and nothing may be left.

    .venv/bin/python benchmarks/kills.py --folder=DIR [--count=1000] [--minutes=7] [--seed=0] [--jobs=2]

A run of `launch` is started, one of its processes (launch, poprun, which also preloads, the leader or the other
instance) or all of them, as Ctrl-C in a terminal does, get a signal at some moment between the first import and the
last step, and the run is resumed until it is complete. A run that trains gets some signals before that which end
nothing, a pause (SIGSTOP and SIGCONT) among them; after each it has to go on. --jobs runs are tried beside each other,
with IPUs of their own.
The campaign is kept in the folder, a line for each signal in kills.jsonl: the same command continues it, and --minutes
ends a part of it. What signal comes when depends on the seed and its number alone.

Checked after every signal: that the job ends, how soon, with which exit code, with no traceback, with the instance
named if one was killed, with no process left and all IPUs free. Checked at the end of every run: that the weights are
those of an undisturbed run, bit by bit. Exits with 1 if any check has failed so far.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from tf_ipu_dp.emulator.devices import registry
from tf_ipu_dp.runs import safe_files

LIMIT_S = 60.0  # a job that takes longer to end hangs; how long it took is in the summary
STEPS = 400
TRAIN = [
    sys.executable, "-m", "tf_ipu_dp.launch", "--instances=2", "--", "--sdk=emulator", "--ipus=4", "--model=mlp",
    "--dataset=synthetic", "--image_size=28", "--micro_batch_size=16", f"--epochs={STEPS}steps",
    "--checkpoint_every=4", "--log_every=2", "--deterministic",
]  # fmt: skip
MOMENTS = ("importing", "preloading", "connecting", "compiling", "training", "training", "training")
# Before `launch` has reached the package, Python answers signals in its own way, also with a traceback.
PYTHON_STARTS = "Python starts"
ENDING = {  # the signals that end a process, and for which target they are sent
    "launch": (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    "poprun": (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT),
    "leader": (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT,
               signal.SIGQUIT, signal.SIGBUS, signal.SIGUSR1, signal.SIGSTOP),
    "other": (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGSEGV, signal.SIGABRT,
              signal.SIGQUIT, signal.SIGBUS, signal.SIGUSR1, signal.SIGSTOP),
    "all": (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),  # of launch's process group
}  # fmt: skip
HARMLESS = (signal.SIGSTOP, signal.SIGCONT, signal.SIGCHLD, signal.SIGWINCH, signal.SIGURG)
HARMLESS_EACH = 4  # sent to a run that trains, before the signal that ends it
ASKING = (signal.SIGTERM, signal.SIGINT)  # which let a run save
NEAR_END = 40  # updates: a run that has more before it must not end by itself


def start(folder, log, environ):
    environ = {**environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    with log.open("wb") as stream:
        return subprocess.Popen(
            [*TRAIN, f"--run_dir={folder}"], stdout=subprocess.DEVNULL, stderr=stream, env=environ,
            start_new_session=True, preexec_fn=restore_signals,  # noqa: PLW1509
        )  # fmt: skip


def restore_signals():
    """Undoes what the campaign's own starter may have done: shells let what runs in their background ignore some."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def digest(folder):
    """Returns a digest of the last checkpoint's weights and optimizer state."""
    (newest,) = sorted((folder / "checkpoints").glob(f"step-{STEPS:08d}"))
    return digest_of(newest)


def digest_of(checkpoint):
    """Returns a digest of a checkpoint's weights and optimizer state, whatever else TensorFlow writes beside them."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(checkpoint / "state"))
    total = hashlib.sha256()
    for name in sorted(reader.get_variable_to_shape_map()):
        if name.startswith(("model/", "optimizer/")):
            total.update(name.encode() + reader.get_tensor(name).tobytes())
    return total.hexdigest()


def read_lines(path):
    """Returns the whole lines of a file of JSON objects: a writer may be killed within the last one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            if line.endswith("\n"):
                found.append(json.loads(line))
    return found


def append_line(path, made):
    """Adds a line to a file of JSON objects, apart from what a killed writer has left of one."""
    with path.open("a+b") as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(end - 1, 0))
        is_cut = stream.read(1) not in (b"", b"\n")
        stream.write(b"\n" * is_cut + json.dumps(made).encode() + b"\n")


def last_step(folder):
    """Returns the step of the last whole line of the metrics, from the end of the file: it is asked all the time."""
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 8192, 0))
            lines = file.read().split(b"\n")[-2::-1]
    except OSError:
        return 0
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return json.loads(line)["step"]
    return 0


def phase(folder):
    """Returns the phases of the instances, in the order of their numbers."""
    found = []
    for path in sorted(folder.glob("status/instance-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            found.append(json.loads(path.read_text(encoding="utf-8"))["phase"])
    return found


def processes_of(pid):
    """Returns the running processes of the job by what they are: launch, poprun, leader, other, and the rest."""
    found, pending = {"launch": pid}, [pid]
    rest = []
    while pending:
        for path in Path(f"/proc/{pending.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                pending += map(int, path.read_text(encoding="ascii").split())
                for child in path.read_text(encoding="ascii").split():
                    name = kind_of(Path("/proc") / child)
                    if name:
                        found[name] = int(child)
                    else:
                        rest.append(int(child))
    return found, rest


def kind_of(path):
    try:
        words = (path / "cmdline").read_bytes().split(b"\0")
        environ = (path / "environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    if words[1:3] == [b"-m", b"tf_ipu_dp.emulator.poprun"]:
        return "poprun"
    if words[1:3] == [b"-m", b"tf_ipu_dp.train"]:
        return "leader" if b"POPDIST_REPLICA_INDEX_OFFSET=0" in environ else "other"
    return ""


def is_alive(pid):
    """Whether a process runs, or has threads that have not ended yet: until then it keeps its files and locks."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        return state not in "ZX" or len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False


def maps_tensorflow(pid):
    try:
        return "libtensorflow_framework" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return False


def is_at(moment, process, folder, goal):
    """Whether a job is at a moment, or has passed it."""
    if moment == "importing":
        return True
    if moment == "compiling":
        return len(phase(folder)) == 2 or "training" in phase(folder)
    if moment == "training":
        return last_step(folder) >= goal
    found, _ = processes_of(process.pid)
    if moment == "preloading":
        return maps_tensorflow(found.get("poprun", 0)) or "leader" in found
    return "leader" in found and "other" in found


def send(folder, number, seed, environ):
    """Starts the run and sends a signal; returns what happened, or None if the run ended before."""
    chance = random.Random(f"{seed}-{number}")
    moment = chance.choice(MOMENTS)
    targets = {"importing": ["launch", "all"], "preloading": ["launch", "poprun", "all"]}.get(moment, list(ENDING))
    target = chance.choice(targets)
    kind = chance.choice(ENDING[target])
    goal, delay_s = (
        last_step(folder) + chance.randrange(2, 40),
        chance.uniform(0, 0.7 if moment != "training" else 0.05),
    )
    log = folder.with_suffix(".log")
    process = start(folder, log, environ)
    deadline = time.monotonic() + 240
    while process.poll() is None and not is_at(moment, process, folder, goal) and time.monotonic() < deadline:
        time.sleep(0.005)
    until = time.monotonic() + delay_s
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    harmless, harm = [], []
    if moment == "training":
        harmless, harm = disturb(process, folder, random.Random(f"{seed}-{number}-harmless"))
    found, rest = processes_of(process.pid)
    if process.poll() is not None or target not in (*found, "all"):
        process.wait()
        done = process.returncode == 0
        early = [f"ended early, after {harmless}: {log.read_text()[-2000:]}"]
        return None if done else record(number, moment, target, kind, 0.0, [*harm, *early], harmless)
    if moment == "importing" and not handles_signals(process.pid):
        moment = PYTHON_STARTS
    steps_left = STEPS - last_step(folder)
    began = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        if target == "all":
            os.killpg(process.pid, kind)
        else:
            os.kill(found[target], kind)
    if kind == signal.SIGSTOP:
        pause_and_go_on(process, found[target], chance.uniform(0.2, 2.0))
        began = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(found["launch"], signal.SIGTERM)
    seconds, left = wait_for_end(process, [*found.values(), *rest], time.monotonic() - began)
    err = log.read_text(encoding="utf-8")
    problems = harm + ([] if moment == PYTHON_STARTS else check(target, kind, process.returncode, err, steps_left))
    if left:
        problems.append(f"{left} processes were left after {seconds:.0f} s")
    try:
        registry.Partition.from_environment(environ).attach(count=64).release()
    except (registry.RegistryError, registry.DeviceBusyError) as error:
        problems.append(f"IPUs are held: {error}")
    return record(number, moment, target, kind, seconds, problems, harmless)


def wait_for_end(process, everyone, seconds):
    """Waits until all processes of a job have ended, and ends those that do not; returns the seconds and their number.

    `seconds` have passed since the signal.
    """
    now = time.monotonic()
    while seconds < LIMIT_S and (process.poll() is None or any(map(is_alive, everyone))):
        time.sleep(0.02)
        now, before = time.monotonic(), now
        seconds += min(now - before, 1.0)  # a longer pause is one of this campaign, by SIGSTOP
    left = [pid for pid in everyone if is_alive(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    return seconds, len(left)


def handles_signals(pid):
    """Whether a process has reached the package: from then on it handles SIGTERM, which Python itself does not."""
    try:
        (caught,) = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return False
    return bool(int(caught, 16) >> signal.SIGTERM - 1 & 1)


def disturb(process, folder, chance):
    """Sends signals that end nothing, and waits after each until the run has gone on.

    Returns what was sent to which process, and what is wrong.
    """
    sent = []
    for _ in range(HARMLESS_EACH):
        kind, target = chance.choice(HARMLESS), chance.choice(("launch", "poprun", "leader", "other"))
        pause_s, (found, _) = chance.uniform(0.02, 0.4), processes_of(process.pid)
        if process.poll() is not None or target not in found:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[target], kind)
        if kind == signal.SIGSTOP:
            pause_and_go_on(process, found[target], pause_s)
        sent.append(f"{kind.name} to {target}")
        before, until = last_step(folder), time.monotonic() + LIMIT_S
        while process.poll() is None and last_step(folder) <= before and time.monotonic() < until:
            time.sleep(0.005)
        if process.poll() is None and last_step(folder) <= before:
            return sent, [f"no progress for {LIMIT_S:.0f} s after {sent[-1]}"]
    return sent, []


def pause_and_go_on(process, pid, seconds):
    until = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def check(target, kind, code, err, steps_left):
    """Returns what is wrong with the end of a job."""
    sent = signal.SIGTERM if kind == signal.SIGSTOP else kind
    if target in ("launch", "all") or kind == signal.SIGSTOP:
        right = [128 + sent] if sent in ASKING else [-sent]
        # At the very beginning, Python has not installed a handler yet.
        right += [-sent] if not err else []
    else:
        right = [128 + sent]
    right += [0] if steps_left <= NEAR_END else []  # it came after the last step
    checks = {
        f"exit code {code} in place of {right}": code in right,
        "a traceback": "Traceback" not in err and "Fatal Python error" not in err,
        "the instance is not named": kind in ASKING
        or kind in (signal.SIGABRT, signal.SIGSTOP)  # of SIGABRT the peers' errors may be first
        or target in ("launch", "poprun", "all")
        or code == 0
        or f"instance {int(target == 'other')} " in err,
    }
    return [f"{text}:\n{err[-1500:]}" for text, fine in checks.items() if not fine]


def record(number, moment, target, kind, seconds, problems, harmless):
    return {
        "number": number, "moment": moment, "target": target, "signal": signal.Signals(kind).name,
        "seconds": round(seconds, 2), "problems": problems, "harmless": harmless,
    }  # fmt: skip


def finish(folder, expected, environ):
    """Resumes a run to its end, if it is not there; returns what is wrong with its weights."""
    log = folder.with_suffix(".log")
    if not (folder / "result.json").exists() and start(folder, log, environ).wait() != 0:
        return [f"{folder.name} was not resumed: {log.read_text()[-2000:]}"]
    return [] if digest(folder) == expected else [f"{folder.name} ended with different weights"]


def render(records):
    """Returns the summary of a campaign."""
    kills = [each for each in records if "signal" in each]
    runs = [each for each in records if "run" in each]
    problems = [problem for each in records for problem in each["problems"]]
    seconds = [each["seconds"] for each in kills]
    lines = [
        f"{len(kills)} signals that end a job, and {sum(len(each['harmless']) for each in kills)} that do not, in "
        f"{len(runs)} complete runs: {len(problems)} problems. The job ended {statistics.median(seconds):.1f} s after "
        f"the signal (at most {max(seconds):.1f} s)."
    ]
    for name in ("moment", "target", "signal"):
        counted = collections.Counter(each[name] for each in kills)
        lines.append(f"{name}: " + ", ".join(f"{value} {count}" for value, count in counted.most_common()))
    return "\n".join([*lines, *(f"- {problem}" for problem in problems)])


class Campaign:
    """What has been done, and what is next. Can be used from any thread."""

    def __init__(self, path, count):
        self._path, self._guard = path, threading.Lock()
        records = read_lines(path)
        numbers, runs = ({each.get(name) for each in records} for name in ("number", "run"))
        self._numbers = collections.deque(number for number in range(count) if number not in numbers)
        self._runs = (run for run in itertools.count() if run not in runs)

    def take_number(self):
        """Returns the number of the next signal; None after the last one."""
        with self._guard:
            return self._numbers.popleft() if self._numbers else None

    def put_back(self, number):
        with self._guard:
            self._numbers.appendleft(number)

    def take_run(self):
        """Returns the number of a run that is not complete."""
        with self._guard:
            return next(self._runs)

    def keep(self, made):
        with self._guard:
            append_line(self._path, made)
            for problem in made["problems"]:
                print(f"{json.dumps({**made, 'problems': 0})}: {problem}", flush=True)


def work(job, campaign, args, expected, deadline):
    """Sends signals to one run after the other."""
    environ = {**os.environ, "IPU_EMULATOR_DIR": str(args.folder / f"partition-{job}")}
    run = campaign.take_run()
    while time.monotonic() < deadline:
        number = campaign.take_number()
        if number is None:
            break
        folder = args.folder / f"run-{run}"
        made = send(folder, number, args.seed, environ)
        if made is None:
            campaign.put_back(number)
            made = {"run": run, "problems": finish(folder, expected, environ)}
            run = campaign.take_run()
        campaign.keep(made)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs beside each other")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    lock = safe_files.lock_file(args.folder / ".lock", wait=True)  # another campaign would take its signals for faults
    path, deadline = args.folder / "kills.jsonl", time.monotonic() + 60 * args.minutes
    reference = args.folder / "undisturbed"
    if not (reference / "result.json").exists():
        environ = {**os.environ, "IPU_EMULATOR_DIR": str(args.folder / "partition-0")}
        start(reference, reference.with_suffix(".log"), environ).wait()
    expected_file = args.folder / "undisturbed.sha256"  # TensorFlow takes seconds, in every part
    if not expected_file.exists():
        expected_file.write_text(digest(reference), encoding="ascii")
    expected = expected_file.read_text(encoding="ascii")
    campaign = Campaign(path, args.count)
    workers = [
        threading.Thread(target=work, args=(job, campaign, args, expected, deadline)) for job in range(args.jobs)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    lock.close()
    records = read_lines(path)
    print(render(records))
    return 1 if any(each["problems"] for each in records) else 0


if __name__ == "__main__":
    sys.exit(main())
