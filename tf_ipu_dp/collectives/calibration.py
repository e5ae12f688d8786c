"""What a short measurement at 2 ranks says about a machine: times of messages, noise, Horovod's share. Kept in a file.

Predictions for more ranks start from it; it never comes from the runs that a prediction is judged by.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import calibration_file, horovod_model, noise, results, topology
from tf_ipu_dp.collectives import loss as loss_model
from tf_ipu_dp.runs import json_files, safe_files
from tf_ipu_dp.runs.records import Record, RecordError

Array = Any  # numpy has no types that hold for both releases

# One-way delays per step of Gloo's ring, if no measurement with a delay says otherwise.
GLOO_HANDSHAKE = 2.2
# As good as unlimited: without a link, all time is the software's.
NO_LINK_BYTES_PER_S = 1e18
_QUANTILES = 41
_LATE_S = 0.15
_MOST_TIMEOUTS = 0.99
_LOWEST_EFFICIENCY, _HIGHEST_EFFICIENCY = 0.5, 1.1


@dataclasses.dataclass(frozen=True)
class MessageTime(Record):
    """What software adds to one message of a ring step, beyond the link's time and the delay."""

    bytes: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Calibration(Record):
    """A machine and its engine, as measured at 2 ranks."""

    SCHEMA: ClassVar[int] = 1

    date: str
    engine: str
    messages: Tuple[MessageTime, ...]
    handshake: float = GLOO_HANDSHAKE
    wire_efficiency: float = 1.0
    link_bytes_per_s: Optional[float] = None  # of the fabric that was measured
    one_way_delay_s: float = 0.0
    jitter_factors: Tuple[float, ...] = ()  # even quantiles of trials, as factors of their median
    horovod_cycle_s: float = 1e-3
    horovod_rounds: float = horovod_model.HorovodModel.negotiation_rounds
    horovod_copy_bytes_per_s: float = 4e9
    horovod_fixed_s: float = 0.0
    flops_per_s: Optional[float] = None  # of a large matrix multiplication in 32 bits, on all cores
    # Of the machine that was measured, which all hosts share if they are emulated. None: the cores are no limit.
    shared_cores: Optional[int] = None
    timeout_per_message: Optional[float] = None  # on a link that loses packets
    timeout_per_packet: float = 0.0
    timeout_per_single_packet: float = 0.0
    loss: Optional[float] = None  # share of packets with which the timeouts were counted
    packet_bytes: Optional[int] = None
    recovery_s: Optional[float] = None
    facts: Dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def horovod(self) -> horovod_model.HorovodModel:
        """Horovod's own parameters."""
        return horovod_model.HorovodModel(
            self.horovod_cycle_s,
            self.horovod_rounds,
            copy_bytes_per_s=self.horovod_copy_bytes_per_s,
            fixed_s=self.horovod_fixed_s,
        )

    @property
    def trial_jitter(self) -> noise.Law:
        """The noise of whole trials."""
        return noise.empirical(self.jitter_factors) if len(self.jitter_factors) > 1 else noise.Law()

    def with_timeouts(self, lossy: loss_model.Loss) -> loss_model.Loss:
        """Returns a loss with the timeouts that were counted, scaled to its probability; as it is if none were.

        The end of a message and a message of one packet meet a timeout if they are lost, the others if what is sent
        again is lost too: with the square of the probability.
        """
        if self.timeout_per_message is None:
            return lossy
        factor = lossy.probability / self.loss if self.loss else 1.0
        return dataclasses.replace(
            lossy,
            timeout_per_message=min(self.timeout_per_message * factor, _MOST_TIMEOUTS),
            timeout_per_packet=min(self.timeout_per_packet * factor**2, _MOST_TIMEOUTS),
            timeout_per_single_packet=min(self.timeout_per_single_packet * factor, _MOST_TIMEOUTS),
            packet_bytes=self.packet_bytes or lossy.packet_bytes,
        )

    def topology(
        self,
        ranks: int,
        hosts: int = 1,
        *,
        link_bytes_per_s: Optional[float] = None,
        one_way_delay_s: Optional[float] = None,
        placement: str = topology.BLOCK,
        emulated: bool = True,
    ) -> topology.Topology:
        """Returns the network of a job on such machines; the link is the measured one unless another is given.

        Hosts that are emulated share the cores of one machine; others have as many cores each.
        """
        if not 1 <= hosts <= ranks:
            raise cli.UsageError(f"{cli.count(ranks, 'rank')} cannot be on {cli.count(hosts, 'host')}.")
        software = tuple((each.bytes, each.seconds) for each in self.messages)
        per_host = -(-ranks // hosts)
        engine = topology.Engine(
            handshake=self.handshake,
            wire_efficiency=self.wire_efficiency,
            ranks_per_core=(ranks if emulated else per_host) / self.shared_cores if self.shared_cores else 0.0,
        )
        rate = link_bytes_per_s or self.link_bytes_per_s or NO_LINK_BYTES_PER_S
        delay = self.one_way_delay_s if one_way_delay_s is None else one_way_delay_s
        inside = topology.Level("host", per_host, NO_LINK_BYTES_PER_S, 0.0, software=software)
        link = topology.Level("link", topology.UNLIMITED, rate, delay, shared_by=per_host, software=software)
        levels = (inside,) if hosts == 1 else (link,) if per_host == 1 else (inside, link)
        return topology.Topology("calibrated", levels, engine, placement)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A result at 2 ranks and the one-way delay of its network."""

    result: results.Result
    one_way_delay_s: float = 0.0


def fit(
    measurements: Sequence[Measurement],
    *,
    date: str,
    facts: Optional[Mapping[str, str]] = None,
    model: Optional[horovod_model.HorovodModel] = None,
    shared_cores: Optional[int] = None,
    flops_per_s: Optional[float] = None,
) -> Calibration:
    """Returns the calibration of one or more measurements of several sizes at 2 ranks; the first one counts most.

    Measurements with different delays give the handshake factor; with one delay alone it is Gloo's usual one.
    """
    model = model or horovod_model.HorovodModel()
    series = [_by_size(each.result) for each in measurements]
    first = series[0]
    handshake = _fit_handshake(measurements, series)
    delay = measurements[0].one_way_delay_s
    link = first[0].facts.link_bytes_per_s
    overheads = _horovod_overheads(first)
    times = {each.facts.bytes: _engine_median(each, model) for each in first}
    steps = [(size / 2, max(0.0, seconds / 2 - handshake * delay)) for size, seconds in times.items()]
    efficiency = _fit_efficiency(steps, link)
    per_byte = 1 / (link * efficiency) if link else 0.0
    # What passes before the link's rate applies takes the software's time alone. That is the least for larger messages,
    # whose share of the link is only known from the slope.
    burst = first[0].facts.link_burst_bytes
    beyond = [(size, seconds - (size * per_byte if size > burst else 0.0)) for size, seconds in steps]
    least = beyond[0][1] if burst else 0.0
    software = tuple(MessageTime(size, max(seconds, least)) for size, seconds in beyond)
    found = Calibration(
        date=date,
        engine=measurements[0].result.description.engine,
        messages=software,
        handshake=handshake,
        wire_efficiency=efficiency,
        link_bytes_per_s=link,
        one_way_delay_s=delay,
        jitter_factors=_jitter(first),
        horovod_cycle_s=model.cycle_s,
        horovod_rounds=_fit_rounds(measurements, series, model),
        flops_per_s=flops_per_s,
        shared_cores=shared_cores,
        facts=dict(facts or {}),
    )
    negotiation = horovod_model.negotiation_seconds(found.horovod, 2, found.topology(2, 2))
    fixed, copy_rate = _fit_horovod([(size, seconds - negotiation) for size, seconds in overheads], model)
    return dataclasses.replace(found, horovod_fixed_s=fixed, horovod_copy_bytes_per_s=copy_rate)


def late_share(seconds: Array) -> float:
    """Returns the share of trials that took 150 ms more than the median."""
    return float((seconds > np.median(seconds) + _LATE_S).mean())


def default_path(environ: Mapping[str, str]) -> Path:
    """Returns where the calibration of this machine is kept."""
    return calibration_file.path(environ)


def save(found: Calibration, path: Path) -> None:
    """Writes a calibration; its folder is made if it is missing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safe_files.write_durably(path, json.dumps(found.to_json(), indent=2) + "\n")
    except OSError as error:
        raise cli.UsageError(f"The calibration cannot be written to {path}: {error.strerror}.") from error


def load(path: Path) -> Optional[Calibration]:
    """Returns the calibration in a file; None if there is none, UsageError if it is damaged."""
    if not path.exists():
        return None
    try:
        return Calibration.from_json(json_files.read_object(path, follow_links=True))
    except RecordError as error:
        raise cli.UsageError(f"{path} is not a calibration: {error}. Calibrate again.") from error


def _by_size(result: results.Result) -> List[results.Series]:
    """Returns the series of 2 ranks in the order of their sizes; of several of one size the fastest."""
    fastest: Dict[int, results.Series] = {}
    for each in sorted(result.series, key=lambda series: -float(np.median(series.seconds))):
        if each.facts.ranks == 2:
            fastest[each.facts.bytes] = each
    found = [fastest[size] for size in sorted(fastest)]
    if len(found) < 2:
        raise cli.UsageError(
            "A calibration needs a measurement of at least 2 sizes at 2 ranks, for example 4KiB..4MiB."
        )
    return found


def _engine_median(series: results.Series, model: horovod_model.HorovodModel) -> float:
    if series.engine_s is not None and np.isfinite(series.engine_s).any():
        return float(np.nanmedian(series.engine_s))
    # Without the engine's own times, what Horovod usually adds is left out, but never most of the time.
    whole = float(np.median(series.seconds))
    usual = model.cycle_s / 2 + 2 * series.facts.bytes / model.copy_bytes_per_s
    return max(whole - usual, whole / 2) if "horovod" in series.facts.label.lower() else whole


def _fit_handshake(measurements: Sequence[Measurement], series: Sequence[Sequence[results.Series]]) -> float:
    """Returns the one-way delays per step: the slope of the smallest size's time over the delay, for 2 steps."""
    delays = [each.one_way_delay_s for each in measurements]
    if max(delays) - min(delays) < 1e-4:
        return GLOO_HANDSHAKE
    smallest = [_plain_median(each[0]) for each in series]
    slope = float(np.polyfit(delays, smallest, 1)[0])
    return max(1.0, slope / 2)


def _fit_rounds(
    measurements: Sequence[Measurement], series: Sequence[Sequence[results.Series]], model: horovod_model.HorovodModel
) -> float:
    """Returns the time of a negotiation, in small all-reduces: what a delay adds to it, over what it adds to these."""
    delays = [each.one_way_delay_s for each in measurements]
    smallest = [each[0] for each in series]
    times = [(each.seconds, each.engine_s) for each in smallest if each.engine_s is not None]
    if max(delays) - min(delays) < 1e-4 or len(times) < len(delays):
        return model.negotiation_rounds
    engine = float(np.polyfit(delays, [np.nanmedian(own) for _, own in times], 1)[0])
    outside = float(np.polyfit(delays, [np.nanmedian(whole - own) for whole, own in times], 1)[0])
    return min(max(outside / engine, 0.0), 3.0) if engine > 0 else model.negotiation_rounds


def _plain_median(series: results.Series) -> float:
    return float(np.nanmedian(series.engine_s if series.engine_s is not None else series.seconds))


def _fit_efficiency(steps: Sequence[Tuple[float, float]], link: Optional[float]) -> float:
    """Returns payload over wire bytes from the slope between the two largest sizes, where the link is the limit."""
    if not link:
        return 1.0
    (small, early), (large, late) = steps[-2:]
    slope = (late - early) / (large - small)
    found = 1 / (slope * link) if slope > 0 else math.inf
    return found if _LOWEST_EFFICIENCY <= found <= _HIGHEST_EFFICIENCY else 1.0


def _horovod_overheads(series: Sequence[results.Series]) -> List[Tuple[float, float]]:
    return [
        (float(each.facts.bytes), float(np.nanmedian(each.seconds - each.engine_s)))
        for each in series
        if each.engine_s is not None and np.isfinite(each.engine_s).any()
    ]


def _fit_horovod(overheads: Sequence[Tuple[float, float]], model: horovod_model.HorovodModel) -> Tuple[float, float]:
    """Returns Horovod's fixed time and the rate of its copies."""
    if len(overheads) < 2:
        return model.fixed_s, model.copy_bytes_per_s
    sizes, seconds = np.array(overheads).T
    slope = float(np.polyfit(sizes, seconds, 1, w=1 / np.maximum(seconds, 1e-9))[0])
    rate = 2 / slope if slope > 1e-13 else 1e12
    return max(0.0, float(np.median(seconds - 2 * sizes / rate))), rate


def _jitter(series: Sequence[results.Series]) -> Tuple[float, ...]:
    factors = np.concatenate([each.seconds / np.median(each.seconds) for each in series])
    return tuple(float(each) for each in np.quantile(factors, np.linspace(0, 1, _QUANTILES)))
