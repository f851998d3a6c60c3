"""A terminal that prints names as they are: no markup, no emoji codes, no guessed colours in a user's text."""

from __future__ import annotations

from typing import Any

from rich.console import Console


def plain_console(**options: Any) -> Console:
    return Console(markup=False, emoji=False, highlight=False, **options)
