"""Published figures beside ours: one sheet, and everything that must be said with it. Needs no torch."""

from __future__ import annotations

from typing import Any

from atma_eval.compare.cells import cells_of
from atma_eval.compare.sheets import NOTHING, Line, Sheet, Text, interval_text
from atma_eval.compare.tables import Table
from atma_eval.metrics import METRICS, Metric
from atma_eval.reference import Published, published_metric, rows_like, texts
from atma_eval.stats import Estimate
from atma_eval.words import plural, sentence


def published_rows(table: Table) -> tuple[str | None, list[Published]]:
    """The published metric that comes nearest to the table's, and its rows for the architectures in the table."""
    metric = published_metric(table.metric.name, retrieval=table.retrieval) if _same_probe(table) else None
    if metric is None:
        return None, []
    distractor = any("distractor" in entry.name for entry in table.entries)
    return metric, rows_like(_configs(table), metric, distractor=distractor)


def _same_probe(table: Table) -> bool:
    """Whether the task is one of the two that the figures are of: a needle before a gap, or the loss of prefixes."""
    return table.of_gaps if table.retrieval else "prefix" in table.protocol


def published_sheet(table: Table) -> Sheet:
    """Ours under the published metric, then theirs, at all lengths of both, and below everything that differs."""
    metric_name, rows = published_rows(table)
    said, missing = texts(), []
    if not _same_probe(table):
        missing.append(said["missing"]["other_probe"])
    elif table.retrieval and table.metric.name == "nll":
        missing.append(said["missing"]["needle_nll"])
    elif table.metric.name in said["missing"]:
        missing.append(said["missing"][table.metric.name])
    if metric_name is None:
        return Sheet(
            title=f"{table.task} · published", stub="", heads=(), sections=(), footnotes=(sentence(missing[0]),)
        )
    ours = _ours(table, METRICS[metric_name])
    lengths = sorted({n for values in ours.values() for n in values} | {n for row in rows for n in row.values})
    sections = [
        tuple(
            Line(label=name, cells=tuple(_published_text(values.get(n)) for n in lengths))
            for name, values in ours.items()
        ),
        (
            Line(label="published, not comparable", heading=True),
            *(Line(label=row.name, cells=tuple(_published_text(row.estimate(n)) for n in lengths)) for row in rows),
        ),
    ]
    kinds = {(c.get("attn_type"), c.get("mem_enabled")) for c in _configs(table)}
    if ("none", True) in kinds:
        missing.append(said["missing"]["memory_only"])
    notes = sorted({note for row in rows for note in row.notes})
    return Sheet(
        title=f"{table.task} · {METRICS[metric_name].label} · published figures beside ours",
        stub="tokens, each model's",
        heads=tuple(f"{n:,}" for n in lengths),
        sections=tuple(section for section in sections if section),
        footnotes=(
            *(sentence(text) for text in missing),
            "Not paired and not tested, for nearly everything differs. " + " ".join(map(sentence, said["differs"])),
            *(f"{note}: {said['notes'][note]}" for note in notes),
            f"Source: {said['source']} {_sources(rows)}",
        ),
    )


def _sources(rows: list[Published]) -> str:
    """Each file or paper table once, with its rows and what they rest on."""
    by_source: dict[str, list[str]] = {}
    for row in rows:
        rests = (
            plural(row.num_trials, "trial") if row.metric == "token_accuracy" else plural(row.num_documents, "document")
        )
        by_source.setdefault(f"{row.source}, {rests}", []).append(row.name)
    return "; ".join(f"{', '.join(names)}: {source}" for source, names in by_source.items()) + "."


def _configs(table: Table) -> list[dict[str, Any]]:
    seeds = [seed for entry in table.entries for seed in entry.seeds if not entry.imported]
    return [seed.details["config"] for seed in seeds if isinstance(seed.details.get("config"), dict)]


def _published_text(of: Estimate | None) -> Text:
    if of is None or of.mean is None:
        return Text(main=NOTHING)
    text = interval_text(of)
    return text if text.under != "no interval" else Text(main=text.main)


def _ours(table: Table, metric: Metric) -> dict[str, dict[int, Estimate]]:
    """Seeds pooled as in the table itself, whatever its metric."""
    found: dict[str, dict[int, Estimate]] = {}
    for entry in table.entries:
        rows = [[row for row in seed.rows if row["task"] == table.task] for seed in entry.seeds]
        cells = cells_of(entry, rows, metric, "length")
        found[entry.name] = {column.length: cell.estimate for column, cell in cells.items()}
    return found
