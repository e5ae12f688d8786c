"""The monitor's flags: declarations, the parsed command line, and which of them exclude each other."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.config import parsers
from tf_ipu_dp.monitoring import selection

GROUPS = {
    "Show": ("watch", "all", "json", "inventory", "gc", "free", "need", "health", "events", "explain"),
    "Choose": ("user", "run", "sort"),
    "Keep": ("record", "report", "export", "pid", "run_dir"),
    "Where": ("sdk",),
}
PERIOD_S = 1.0
EVENT_PATH = "IPU_APP_EVENT_RECORD_PATH"
# What each does: those in the first row do it once, and alone.
_ONCE = {
    "free": "prints the free IPUs once",
    "health": "checks for faults once",
    "explain": "explains one run",
    "inventory": "prints what the IPUs are once",
    "gc": "prints the IPUs once as gc-monitor does",
}
_CONTINUOUS = {
    "watch": "shows the IPUs until stopped",
    "record": "records until stopped",
    "export": "serves metrics until stopped",
}
_MIN_PERIOD_S = 0.1
_HOST, _PORT = "127.0.0.1", 9510


@dataclasses.dataclass(frozen=True)
class MonitorConfig:
    """The parsed command line. Field names are the flag names; defaults live in the flags only."""

    watch: Optional[float]
    all: bool
    json: bool
    inventory: bool
    gc: bool
    free: bool
    need: int
    health: bool
    events: Optional[str]
    explain: Optional[str]
    user: Optional[str]
    run: Optional[str]
    sort: str
    record: Optional[str]
    report: Optional[str]
    export: Optional[Tuple[str, int]]
    pid: Optional[int]
    run_dir: Optional[str]
    sdk: str

    @property
    def view(self) -> selection.View:
        return selection.View(self.user, self.run, self.sort, self.all)


def parse(words: Sequence[str]) -> MonitorConfig:
    """Returns the config of a command line; refuses flags that cannot be combined."""
    fv = make_flags()
    cli.parse(words, fv)
    values: Dict[str, Any] = {field.name: fv[field.name].value for field in dataclasses.fields(MonitorConfig)}
    cfg = MonitorConfig(**values)
    once, continuous = ([name for name in names if values[name] not in (None, False)] for names in (_ONCE, _CONTINUOUS))
    if once and len(once) + len(continuous) > 1:
        does = [f"--{name} {({**_ONCE, **_CONTINUOUS})[name]}" for name in (*once, *continuous)]
        names = " and ".join(f"--{name}" for name in (*once, *continuous))
        raise cli.UsageError(f"{names} cannot be combined: {', '.join(does)}. Use --{once[0]} alone.")
    if cfg.explain == "":
        raise cli.UsageError("--explain needs the folder of a run, for example --explain=runs/first.")
    if cfg.need and not cfg.free:
        raise cli.UsageError(f"--need={cfg.need} works only with --free. Use --free --need={cfg.need}.")
    if cfg.events is not None and not cfg.health:
        raise cli.UsageError(f"--events={cfg.events} works only with --health. Use --health --events={cfg.events}.")
    if cfg.gc and cfg.json:
        raise cli.UsageError(
            "--gc and --json cannot be combined: --gc prints boxes for readers, --json prints values for programs. "
            "Use --inventory --json for the same values."
        )
    if cfg.report is not None and cfg.record is None:
        raise cli.UsageError(
            f"--report={cfg.report} needs a recording. Add --record=FILE: an existing recording is drawn, "
            "a new one is recorded first."
        )
    for name, value in (("pid", cfg.pid), ("run_dir", cfg.run_dir)):
        if value is not None and not continuous:
            raise cli.UsageError(f"--{name}={value} sets when to stop. Use it with --record, --watch or --export.")
    if cfg.pid is not None and cfg.run_dir is not None:
        raise cli.UsageError(
            f"--pid={cfg.pid} and --run_dir={cfg.run_dir} cannot be combined: --pid={cfg.pid} stops with that process, "
            f"--run_dir={cfg.run_dir} stops with that run. Use one of them."
        )
    _check_view(cfg, once, continuous)
    return cfg


def make_flags() -> flags.FlagValues:
    """Returns the monitor's flags, unset."""
    fv = flags.FlagValues()  # type: ignore[no-untyped-call, unused-ignore]
    define: Any = flags.DEFINE
    define(
        _Seconds(), "watch", None,
        f"Seconds between refreshes, {PERIOD_S:g} by default. Keys: q quits, p pauses, s sorts, h helps.",
        flag_values=fv, boolean=True,
    )  # fmt: skip
    flags.DEFINE_bool("all", False, "A row for each IPU, in place of one for each process and a line of free ones.",
                      flag_values=fv)  # fmt: skip
    flags.DEFINE_bool("json", False, "Print JSON; with --watch one object per line.", flag_values=fv)
    flags.DEFINE_bool(
        "inventory", False, "Print what the IPUs are: partition, machine, serial, type, versions and routing; a row "
        "for each board, or with --all for each IPU.", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_bool("gc", False, "Print the IPUs and the attached processes as gc-monitor does.", flag_values=fv)
    flags.DEFINE_bool("free", False, "Print the ids of the free IPUs.", flag_values=fv)
    flags.DEFINE_integer("need", 0, "With --free: exit code 1 when fewer IPUs are free.", lower_bound=0, flag_values=fv)
    flags.DEFINE_bool(
        "health", False, "Print the faults of the IPUs and the last application event. Exit code 1 when there is a "
        "fault.", flag_values=fv,
    )  # fmt: skip
    parsers.define_path(
        "events", None, f"With --health: the file with application events. By default {EVENT_PATH} names it.",
        flag_values=fv,
    )  # fmt: skip
    parsers.define_path("explain", None, "Name the bottleneck of the run in this folder, and the flag to change.",
                        flag_values=fv)  # fmt: skip
    define(_Name(), "user", None, "Show only processes of this user, and their IPUs.", flag_values=fv)
    define(
        _Name(), "run", None, "Show only the run of this name or in this folder; of a folder its instances on all "
        "hosts, even if none is on this one.", flag_values=fv,
    )  # fmt: skip
    flags.DEFINE_enum("sort", selection.SORT_NAMES[0], list(selection.SORT_NAMES), "What to sort the processes by.",
                      flag_values=fv)  # fmt: skip
    parsers.define_path("record", None, "Record snapshots to this file, as JSON lines, until stopped.",
                        flag_values=fv)  # fmt: skip
    parsers.define_path(
        "report", None, "Draw the recording of --record as PNG, SVG or HTML, by the ending of this name: an existing "
        "recording, or the one that is made now.", flag_values=fv,
    )  # fmt: skip
    define(
        _Address(), "export", None, f"Serve Prometheus metrics, on {_HOST}:{_PORT} by default.", flag_values=fv,
        boolean=True,
    )  # fmt: skip
    flags.DEFINE_integer("pid", None, "Stop when this process ends.", lower_bound=1, flag_values=fv)
    parsers.define_path("run_dir", None, "Stop when the run in this folder ends.", flag_values=fv)
    flags.DEFINE_enum(
        "sdk", "auto", ["auto", "poplar", "emulator"], "Whose IPUs to show: the Poplar SDK's or the emulator's. auto "
        "takes the Poplar SDK's where there are any.", flag_values=fv,
    )  # fmt: skip
    return fv


class _Name(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """A name, as it was typed."""

    placeholder = "NAME"

    def flag_type(self) -> str:
        return "name"


class _Seconds(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """The refresh period; a flag without a value means the default."""

    placeholder = "SECONDS"
    syntactic_help = f"a number of seconds from {_MIN_PERIOD_S:g} to 86400"

    def parse(self, argument: Any) -> Optional[float]:
        """Reads the flag's text."""
        if argument in ("true", True):
            return PERIOD_S
        if argument in ("false", False, None):
            return None
        seconds = float(argument)
        if not _MIN_PERIOD_S <= seconds <= 86400:
            raise ValueError("out of range")
        return seconds

    def flag_type(self) -> str:
        return "seconds"


class _Address(flags.ArgumentParser):  # type: ignore[type-arg, unused-ignore]
    """Where to listen: a port for this machine alone, or an address and a port."""

    placeholder = "[HOST:]PORT"
    syntactic_help = "a port from 0 to 65535, after an address if other machines are to reach it"

    def parse(self, argument: Any) -> Optional[Tuple[str, int]]:
        """Reads the flag's text."""
        if argument in ("true", True):
            return (_HOST, _PORT)
        if argument in ("false", False, None):
            return None
        host, _, port = str(argument).rpartition(":")
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            raise ValueError("not a port")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        return (host or _HOST, int(port))

    def flag_type(self) -> str:
        return "address"


def _check_view(cfg: MonitorConfig, once: Sequence[str], continuous: Sequence[str]) -> None:
    """Refuses filters and orders of tables where no table is shown."""
    given: List[str] = [
        f"--{name}={value}" for name, value in (("user", cfg.user), ("run", cfg.run)) if value is not None
    ]
    given += [f"--sort={cfg.sort}"] if cfg.sort != selection.SORT_NAMES[0] else []
    if not given:
        return
    if once:
        raise cli.UsageError(
            f"{given[0]} chooses rows of the tables, and --{once[0]} {_ONCE[once[0]]}. Use one of them alone."
        )
    if continuous and "watch" not in continuous:
        name = continuous[0]
        raise cli.UsageError(
            f"{given[0]} chooses rows of the tables, and --{name} keeps all. Leave it out, or add --watch."
        )
