"""What must be said of a whole task, above its tables: what is missing, and what sets its models apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atma_eval.compare.columns import By
from atma_eval.compare.pairing import Entry
from atma_eval.compare.unlike import headline_metrics, tokenizer_notes, window_notes
from atma_eval.metrics import Metric, Row

MISSING: dict[By, str] = {  # why a task has no table
    "length": "no row has the metric; uplift takes the format control",
    "depth": "it takes needles at several depths",
    "position": "it takes a retrieval task",
    "bucket": "it takes losses with curves.npz beside the records, and a length that all models have",
}


def task_notes(
    task: str, found: Sequence[Entry], row: Row, shown: Metric | None, asked: str | None, by: By
) -> Iterator[str]:
    """``row`` is any of the task, ``shown`` the metric of its tables, if there are any, ``asked`` the one asked for."""
    models = [seed for entry in found for seed in entry.seeds]
    headline = headline_metrics(models, row)[0]
    if shown is None:
        yield f"{task} is left out: {MISSING[by]}"
    elif asked is None and by == "length" and shown.name != headline:
        yield f"no row of {task} has {headline}: {shown.name} is shown"
    if shown is not None:
        yield from tokenizer_notes(models, task, shown)
    yield from window_notes(models, task)
    types = {str(model.details["dtype"]) for model in models if model.details.get("dtype")}
    if len(types) > 1:
        yield f"models of {task} were measured in {' and '.join(sorted(types))}"
