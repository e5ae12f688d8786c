"""What the values of flags may be: one absl parser for each kind of value, with its bounds. Pure.

A parser's `placeholder` stands for the value in `--help`; `syntactic_help` completes "It takes ..." in a refusal.
"""

from __future__ import annotations

import math
import re
from typing import Any, Optional, Sequence, Tuple

from absl import flags

from tf_ipu_dp import cli, user_code
from tf_ipu_dp.config.values import TIME_UNITS, TRACKERS, Duration, Hosts, LossScaling, TimeSpan

# Bounds that no job reaches, so that a typing error is refused before anything is calculated with it.
LARGEST_NUMBER = 2**31 - 1
_LONGEST_NAME = 253  # of a host in the domain name system; and no file has a longer one
LARGEST_JOB = 2**20  # IPUs, and with them stages, instances and hosts

Parser = Any  # flags.ArgumentParser is generic in newer releases of absl only


class Serializer(flags.ArgumentSerializer):  # type: ignore[misc, type-arg, unused-ignore]
    """Writes values as a user would type them."""

    def serialize(self, value: object) -> str:
        """Returns the text of a value."""
        return cli.typed(value)


def whole(lowest: int, highest: int = LARGEST_NUMBER) -> Parser:
    """Returns the parser of whole numbers within bounds."""
    return flags.IntegerParser(lower_bound=lowest, upper_bound=highest)


def real(highest: float = 1e6) -> Parser:
    """Returns the parser of numbers from 0 to a bound."""
    return _RealParser(lower_bound=0.0, upper_bound=highest)


def choice(values: Sequence[str]) -> Parser:
    """Returns the parser of one of several words."""
    return flags.EnumParser(list(values))


def switch() -> Parser:
    """Returns the parser of a flag that is on or off."""
    return flags.BooleanParser()


class _BaseParser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    kind = ""  # what absl calls the type of the value

    def flag_type(self) -> str:
        return self.kind


class _RealParser(flags.FloatParser):  # type: ignore[misc, unused-ignore]
    placeholder = "X"

    def convert(self, argument: Any) -> float:
        value = super().convert(argument)
        if not math.isfinite(value):  # NaN passes absl's bounds
            raise ValueError("it is not a finite number")
        return float(value)


class PathParser(_BaseParser):
    """Paths, unchanged."""

    kind = "path"
    syntactic_help = "a path"
    placeholder = "PATH"

    def parse(self, argument: Any) -> str:
        """Returns the path."""
        return cli.check_path(str(argument))


def define_path(name: str, default: Optional[str], text: str, flag_values: flags.FlagValues) -> None:
    """Defines a flag that takes a path, for commands other than train."""
    define: Any = flags.DEFINE
    define(PathParser(), name, default, text, flag_values, Serializer())


class ModelParser(flags.EnumParser):  # type: ignore[misc, unused-ignore]
    """Names of built-in models, or a reference to a function that makes one: FILE.py:function."""

    placeholder = "NAME|FILE.py:function"

    def parse(self, argument: Any) -> str:
        """Returns the name or the reference."""
        text = str(argument).strip()
        if user_code.is_reference(text):
            return _check_reference(text)
        if text in self.enum_values:
            return text
        if text.endswith(".py") or ":" in text:
            raise ValueError("it does not name a function of a file or module, like FILE.py:function")
        raise ValueError("it is none of the models")


class ReferenceParser(_BaseParser):
    """References to functions of users: FILE.py:function or package.module:function."""

    kind = "function"
    syntactic_help = "a function of a file or module, like FILE.py:function or package.module:function"
    placeholder = "FILE.py:function"

    def parse(self, argument: Any) -> str:
        """Returns the reference."""
        text = str(argument).strip()
        if not user_code.is_reference(text):
            raise ValueError("it does not name a function of a file or module, like FILE.py:function")
        return text


