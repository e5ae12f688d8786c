"""How often messages meet a timeout on links that lose packets, from lossy measurements at 2 ranks. Pure, numpy.

Of an all-reduce between n ranks, 2(n-1)n messages go around the ring, each with the packets of a chunk. The end of a
message has no packets behind it that report its loss, whatever the size; other packets meet a timeout only where what
is sent again is lost too. Before it, Horovod negotiates, with packets that are each alone on their way. So are those of
an all-reduce of a single number, which tells them from the others. A trial met a timeout if it took 150 ms more than
the median.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, List, Sequence, Tuple

import numpy as np

from tf_ipu_dp.collectives import horovod_model, results
from tf_ipu_dp.collectives.calibration import Calibration, late_share

Array = Any  # numpy has no types that hold for both releases

SINGLE_BYTES = 8  # up to here an all-reduce is one message after the other: Gloo does not cut it
_SINGLE, _MESSAGE, _PACKET = range(3)


def fit_timeouts(
    found: Calibration, lossy: Sequence[results.Series], *, loss: float, packet_bytes: int = 1448
) -> Calibration:
    """Returns the calibration with the timeouts of single packets, of messages and of the packets in them.

    Sizes that cannot tell them apart leave the later ones out: one size gives timeouts of messages alone.
    """
    rows, expected, weights = [], [], []
    for series in lossy:
        trials = len(series.seconds)
        late = min(late_share(series.seconds), 1 - 1 / (2 * trials))
        rate = -math.log1p(-late)
        rows.append(_counts(series.facts, packet_bytes))
        expected.append(rate)
        # Counts of rare events scatter with the root of their number.
        weights.append(math.sqrt(trials / max(rate, 1 / trials)))
    columns = [_MESSAGE] if len(rows) == 1 else [_MESSAGE, _PACKET]
    columns += [_SINGLE] if len(rows) > 1 and any(not row[_MESSAGE] for row in rows) else []
    rates = _fit(np.array(rows, dtype=float), np.array(expected), np.array(weights), columns)
    return dataclasses.replace(
        found,
        timeout_per_message=rates[_MESSAGE],
        timeout_per_packet=rates[_PACKET],
        timeout_per_single_packet=rates[_SINGLE],
        loss=loss,
        packet_bytes=packet_bytes,
    )


def _counts(facts: results.SeriesFacts, packet_bytes: int) -> Tuple[float, float, float]:
    """Returns the single packets, the messages and their packets of a trial."""
    single = horovod_model.single_packets(facts.ranks)
    if facts.bytes <= SINGLE_BYTES:
        return 2.0 * single, 0.0, 0.0
    messages = 2 * (facts.ranks - 1) * facts.ranks
    return float(single), float(messages), messages * max(1.0, facts.bytes / facts.ranks / packet_bytes)


def _fit(matrix: Array, values: Array, weights: Array, columns: Sequence[int]) -> List[float]:
    """Returns the rates with the least weighted errors, none of them negative, 0 for columns that are not asked for."""
    best: Tuple[float, List[float]] = (math.inf, [0.0] * matrix.shape[1])
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(columns, count):
            part = matrix[:, list(chosen)] * weights[:, None]
            scale = np.maximum(np.abs(part).max(axis=0), 1e-300)
            found = np.linalg.lstsq(part / scale, values * weights, rcond=None)[0] / scale
            error = float(((part @ found - values * weights) ** 2).sum())
            if (found >= 0).all() and error < best[0] * (1 - 1e-9):
                rates = [0.0] * matrix.shape[1]
                for column, rate in zip(chosen, found.tolist()):
                    rates[column] = rate
                best = error, rates
    return best[1]
