"""The error of a user's mistake, which every command shows as a sentence."""

from __future__ import annotations


class UsageError(ValueError):
    """What the user asked for cannot be done. Each sentence is shown to the user unchanged."""

    def __init__(self, *sentences: str) -> None:
        super().__init__("\n".join(sentences))
        self.sentences = sentences