class DatasetNameParser(_BaseParser):
    """Names of data sets, as tensorflow-datasets writes them: `set`, `set/config`, `set:1.2.3`; functions; paths."""

    kind = "name"
    syntactic_help = (
        "a name like cifar10, with a configuration like name/config where it has several, a function like "
        "FILE.py:function, or a path"
    )
    placeholder = "NAME|FILE.py:function|PATH"

    def parse(self, argument: Any) -> str:
        """Returns the name, the reference or the path."""
        name = str(argument).strip()
        if user_code.is_reference(name):
            return _check_reference(name)
        if is_path(name):
            return cli.check_path(name)
        if not re.fullmatch(r"\w+(/[\w.+-]+)*(:[\w.]+)?", name, re.ASCII):
            raise ValueError("it is not a data set's name")
        if len(name) > _LONGEST_NAME:
            raise ValueError(f"it has more than {_LONGEST_NAME} characters")
        return name


def _check_reference(text: str) -> str:
    """Returns a reference, unchanged; ValueError if it is to a file that no file can have the name of."""
    place = text.rpartition(":")[0]
    if place.endswith(".py"):
        cli.check_path(place)
    return text


def is_path(text: str) -> bool:
    """Whether a data set is certainly given by its path; a relative folder may also look like a name."""
    if user_code.is_reference(text):
        return False
    return text.startswith(("/", "./", "../", "~")) or text.endswith("/") or text.lower().endswith((".npz", ".csv"))


class PatternsParser(_BaseParser):
    """Names of layers, in which * stands for any letters, separated by commas."""

    kind = "patterns"
    syntactic_help = "names of layers like conv1_conv,conv2_*"
    placeholder = "a,b*"

    def parse(self, argument: Any) -> Tuple[str, ...]:
        """Returns the patterns."""
        if isinstance(argument, tuple):
            return argument
        patterns = tuple(name.strip() for name in str(argument).split(","))
        if not all(patterns):
            raise ValueError("one of the names is empty")
        return patterns


class BestMetricParser(_BaseParser):
    """A metric by which the best weights are known; the loss, if the flag is given without one."""

    kind = "metric"
    syntactic_help = "the name of a metric like accuracy"
    placeholder = "METRIC"

    def parse(self, argument: Any) -> str:
        """Returns the name of the metric."""
        text = str(argument).strip()
        if text in ("true", "True"):
            return "loss"
        if not re.fullmatch(r"[^\W\d][\w/.-]*", text):
            raise ValueError("it is not the name of a metric")
        return text


class NamesParser(_BaseParser):
    """Names of blocks, separated by commas."""

    kind = "names"
    syntactic_help = "names like conv3_block1,conv4_block1"
    placeholder = "a,b"

    def parse(self, argument: Any) -> Tuple[str, ...]:
        """Returns the names."""
        if isinstance(argument, tuple):
            return argument
        names = tuple(name.strip() for name in str(argument).split(","))
        if not all(re.fullmatch(r"\w+", name, re.ASCII) for name in names):
            raise ValueError("one of the names is empty or has an impossible character")
        return names


class TrackersParser(_BaseParser):
    """Names of experiment trackers, separated by commas."""

    kind = "names"
    syntactic_help = f"{cli.alternatives(TRACKERS)}, or several, separated by commas"
    placeholder = "a,b"

    def parse(self, argument: Any) -> Tuple[str, ...]:
        """Returns the names, each once."""
        if isinstance(argument, tuple):
            return argument
        names = tuple(dict.fromkeys(name.strip() for name in str(argument).split(",")))
        if not all(name in TRACKERS for name in names):
            raise ValueError("it is not a tracker that is known")
        return names


class AscendingNumbersParser(_BaseParser):
    """Ascending numbers above 0, separated by commas."""

    kind = "numbers"
    syntactic_help = "ascending numbers like 30,60,80"
    placeholder = "a,b"

    def parse(self, argument: Any) -> Tuple[float, ...]:
        """Returns the numbers."""
        if isinstance(argument, tuple):
            return argument
        words = [word.strip() for word in str(argument).split(",")]
        if not all(re.fullmatch(r"\d{1,9}(\.\d{1,9})?", word, re.ASCII) for word in words):
            raise ValueError("part of it is not a number")
        numbers = tuple(float(word) for word in words)
        if list(numbers) != sorted(set(numbers)) or not numbers[0]:
            raise ValueError("the numbers do not ascend from above 0")
        return numbers


