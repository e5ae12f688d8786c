"""Reads all IPUs of the Poplar SDK or of the emulator, used by any process. No TensorFlow."""

from __future__ import annotations

import time
from typing import Dict, List, Mapping, Optional, Tuple

from tf_ipu_dp import sdk
from tf_ipu_dp.monitoring import clients, devices
from tf_ipu_dp.monitoring.clients import DeviceFailure
from tf_ipu_dp.monitoring.devices import DeviceReading, Ipu, TelemetryError

_NO_IPU = "gcipuinfo finds no IPU"


class DeviceReader:
    """Reads all IPUs and never raises: errors are the `problem` of the reading."""

    def __init__(
        self,
        sdk_name: str,
        client: clients.Client,
        note: Optional[str] = None,
        period_s: float = 0.0,
        failure: Optional[str] = None,
    ) -> None:
        """`note`: why these are not the Poplar SDK's IPUs. `failure`: the same, if the SDK is enabled but fails."""
        self.sdk_name, self.note, self.failure = sdk_name, note, failure
        self._client, self._period_s = client, period_s
        self._known: Tuple[Ipu, ...] = ()
        self._last: Optional[Tuple[float, DeviceReading]] = None

    @property
    def emulated(self) -> bool:
        return sdk.is_emulated(self.sdk_name)

    def read(self) -> DeviceReading:
        """Returns the IPUs. IPUs of an earlier reading that do not answer now are listed with the reason.

        A second call within the period returns the same reading.
        """
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= self._period_s:
            self._last = (now, self._read())
        return self._last[1]

    def read_faults(self) -> List[str]:
        """Returns the faults of gcipuinfo's health check as sentences. TelemetryError if the check fails."""
        return devices.parse_health(self._client.check_health())

    def read_event(self, path: str) -> Dict[str, str]:
        """Returns the last event record of an application, empty if there is none. TelemetryError as above."""
        return dict(self._client.read_event(path))

    def close(self) -> None:
        """Ends the child process, if there is one."""
        self._client.close()

    def _read(self) -> DeviceReading:
        now = time.time()
        try:
            answers = self._client.read_devices()
        except TelemetryError as error:
            return DeviceReading(now, tuple(_without_values(ipu, str(error)) for ipu in self._known), str(error))
        answering = {
            index: devices.parse_device(answer)
            for index, answer in enumerate(answers)
            if not isinstance(answer, DeviceFailure)
        }
        failed = {
            index: self._describe_failed(answer, index, len(answers), answering)
            for index, answer in enumerate(answers)
            if isinstance(answer, DeviceFailure)
        }
        self._known = tuple(ipu for _, ipu in sorted({**answering, **failed}.items(), key=lambda item: item[0]))
        return DeviceReading(now, self._known, None if self._known else _NO_IPU)

    def _describe_failed(self, failure: DeviceFailure, index: int, count: int, answering: Mapping[int, Ipu]) -> Ipu:
        """Returns the record of a device that fails. Its id is None if it could only be guessed."""
        number = devices.parse_id(failure.id)
        if number is not None:
            known = next((ipu for ipu in self._known if ipu.id == number), Ipu(id=number))
        elif len(self._known) == count:
            known = self._known[index]
        else:
            # At the first reading, the other devices show whether ids equal list positions.
            positional = not self._known and all(ipu.id == place for place, ipu in answering.items())
            known = Ipu(id=index if positional else None)
        return _without_values(known, devices.shorten(failure.reason))


def open_reader(choice: str = "auto") -> DeviceReader:
    """Returns a reader of the Poplar SDK's devices or of the emulator's. TelemetryError if --sdk=poplar fails."""
    missing = failure = None
    if choice != "emulator":
        missing = sdk.explain_missing_gcipuinfo()
        if missing is None:
            # Slightly below the period: a monitor that reads once per second must not get the old reading.
            reader = DeviceReader("poplar", clients.SubprocessClient(), period_s=0.9 * devices.MIN_PERIOD_S)
            first = reader.read()
            if first.problem is None:
                return reader
            reader.close()
            missing = first.problem
            failure = None if missing == _NO_IPU else missing
        if choice == "poplar":
            raise TelemetryError(missing)
    client = clients.InProcessClient(sdk.load_emulated_gcipuinfo())
    return DeviceReader("emulator", client, missing, failure=failure)


def _without_values(known: Ipu, problem: str) -> Ipu:
    """Returns an IPU with only its constant attributes, and the reason why the others are not known."""
    return Ipu(**{name: getattr(known, name) for name in devices.CONSTANT}, problem=problem)
