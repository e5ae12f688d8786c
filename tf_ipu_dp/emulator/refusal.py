"""What the emulator does not do: the name is there, so that programs import, and calling it says why not."""

from __future__ import annotations

from typing import Any

REASON = "_why_refused"


def refused(name: str, why: str) -> Any:
    """Returns a stand-in for a class or function of the SDK. Calling it, or a class made from it, is refused."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"The emulator has no {name}: {why}.")

    short = name.rsplit(".", 1)[-1]
    return type(short, (), {"__new__": refuse, "__doc__": f"Refused: {why}.", REASON: why})
