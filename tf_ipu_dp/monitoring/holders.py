"""Who holds the IPUs that a job cannot get, in a sentence."""

from __future__ import annotations

from typing import Sequence

from tf_ipu_dp import cli
from tf_ipu_dp.monitoring import device_reader, devices, snapshots, text_layout

_MAX_NAMED = 3


def describe_holders(sdk: str) -> str:
    """Returns who holds IPUs of an SDK now, and where to look; where nobody can be named, only the latter."""
    try:
        reader = device_reader.open_reader(sdk)
    except devices.TelemetryError:
        return render_holders(())
    try:
        return render_holders(snapshots.SnapshotReader(reader).read().processes)
    finally:
        reader.close()


def render_holders(processes: Sequence[snapshots.Process]) -> str:
    """Returns the sentence for some processes; those that hold the most come first."""
    holding = sorted((each for each in processes if each.ipus), key=lambda each: -len(each.ipus))
    parts = [_render(each) for each in holding[:_MAX_NAMED]]
    if len(holding) > _MAX_NAMED:
        parts.append(f"{cli.count(len(holding) - _MAX_NAMED, 'more process', 'more processes')} the others")
    sentence = "; ".join(parts)
    held = f"{sentence[0].upper()}{sentence[1:]}. " if parts else ""
    return f"{held}Wait for them, use fewer --ipus, or look with: python -m tf_ipu_dp.monitor"


def _render(process: snapshots.Process) -> str:
    user = f" of {text_layout.printable(process.user)}" if process.user else ""
    run = f" for the run {text_layout.printable(process.run)}" if process.run else ""
    ipus = "IPU" if len(process.ipus) == 1 else "IPUs"
    return f"process {process.pid}{user} holds {ipus} {text_layout.id_ranges(process.ipus)}{run}"
