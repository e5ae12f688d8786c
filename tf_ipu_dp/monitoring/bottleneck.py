"""The bottleneck of a run, in one sentence with its numbers and the flag to change. Pure.

To add a verdict: a kind, a function that returns it or None, and its place in `find_bottleneck`.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple

from tf_ipu_dp.runs.records import InstanceTimes, Verdict

INPUT, EXECUTIONS, COLLECTIVES, LATE_INSTANCE = "input", "small executions", "collectives", "late instance"
BOOKKEEPING, COMPILING, NONE, TOO_SHORT = "logging and checkpoints", "compiling", "none", "too short"
NOTHING_TRAINED = Verdict("nothing trained", "Nothing was left to train.")

# A bottleneck takes more than this share of training.
THRESHOLD = 0.1
# Compiling is part of every run; it is the bottleneck only above this share of the run.
_COMPILING_THRESHOLD = 0.5
# A shorter wait at the start of an execution is not slow input: the call itself takes this long.
_CALL_S = 0.001


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts of a run besides the times of its instances; `diagnosis` builds it."""

    device_iterations: int
    executions: int = 0  # in the times
    larger_executions: Tuple[int, ...] = ()  # larger device iterations that also fit the run
    prefetch: bool = True
    eight_bit_io: bool = False
    compile_s: float = 0.0
    total_s: float = 0.0  # of the whole run; 0: not known
    bookkeeping_s: float = 0.0  # logging and checkpoints, of the whole training
    training_s: float = 0.0  # of the whole training; 0: not known


@dataclasses.dataclass(frozen=True)
class _InstanceShares:
    """One instance over all records, in shares of its time.

    Input waits and collectives are shares of the whole training, as in the table that ends a run. Part of it is in no
    record: the start of an epoch, and what follows its last execution.
    """

    instance: int
    seconds: float  # in the records
    training_s: float  # of the whole training, as far as it is known
    executing: float
    waiting: Optional[float]
    collective: Optional[float]

    @property
    def waited_s(self) -> float:
        return (self.waiting or 0.0) * self.training_s


def find_bottleneck(records: Sequence[Sequence[InstanceTimes]], facts: Facts) -> Verdict:
    """Returns the largest cost of a run above the threshold; each record has the times of all instances."""
    sums = _sum_by_instance(records, facts.training_s)
    mostly_compiling = facts.compile_s > _COMPILING_THRESHOLD * facts.total_s > 0
    if not sums:
        return _compiling(facts) if mostly_compiling else _too_short()
    seconds, training_s = (max(getattr(each, name) for each in sums) for name in ("seconds", "training_s"))
    waiting, collective = _input(sums, facts), _collectives(sums, records)
    if waiting and collective and collective.kind == LATE_INSTANCE and waiting.instance == collective.instance:
        collective = None  # the others wait for that instance's input, not for the network
    causes = [waiting, collective, _bookkeeping(training_s, facts), _executions(sums, seconds, facts)]
    costs = [((each.share_pct or 0.0) * training_s / 100, each) for each in causes if each is not None]
    if mostly_compiling:
        costs.append((facts.compile_s, _compiling(facts)))
    return max(costs, key=lambda each: each[0])[1] if costs else _no_bottleneck(sums)


def predict_input(input_samples_per_s: float, model_samples_per_s: float, facts: Facts) -> Verdict:
    """Returns the verdict on the input that a run would get whose input and model have these speeds alone."""
    loading_s, computing_s = 1 / input_samples_per_s, 1 / model_samples_per_s
    # Without prefetching, nothing is loaded while the device computes.
    waiting_s = max(loading_s - computing_s, 0.0) if facts.prefetch else loading_s
    share = waiting_s / (computing_s + waiting_s)
    if share > THRESHOLD:
        advice, flag = _input_advice(facts)
        sentence = f"The bottleneck is the input: {_percent(share)} of training would be waiting for samples. {advice}"
        return Verdict(INPUT, sentence, 100 * share, flag=flag)
    ratio = input_samples_per_s / model_samples_per_s
    sentence = f"The input is not the bottleneck: it is {ratio:.1f} times as fast as the model."
    return Verdict(NONE, sentence, 100 * (1 - share))


