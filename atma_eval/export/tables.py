"""CSV and Parquet: ``rows``, the records as they are, and ``cells``, the figures with their intervals.

Types are the same whatever a run holds, so that files of two runs can be laid one under the other. In CSV a missing
value is an empty field, and a list is JSON. Mind that pandas takes the status ``nan`` for a missing value unless told
otherwise: `READ_CSV`.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from atma_eval.errors import UserError
from atma_eval.export.cells import Cell, cells_of, number_or_none
from atma_eval.records import FIELDS
from atma_eval.runs import ModelRows

READ_CSV = "pandas.read_csv(path, keep_default_na=False, na_values=[''])"

_FIELDS_OF = {  # the rest is text
    "integer": "schema length gap context_tokens num_bytes trial seed num_targets peak_memory_bytes".split(),
    "number": "depth nll_sum token_accuracy elapsed_s".split(),
    "flag": "first_token_correct exact".split(),
    "integers": "target_ids predicted_ids".split(),
    "numbers": ["nll"],
}
ROW_TYPES = {name: next((kind for kind, names in _FIELDS_OF.items() if name in names), "text") for name in FIELDS}
CELL_TYPES = {
    "model": "text",
    "task": "text",
    "protocol": "text",
    "length": "integer",
    "control": "text",
    "metric": "text",
    "higher_is_better": "flag",
    "mean": "number",
    "low": "number",
    "high": "number",
    "n": "integer",
    "interval": "text",
    "num_documents": "integer",
    "num_failed": "integer",
}
_LIST_ITEMS = {"integers": "integer", "numbers": "number"}
_WORDS = {"integer": "a whole number", "number": "a number", "flag": "true or false", "text": "text"}


def check_types(rows: Iterable[dict[str, Any]]) -> None:
    """Refuse a row edited by hand, of which a field no longer has its type: a column has one."""
    for row in rows:
        for name, kind in ROW_TYPES.items():
            value = row[name]
            if value is not None and not _has_type(value, kind):
                words = _WORDS.get(kind) or f"a list, each {_WORDS[_LIST_ITEMS[kind]]}"
                raise UserError(f"row {row['key']}: {name} is {value!r}, not {words} or null", "restore the line")


def _has_type(value: Any, kind: str) -> bool:
    if kind in _LIST_ITEMS:
        return isinstance(value, list) and all(_has_type(item, _LIST_ITEMS[kind]) for item in value)
    if kind == "number" and type(value) is float:
        return math.isfinite(value)
    if kind in ("integer", "number"):
        return type(value) is int and abs(value) < 2**63
    return type(value) is (bool if kind == "flag" else str)


def csv_files(models: list[ModelRows]) -> Iterator[tuple[str, bytes]]:
    yield "rows.csv", _csv(_rows(models), ROW_TYPES)
    yield "cells.csv", _csv(_cells(models), CELL_TYPES)


def parquet_files(models: list[ModelRows]) -> Iterator[tuple[str, bytes]]:
    yield "rows.parquet", _parquet(_rows(models), ROW_TYPES)
    yield "cells.parquet", _parquet(_cells(models), CELL_TYPES)


def _rows(models: list[ModelRows]) -> list[dict[str, Any]]:
    return [row for model in models for row in model.rows]


def _cells(models: list[ModelRows]) -> list[dict[str, Any]]:
    return [cell_row(cell) for model in models for cell in cells_of(model)]


def cell_row(cell: Cell) -> dict[str, Any]:
    """A figure as a flat row, with the columns of `CELL_TYPES`."""
    mean, low, high, n = cell.estimate
    return {
        "model": cell.model,
        "task": cell.task,
        "protocol": cell.protocol,
        "length": cell.length,
        "control": cell.control,
        "metric": cell.metric.name,
        "higher_is_better": cell.metric.higher_is_better,
        "mean": number_or_none(mean),
        "low": number_or_none(low),
        "high": number_or_none(high),
        "n": n,
        "interval": cell.method,
        "num_documents": cell.num_documents,
        "num_failed": cell.num_failed,
    }


def _csv(rows: list[dict[str, Any]], types: dict[str, str]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(types)
    writer.writerows([_csv_field(row[name], kind) for name, kind in types.items()] for row in rows)
    return text.getvalue().encode()


def _csv_field(value: Any, kind: str) -> str:
    if value is None:
        return ""
    if kind == "number":
        return repr(float(value))
    return value if kind == "text" else json.dumps(value)


def _parquet(rows: list[dict[str, Any]], types: dict[str, str]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrow = {
        "integer": pa.int64(),
        "number": pa.float64(),
        "flag": pa.bool_(),
        "text": pa.string(),
        "integers": pa.list_(pa.int64()),
        "numbers": pa.list_(pa.float64()),
    }
    columns = {name: pa.array([row[name] for row in rows], type=arrow[kind]) for name, kind in types.items()}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()
