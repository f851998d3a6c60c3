"""A comparison as plain data: JSON with everything, CSV with one line per model and column. Needs no torch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from atma_eval.compare.published import published_rows
from atma_eval.compare.sheets import main_sheet
from atma_eval.compare.tables import Comparison, Table
from atma_eval.reference import texts


def as_json(comparison: Comparison, *, against_paper: bool = False) -> str:
    return json.dumps(as_data(comparison, against_paper=against_paper), indent=1, allow_nan=False) + "\n"


def as_data(comparison: Comparison, *, against_paper: bool = False) -> dict[str, Any]:
    """Everything as plain data: no key is ever missing, ``None`` where there is nothing."""
    data = {
        "notes": list(comparison.notes),
        "num_tests": comparison.num_tests,
        "adjustment": "Benjamini-Hochberg over num_tests",
        "tables": [
            {
                "task": table.task,
                "protocol": table.protocol,
                "metric": table.metric.name,
                "by": table.by,
                "length": table.length,
                "baseline": table.baseline,
                "higher_is_better": table.metric.higher_is_better,
                "cells": list(_cells(table)),
                "effective_lengths": {name: of._asdict() for name, of in table.effective_lengths.items()},
                "footnotes": list(main_sheet(table, comparison).footnotes),
            }
            for table in comparison.tables
        ],
    }
    if against_paper:
        data |= {"published": list(_published(comparison)), "published_texts": texts()}
    return data


def _cells(table: Table) -> Iterator[dict[str, Any]]:
    """One flat object per model and column."""
    for (name, column), cell in sorted(table.cells.items(), key=lambda item: table.columns.index(item[0][1])):
        contrast, means = table.contrasts.get((name, column)), list(cell.seed_means.values())
        difference = contrast.difference if contrast else None
        yield {
            "model": name,
            "length": column.length,
            "part": column.part,
            "mean": cell.estimate.mean,
            "low": cell.estimate.low,
            "high": cell.estimate.high,
            "n": cell.estimate.n,
            "num_samples": cell.num_samples,
            "num_documents": cell.num_documents,
            "num_failed": sum(cell.statuses.values()),
            "num_seeds": max(1, len(means)),
            "seed_min": min(means, default=None),
            "seed_max": max(means, default=None),
            "best": table.is_best(name, column),
            "diff": difference.mean if difference else None,
            "diff_low": difference.low if difference else None,
            "diff_high": difference.high if difference else None,
            "p": difference.p if difference else None,
            "p_adjusted": contrast.p_adjusted if contrast else None,
            "resolved": contrast.resolved if contrast else None,
            "smallest_at_80_power": contrast.smallest if contrast else None,
            "num_pairs": difference.n if difference else None,
            "num_left_out": contrast.num_left_out if contrast else None,
        }


def _published(comparison: Comparison) -> Iterator[dict[str, Any]]:
    for table in comparison.tables:
        metric, rows = published_rows(table) if table.by == "length" else (None, [])
        for row in rows:
            for length in row.values:
                of = row.estimate(length)
                if of is not None:
                    yield {
                        "task": table.task,
                        "metric": metric,
                        "model": row.name,
                        "length": length,
                        **of._asdict(),
                        "num_documents": row.num_documents,
                        "published_in": row.source,
                        "notes": list(row.notes),
                    }


def as_csv(comparison: Comparison, *, against_paper: bool = False) -> str:
    """One line per task, model and column; ``source`` tells runs from published figures."""
    rows: list[dict[str, Any]] = []
    for table in comparison.tables:
        shared = {"source": "run", "task": table.task, "protocol": table.protocol, "metric": table.metric.name}
        rows += [{**shared, "by": table.by, "baseline": table.baseline, **cell} for cell in _cells(table)]
    fields = list(rows[0])
    if against_paper:
        for row in _published(comparison):
            rows.append({"source": row["published_in"], "by": "length", **{k: row[k] for k in fields if k in row}})
    out = io.StringIO()
    writer = csv.DictWriter(out, fields, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