def _input_advice(facts: Facts) -> Tuple[str, str]:
    """Returns what to do about slow input, and the flag to change."""
    if not facts.prefetch:
        return "Add --prefetch.", "prefetch"
    if not facts.eight_bit_io:
        return "Add --eight_bit_io, so that the host has less to prepare and to send.", "eight_bit_io"
    return "Use more --instances, so that more host processes load.", "instances"


def _input(sums: Sequence[_InstanceShares], facts: Facts) -> Optional[Verdict]:
    known = [(each.waiting, each) for each in sums if each.waiting is not None and not _is_call_overhead(each, facts)]
    share, worst = max(known, key=lambda each: each[0], default=(0.0, sums[0]))
    if share <= THRESHOLD:
        return None
    least = min((each.waiting or 0.0 for each in sums if each is not worst), default=share)
    place = ""
    if len(sums) > 1:
        others = "" if least < share / 2 else f" (and at least {_percent(least)} of every other)"
        place = f" of instance {worst.instance}{others}"
    advice, flag = _input_advice(facts)
    sentence = f"The bottleneck is the input: {_percent(share)} of training{place} was waiting for samples. {advice}"
    return Verdict(INPUT, sentence, 100 * share, worst.instance if place else None, flag=flag)


def _collectives(sums: Sequence[_InstanceShares], records: Sequence[Sequence[InstanceTimes]]) -> Optional[Verdict]:
    known = [(each.collective, each) for each in sums if each.collective is not None]
    if len(sums) < 2 or len(known) < len(sums):
        return None
    late, often = _most_often_last(records)
    own = sum(collective for collective, each in known if each.instance == late)
    waiting = sum(collective - own for collective, each in known if each.instance != late) / (len(known) - 1)
    # Far more often than its share: more than halfway from there to always.
    if often > (1 + 1 / len(known)) / 2 and waiting > max(THRESHOLD, own):
        sentence = (
            f"The bottleneck is instance {late}: it was last in {_percent(often)} of the exchanges, and "
            f"{_percent(waiting)} of the others' training was waiting for it. Check its host, or run without it "
            "(fewer --instances)."
        )
        return Verdict(LATE_INSTANCE, sentence, 100 * waiting, late, 100 * often, "instances")
    least, most = (choose(collective for collective, _ in known) for choose in (min, max))
    if most <= THRESHOLD:
        return None
    turns = " The instances wait for each other in turn." if least <= most / 2 else ""
    shares = _percent(most) if _percent(least) == _percent(most) else f"{100 * least:.0f} to {_percent(most)}"
    sentence = (
        f"The bottleneck is the collectives: the instances spent {shares} of training in them.{turns} "
        "Raise --gradient_accumulation, so that gradients are reduced less often, or use fewer --instances."
    )
    return Verdict(COLLECTIVES, sentence, 100 * most, flag="gradient_accumulation")


def _bookkeeping(whole: float, facts: Facts) -> Optional[Verdict]:
    # Records may have little of the time that it took: then it comes on top of theirs.
    share = facts.bookkeeping_s / (whole if facts.bookkeeping_s <= whole else whole + facts.bookkeeping_s)
    if share <= THRESHOLD:
        return None
    sentence = (
        f"The bottleneck is logging and checkpoints: {_percent(share)} of training. "
        "Raise --log_every and --checkpoint_every."
    )
    return Verdict(BOOKKEEPING, sentence, 100 * share, flag="checkpoint_every")


