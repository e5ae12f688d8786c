"""`gcipuinfo`: information about the IPUs, read from the emulated partition. No TensorFlow.

Keys and formats are those of the SDK. Values that need hardware (power, temperature) are "N/A". Utilisation is
measured: the time of executions without the time that they waited for input. The server is the emulator and has its
version. Two keys are the emulator's own: how long the executions waited, and how old the heartbeat of the process is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from typing import Dict, List, Optional, Tuple

import tf_ipu_dp
from tf_ipu_dp.emulator.devices import registry

DiscoverActivePartitionIPUs = 0
DiscoverAllPartitionIPUs = 1

BoardType = "board type"
IpuPower = "ipu power"
IpuUtilisation = "ipu utilisation"
IpuUtilisationSession = "ipu utilisation (session)"
AverageBoardTemp = "average board temp"
AverageDieTemp = "average die temp"
TotalBoardPower = "total board power"

INPUT_WAIT = "emulated input wait"
HEARTBEAT_AGE = "emulated heartbeat age"
STALE_S = 5.0

_IPUS_PER_BOARD = 4
_UNKNOWN = "N/A"
_IDLE = {IpuUtilisation: "0.00%", IpuUtilisationSession: "0.00%"}
_NOT_YET = {IpuUtilisation: _UNKNOWN, IpuUtilisationSession: _UNKNOWN, INPUT_WAIT: _UNKNOWN}
_mode: Optional[int] = None


class gcipuinfo:  # noqa: N801
    """An inventory of the partition's IPUs. Values do not change until they are refreshed."""

    def __init__(self, mode: int = DiscoverActivePartitionIPUs) -> None:
        global _mode  # noqa: PLW0603
        if mode not in (DiscoverActivePartitionIPUs, DiscoverAllPartitionIPUs):
            raise ValueError(f"{mode!r} is not a discovery mode.")
        if _mode not in (None, mode):
            raise RuntimeError("Only one discovery mode can be used in a process.")
        _mode = mode
        self._partition = registry.Partition.from_environment(os.environ)
        self._refreshes = False
        self._devices: List[Dict[str, str]] = []
        self._previous: Dict[Tuple[int, float], Tuple[registry.Meter, Dict[str, str]]] = {}
        self.updateData()

    def getDevices(self) -> List[Dict[str, str]]:  # noqa: N802
        """Returns one mapping of names to values per IPU."""
        self._refresh()
        return [dict(device) for device in self._devices]

    def getDevicesAsJSON(self) -> str:  # noqa: N802
        """Returns the same as JSON text."""
        return json.dumps(self.getDevices())

    def getNamedAttributeForAll(self, label: str) -> List[str]:  # noqa: N802
        """Returns one value per IPU; an empty text where an IPU has none."""
        self._refresh()
        return [device.get(label, "") for device in self._devices]

    def getNamedAttributeForDevice(self, id: int, label: str) -> str:  # noqa: N802
        """Returns one value of one IPU."""
        self._refresh()
        found = [device for device in self._devices if device["id"] == str(id)]
        return found[0].get(label, "") if found else ""

    def setUpdateMode(self, refresh: bool) -> None:  # noqa: N802
        """Sets whether every query refreshes the values."""
        self._refreshes = refresh

    def updateData(self) -> bool:  # noqa: N802
        """Refreshes the values once."""
        holders: Dict[int, Tuple[registry.Owner, Dict[str, str]]] = {}
        previous = {}
        now = time.monotonic()
        for holding in self._partition.holdings():
            key = (holding.owner.pid, holding.meter.attached)
            before, reported = self._previous.get(key, (holding.earlier, _NOT_YET))
            previous[key], activity = _activity(holding.meter, before, reported, now)
            holders.update((ipu, (holding.owner, activity)) for ipu in holding.owner.ipus)
        self._previous = previous
        # A process may have been started with a larger partition than this one.
        ipus = sorted({*range(self._partition.size), *holders})
        self._devices = [_describe(ipu, *holders.get(ipu, (None, _IDLE))) for ipu in ipus]
        return True

    def checkHealthOfDevices(self) -> str:  # noqa: N802
        """Returns the faults as JSON text; emulated IPUs have none."""
        return "{}"

    def getLastAppEventRecord(self, path: str) -> Dict[str, str]:  # noqa: N802
        """Returns the event record that an application has written."""
        try:
            with open(path, encoding="utf-8") as stream:  # noqa: PTH123 the caller's path may be bytes
                record = json.load(stream)
        except FileNotFoundError:
            return {}
        return {str(key): str(value) for key, value in record.items()}

    def getLastAppEventRecordAsJSON(self, path: str) -> str:  # noqa: N802
        """Returns the same as JSON text."""
        return json.dumps(self.getLastAppEventRecord(path))

    def _refresh(self) -> None:
        if self._refreshes:
            self.updateData()


def _activity(
    meter: registry.Meter, before: registry.Meter, reported: Dict[str, str], now: float
) -> Tuple[Tuple[registry.Meter, Dict[str, str]], Dict[str, str]]:
    """Returns what to keep for the next update, and the shares of time since the last one and since the attachment."""
    span = meter.heartbeat - before.heartbeat
    age = max(0.0, now - meter.heartbeat)
    if span > 0:
        reported = {
            IpuUtilisation: _share(meter.busy - before.busy, span),
            INPUT_WAIT: _share(meter.waiting - before.waiting, span),
        }
        # Waiting that is reported late was counted as busy before; the correction is spread over the next updates.
        before = dataclasses.replace(meter, busy=max(meter.busy, before.busy))
    activity = {**reported, HEARTBEAT_AGE: f"{age:.1f} s"}
    if age > STALE_S:
        activity.update({IpuUtilisation: _UNKNOWN, INPUT_WAIT: _UNKNOWN})
    activity[IpuUtilisationSession] = _share(meter.busy, meter.heartbeat - meter.attached)
    return (before, reported), activity


def _share(part: float, seconds: float) -> str:
    return f"{min(1.0, max(0.0, part / seconds)):.2%}" if seconds > 0 else _UNKNOWN


def _describe(ipu: int, owner: Optional[registry.Owner], activity: Dict[str, str]) -> Dict[str, str]:
    board = ipu // _IPUS_PER_BOARD
    device = {
        "id": str(ipu),
        "board ipu index": str(ipu % _IPUS_PER_BOARD),
        "target": "Fabric",
        BoardType: "M2000",
        "board variant": "emulated",
        "board serial number": f"emulated-{board:04d}",
        "ipu architecture": "ipu2",
        "clock": "1330MHz",
        "numa node": "0",
        **activity,
        IpuPower: _UNKNOWN,
        TotalBoardPower: _UNKNOWN,
        AverageBoardTemp: _UNKNOWN,
        AverageDieTemp: _UNKNOWN,
        "ipu error state": "no errors",
        "host link correctable error count": "0",
        "link correctable error count": "0",
        "ipuof partition id": "emulated",
        "ipuof host": socket.gethostname(),
        "ipuof routing id": "0",
        "ipuof routing type": "DNC",
        "ipuof server version": tf_ipu_dp.__version__,
        "firmware version": "emulated",
        "reconfigurable partition": "0",
        "remote buffers supported": "1",
    }
    if owner:
        device.update(
            {
                "user name": owner.user,
                "user process id": str(owner.pid),
                "user executable": owner.executable,
                "process start time": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(owner.started)),
                "number of replicas": str(owner.replicas),
            }
        )
    return device
