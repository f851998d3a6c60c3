"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PARTIAL = ".partial"  # suffix of a file that is being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write to. What is there at the end takes the place of ``path``.

    After a kill in the middle, and after an exception (which also takes the part away again), ``path`` is what it
    was before.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()
