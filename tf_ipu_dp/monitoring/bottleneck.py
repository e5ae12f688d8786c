"""What held a run back, in one sentence with its numbers and the flag to change. Pure: times in, a verdict out."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

INPUT, EXECUTIONS, COLLECTIVE, LATE = "input", "executions", "collective", "late instance"
KEEPING, COMPILING, WELL_FED, TOO_SHORT = "keeping", "compiling", "well fed", "too short"

# A run is held back by what takes more than this share of its training time.
HELD_BACK = 0.1
# Compiling is part of every run; it is the verdict where it is most of one.
_MOST_OF_A_RUN = 0.5
# Input that comes within this time of an execution's call is there; what takes that time is the call itself.
_CALL_S = 0.001
# An instance is the late one if it was last in more than this share of the stretches that were looked at.
_OFTEN = 0.5


@dataclasses.dataclass(frozen=True)
class InstanceTimes:
    """Where one instance's seconds of a stretch of training went. None: not reported."""

    instance: int
    seconds: float
    executing_s: float  # in executions, waiting for input and collectives included
    input_wait_s: Optional[float] = None
    collective_s: Optional[float] = None  # in collectives, waiting for the others included


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the judgement needs besides the times."""

    device_iterations: int
    executions: int = 0  # in the times
    larger: Tuple[int, ...] = ()  # device iterations that fit too
    prefetch: bool = True
    eight_bit_io: bool = False
    compile_s: float = 0.0
    total_s: float = 0.0  # of the whole run; 0: not known
    bookkeeping_s: float = 0.0  # logging and checkpoints, within the times


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What held the run back most."""

    kind: str
    sentence: str
    share_pct: Optional[float] = None  # of the training; of compiling: of the run
    instance: Optional[int] = None  # the one that it is about
    often_pct: Optional[float] = None  # share of the stretches in which that one was last
    flag: Optional[str] = None  # what to change, without its dashes

    def to_value(self) -> Dict[str, Any]:
        """Returns it for a program."""
        return {"schema": 1, **dataclasses.asdict(self)}


@dataclasses.dataclass(frozen=True)
class _Sums:
    """One instance over all stretches, as shares of its own time."""

    instance: int
    seconds: float
    executing: float
    waiting: Optional[float]
    collective: Optional[float]


def judge(stretches: Sequence[Sequence[InstanceTimes]], facts: Facts) -> Verdict:
    """Returns what cost the run most, if it cost enough; each stretch has the times of all instances."""
    sums = _summed(stretches)
    if not sums:
        if facts.compile_s > _MOST_OF_A_RUN * facts.total_s > 0:
            return _compiling(facts)
        return Verdict(TOO_SHORT, "Too short to say what held it back. Train longer with --epochs.", flag="epochs")
    seconds = max(each.seconds for each in sums)
    waiting, collective = _input(sums, facts), _collective(sums, stretches)
    if waiting is not None and collective is not None and collective.kind == LATE:
        # What the others wait for is then that instance's input, and not the collective.
        collective = None if waiting.instance == collective.instance else collective
    causes = [waiting, collective, _keeping(seconds, facts), _executions(sums, seconds, facts)]
    costs = [((each.share_pct or 0.0) * seconds / 100, each) for each in causes if each is not None]
    if facts.compile_s > _MOST_OF_A_RUN * facts.total_s > 0:
        costs.append((facts.compile_s, _compiling(facts)))
    return max(costs, key=lambda each: each[0])[1] if costs else _well_fed(sums)


def parse_stretch(value: Any) -> Optional[List[InstanceTimes]]:
    """Returns the times of a metrics record's `instances`; None where it has none that make sense."""
    if not isinstance(value, list) or not value:
        return None
    found = []
    for each in value:
        if not isinstance(each, dict) or type(each.get("instance")) is not int:
            return None
        seconds, executing, waiting, collective = (
            _number(each.get(name)) for name in ("seconds", "executing_s", "input_wait_s", "collective_s")
        )
        if seconds is None or executing is None:
            return None
        found.append(InstanceTimes(each["instance"], seconds, executing, waiting, collective))
    return found


def _input(sums: Sequence[_Sums], facts: Facts) -> Optional[Verdict]:
    known = [(each.waiting, each) for each in sums if each.waiting is not None and not _is_call(each, facts)]
    share, worst = max(known, key=lambda each: each[0], default=(0.0, sums[0]))
    if share <= HELD_BACK:
        return None
    least = min((each.waiting or 0.0 for each in sums if each is not worst), default=share)
    who = ""
    if len(sums) > 1:
        others = "" if least < share / 2 else f" (of no other less than {_percent(least)})"
        who = f" of instance {worst.instance}{others}"
    advice, flag = (
        ("Add --prefetch.", "prefetch")
        if not facts.prefetch
        else ("Add --eight_bit_io, so that the host has less to prepare and to send.", "eight_bit_io")
        if not facts.eight_bit_io
        else ("Use more --instances, so that more host processes load.", "instances")
    )
    sentence = f"Held back by its input: {_percent(share)} of the training{who} was waiting for samples. {advice}"
    return Verdict(INPUT, sentence, 100 * share, worst.instance if who else None, flag=flag)


