"""The one exception that stands for "the request cannot be met": shown without a traceback, exit code 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """What was wrong and with which value, and a hint at what would work."""

    exit_code = 2

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class ComputationError(UserError):
    """The request was sound, but its computation failed: out of memory, or numbers that are not finite."""

    exit_code = 1


def did_you_mean(value: str, allowed: Iterable[str]) -> str:
    """A hint that names the closest allowed values, or all of them."""
    allowed = sorted(allowed)
    close = difflib.get_close_matches(value, allowed, n=3, cutoff=0.5)
    if close:
        return f"did you mean {' or '.join(close)}? allowed: {', '.join(allowed)}"
    return f"allowed: {', '.join(allowed)}" if allowed else "there are none"
