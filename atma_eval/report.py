"""Tables of records for the terminal, and the same figures as plain data. Needs no torch and no model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from atma_eval.metrics import METRICS, Row, estimate, is_retrieval, metrics_of, units
from atma_eval.stats import Estimate
from atma_eval.words import number, span

LABEL_WIDTH, COLUMN_WIDTH = 15, 14  # with the space between columns


def _pick(rows: list[Row], **fields: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in fields.items())]


def _distinct(rows: list[Row], name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


def _estimates(ok: list[Row], control: str) -> dict[str, Estimate]:
    """Every metric of the scored rows of one cell and control, but what contrasts two controls."""
    metrics = [METRICS[name] for name in metrics_of(ok[0]) if METRICS[name].contrast is None]
    return {metric.name: estimate(units(ok, metric, control).values(), metric) for metric in metrics}


def summary(rows: list[Row], curves: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """One object per model, task, length and control, in row order: estimates and counts of outcomes."""
    cells = []
    for model in _distinct(rows, "model"):
        for task in _distinct(_pick(rows, model=model), "task"):
            mine = _pick(rows, model=model, task=task)
            for length in sorted({row["length"] for row in mine}):
                for control in _distinct(_pick(mine, length=length), "control"):
                    cell_rows = _pick(mine, length=length, control=control)
                    ok = _pick(cell_rows, status="ok")
                    retrieval = is_retrieval(mine[0])
                    estimates = _estimates(ok, control) if ok else {}
                    cell: dict[str, Any] = {
                        "model": model,
                        "task": task,
                        "length": length,
                        "control": control,
                        "retrieval": retrieval,
                        "statuses": dict(Counter(row["status"] for row in cell_rows)),
                        "n": len(ok),
                        "num_documents": len({row["text_id"] for row in ok}),
                        **{name: estimate._asdict() for name, estimate in estimates.items()},
                    }
                    if curves and not retrieval:
                        cell["loss_by_position"] = _buckets(
                            [curves[row["key"]] for row in ok if row["key"] in curves], length
                        )
                    cells.append(cell)
    return cells


def _buckets(parts: list[tuple[np.ndarray, np.ndarray]], length: int) -> list[dict[str, Any]]:
    if not parts:
        return []
    sums, counts = (np.sum([part[i] for part in parts], axis=0) for i in (0, 1))
    return [
        {
            "first": 2**k,
            "last": min(2 ** (k + 1) - 1, length),
            "nll": float(sums[k] / counts[k]),
            "num_targets": int(counts[k]),
        }
        for k in range(len(counts))
        if counts[k]
    ]


# -- rendering --------------------------------------------------------------------------------------------

RETRIEVAL_LINES = (  # label, control, metric; the headline first, the controls below
    ("exact", "none", "exact"),
    ("first token", "none", "first_token"),
    ("token accuracy", "none", "token_accuracy"),
    ("nll (nats)", "none", "nll"),
    ("absent: exact", "absent", "exact"),
    ("absent: nll", "absent", "nll"),
    ("format: exact", "format", "exact"),
    ("format: nll", "format", "nll"),
)
LOSS_LINES = (
    ("nll (nats)", "none", "nll"),
    ("perplexity", "none", "perplexity"),
    ("bits per byte", "none", "bits_per_byte"),
)


def _cell(cell: dict[str, Any] | None, metric: str) -> Text:
    """The mean, and under it the interval; what went wrong where there is no mean."""
    if cell is None:
        return Text("…", style="dim")
    estimate = cell.get(metric)
    if estimate is None:
        statuses = [f"{count} {status}" for status, count in cell["statuses"].items() if status != "ok"]
        return Text(", ".join(statuses) or "…", style="red")
    mean, low, high, _ = estimate.values()
    text = Text("overflow" if mean is None else number(mean), style="bold" if metric == "exact" else "")
    if low is not None and high is not None:
        text.append(f"\n{span(low, high)}", style="dim")
    elif mean is not None:
        text.append("\nno interval", style="dim")
    return text


class Tables:
    """All cells as tables: lengths across, metrics and controls down, failures named below.

    As many lengths stand side by side as the console has room for; six fit 100 columns.
    """

    def __init__(self, cells: list[dict[str, Any]], chance: dict[str, dict[str, float]] | None = None):
        self._cells, self._chance = cells, chance or {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        step = max(1, (options.max_width - LABEL_WIDTH) // COLUMN_WIDTH)
        for model, task in dict.fromkeys((cell["model"], cell["task"]) for cell in self._cells):
            mine = [cell for cell in self._cells if (cell["model"], cell["task"]) == (model, task)]
            lengths = sorted({cell["length"] for cell in mine})
            for start in range(0, len(lengths), step):
                yield _table(model, task, mine, lengths[start : start + step])
            yield Text(self._footnote(task, mine), style="dim")
            by_position = _position_table(mine)
            if by_position is not None:
                yield by_position
        failures = _failures(self._cells)
        if failures:
            yield Text("not scored, and left out of the means:\n" + "\n".join(failures), style="red")

    def _footnote(self, task: str, cells: list[dict[str, Any]]) -> str:
        clusters = "documents" if max(cell["num_documents"] for cell in cells) != 1 else "trials, of one document"
        if not cells[0]["retrieval"]:
            return "95 % t intervals over documents."
        line = (
            f"95 % intervals: Wilson over trials for exact, first token, and all or none right; else t over {clusters}."
        )
        guess = self._chance.get(task)
        if guess:
            line += f" Chance: exact {guess['exact']:g}, first token {guess['first_token']:g}."
        return line


def _failures(cells: list[dict[str, Any]]) -> list[str]:
    lines = []
    for cell in cells:
        counts = [f"{count} {status}" for status, count in cell["statuses"].items() if status != "ok"]
        if counts:
            control = f" ({cell['control']})" if cell["control"] != "none" else ""
            lines.append(f"{cell['model']}, {cell['task']} at {cell['length']:,}{control}: {', '.join(counts)}")
    return lines


def _table(model: str, task: str, cells: list[dict[str, Any]], lengths: list[int]) -> Table:
    retrieval = cells[0]["retrieval"]
    at = {(cell["control"], cell["length"]): cell for cell in cells}
    table = Table(
        title=Text(f"{task} · {model}"), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("gap, tokens" if retrieval else "length, tokens", no_wrap=True)
    for length in lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    lines = RETRIEVAL_LINES if retrieval else LOSS_LINES
    for i, (label, control, metric) in enumerate(lines):
        ends = i + 1 == len(lines) or lines[i + 1][1] != control
        row = [_cell(at.get((control, length)), metric) for length in lengths]
        table.add_row(label, *row, end_section=ends and control in ("none", "format"))
    counted = [at.get(("none", length)) for length in lengths]
    for label, name in (("n (trials)", "n"), ("n (documents)", "num_documents")):
        if retrieval or name == "num_documents":
            table.add_row(label, *(str(cell[name]) if cell else "…" for cell in counted), style="dim")
    return table


def _position_table(cells: list[dict[str, Any]]) -> Table | None:
    """Loss by position at the longest length that has one, in two halves side by side."""
    last = max((cell for cell in cells if cell.get("loss_by_position")), key=lambda c: c["length"], default=None)
    if last is None:
        return None
    buckets = last["loss_by_position"]
    half = -(-len(buckets) // 2)
    table = Table(
        title=f"loss by position, length {last['length']:,}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    for _ in range(2):
        table.add_column("positions", no_wrap=True)
        table.add_column("nll", justify="right")
        table.add_column("targets", justify="right")
    for i in range(half):
        texts: list[str] = []
        for bucket in buckets[i::half]:
            span = (
                f"{bucket['first']:,}–{bucket['last']:,}"
                if bucket["last"] > bucket["first"]
                else f"{bucket['first']:,}"
            )
            texts += [span, number(bucket["nll"]), f"{bucket['num_targets']:,}"]
        table.add_row(*texts)
    return table
