"""The flags of `simulate`, and what they say as typed values. Flags in, records out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from absl import flags

from tf_ipu_dp import cli
from tf_ipu_dp.collectives import (
    calibration,
    disturbances,
    fitting,
    flag_values,
    formulas,
    horovod_model,
    loss,
    noise,
    simulator,
    topology,
)
from tf_ipu_dp.collectives.flag_values import Form

_Define = Callable[[str, Any, Form, str], None]

GROUPS: Dict[str, Tuple[str, ...]] = {
    "Job": ("replicas", "bytes", "algorithm", "buckets", "torus", "tree_pieces"),
    "Network": (
        "topology",
        "bandwidth",
        "latency",
        "ports",
        "levels",
        "pieces",
        "placement",
        "ranks_per_host",
        "calibration",
    ),
    "Engine": ("handshake", "overhead", "base_latency", "reduction_rate", "wire_efficiency", "segments"),
    "Disturbances": ("jitter", "trial_jitter", "start_jitter", "stragglers", "slow_links"),
    "Loss": (
        "loss",
        "transport",
        "packet_bytes",
        "timeout_given_loss",
        "timeout_per_message",
        "timeout_per_packet",
        "timeout_per_single_packet",
        "recovery",
    ),
    "Training step": ("forward", "backward", "optimizer_time", "compute_jitter", "horovod", "cycle"),
    "Fit of measured points": ("fit", "fit_form", "check"),
    "Simulation": ("mode", "trials", "seed", "out", "json"),
}


class _Parser(flags.ArgumentParser):  # type: ignore[misc, type-arg, unused-ignore]
    """Reads a value by a function that raises ValueError with a sentence."""

    def __init__(self, placeholder: str, form: str, read: Callable[[str], Any]) -> None:
        self.placeholder = placeholder
        self.syntactic_help = form
        self._read = read

    def parse(self, argument: Any) -> Any:
        try:
            return self._read(argument) if isinstance(argument, str) else argument
        except cli.UsageError as error:
            raise ValueError(str(error)) from None

    def flag_type(self) -> str:
        return self.placeholder


class _Serializer(flags.ArgumentSerializer):  # type: ignore[misc, type-arg, unused-ignore]
    def serialize(self, value: Any) -> str:
        return cli.typed(value)


def define_flags(fv: flags.FlagValues) -> None:
    """Defines all flags of `simulate`."""

    def value(name: str, default: Any, parser: Form, text: str) -> None:
        flags.DEFINE(_Parser(*parser), name, default, text, flag_values=fv, serializer=_Serializer())

    _define_job(value)
    _define_network(value, fv)
    _define_disturbances(value)
    _define_rest(value, fv)


def _define_job(value: _Define) -> None:
    value("replicas", None, flag_values.COUNTS, "Ranks of the all-reduce. Several are simulated one after the other.")
    value("bytes", None, flag_values.SIZES, "Bytes that each rank contributes.")
    names = cli.alternatives((formulas.AUTO, *formulas.ALGORITHMS))
    value(
        "algorithm", formulas.AUTO, flag_values.NAME, f"{names}. auto takes the one with the least time without noise."
    )
    value(
        "buckets",
        (1,),
        ("N|BYTES", "a whole number, or sizes like 802816,168232", flag_values.parse_buckets),
        "Equal buckets that the bytes are sent in, or the bytes of each in the order of the backward pass, as size "
        "shows them; they replace --bytes.",
    )
    value(
        "torus",
        None,
        ("RxC", "rows and columns like 8x8", flag_values.parse_shape),
        "Shape of the 2-D torus. As square as possible.",
    )
    value(
        "tree_pieces",
        None,
        ("N", "a whole number from 1 on", flag_values.parse_whole),
        "Pieces of the double tree's pipeline.",
    )


def _define_network(value: _Define, fv: flags.FlagValues) -> None:
    value("topology", None, flag_values.NAME, f"A preset: {cli.alternatives(topology.PRESETS)}.")
    value("bandwidth", None, flag_values.RATE, "Bandwidth of equal links, per direction, instead of a preset.")
    value("latency", None, flag_values.SECONDS, "One-way latency of equal links.")
    value(
        "ports",
        None,
        ("N", "1 or 2", flag_values.parse_whole),
        "2 where ranks are wired to both neighbours with links of their own.",
    )
    value(
        "levels",
        None,
        ("LEVELS", "levels like host:8:12GB/s:5us,link:64:1.25GB/s:20us:8", topology.parse_levels),
        "Levels from the inside out: NAME:SIZE:RATE:LATENCY[:RANKS THAT SHARE A LINK], separated by commas.",
    )
    value(
        "pieces",
        None,
        ("PIECES", "pieces like 4KiB:20us:1GB/s,max:50us:3GB/s", topology.parse_pieces),
        "Latency and bandwidth by message size: UP_TO:LATENCY:RATE, separated by commas.",
    )
    flags.DEFINE_enum(
        "placement", topology.BLOCK, list(topology.PLACEMENTS), "How ranks lie on hosts or groups.", flag_values=fv
    )
    value(
        "ranks_per_host",
        1,
        ("N", "a whole number from 1 on", flag_values.parse_whole),
        "Ranks that share the link of a host.",
    )
    value(
        "calibration",
        None,
        flag_values.PATH,
        "A calibration of this machine, as calibrate writes it, instead of a topology.",
    )
    value("handshake", None, flag_values.POSITIVE, "One-way latencies per step; about 2.2 for Gloo.")
    value("overhead", None, flag_values.SECONDS, "The engine's own time per message.")
    value("base_latency", None, flag_values.SECONDS, "The engine's own time per all-reduce.")
    value(
        "reduction_rate",
        None,
        flag_values.RATE,
        "Bytes that a rank adds up per second. Without it, adding takes no time.",
    )
    value("wire_efficiency", None, flag_values.POSITIVE, "Payload over bytes on the wire, for example 0.956.")
    value(
        "segments",
        None,
        ("N|gloo", "a whole number, or gloo", flag_values.parse_segments),
        "Messages per step of a ring.",
    )


def _define_disturbances(value: _Define) -> None:
    value("jitter", "none", flag_values.LAW, "Noise of each step of each rank.")
    value("trial_jitter", "none", flag_values.LAW, "Noise of whole trials, the same on all ranks.")
    value(
        "start_jitter",
        "none",
        ("LAW", "none, or a law with a time: exponential:50us", noise.parse_start_law),
        "How late ranks start.",
    )
    value(
        "stragglers",
        None,
        ("COUNT:FACTOR", "ranks and a factor like 3:2.0", disturbances.parse_stragglers),
        "Ranks whose steps take longer by a factor.",
    )
    value(
        "slow_links",
        None,
        ("COUNT:RATE", "links and a rate like 1:25Mbit", disturbances.parse_slow_links),
        "Ranks that send at a lower rate.",
    )
    value(
        "loss",
        "0",
        ("P[:BURST]", "a share of packets like 0.01 or 1%, or with bursts 0.01:8", loss.parse_loss),
        "Packets lost, on the outermost links.",
    )
    value(
        "transport",
        loss.CUBIC,
        ("cubic|bbr|roce[:T]", "cubic, bbr, roce or roce:T", loss.parse_transport),
        "What recovers them. roce waits 4.096 us x 2^T.",
    )
    value(
        "packet_bytes",
        None,
        ("N", "a whole number from 1 on", flag_values.parse_whole),
        "Payload of a packet. Default: 1448, or the calibrated one.",
    )
    value("timeout_given_loss", None, flag_values.SHARE, "Share of losses that end in a timeout. Without it, by rule.")
    value(
        "timeout_per_message",
        None,
        flag_values.SHARE,
        "Messages whose end meets a timeout, instead of a share of losses.",
    )
    value(
        "timeout_per_packet",
        None,
        flag_values.SHARE,
        "Packets that meet a timeout besides, with --timeout_per_message.",
    )
    value(
        "timeout_per_single_packet",
        None,
        flag_values.SHARE,
        "Packets of Horovod's negotiation that meet a timeout, with --horovod.",
    )
    value("recovery", None, flag_values.SECONDS, "What a packet costs that is lost in the stream. Without it, by rule.")


def _define_rest(value: _Define, fv: flags.FlagValues) -> None:
    value("forward", None, flag_values.SECONDS, "Forward pass of a training step; with it, the step is shown too.")
    value("backward", None, flag_values.SECONDS, "Backward pass, in which buckets become ready at an even rate.")
    value("optimizer_time", None, flag_values.SECONDS, "What follows when all buckets are reduced.")
    value("compute_jitter", "none", flag_values.LAW, "Noise of the passes of each replica; the slowest counts.")
    flags.DEFINE_bool("horovod", False, "Adds what Horovod adds to the engine's time.", flag_values=fv)
    value("cycle", None, flag_values.SECONDS, "Horovod's cycle time, if it is not 1 ms.")
    value("fit", None, flag_values.PATH, "A CSV file of measured points (ranks, bytes, seconds or efficiency) to fit.")
    flags.DEFINE_enum("fit_form", fitting.RING, list(fitting.FORMS), "What is fitted to them.", flag_values=fv)
    value("check", None, flag_values.PATH, "A CSV file of points that the fit is compared with.")
    flags.DEFINE_enum("mode", simulator.AUTO, list(simulator.MODES), "How trials are calculated.", flag_values=fv)
    flags.DEFINE_integer(
        "trials", 1000, "Trials of each.", lower_bound=1, upper_bound=simulator.MAX_TRIALS, flag_values=fv
    )
    flags.DEFINE_integer(
        "seed", 0, "The same seed gives the same output.", lower_bound=0, upper_bound=2**32 - 1, flag_values=fv
    )
    value("out", None, flag_values.PATH, "A folder for all trials, which report reads.")
    flags.DEFINE_bool("json", False, "Prints JSON instead of a table.", flag_values=fv)


def get(fv: flags.FlagValues, name: str) -> Any:
    """Returns the value of a flag."""
    value: Any = fv[name].value
    return value


@dataclasses.dataclass(frozen=True)
class Network:
    """Where collectives run: a topology, or a calibrated machine."""

    fixed: Optional[topology.Topology] = None
    calibrated: Optional[calibration.Calibration] = None

    def topology(self, fv: flags.FlagValues, ranks: int) -> topology.Topology:
        """Returns the topology for a number of ranks."""
        if self.calibrated is None:
            assert self.fixed is not None
            return self.fixed
        found = self.calibrated.topology(
            ranks,
            -(-ranks // _int(fv, "ranks_per_host")),
            link_bytes_per_s=get(fv, "bandwidth"),
            one_way_delay_s=get(fv, "latency"),
            placement=str(get(fv, "placement")),
        )
        return _with_engine(fv, found)


def read_network(fv: flags.FlagValues, read_calibration: Callable[[Path], calibration.Calibration]) -> Network:
    """Returns the network that the flags describe; UsageError if they describe several."""
    given = [name for name in ("topology", "levels", "calibration", "fit") if get(fv, name) is not None]
    plain = [name for name in ("bandwidth", "latency", "pieces", "ports") if get(fv, name) is not None]
    # A calibration may be used with another link than the one it was made on.
    clash = [name for name in plain if given != ["calibration"] or name in ("pieces", "ports")]
    if len(given) > 1 or (given and clash):
        both = cli.alternatives(f"--{name}" for name in [*given, *clash]).replace(" or ", " and ")
        raise cli.UsageError(f"{both} all describe the network. Use one of them.")
    if given == ["calibration"]:
        return Network(calibrated=read_calibration(Path(str(get(fv, "calibration")))))
    base = _plain_topology(fv, given)
    return Network(_with_engine(fv, dataclasses.replace(base, placement=str(get(fv, "placement")))))


def read_disturbances(
    fv: flags.FlagValues, network: topology.Topology, calibrated: Optional[calibration.Calibration] = None
) -> disturbances.Disturbances:
    """Returns the disturbances that the flags describe; recoveries depend on the links.

    What the flags do not say about noise and timeouts comes from the calibration, if there is one.
    """
    trial_jitter: noise.Law = get(fv, "trial_jitter")
    per_message, per_packet = get(fv, "timeout_per_message"), get(fv, "timeout_per_packet") or 0.0
    recovery = get(fv, "recovery")
    if calibrated is not None:
        trial_jitter = calibrated.trial_jitter if trial_jitter.is_none else trial_jitter
        recovery = calibrated.recovery_s if recovery is None else recovery
    stragglers: Tuple[int, float] = get(fv, "stragglers") or (0, 1.0)
    slow_links: Tuple[int, float] = get(fv, "slow_links") or (0, 0.0)
    outer = network.levels[-1]
    packet = _int(fv, "packet_bytes", (calibrated.packet_bytes if calibrated is not None else None) or 1448)
    asked: loss.Loss = get(fv, "loss")
    transport: loss.Transport = get(fv, "transport")
    lossy = dataclasses.replace(
        asked,
        transport=transport.name,
        timeout_s=transport.timeout_s,
        packet_bytes=packet,
        round_trip_s=2 * outer.latency_s,
        packet_s=packet / outer.bytes_per_s,
        timeout_given_loss=get(fv, "timeout_given_loss"),
        timeout_per_message=per_message,
        timeout_per_packet=per_packet,
        timeout_per_single_packet=get(fv, "timeout_per_single_packet") or 0.0,
        recovery_s=recovery,
    )
    if calibrated is not None and per_message is None and get(fv, "timeout_given_loss") is None:
        lossy = dataclasses.replace(calibrated.with_timeouts(lossy), packet_bytes=packet)
    return disturbances.Disturbances(
        get(fv, "jitter"),
        trial_jitter,
        get(fv, "start_jitter"),
        *stragglers,
        *slow_links,
        lossy,
    )


def read_simulation(fv: flags.FlagValues, ranks: int, size: int, network: Network) -> simulator.Simulation:
    """Returns what is to be simulated for one number of ranks and one size."""
    where = network.topology(fv, ranks)
    model = _horovod(fv, network.calibrated) if get(fv, "horovod") else None
    forward, backward, optimizer = (get(fv, name) or 0.0 for name in ("forward", "backward", "optimizer_time"))
    compute = simulator.Compute(forward, backward, optimizer, get(fv, "compute_jitter"))
    buckets: Tuple[int, ...] = get(fv, "buckets")
    return simulator.Simulation(
        ranks,
        size,
        where,
        str(get(fv, "algorithm")),
        read_disturbances(fv, where, network.calibrated),
        str(get(fv, "mode")),
        _int(fv, "trials"),
        _int(fv, "seed"),
        1 if len(buckets) > 1 else buckets[0],
        get(fv, "torus"),
        get(fv, "tree_pieces"),
        model,
        compute,
        buckets if len(buckets) > 1 else (),
    )


def _horovod(fv: flags.FlagValues, calibrated: Optional[calibration.Calibration]) -> horovod_model.HorovodModel:
    model = horovod_model.HorovodModel() if calibrated is None else calibrated.horovod
    cycle = get(fv, "cycle")
    return model if cycle is None else dataclasses.replace(model, cycle_s=cycle)


def read_sizes(fv: flags.FlagValues) -> Optional[Tuple[int, ...]]:
    """Returns the sizes to simulate: --bytes, or what unequal buckets add up to; None where neither is given."""
    sizes: Optional[Tuple[int, ...]] = get(fv, "bytes")
    buckets: Tuple[int, ...] = get(fv, "buckets")
    if len(buckets) == 1:
        return sizes
    total = sum(buckets)
    if sizes is not None and sizes != (total,):
        raise cli.UsageError(f"The --buckets add up to {total:,} bytes, which are not the --bytes. Leave --bytes out.")
    return (total,)


def _plain_topology(fv: flags.FlagValues, given: List[str]) -> topology.Topology:
    per_host = _int(fv, "ranks_per_host")
    if per_host > 1 and given:
        raise cli.UsageError(f"--ranks_per_host is part of --{given[0]}. Leave it out.")
    if given == ["topology"]:
        return topology.preset(str(get(fv, "topology")))
    if given == ["levels"]:
        return topology.Topology("levels", get(fv, "levels"))
    rate, latency = get(fv, "bandwidth") or 1.25e9, get(fv, "latency")
    latency = 25e-6 if latency is None else latency
    if per_host > 1:
        return topology.hosts(per_host, rate, latency)
    return topology.uniform(rate, latency, ports=_int(fv, "ports", 1), pieces=get(fv, "pieces") or ())


def _with_engine(fv: flags.FlagValues, network: topology.Topology) -> topology.Topology:
    rate: Optional[float] = get(fv, "reduction_rate")
    asked = {
        "handshake": get(fv, "handshake"),
        "overhead_s": get(fv, "overhead"),
        "base_s": get(fv, "base_latency"),
        "reduction_s_per_byte": 1 / rate if rate else None,
        "wire_efficiency": get(fv, "wire_efficiency"),
        "segments": get(fv, "segments"),
    }
    changed: Dict[str, Any] = {name: each for name, each in asked.items() if each is not None}
    return dataclasses.replace(network, engine=dataclasses.replace(network.engine, **changed))


def _int(fv: flags.FlagValues, name: str, default: int = 0) -> int:
    value = get(fv, name)
    return default if value is None else int(value)
