"""Laws of jitter: how much longer than usual a step takes, and how late ranks start. Pure, numpy.

A law of steps has the mean 1 and a relative standard deviation: `lognormal:0.1`. A law of starts has a time as its
scale: `exponential:50us`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import statistics
from typing import Any, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import quantities

Array = Any  # numpy has no types that hold for both releases
Generator = Any

NONE, NORMAL, LOGNORMAL, EXPONENTIAL, PARETO, EMPIRICAL = (
    "none",
    "normal",
    "lognormal",
    "exponential",
    "pareto",
    "empirical",
)
LAWS = (NONE, NORMAL, LOGNORMAL, EXPONENTIAL, PARETO)
_PARETO_SHAPE = 3.0
_STANDARD_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True)
class Law:
    """A random factor with mean 1; `sigma` is its standard deviation. An empirical law draws from `values`."""

    name: str = NONE
    sigma: float = 0.0
    shape: float = _PARETO_SHAPE
    values: Tuple[float, ...] = ()
    ceiling: float = math.inf  # larger factors are cut to this

    def __str__(self) -> str:
        if self.name in (NONE, EMPIRICAL):
            return self.name
        return f"{self.name}:{self.sigma:g}" + (f":{self.shape:g}" if self.name == PARETO else "")

    @property
    def is_none(self) -> bool:
        """Whether there is no noise at all."""
        return self.name == NONE or (self.sigma == 0 and self.name != EMPIRICAL)

    def sample(self, rng: Generator, size: Any) -> Array:
        """Returns random factors."""
        factors = self._sample(rng, size)
        return factors if self.ceiling == math.inf else np.minimum(factors, self.ceiling)

    def _sample(self, rng: Generator, size: Any) -> Array:
        if self.is_none:
            return np.ones(size)
        if self.name == NORMAL:
            return np.maximum(rng.normal(1.0, self.sigma, size), 0.0)
        if self.name == LOGNORMAL:
            mean, deviation = self._log_parameters()
            return np.exp(mean + deviation * rng.standard_normal(size))
        if self.name == EXPONENTIAL:
            return (1 - self.sigma) + self.sigma * rng.standard_exponential(size)
        if self.name == PARETO:
            return self._from_pareto(np.exp(rng.standard_exponential(size) / self.shape))
        return rng.choice(np.asarray(self.values), size)

    @property
    def is_heavy_tailed(self) -> bool:
        """Whether single draws can matter beside the sum of many."""
        return self.name == PARETO or (self.name == LOGNORMAL and self.sigma > 2)

    def upper_quantile(self, tail: Array) -> Array:
        """Returns the factors that are exceeded with the given probabilities, exact for very small ones too."""
        tail = np.asarray(tail, dtype=float)
        if self.is_none:
            return np.ones_like(tail)
        if self.name == NORMAL:
            return np.maximum(1 + self.sigma * _normal_upper(tail), 0.0)
        if self.name == LOGNORMAL:
            mean, deviation = self._log_parameters()
            return np.exp(mean + deviation * _normal_upper(tail))
        if self.name == EXPONENTIAL:
            return (1 - self.sigma) - self.sigma * np.log(tail)
        if self.name == PARETO:
            return self._from_pareto(tail ** (-1 / self.shape))
        return np.quantile(np.asarray(self.values), np.clip(1 - tail, 0, 1))

    def slowest(self, rng: Generator, count: int, trials: int) -> Array:
        """Returns the largest of `count` factors in each trial: one draw per trial instead of `count`."""
        return self.upper_quantile(upper_tail_of_largest(rng, count, trials))

    def _log_parameters(self) -> Tuple[float, float]:
        variance = math.log1p(self.sigma**2)
        return -variance / 2, math.sqrt(variance)

    def _from_pareto(self, draws: Array) -> Array:
        mean, deviation = _pareto_moments(self.shape)
        return 1 + self.sigma * (draws - mean) / deviation


@dataclasses.dataclass(frozen=True)
class StartLaw:
    """How late ranks start: exponential with a mean, normal (its absolute value), lognormal with a median, Pareto."""

    name: str = NONE
    scale_s: float = 0.0

    def __str__(self) -> str:
        return NONE if self.is_none else f"{self.name}:{self.scale_s:g}s"

    @property
    def is_none(self) -> bool:
        """Whether all ranks start at once."""
        return self.name == NONE or self.scale_s == 0

    def sample(self, rng: Generator, size: Any) -> Array:
        """Returns the lateness of ranks in seconds."""
        return self.upper_quantile(1 - rng.random(size)) if not self.is_none else np.zeros(size)

    def latest(self, rng: Generator, count: int, trials: int) -> Array:
        """Returns the lateness of the last of `count` ranks in each trial."""
        return self.upper_quantile(upper_tail_of_largest(rng, count, trials))

    def upper_quantile(self, tail: Array) -> Array:
        """Returns the seconds that are exceeded with the given probabilities."""
        tail = np.asarray(tail, dtype=float)
        if self.is_none:
            return np.zeros_like(tail)
        if self.name == EXPONENTIAL:
            return -self.scale_s * np.log(tail)
        if self.name == NORMAL:
            return self.scale_s * _normal_upper(tail / 2)
        if self.name == LOGNORMAL:
            return self.scale_s * np.exp(_normal_upper(tail))
        return self.scale_s * (tail ** (-1 / _PARETO_SHAPE) - 1)


def empirical(factors: Array) -> Law:
    """Returns the law of measured times, as factors of their mean."""
    values: Array = np.asarray(factors, dtype=float)
    if values.size < 2 or not np.isfinite(values).all() or not (values > 0).all():
        raise cli.UsageError("An empirical law needs at least 2 measured times above 0.")
    values = values / values.mean()
    return Law(EMPIRICAL, float(values.std()), values=tuple(float(each) for each in values))


def parse_law(text: str) -> Law:
    """Returns the law of a text like none, lognormal:0.1 or pareto:0.1:2.5."""
    name, _, rest = text.strip().partition(":")
    _check_name(name)
    if name == NONE:
        return Law()
    words = rest.split(":") if rest else []
    if not words or len(words) > (2 if name == PARETO else 1):
        raise ValueError(f"{text!r} is not a law with a relative standard deviation, for example {name}:0.1.")
    numbers = [_number(word, text) for word in words]
    highest = 1.0 if name == EXPONENTIAL else 10.0
    if not 0 <= numbers[0] <= highest:
        raise ValueError(f"{text!r} has a standard deviation that is not from 0 to {highest:g} times the mean.")
    shape = numbers[1] if len(numbers) > 1 else _PARETO_SHAPE
    if name == PARETO:
        if not shape > 2:
            raise ValueError(f"{text!r} has no variance: the second number must be more than 2.")
        mean, deviation = _pareto_moments(shape)
        if numbers[0] * (mean - 1) / deviation > 1:
            raise ValueError(f"{text!r} would make steps of negative length. Use at most {deviation / (mean - 1):.2g}.")
    return Law(name, numbers[0], shape)


def parse_start_law(text: str) -> StartLaw:
    """Returns the law of a text like none or exponential:50us."""
    name, _, rest = text.strip().partition(":")
    _check_name(name)
    if name == NONE:
        return StartLaw()
    if not rest:
        raise ValueError(f"{text!r} needs a time, for example {name}:50us.")
    return StartLaw(name, quantities.parse_seconds(rest))


def upper_tail_of_largest(rng: Generator, count: int, trials: int) -> Array:
    """Returns 1 - U^(1/count): where in the upper tail the largest of `count` draws lies."""
    return np.maximum(-np.expm1(np.log(even_uniform(rng, trials)) / count), 1e-300)


def even_uniform(rng: Generator, trials: int) -> Array:
    """Returns uniform draws above 0, one in each of `trials` equal parts, in random order: quantiles come out even."""
    return (rng.permutation(trials) + 1 - rng.random(trials)) / trials


def _normal_upper(tail: Array) -> Array:
    inverse = _STANDARD_NORMAL.inv_cdf
    flat = np.clip(np.ravel(tail), 1e-300, 1 - 1e-16)
    return -np.array([inverse(each) for each in flat.tolist()]).reshape(np.shape(tail))


def _pareto_moments(shape: float) -> Tuple[float, float]:
    mean = shape / (shape - 1)
    return mean, math.sqrt(shape / (shape - 2) - mean**2)


def _check_name(name: str) -> None:
    if name not in LAWS:
        near = difflib.get_close_matches(name, LAWS, n=1)
        advice = f"the nearest is {near[0]}" if near else f"use {cli.alternatives(LAWS)}"
        raise ValueError(f"{name!r} is not a law of jitter; {advice}.")


def _number(word: str, text: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"{text!r} has {word!r} where a number is expected.")
    return value