def _collective(sums: Sequence[_Sums], stretches: Sequence[Sequence[InstanceTimes]]) -> Optional[Verdict]:
    known = [(each.collective, each) for each in sums if each.collective is not None]
    if len(sums) < 2 or len(known) < len(sums):
        return None
    least, last = min(known, key=lambda each: each[0])
    others = [collective for collective, each in known if each is not last]
    waiting = sum(others) / len(others) - least
    if waiting > max(HELD_BACK, least):
        late, often = _most_often_last(stretches)
        if often > _OFTEN:
            sentence = (
                f"Held back by instance {late}: it was the last in {_percent(often)} of the collectives that were "
                f"looked at, and {_percent(waiting)} of the others' training was waiting for it. Look at its host, or "
                "start without it (fewer --instances)."
            )
            return Verdict(LATE, sentence, 100 * waiting, late, 100 * often, "instances")
    most = max(collective for collective, _ in known)
    if most <= HELD_BACK:
        return None
    turns = " The instances wait for each other in turn." if least <= most / 2 else ""
    sentence = (
        f"Held back by its collectives: up to {_percent(most)} of the training was in them.{turns} "
        "Raise --gradient_accumulation, so that gradients meet less often, or use fewer --instances."
    )
    return Verdict(COLLECTIVE, sentence, 100 * most, flag="gradient_accumulation")


def _keeping(seconds: float, facts: Facts) -> Optional[Verdict]:
    share = facts.bookkeeping_s / seconds
    if share <= HELD_BACK:
        return None
    sentence = (
        f"Held back by logging and checkpoints: {_percent(share)} of the training. "
        "Raise --log_every and --checkpoint_every."
    )
    return Verdict(KEEPING, sentence, 100 * share, flag="checkpoint_every")


def _executions(sums: Sequence[_Sums], seconds: float, facts: Facts) -> Optional[Verdict]:
    # What the others spend between executions may be waiting for the instance that spends least there.
    calls = [(each.waiting or 0.0) if _is_call(each, facts) else 0.0 for each in sums]
    between = min(1 - each.executing + call for each, call in zip(sums, calls)) - facts.bookkeeping_s / seconds
    if between <= HELD_BACK:
        return None
    # Ten times fewer calls, or as near as the epoch's divisors come.
    best = min(facts.larger, key=lambda number: abs(number - 10 * facts.device_iterations), default=None)
    advice = f"Use --device_iterations={best}." if best else "Use a larger --micro_batch_size."
    busy = max(each.executing * each.seconds for each in sums)
    length = f" of {1000 * busy / facts.executions:,.0f} ms" if facts.executions else ""
    sentence = (
        f"Held back by too small executions{length}: {_percent(between)} of the training was between them"
        f"{' or at their beginning' if any(calls) else ''}. {advice}"
    )
    return Verdict(EXECUTIONS, sentence, 100 * between, flag="device_iterations" if best else "micro_batch_size")


def _is_call(each: _Sums, facts: Facts) -> bool:
    """Whether an instance's waiting is what each call costs anyhow, and not slow input."""
    return bool(facts.executions and each.waiting) and (each.waiting or 0.0) * each.seconds < _CALL_S * facts.executions


def _compiling(facts: Facts) -> Verdict:
    share = facts.compile_s / facts.total_s
    sentence = (
        f"Held back by compiling: {facts.compile_s:,.1f} of {facts.total_s:,.1f} s, {_percent(share)} of the run. "
        "Train longer, or keep what was compiled with --executable_cache."
    )
    return Verdict(COMPILING, sentence, 100 * share, flag="executable_cache")


def _well_fed(sums: Sequence[_Sums]) -> Verdict:
    if any(each.waiting is None for each in sums):
        sentence = "Held back by nothing that was measured; how long the input took is not reported by the device."
        return Verdict(WELL_FED, sentence)
    work = min(each.executing - (each.waiting or 0.0) for each in sums)
    sentence = f"Held back by nothing: the device was at work {_percent(max(work, 0.0))} of the training."
    return Verdict(WELL_FED, sentence, 100 * max(work, 0.0))


def _summed(stretches: Sequence[Sequence[InstanceTimes]]) -> List[_Sums]:
    """Returns the instances that have trained, each over all stretches."""
    rows: Dict[int, List[InstanceTimes]] = {}
    for stretch in stretches:
        for each in stretch:
            rows.setdefault(each.instance, []).append(each)
    found = []
    for instance, times in sorted(rows.items()):
        seconds = sum(each.seconds for each in times)
        if seconds > 0:
            parts = [
                [getattr(each, name) for each in times if getattr(each, name) is not None]
                for name in ("executing_s", "input_wait_s", "collective_s")
            ]
            executing, waiting, collective = (sum(part) / seconds if part else None for part in parts)
            found.append(_Sums(instance, seconds, min(executing or 0.0, 1.0), waiting, collective))
    return found


def _most_often_last(stretches: Sequence[Sequence[InstanceTimes]]) -> Tuple[int, float]:
    """Returns the instance that the others waited for in most stretches, and in which share of them.

    The last one spends the least time in the collective: when it comes the others are there.
    """
    counts: Dict[int, int] = {}
    looked_at = 0
    for stretch in stretches:
        known = [(each.collective_s / each.seconds, each) for each in stretch if each.collective_s is not None
                 and each.seconds > 0]  # fmt: skip
        if len(known) > 1:
            looked_at += 1
            least, last = min(known, key=lambda each: each[0])
            others = [share for share, each in known if each is not last]
            if sum(others) / len(others) - least > HELD_BACK / 2:
                counts[last.instance] = counts.get(last.instance, 0) + 1
    late = max(counts, key=lambda instance: counts[instance], default=0)
    return late, counts.get(late, 0) / looked_at if looked_at else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _number(value: Any) -> Optional[float]:
    return float(value) if type(value) in (int, float) and value >= 0 else None