def _executions(sums: Sequence[_InstanceShares], seconds: float, facts: Facts) -> Optional[Verdict]:
    # Time between executions may be waiting for another instance, so the smallest share counts.
    calls = [each.waited_s / each.seconds if _is_call_overhead(each, facts) else 0.0 for each in sums]
    between = min(1 - each.executing + call for each, call in zip(sums, calls)) - facts.bookkeeping_s / seconds
    between = min(between, 1.0)
    if between <= THRESHOLD:
        return None
    # Ten times fewer calls, or the nearest divisor of the epoch.
    best = min(facts.larger_executions, key=lambda number: abs(number - 10 * facts.device_iterations), default=None)
    advice = f"Use --device_iterations={best}." if best else "Use a larger --micro_batch_size."
    busy = max(each.executing * each.seconds for each in sums)
    length = f" of {1000 * busy / facts.executions:,.0f} ms" if facts.executions else ""
    sentence = (
        f"The bottleneck is small executions{length}: {_percent(between)} of training was between them"
        f"{' or at their start' if any(calls) else ''}. {advice}"
    )
    return Verdict(EXECUTIONS, sentence, 100 * between, flag="device_iterations" if best else "micro_batch_size")


def _is_call_overhead(each: _InstanceShares, facts: Facts) -> bool:
    """Whether an instance's waiting is the normal cost of calls, and not slow input."""
    return bool(facts.executions) and 0 < each.waited_s < _CALL_S * facts.executions


def _compiling(facts: Facts) -> Verdict:
    share = min(facts.compile_s / facts.total_s, 1.0)
    sentence = (
        f"The bottleneck is compiling: {facts.compile_s:,.1f} of {facts.total_s:,.1f} s, {_percent(share)} of the run. "
        "Train longer, or cache compiled programs with --executable_cache."
    )
    return Verdict(COMPILING, sentence, 100 * share, flag="executable_cache")


def _too_short() -> Verdict:
    return Verdict(TOO_SHORT, "The run is too short to name a bottleneck. Train longer with --epochs.", flag="epochs")


def _no_bottleneck(sums: Sequence[_InstanceShares]) -> Verdict:
    if any(each.waiting is None for each in sums):
        return Verdict(NONE, "No bottleneck was measured; the device does not report how long it waits for input.")
    busy = max(min(each.executing - (each.waiting or 0.0) for each in sums), 0.0)
    return Verdict(NONE, f"No bottleneck: the device was busy {_percent(busy)} of training.", 100 * busy)


def _sum_by_instance(records: Sequence[Sequence[InstanceTimes]], training_s: float) -> List[_InstanceShares]:
    """Returns the instances that have trained, each over all records."""
    rows: Dict[int, List[InstanceTimes]] = {}
    for record in records:
        for each in record:
            rows.setdefault(each.instance, []).append(each)
    found = []
    for instance, times in sorted(rows.items()):
        seconds = sum(each.seconds for each in times)
        if seconds > 0:
            whole = max(seconds, training_s)
            waiting, collective = (_share(times, name, whole) for name in ("input_wait_s", "collective_s"))
            executing = _share(times, "executing_s", seconds) or 0.0
            found.append(_InstanceShares(instance, seconds, whole, executing, waiting, collective))
    return found


def _share(times: Sequence[InstanceTimes], name: str, whole: float) -> Optional[float]:
    parts = [getattr(each, name) for each in times if getattr(each, name) is not None]
    # Clocks are read at different moments, so that a part may be a little longer than the whole.
    return min(sum(parts) / whole, 1.0) if parts else None


def _most_often_last(records: Sequence[Sequence[InstanceTimes]]) -> Tuple[int, float]:
    """Returns the instance that was last in most exchanges of gradients, and in which share of them."""
    counts: Dict[int, int] = {}
    for record in records:
        for each in record:
            counts[each.instance] = counts.get(each.instance, 0) + (each.last or 0)
    late = max(counts, key=lambda instance: counts[instance])
    return late, counts[late] / max(sum(counts.values()), 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
