"""Sizes, rates and times as people write them: `971048`, `4KiB..64MiB`, `1Gbit`, `25GB/s`, `5us`. Pure."""

from __future__ import annotations

import math
import re
from typing import List, Mapping, Tuple

_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_RATE_UNITS = {
    **{f"{prefix}bit": factor / 8 for prefix, factor in (("", 1), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}bit/s": factor / 8 for prefix, factor in (("", 1), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}b/s": factor / 8 for prefix, factor in (("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
    **{f"{prefix}B/s": float(factor) for prefix, factor in (("", 1), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))},
}
_TIME_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]*)\s*", re.ASCII)
_MAX_BYTES = 2**50


def parse_bytes(text: str) -> int:
    """Returns a size in bytes; ValueError with one sentence for anything else."""
    value = _parse(text, _SIZE_UNITS, "a size like 971048, 4KiB or 64MB")
    if not 1 <= value <= _MAX_BYTES or value != int(value):
        raise ValueError(f"{text} is not a whole number of bytes from 1 to {render_bytes(_MAX_BYTES)}.")
    return int(value)


def parse_byte_list(text: str) -> Tuple[int, ...]:
    """Returns the sizes of a list like `4KiB,971048` or of a range like `4KiB..64MiB`, which doubles."""
    found: List[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        sizes = [parse_bytes(first)]
        if dots:
            end = parse_bytes(last)
            if end < sizes[0]:
                raise ValueError(f"{part} is an empty range: {last.strip()} is less than {first.strip()}.")
            while sizes[-1] * 2 <= end:
                sizes.append(sizes[-1] * 2)
            if sizes[-1] != end:
                sizes.append(end)
        found += [size for size in sizes if size not in found]
    return tuple(found)


def parse_rate(text: str) -> float:
    """Returns bytes per second; ValueError with one sentence for anything else."""
    value = _parse(text, _RATE_UNITS, "a rate like 100Mbit, 1Gbit or 25GB/s")
    if not value > 0:
        raise ValueError(f"{text} is not a rate: it must be more than 0.")
    return value


def parse_seconds(text: str) -> float:
    """Returns seconds, 0 included; ValueError with one sentence for anything else."""
    return 0.0 if text.strip() == "0" else _parse(text, _TIME_UNITS, "a time like 5us, 2ms or 1s")


def render_bytes(size: float) -> str:
    """Returns a size with a unit, like 948 KiB; small ones to the byte."""
    if size < 10 * 2**10:
        return f"{size:,.0f} B"
    unit = next(unit for unit in ("GiB", "MiB", "KiB") if size >= _SIZE_UNITS[unit])
    return f"{_three_digits(size / _SIZE_UNITS[unit])} {unit}"


def render_rate(bytes_per_s: float) -> str:
    """Returns a rate in bits, as network rates are given: 1 Gbit/s."""
    bits = bytes_per_s * 8
    factor, unit = next(
        ((f, u) for f, u in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")) if bits >= f), (1e3, "Kbit/s")
    )
    return f"{_three_digits(bits / factor)} {unit}"


def render_seconds(seconds: float) -> str:
    """Returns a time with three digits and its unit: 14.1 ms."""
    if seconds == 0:
        return "0 s"
    if not math.isfinite(seconds):
        return "-"
    scale, unit = next(
        ((f, u) for f, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")) if abs(seconds) >= f * 0.9995), (1e-9, "ns")
    )
    return f"{_three_digits(seconds / scale)} {unit}"


def _parse(text: str, units: Mapping[str, float], form: str) -> float:
    found = _NUMBER.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is not {form}.")
    if found[2] not in units:
        same = [unit for unit in units if unit.lower() == found[2].lower()]
        advice = f"Write {found[1]}{same[0]}." if same else f"Use {', '.join(unit for unit in units if unit)}."
        missing = "has no unit" if not found[2] else f"has the unit {found[2]!r}, which is not known"
        raise ValueError(f"{text!r} {missing}. {advice}")
    return float(found[1]) * units[found[2]]


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
