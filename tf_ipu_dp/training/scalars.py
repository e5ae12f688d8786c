"""The numbers of a record by their names, as TensorBoard and trackers get them. Pure: no TensorFlow."""

from __future__ import annotations

from typing import Dict, Optional

from tf_ipu_dp.runs.records import MetricsRecord, ValidationRecord


def scalars(record: MetricsRecord) -> Dict[str, Optional[float]]:
    """Returns the numbers of a record by their tag; shares are per cent, as everywhere that people read them."""
    shared = {"loss": record.loss, "accuracy_pct": _percent(record.accuracy), **record.metrics}
    if isinstance(record, ValidationRecord):
        return {**shared, "top5_pct": _percent(record.top5), "seconds": record.seconds}
    used = [percent for percent in record.ipu_utilisation_pct.values() if percent is not None]
    return {
        **shared,
        "learning_rate": record.learning_rate,
        "samples_per_s": record.samples_per_s,
        "input_wait_s": record.input_wait_s,
        "ipu_utilisation_pct": sum(used) / len(used) if used else None,  # the mean: many IPUs are one chart
    }


def _percent(share: Optional[float]) -> Optional[float]:
    return None if share is None else 100 * share
