"""What is wrong with a job's flags, and the nearest things that work. Pure.

The planner finds out which rules are broken and tries every way out; this says them, and has the numbers that are near.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Dict, Iterable, List, Sequence, Tuple

from tf_ipu_dp import cli
from tf_ipu_dp.config.schema import TrainConfig

_MOST_VALUES = 12


@dataclasses.dataclass(frozen=True)
class Fix:
    """One way out of a problem: flags to set; None stands for leaving the flag out."""

    changes: Tuple[Tuple[str, Any], ...]

    def apply(self, config: TrainConfig) -> TrainConfig:
        """Returns the config with the changes made."""
        return dataclasses.replace(config, **dict(self.changes))


@dataclasses.dataclass(frozen=True)
class Problem:
    """One rule that the flags break. `rule` is stable, `sentence` is for the user."""

    rule: str
    sentence: str
    fixes: Tuple[Fix, ...] = ()

    def __str__(self) -> str:
        return f"{self.sentence} {_render_fixes(self.fixes)}".strip()


class PlanError(cli.UsageError):
    """The flags describe a job that cannot be laid out."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__(*map(str, problems))
        self.problems = tuple(problems)


def without_repeats(fixes: Iterable[Fix], config: TrainConfig) -> List[Fix]:
    """Leaves out of each fix what is so already, and fixes that come twice."""
    real = (Fix(tuple(change for change in fix.changes if getattr(config, change[0]) != change[1])) for fix in fixes)
    return [fix for fix in dict.fromkeys(real) if fix.changes]


def sets(name: str, values: Iterable[Any]) -> List[Fix]:
    """Returns a fix for each value of a flag."""
    return [Fix(((name, value),)) for value in values]


def is_power_of_two(number: int) -> bool:
    """Whether IPUs and what divides them may be so many."""
    return number > 0 and number & (number - 1) == 0


def powers_around(number: int) -> List[int]:
    """Returns the power of two that a number reaches, and the next."""
    below = 1 << (number.bit_length() - 1)
    return [below, 2 * below]


def powers(least: int, most: int) -> List[int]:
    """Returns the powers of two from one number to another."""
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent >= least]


def nearest(numbers: Iterable[int], near: int, most: int = 3) -> List[int]:
    """The few numbers that are nearest to another, in ascending order."""
    return sorted(sorted(numbers, key=lambda number: abs(number - near))[:most])


def multiples_around(number: int, unit: int) -> List[int]:
    """Returns the multiples of a unit below and above a number that is none."""
    below = number // unit * unit
    return [n for n in (below, below + unit) if n > 0 and n != number]


def divisors_around(number: int, near: int, most: int = _MOST_VALUES) -> List[int]:
    """The divisors of a number that are nearest to another, in ascending order."""
    # Trial division up to a bound: beyond it only small divisors and their partners are found; that suggests enough.
    small = [n for n in range(1, min(math.isqrt(number), 100_000) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)} - {near}
    return nearest(divisors, near, most)


def _render_fixes(fixes: Sequence[Fix]) -> str:
    """Returns `Use --a=1 or 2, or --b=3, or leave --c out.`"""
    values: Dict[str, List[object]] = {}
    parts: List[str] = []
    for fix in fixes:
        if len(fix.changes) == 1:
            name, value = fix.changes[0]
            values.setdefault(name, []).append(value)
        else:
            parts.append(_render_changes(fix.changes))
    singles = []
    for name, options in values.items():
        said = [value for value in options if value is not None]
        if said:
            singles.append(f"--{name}={cli.alternatives(said)}")
        if None in options:
            singles.append(f"leave --{name} out")
    parts = singles + parts
    if not parts:
        return ""
    text = ", or ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text.startswith("leave") else f"Use {text}."


def _render_changes(changes: Sequence[Tuple[str, Any]]) -> str:
    given = " ".join(cli.flag_text(name, value) for name, value in changes if value is not None)
    left_out = [f"--{name}" for name, value in changes if value is None]
    return f"{given} without {cli.alternatives(left_out)}" if left_out else given
