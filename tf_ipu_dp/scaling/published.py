"""Published scaling curves as data, to stand behind a study's own. Pure.

Efficiencies are (rate / rate of the first point) / (devices / devices of the first point). Of times to train (TTT) a
rate is 1 / TTT. Where a source gives rates or times they are kept, and the efficiency is computed from them.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

from tf_ipu_dp.scaling import records

WEAK, STRONG, TIME_TO_TRAIN = "weak", "strong", "time to train"
KINDS = (WEAK, STRONG, TIME_TO_TRAIN)
IPUS, GPUS, NODES = "IPUs", "GPUs", "nodes"

_MLPERF = "MLPerf Training {}, ResNet-50, computed from the submission's logs"
_NVIDIA_TABLES = "NVIDIA DeepLearningExamples, README of the model"
_HOROVOD = "Horovod documentation, benchmarks"
_PIZ_DAINT = "tf_cnn_benchmarks on synthetic data, Cray and CSCS"


@dataclasses.dataclass(frozen=True)
class Point:
    """One published size."""

    devices: int
    efficiency: float  # from 0 to 1, against the first point of its curve
    rate: Optional[float] = None  # samples/s
    minutes: Optional[float] = None  # to train
    epochs: Optional[float] = None
    global_batch_size: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Curve:
    """One published series. The first point is its baseline."""

    title: str
    source: str
    unit: str  # what is counted
    kind: str  # one of KINDS
    points: Tuple[Point, ...]
    behind: bool = False  # drawn behind a study: one that others are usually compared with


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """A published efficiency of the time to train, as its three factors."""

    title: str
    devices: int
    hardware: float
    statistical: float
    overhead: float
    product: float


def _shares(*points: Tuple[int, float]) -> Tuple[Point, ...]:
    """Returns points of which efficiencies in percent are published, against one device."""
    return (Point(1, 1.0), *(Point(devices, percent / 100) for devices, percent in points))


def _rates(*points: Tuple[int, float]) -> Tuple[Point, ...]:
    (base, base_rate), *_ = points
    return tuple(Point(devices, rate / base_rate / (devices / base), rate) for devices, rate in points)


def _trained(*points: Tuple[int, int, float, float, Optional[float]]) -> Tuple[Point, ...]:
    """Returns points of devices, global batch, epochs, minutes and samples/s; efficiencies are those of the time."""
    base, _, _, base_minutes, _ = points[0]
    return tuple(
        Point(devices, base_minutes / minutes / (devices / base), rate, minutes, epochs, batch)
        for devices, batch, epochs, minutes, rate in points
    )


def throughput(curve: Curve) -> Curve:
    """Returns a curve of times to train as the curve of its rates, of which every replica had about the same batch."""
    rates = [(point.devices, point.rate) for point in curve.points if point.rate is not None]
    return Curve(f"{curve.title}, throughput", curve.source, curve.unit, WEAK, _rates(*rates), curve.behind)


_GRAPHCORE = (
    Curve(
        "Graphcore POD, MLPerf v1.0", _MLPERF.format("v1.0"), IPUS, TIME_TO_TRAIN,
        _trained((16, 1920, 44, 37.12, 27_048), (64, 2560, 45, 14.48, 79_172)),
    ),
    Curve(
        "Graphcore POD, MLPerf v1.1", _MLPERF.format("v1.1"), IPUS, TIME_TO_TRAIN,
        _trained(
            (16, 3200, 38, 28.33, 29_037), (64, 3840, 38, 8.50, 100_394), (128, 5120, 41, 5.67, 169_661),
            (256, 10_240, 45, 3.79, 299_846),
        ),
    ),
    Curve(
        "Graphcore Bow Pod, MLPerf v2.0", _MLPERF.format("v2.0"), IPUS, TIME_TO_TRAIN,
        _trained(
            (16, 3520, 38, 19.64, 42_166), (64, 5120, 40, 6.30, 143_689), (128, 5120, 41, 4.19, 226_855),
            (256, 10_240, 45, 2.67, 413_074),
        ),
        behind=True,
    ),
)  # fmt: skip

CURVES: Tuple[Curve, ...] = (
    *_GRAPHCORE,
    *(throughput(curve) for curve in _GRAPHCORE),
    Curve(
        "NVIDIA DGX A100, MLPerf v1.1", _MLPERF.format("v1.1"), GPUS, TIME_TO_TRAIN,
        _trained(
            (8, 3264, 35, 29.15, None), (64, 3264, 35, 4.53, None), (1024, 35_840, 60, 0.575, None),
            (4320, 64_800, 85, 0.347, None),
        ),
        behind=True,
    ),
    Curve(
        "NVIDIA DGX A100, MLPerf v2.0", _MLPERF.format("v2.0"), GPUS, TIME_TO_TRAIN,
        _trained(
            (8, 3264, 35, 28.69, None), (64, 3264, 35, 4.50, None), (1024, 35_840, 60, 0.555, None),
            (4216, 67_456, 86, 0.319, None),
        ),
    ),
    # The same batch and epochs at both sizes: their ratio of times is a strong scaling.
    Curve(
        "NVIDIA DGX A100, ResNet-50, batch 3,264", _MLPERF.format("v1.1"), GPUS, STRONG,
        _trained((8, 3264, 35, 29.15, None), (64, 3264, 35, 4.53, None)), behind=True,
    ),
    Curve("Horovod, ResNet-101, 25 Gbit/s RoCE", _HOROVOD, GPUS, WEAK, _shares((128, 90), (512, 90)), behind=True),
    Curve("Horovod, Inception V3, 25 Gbit/s RoCE", _HOROVOD, GPUS, WEAK, _shares((128, 90), (512, 90))),
    Curve("Horovod, VGG-16, 25 Gbit/s RoCE", _HOROVOD, GPUS, WEAK, _shares((128, 79), (512, 68)), behind=True),
    Curve(
        "Horovod, ResNet-50, V100 (a user's report)", "horovod/horovod#871", GPUS, WEAK,
        (Point(8, 1.0), Point(16, 0.924), Point(32, 0.779)), behind=True,
    ),
    Curve(
        "Horovod, VGG-16, under-used NIC (a user's report)", "horovod/horovod#2581", GPUS, WEAK,
        _rates((8, 1531.9), (16, 546.9)),
    ),
    Curve("torchtitan FSDP, Llama-3.1-8B, H100", "torchtitan", GPUS, WEAK, (Point(8, 1.0), Point(128, 5605 / 5762))),
    Curve("Goyal et al., ResNet-50", "arXiv 1706.02677", GPUS, WEAK, (Point(8, 1.0), Point(256, 0.9)), behind=True),
    *(
        Curve(title, _NVIDIA_TABLES, GPUS, kind, _shares(*points))
        for title, kind, points in (
            ("ResNet-50 TF1, A100 AMP", WEAK, ((8, 91.6),)),
            ("ResNet-50 TF1, A100 TF32", WEAK, ((8, 96.3),)),
            ("ResNet-50 TF1, V100 AMP", WEAK, ((8, 93.6), (16, 82.9))),
            ("ResNet-50 TF1, V100 FP32", WEAK, ((8, 96.2), (16, 94.0))),
            ("ResNet-50 PyTorch, A100 AMP", STRONG, ((8, 84.1),)),
            ("ResNet-50 PyTorch, A100 TF32", STRONG, ((8, 96.6),)),
            ("EfficientNet-B0 TF2 Horovod, A100 AMP", WEAK, ((8, 74.7), (16, 73.5))),
            ("EfficientNet-B0 TF2 Horovod, A100 TF32", WEAK, ((8, 94.3), (16, 92.1))),
            ("EfficientNet-B0 TF2 Horovod, V100 AMP", WEAK, ((8, 70.3), (32, 66.3))),
            ("EfficientNet-B0 TF2 Horovod, V100 FP32", WEAK, ((8, 74.9), (32, 63.6))),
            ("EfficientNet-B4 TF2 Horovod, A100 AMP", WEAK, ((8, 94.4), (32, 85.8), (64, 84.6))),
            ("EfficientNet-B4 TF2 Horovod, A100 TF32", WEAK, ((8, 99.1), (32, 90.6), (64, 89.7))),
            ("EfficientNet-B4 TF2 Horovod, V100 AMP", WEAK, ((8, 74.5), (32, 64.1), (64, 64.0))),
            ("EfficientNet-B4 TF2 Horovod, V100 FP32", WEAK, ((8, 90.2), (32, 73.4), (64, 70.6))),
        )
    ),
    Curve(
        "tf_cnn_benchmarks, Piz Daint P100", _PIZ_DAINT, GPUS, WEAK,
        _rates((1, 138.2), (2, 264.6), (4, 523.4), (8, 1018.2)), behind=True,
    ),
    Curve(
        "tf_cnn_benchmarks, DGX-1 (NVLink)", _PIZ_DAINT, GPUS, WEAK, _rates((1, 142), (2, 284), (4, 569), (8, 1131)),
    ),
    Curve("HyPar-Flow, ResNet-1001, Stampede2", "HyPar-Flow", NODES, WEAK, (Point(1, 1.0), Point(128, 110 / 128))),
    Curve("HyPar-Flow, ResNet-1001, Frontera", "HyPar-Flow", NODES, WEAK, (Point(1, 1.0), Point(512, 481 / 512))),
)  # fmt: skip

DECOMPOSITIONS = (
    Decomposition("Graphcore Bow Pod, MLPerf v2.0", 64, 0.852, 0.950, 0.963, 0.779),
    Decomposition("Graphcore Bow Pod, MLPerf v2.0", 128, 0.673, 0.927, 0.940, 0.586),
    Decomposition("Graphcore Bow Pod, MLPerf v2.0", 256, 0.612, 0.844, 0.889, 0.460),
    Decomposition("Graphcore POD, MLPerf v1.1", 256, 0.645, 0.844, 0.857, 0.467),
)


def behind(mode: str) -> List[Curve]:
    """Returns the curves that are drawn behind a study of a mode: those of the same kind."""
    kind = {records.WEAK: WEAK, records.STRONG: STRONG}.get(mode)
    return [curve for curve in CURVES if curve.behind and curve.kind == kind]
