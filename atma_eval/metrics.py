"""What a row says, metric by metric: one value per scored sample, and the estimate of many. Needs no torch.

A *unit* is what counts as one observation: a trial of a retrieval task, a document of a loss. Units of two models
pair when their keys and sample hashes agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from atma_eval.errors import UserError, did_you_mean
from atma_eval.stats import Estimate, clustered_mean, clustered_share, ratio_mean, wilson

Row = dict[str, Any]
Kind = Literal["proportion", "share", "mean", "ratio", "exponential"]
MAX_EXPONENT = 700.0  # beyond it the perplexity is no longer a number; the loss still is


class UnitKey(NamedTuple):
    """What two models must share for their values to be of the same thing."""

    length: int
    depth: float | None
    trial: int | None
    text_id: str


class Unit(NamedTuple):
    """One observation: a value, its weight (bytes for bits per byte, else 1), its document and its sample's hash.

    ``num_trials`` is 1, and more for an imported row, which is the mean of so many trials nobody kept apart.
    """

    value: float
    weight: float
    document: str
    sample_hash: str | None
    num_trials: int = 1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure made of rows.

    Attributes:
        name: as in ``--metric`` and in JSON.
        label: as in tables.
        kind: how values become an estimate: ``proportion`` (0 or 1 each), ``share`` (between 0 and 1), ``mean``,
            ``ratio`` (weighted by bytes), ``exponential`` (exp of a mean).
        higher_is_better: direction of improvement.
        value: of one row; ``None`` where the row has none. ``contrast`` metrics take the row of that control too.
        contrast: the control whose row is subtracted from.
    """

    name: str
    label: str
    kind: Kind
    higher_is_better: bool
    value: Callable[[Row], float | None]
    contrast: str | None = None


def _nll(row: Row) -> float | None:
    return None if row["nll_sum"] is None else row["nll_sum"] / row["num_targets"]


def _bits_per_byte(row: Row) -> float | None:
    return row["nll_sum"] / math.log(2) / row["num_bytes"] if row["num_bytes"] and row["nll_sum"] is not None else None


def _field(name: str) -> Callable[[Row], float | None]:
    return lambda row: None if row[name] is None else float(row[name])


def _exact(row: Row) -> float | None:
    if row.get("num_exact") is not None:  # an imported row: so many of its trials
        return row["num_exact"] / row["num_trials"]
    return None if row["exact"] is None else float(row["exact"])


METRICS = {
    metric.name: metric
    for metric in (
        Metric(name="exact", label="exact", kind="proportion", higher_is_better=True, value=_exact),
        Metric(
            name="first_token",
            label="first token",
            kind="proportion",
            higher_is_better=True,
            value=_field("first_token_correct"),
        ),
        Metric(
            name="token_accuracy",
            label="token accuracy",
            kind="share",
            higher_is_better=True,
            value=_field("token_accuracy"),
        ),
        Metric(name="nll", label="nll (nats)", kind="mean", higher_is_better=False, value=_nll),
        # what the right value gains over another of the same form in the same context; 0 for a model that has
        # only learnt the form (protocols, W5)
        Metric(name="uplift", label="uplift (nats)", kind="mean", higher_is_better=True, value=_nll, contrast="format"),
        Metric(name="bits_per_byte", label="bits per byte", kind="ratio", higher_is_better=False, value=_bits_per_byte),
        Metric(name="perplexity", label="perplexity", kind="exponential", higher_is_better=False, value=_nll),
    )
}
RETRIEVAL_METRICS = ("exact", "first_token", "token_accuracy", "nll", "uplift")
LOSS_METRICS = ("nll", "perplexity", "bits_per_byte")


def is_retrieval(row: Row) -> bool:
    """Whether the row is of a task that asks for a value, rather than of a loss over text."""
    return row["gap"] is not None or row["depth"] is not None


def metrics_of(row: Row) -> tuple[str, ...]:
    """Names of the metrics the row's task has, the headline first."""
    return RETRIEVAL_METRICS if is_retrieval(row) else LOSS_METRICS


def metric_for(row: Row, name: str | None) -> Metric:
    """The metric called ``name`` (default: the headline), if the row's task has it."""
    names = metrics_of(row)
    if name is not None and name not in names:
        where = f"task {row['task']} has no metric {name!r}" if name in METRICS else f"unknown metric {name!r}"
        raise UserError(where, did_you_mean(name, names))
    return METRICS[name or names[0]]


def units(rows: Iterable[Row], metric: Metric, control: str = "none") -> dict[UnitKey, Unit]:
    """Values of the rows that were scored and have one, by what they are of; other rows are left out."""
    rows = [row for row in rows if row["status"] == "ok"]
    other = {_key(row): row for row in rows if row["control"] == metric.contrast} if metric.contrast else {}
    found = {}
    for row in rows:
        if row["control"] != control:
            continue
        value = metric.value(row)
        if value is not None and metric.contrast:
            against = metric.value(other[_key(row)]) if _key(row) in other else None
            value = None if against is None else against - value
        if value is not None:
            weight = float(row["num_bytes"]) if metric.kind == "ratio" else 1.0
            trials = row.get("num_trials") or 1
            found[_key(row)] = Unit(value, weight, row["text_id"], row["sample_hash"], trials)
    return found


def _key(row: Row) -> UnitKey:
    return UnitKey(row["length"], row["depth"] if row["control"] != "absent" else None, row["trial"], row["text_id"])


def estimate(values: Iterable[Unit], metric: Metric) -> Estimate:
    """Mean and 95 % interval: Wilson over trials for proportions, else t over documents.

    A mean of trials that nobody kept apart (an imported figure) gets Wilson's interval if it is a share, with as many
    observations as trials, which is cautious; another has no interval.
    """
    found = list(values)
    x, documents = [unit.value for unit in found], [unit.document for unit in found]
    if any(unit.num_trials > 1 for unit in found):
        return _estimate_of_means(found, metric)
    if metric.kind == "proportion":
        return wilson(round(sum(x)), len(x))
    if metric.kind == "share":
        return clustered_share(x, documents)
    if metric.kind == "ratio":
        return ratio_of_sums(found)
    mean = clustered_mean(x, documents)
    return exponential(mean) if metric.kind == "exponential" else mean


def ratio_of_sums(found: list[Unit]) -> Estimate:
    """Weighted mean of values, with a t interval over documents."""
    weights, documents = [unit.weight for unit in found], [unit.document for unit in found]
    return ratio_mean([unit.value * unit.weight for unit in found], weights, documents)


def _estimate_of_means(found: list[Unit], metric: Metric) -> Estimate:
    trials = sum(unit.num_trials for unit in found)
    mean = sum(unit.value * unit.num_trials for unit in found) / trials
    if metric.kind in ("proportion", "share"):
        return wilson(mean * trials, trials)
    alone = Estimate(mean, None, None, trials)
    return exponential(alone) if metric.kind == "exponential" else alone


def exponential(of: Estimate) -> Estimate:
    """exp of a mean and of its bounds; ``None`` where it passes what a float holds."""

    def exp(value: float | None) -> float | None:
        return None if value is None or value > MAX_EXPONENT else math.exp(value)

    return Estimate(exp(of.mean), exp(of.low), exp(of.high), of.n)
