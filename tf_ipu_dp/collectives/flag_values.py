"""How the values of `simulate`'s flags are written, and their parsers: they raise ValueError with a sentence. Pure."""

from __future__ import annotations

import re
from typing import Any, Callable, List, Tuple, Type

from tf_ipu_dp.collectives import noise, quantities, topology

MAX_RANKS = 1 << 24
_SHAPE = re.compile(r"([0-9]{1,8})x([0-9]{1,8})", re.ASCII)
Form = Tuple[str, str, Callable[[str], Any]]  # placeholder, how it is written, parser


def parse_counts(text: str) -> Tuple[int, ...]:
    """Returns the numbers of a list like 2,4,8 or of a range like 2..64, which doubles."""
    found: List[int] = []
    for part in text.split(","):
        first, dots, last = (word.strip() for word in part.partition(".."))
        ends = [first, last] if dots else [first]
        if not all(re.fullmatch(r"[0-9]{1,9}", word, re.ASCII) for word in ends):
            raise ValueError(f"{part.strip()!r} is not a number of replicas")
        numbers = [int(word) for word in ends]
        if not all(1 <= number <= MAX_RANKS for number in numbers) or numbers[-1] < numbers[0]:
            raise ValueError(f"{part.strip()!r} is not from 1 to {MAX_RANKS:,}, ascending")
        while dots and numbers[-2] * 2 < numbers[-1]:
            numbers.insert(-1, numbers[-2] * 2)
        found += [number for number in numbers if number not in found]
    return tuple(found)


def parse_whole(text: str) -> int:
    """Returns a whole number from 1 on."""
    if not re.fullmatch(r"[0-9]{1,8}", text.strip(), re.ASCII) or not int(text):
        raise ValueError("it is not a whole number from 1 to 99,999,999")
    return int(text)


def parse_buckets(text: str) -> Tuple[int, ...]:
    """Returns a number of buckets, or the bytes of several."""
    return tuple(map(quantities.parse_bytes, text.split(","))) if "," in text else (parse_whole(text),)


def parse_segments(text: str) -> int:
    """Returns a number of messages per step, or Gloo's."""
    return topology.GLOO_SEGMENTS if text.strip() == "gloo" else parse_whole(text)


def parse_shape(text: str) -> Tuple[int, int]:
    """Returns rows and columns."""
    found = _SHAPE.fullmatch(text.strip())
    if not found or not int(found[1]) or not int(found[2]):
        raise ValueError("it is not a shape")
    return int(found[1]), int(found[2])


def _number(text: str, kind: Type[float] = float) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError("it is not a number") from None


def _share(text: str) -> float:
    value = _number(text)
    if not 0 <= value <= 1:
        raise ValueError("it is not from 0 to 1")
    return value


def _positive(text: str) -> float:
    value = _number(text)
    if not 0 < value < 1e6:
        raise ValueError("it is not from above 0 to 1,000,000")
    return value


RATE: Form = ("RATE", "a rate like 1Gbit or 25GB/s", quantities.parse_rate)
SECONDS: Form = ("TIME", "a time like 5us, 2ms or 1s", quantities.parse_seconds)
LAW: Form = ("LAW", "none, or a law with its standard deviation: lognormal:0.1", noise.parse_law)
SHARE: Form = ("X", "a number from 0 to 1", _share)
POSITIVE: Form = ("X", "a number above 0", _positive)
NAME: Form = ("NAME", "a name", str)
PATH: Form = ("PATH", "a path", str)
COUNTS: Form = ("N", "numbers like 4, 2,4,8 or 2..64 (doubling)", parse_counts)
SIZES: Form = ("BYTES", "sizes like 971048 or 4KiB..64MiB (doubling)", quantities.parse_byte_list)