class LossScalingParser(_BaseParser):
    """Loss scaling: none, dynamic or a factor."""

    kind = "loss scaling"
    syntactic_help = "none, dynamic, or a number from 1 to 2^31"
    placeholder = "none|dynamic|N"

    def parse(self, argument: Any) -> LossScaling:
        """Returns the loss scaling."""
        if isinstance(argument, LossScaling):
            return argument
        text = str(argument).strip()
        if text in ("none", "dynamic"):
            return LossScaling(1.0 if text == "none" else None)
        if not re.fullmatch(r"\d{1,10}(\.\d{1,9})?", text, re.ASCII) or not 1 <= float(text) <= 2**31:
            raise ValueError("it is not a loss scaling")
        return LossScaling(float(text))


class DurationParser(_BaseParser):
    """Durations of a training: in epochs or in weight updates."""

    kind = "duration"
    syntactic_help = "a number of epochs like 5, or of weight updates like 200steps"
    placeholder = "N|Nsteps"

    def parse(self, argument: Any) -> Duration:
        """Returns the duration."""
        if isinstance(argument, Duration):
            return argument
        match = re.fullmatch(r"\s*(\d+)\s*(epochs?|steps?)?\s*", str(argument), re.ASCII)
        if not match:
            raise ValueError("it is not a duration")
        count = _read_digits(match[1], LARGEST_NUMBER)
        if count < 1:
            raise ValueError("nothing would be trained")
        return Duration(count, "steps" if (match[2] or "").startswith("step") else "epochs")


class TimeParser(_BaseParser):
    """Times in seconds, minutes, hours or days."""

    kind = "time"
    syntactic_help = "a time like 90s, 30m, 2h or 3d"
    placeholder = "N[s|m|h|d]"

    def parse(self, argument: Any) -> TimeSpan:
        """Returns the time."""
        if isinstance(argument, TimeSpan):
            return argument
        match = re.fullmatch(r"\s*(\d+)\s*([smhd]?)\s*", str(argument), re.ASCII)
        if not match:
            raise ValueError("it is not a time")
        return TimeSpan(_read_digits(match[1], LARGEST_NUMBER) * TIME_UNITS[match[2] or "s"])


class HostsParser(_BaseParser):
    """The machines of a job: a number, or names separated by commas."""

    kind = "hosts"
    syntactic_help = "a number of hosts like 2, or different names like node1,node2"
    placeholder = "N|a,b"

    def parse(self, argument: Any) -> Hosts:
        """Returns the hosts."""
        if isinstance(argument, Hosts):
            return argument
        text = str(argument).strip()
        if re.fullmatch(r"\d+", text, re.ASCII):
            count = _read_digits(text, LARGEST_JOB)
            if count < 1:
                raise ValueError("a job has at least 1 host")
            return Hosts(count)
        names = tuple(name.strip() for name in text.split(","))
        if not all(re.fullmatch(r"[a-z0-9][\w.:@%-]*", name, re.ASCII | re.IGNORECASE) for name in names):
            raise ValueError("one of the host names is empty or has an impossible character")
        if any(re.fullmatch(r"\d+\.?\d*|0x[\da-f]*", name, re.ASCII | re.IGNORECASE) for name in names):
            raise ValueError("it is neither a whole number nor names")
        if any(len(name) > _LONGEST_NAME for name in names):
            raise ValueError(f"a host's name has more than {_LONGEST_NAME} characters")
        if len(set(names)) < len(names):
            raise ValueError("a host is named twice")
        return Hosts(len(names), names)


def _read_digits(digits: str, highest: int) -> int:
    """Returns a number within a bound; int() itself would fail on thousands of digits."""
    if len(digits) > 10 or int(digits) > highest:
        raise ValueError(f"it is more than {highest}")
    return int(digits)
