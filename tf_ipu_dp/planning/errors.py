"""Errors of a plan: what is wrong with the flags, and the nearest values that work. Pure.

`rules` finds broken rules and suggests fixes, and `plan` tries them; this module renders them and finds nearby numbers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.train_flags import TrainConfig

_MAX_VALUES = 12


@dataclasses.dataclass(frozen=True)
class Fix:
    """One way to solve a problem: values for flags; None removes the flag."""

    changes: Tuple[Tuple[str, Any], ...]

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Returns the config with the changes applied."""
        return dataclasses.replace(config, **dict(self.changes))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One rule that the flags break: its name for programs, a sentence and fixes for the user."""

    rule: str
    sentence: str
    fixes: Tuple[Fix, ...] = ()

    def __str__(self) -> str:
        return f"{self.sentence} {_render_fixes(self.fixes)}".strip()


class PlanError(cli.UsageError):
    """The flags describe a job that cannot be planned."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(*map(str, problems))
        self.problems = tuple(problems)


def distinct_fixes(fixes: Iterable[Fix], config: TrainConfig) -> List[Fix]:
    """Returns the fixes that change the config, each once, without values that the config already has."""
    effective = (
        Fix(tuple(change for change in fix.changes if getattr(config, change[0]) != change[1])) for fix in fixes
    )
    return [fix for fix in dict.fromkeys(effective) if fix.changes]


def fixes_for(name: str, values: Iterable[Any]) -> List[Fix]:
    """Returns one fix for each value that a flag could be given."""
    return [Fix(((name, value),)) for value in values]


def is_power_of_two(number: int) -> bool:
    """Whether a number is a power of two, as numbers of IPUs and of what divides them must be."""
    return number > 0 and number & (number - 1) == 0


def powers_of_two_around(number: int) -> List[int]:
    """Returns the largest power of two up to a number, and the next one."""
    below = 1 << (number.bit_length() - 1)
    return [below, 2 * below]


def powers_of_two(least: int, most: int) -> List[int]:
    """Returns the powers of two within two bounds, in ascending order."""
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent >= least]


def nearest(numbers: Iterable[int], near: int, most: int = 3) -> List[int]:
    """Returns the few numbers that are nearest to a given one, in ascending order."""
    return sorted(sorted(numbers, key=lambda number: abs(number - near))[:most])


def multiples_around(number: int, unit: int) -> List[int]:
    """Returns the multiples of a unit just below and above a number."""
    below = number // unit * unit
    return [n for n in (below, below + unit) if n > 0 and n != number]


def divisors_around(number: int, near: int, most: int = _MAX_VALUES) -> List[int]:
    """Returns the divisors of a number that are nearest to a given one, in ascending order."""
    # Trial division stops at a bound: beyond it only small divisors and their cofactors are found, which is enough.
    small = [n for n in range(1, min(math.isqrt(number), 100_000) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)} - {near}
    return nearest(divisors, near, most)


def _render_fixes(fixes: Sequence[Fix]) -> str:
    """Returns `Use --a=1 or 2, or --b=3, or leave --c out.`"""
    values: Dict[str, List[object]] = {}  # of fixes that change one flag only
    combined: List[str] = []
    for fix in fixes:
        if len(fix.changes) == 1:
            name, value = fix.changes[0]
            values.setdefault(name, []).append(value)
        else:
            combined.append(_render_changes(fix.changes))
    singles: List[str] = []
    for name, options in values.items():
        values_to_set = [value for value in options if value is not None]
        if values_to_set:
            singles.append(f"--{name}={cli.alternatives(values_to_set)}")
        if None in options:
            singles.append(f"leave --{name} out")
    parts = singles + combined
    if not parts:
        return ""
    text = ", or ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text.startswith("leave") else f"Use {text}."


def _render_changes(changes: Sequence[Tuple[str, Any]]) -> str:
    to_set = " ".join(cli.flag_text(name, value) for name, value in changes if value is not None)
    removed = [f"--{name}" for name, value in changes if value is None]
    return f"{to_set} without {cli.alternatives(removed)}" if removed else to_set
