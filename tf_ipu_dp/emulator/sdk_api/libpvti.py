"""`libpvti`: the SDK's trace points for its own profiler, which this machine does not have. Nothing is recorded."""

from __future__ import annotations

from typing import Any


class TraceChannel:
    """A named stream of trace points."""

    def __init__(self, name: str) -> None:
        self.name = name


def createTraceChannel(name: str) -> TraceChannel:  # noqa: N802 the SDK's name
    """Returns a channel to give to trace points."""
    return TraceChannel(name)


class Tracepoint:
    """A labelled span of time: `with Tracepoint(channel, label):`, or `begin` and `end`."""

    def __init__(self, channel: TraceChannel, label: str) -> None:
        self.channel, self.label = channel, label

    def __enter__(self) -> Tracepoint:
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    @staticmethod
    def begin(channel: TraceChannel, label: str) -> None:
        """Begins a span."""

    @staticmethod
    def end(channel: TraceChannel, label: str) -> None:
        """Ends a span."""


__all__ = ["TraceChannel", "Tracepoint", "createTraceChannel"]
