"""One line of a table in numbers: estimates by column, the spread of its seeds, and what failed. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from atma_eval import stats
from atma_eval.compare.columns import By, Column, columns_of
from atma_eval.compare.pairing import Entry, Units, mean_over_seeds
from atma_eval.metrics import Metric, Row, estimate, is_retrieval
from atma_eval.stats import EffectiveLength, Estimate

SHARE = 0.85  # of the shortest length's score, which an effective length keeps


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One line in one column.

    Attributes:
        estimate: over all samples of all its seeds.
        seed_means: by seed, where the line is of several.
        statuses: counts of rows that were not scored.
        units: values by sample; of several seeds, means over them.
    """

    estimate: Estimate
    seed_means: dict[str, float]
    statuses: dict[str, int]
    units: Units

    @property
    def num_samples(self) -> int:
        """Trials or documents, each once whatever the number of seeds; of imported means those behind them."""
        return sum(unit.num_trials for unit in self.units.values())

    @property
    def num_documents(self) -> int | None:
        """``None`` for imported means: what they name is a whole data set."""
        if any(unit.sample_hash is None for unit in self.units.values()):
            return None
        return len({unit.document for unit in self.units.values()})

    @property
    def outcomes(self) -> str:
        """What became of rows that were not scored: ``2 oom, 1 nan``; empty where all were."""
        return ", ".join(f"{count} {status}" for status, count in self.statuses.items())


Cells = dict[tuple[str, Column], Cell]  # by the line's name


def cells_of(entry: Entry, rows: Sequence[Sequence[Row]], metric: Metric, by: By) -> dict[Column, Cell]:
    """Cells of one line by column, from the rows of each of its seeds; a column where all failed has one too."""
    by_seed = [columns_of(seed, mine, metric, by) for seed, mine in zip(entry.seeds, rows, strict=True)]
    failed: dict[Column, Counter[str]] = {}
    for row in (row for seed in rows for row in seed if row["control"] == "none" and row["status"] != "ok"):
        for column in _columns_of_failure(row, by, by_seed):
            failed.setdefault(column, Counter())[row["status"]] += 1
    cells = {}
    for column in dict.fromkeys([*(c for seed in by_seed for c in seed), *failed]):
        seeds = {s.label: found[column] for s, found in zip(entry.seeds, by_seed, strict=True) if column in found}
        units = list(seeds.values())
        cells[column] = Cell(
            estimate=_pooled(units, metric),
            seed_means=_seed_means(seeds, metric) if len(entry.seeds) > 1 else {},
            statuses=dict(failed.get(column, {})),
            units=mean_over_seeds(units, retrieval=is_retrieval(rows[0][0])),
        )
    return cells


def _columns_of_failure(row: Row, by: By, by_seed: list[dict[Column, Units]]) -> list[Column]:
    if by in ("length", "depth"):
        return [Column(row["length"], row["depth"] if by == "depth" else None)]
    known = {column for seed in by_seed for column in seed if column.length == row["length"]}
    return list(known) or [Column(row["length"], 1 if by == "position" else 0)]


def _pooled(seeds: list[Units], metric: Metric) -> Estimate:
    """Over the samples of all seeds; a document is one cluster in all of them, for more seeds read no more text."""
    together = [unit for units in seeds for unit in units.values()]
    if len(seeds) > 1 and metric.kind in ("proportion", "share"):
        values = [[unit.value for unit in units.values()] for units in seeds]
        if metric.kind == "proportion":
            return stats.pooled_proportion(values)
        documents = [[unit.document for unit in units.values()] for units in seeds]
        return stats.pooled_seeds(values, documents, bounded=True)
    return estimate(together, metric)


def _seed_means(seeds: dict[str, Units], metric: Metric) -> dict[str, float]:
    means = {label: estimate(units.values(), metric).mean for label, units in seeds.items()}
    return {label: mean for label, mean in means.items() if mean is not None}


def effective_length(cells: dict[Column, Cell], metric: Metric) -> EffectiveLength | None:
    """How far one model keeps its score, from its cells by length; ``None`` but for scores between 0 and 1."""
    if metric.kind not in ("proportion", "share"):
        return None
    by_length = {column.length: cell.units for column, cell in cells.items()}
    trials = {(key.depth, key.trial): unit.document for units in by_length.values() for key, unit in units.items()}
    if not trials:
        return None
    values = [{(key.depth, key.trial): unit.value for key, unit in units.items()} for units in by_length.values()]
    table = [[mine.get(trial) for trial in trials] for mine in values]
    return stats.effective_length(list(by_length), table, list(trials.values()), share=SHARE)
