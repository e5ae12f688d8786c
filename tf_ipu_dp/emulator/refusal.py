"""Names of the SDK that the emulator refuses: programs can import them, but calling one raises the reason."""

from __future__ import annotations

from typing import Any

REASON = "_why_refused"


def refused(name: str, why: str) -> Any:
    """Returns a placeholder for a class or function of the SDK. Calling it, or a subclass of it, is refused."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"The emulator has no {name}: {why}.")

    short = name.rsplit(".", 1)[-1]
    return type(short, (), {"__new__": refuse, "__doc__": f"Refused: {why}.", REASON: why})
