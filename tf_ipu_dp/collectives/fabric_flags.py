"""The flags that choose a network to emulate, and the profiles that come with the package."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import fabric, quantities
from tf_ipu_dp.collectives.fabric import Fabric, FabricError

_FOLDER = Path(__file__).parent / "fabrics"
_SUFFIX = ".ini"
# By flag, in the order of the help: the setting that it overrides, and what it does.
_OVERRIDES = {
    "fabric_hosts": ("hosts", "Emulated hosts."),
    "ranks_per_host": ("ranks_per_host", "Ranks on each emulated host."),
    "placement": ("placement", "block puts neighbouring ranks on one host, round-robin on different ones."),
    "rate": ("rate", "Rate of each host's link in each direction, like 100Mbit, or unlimited."),
    "delay": ("delay", "Delay from one host to another, like 2ms."),
    "jitter": ("jitter", "Standard deviation of the delay, like 200us."),
    "jitter_law": ("jitter_law", "Law of the jitter: normal, lognormal or uniform."),
    "loss": ("loss", "Share of packets that are lost, like 0.1%."),
    "loss_burst": ("loss_burst", "Mean number of packets that are lost in a row; none loses each by itself."),
    "mtu": ("mtu", "Largest packet in bytes, without the Ethernet header."),
    "congestion_control": ("congestion_control", "TCP's congestion control on the emulated hosts: cubic, reno or bbr."),
    "burst": ("burst", "Bytes that a link passes before its rate applies, like 64KiB, or automatic."),
    "queue": ("queue", "Bytes that wait at each end of a link before packets are dropped, or unlimited."),
    "dilation": ("dilation", "How many times slower the network is built; measured times are divided by it."),
}
_SLOW_HOST = "slow_host"
FLAG_NAMES = ("fabric", *_OVERRIDES, _SLOW_HOST)


def define_flags(fv: flags.FlagValues) -> None:
    """Defines the flags of the network. `FLAG_NAMES` lists them for the help."""
    names = cli.alternatives(profile_names())
    text = f"Emulated hosts: a profile ({names}) or the path of one. Needs root."
    define_text("fabric", text, "PROFILE", fv)
    for name, (setting, about) in _OVERRIDES.items():
        define_text(name, f"{about} Overrides {setting} of the profile.", "VALUE", fv)
    define_text(_SLOW_HOST, "A host with a link of its own, and its rate, delay or loss: 2:25Mbit or 2:25Mbit,5ms,1%.",
            "HOST:VALUES", fv)  # fmt: skip


def from_flags(fv: flags.FlagValues) -> Optional[Fabric]:
    """Returns the network that the flags ask for; None without --fabric."""
    values: Dict[str, Optional[str]] = {name: fv[name].value for name in FLAG_NAMES}  # type: ignore[misc, unused-ignore]
    given = [name for name in FLAG_NAMES if values[name] is not None]
    profile = values["fabric"]
    if profile is None:
        if given:
            flag = cli.flag_text(given[0], values[given[0]])
            raise cli.UsageError(f"{flag} needs emulated hosts. Add --fabric=PROFILE, for example --fabric=r4.")
        return None
    found = load(profile)
    flag_of = {setting: name for name, (setting, _) in _OVERRIDES.items()}
    settings = {_OVERRIDES[name][0]: str(values[name]) for name in given if name in _OVERRIDES}
    found = found.override(settings, lambda setting: f"--{flag_of.get(setting, setting)}")
    if values[_SLOW_HOST] is not None:
        host, changes = _parse_slow_host(str(values[_SLOW_HOST]))
        found = found.override_host(host, changes, lambda setting: f"--{_SLOW_HOST}: {setting}")
    return found


def load(profile: str) -> Fabric:
    """Returns the network of a profile, by name or path; UsageError for a mistake in it."""
    path = _FOLDER / f"{profile}{_SUFFIX}"
    if profile not in profile_names():
        path = cli.expand_path(profile)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        near = difflib.get_close_matches(profile, profile_names(), n=1, cutoff=0.5)
        advice = f"Did you mean {near[0]}?" if near else f"Use {cli.alternatives(profile_names())}, or the path of one."
        raise cli.UsageError(f"--fabric={profile} is neither a profile nor a file that can be read. {advice}") from None
    try:
        return fabric.parse(text, profile)
    except FabricError as error:
        raise cli.UsageError(f"--fabric={error}") from None


def profile_names() -> List[str]:
    """Lists the profiles of the package."""
    return sorted(path.stem for path in _FOLDER.glob(f"*{_SUFFIX}"))


def _parse_slow_host(text: str) -> Tuple[int, Dict[str, str]]:
    form = f"--{_SLOW_HOST} takes a host and its rate, delay or loss, like 2:25Mbit or 2:25Mbit,5ms,1%"
    host, colon, values = text.partition(":")
    if not (host.strip().isdigit() and colon and values.strip()):
        raise cli.UsageError(f"--{_SLOW_HOST}={text} is not possible. {form}.")
    settings: Dict[str, str] = {}
    for value in values.split(","):
        setting = _setting_of(value.strip())
        if setting is None:
            raise cli.UsageError(f"--{_SLOW_HOST}={text} is not possible: {value.strip()!r} is none of them. {form}.")
        settings[setting] = value.strip()
    return int(host), settings


def _setting_of(value: str) -> Optional[str]:
    """Returns what a value is, by its unit."""
    if value.endswith("%"):
        return "loss"
    for setting, parse in (("rate", quantities.parse_rate), ("delay", quantities.parse_seconds)):
        try:
            parse(value)
        except ValueError:
            continue
        return setting
    return None


def define_text(name: str, text: str, placeholder: str, fv: flags.FlagValues) -> None:
    """Defines a flag that takes a text, without a default; the placeholder stands for the text in the help."""
    # A class for each placeholder: absl makes one parser for all flags of a class.
    kind: Any = type("_TextParser", (flags.ArgumentParser,), {"placeholder": placeholder})
    flags.DEFINE(kind(), name, None, text, flag_values=fv)  # type: ignore[no-untyped-call, call-overload, unused-ignore]
