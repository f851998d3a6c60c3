"""Who is compared with whom: seeds of one recipe, and which samples of two models are the same. Needs no torch.

Two models pair where their samples have one key and one hash; `unlike` tells why two may not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from atma_eval.metrics import Unit, UnitKey
from atma_eval.runs import ModelRows

Units = dict[UnitKey, Unit]
_SEED = re.compile(r"-s\d+$")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a table: a model, or the seeds of one recipe."""

    name: str
    seeds: tuple[ModelRows, ...]

    @property
    def imported(self) -> bool:
        return any(seed.run.imported for seed in self.seeds)

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer; ``None`` where no manifest tells."""
        return next((seed.tokenizer for seed in self.seeds if seed.tokenizer), None)


def entries(models: Sequence[ModelRows], *, pool: bool = True) -> tuple[list[Entry], list[str]]:
    """Models of one task as lines of a table, seeds of one recipe in one line, and notes on what was not pooled.

    Seeds are told by their labels, which are equal up to ``-s2`` and the like, and their manifests, whose
    configurations must be equal where there are any.
    """
    recipes: dict[tuple[str, str], list[ModelRows]] = {}
    recipe_of = {model.name: _SEED.sub("", model.label) if pool else model.label for model in models}
    folders = {(recipe_of[m.name], m.run.path): m.name.removeprefix(m.label) for m in models if m.name != m.label}
    for model in models:  # where a run's folder tells one seed from another run's, it is said of all seeds of that run
        recipe = recipe_of[model.name]
        recipes.setdefault((recipe, folders.get((recipe, model.run.path), "")), []).append(model)
    found, notes = [], []
    for (recipe, folder), seeds in recipes.items():
        why_not = _not_one_recipe(seeds)
        if len(seeds) == 1 or why_not:
            found += [Entry(name=model.name, seeds=(model,)) for model in seeds]
            if why_not:
                notes.append(f"{', '.join(model.name for model in seeds)} are not pooled: {why_not}")
        else:
            found.append(Entry(name=f"{recipe}{folder} ({len(seeds)} seeds)", seeds=tuple(seeds)))
    return found, notes


def _not_one_recipe(seeds: list[ModelRows]) -> str | None:
    for a, b in combinations(seeds, 2):
        for name, words in (("config", "their configurations differ"), ("tokenizer_fingerprint", "other tokenizers")):
            if {name} <= a.details.keys() & b.details.keys() and a.details[name] != b.details[name]:
                return words
        if any(len({a.window(task), b.window(task)} - {None}) > 1 for task in a.tasks):
            return "their windows differ"
        if a.details.get("fingerprint") and a.details["fingerprint"] == b.details.get("fingerprint"):
            return "their weights are the same"
    return None


# -- pairs ----------------------------------------------------------------------------------------------------


def sample_key(key: UnitKey, retrieval: bool) -> UnitKey:
    """What names a sample: a document of a loss is the same one whichever trial it was."""
    return key if retrieval else key._replace(trial=None)


class Pairs(NamedTuple):
    """Values of the samples that two lines share, in one order; weights and documents are of the samples."""

    a: list[float]
    b: list[float]
    weights: list[float]
    documents: list[str]
    num_left_out: int  # samples that only one side has


def pair(a: Units, b: Units, *, retrieval: bool) -> Pairs:
    """Pair the units of one column; what was imported as a mean, without a hash, is left out."""
    mine, theirs = (
        {sample_key(key, retrieval): unit for key, unit in side.items() if unit.sample_hash is not None}
        for side in (a, b)
    )
    common = [key for key in mine if key in theirs and mine[key].sample_hash == theirs[key].sample_hash]
    return Pairs(
        a=[mine[key].value for key in common],
        b=[theirs[key].value for key in common],
        weights=[mine[key].weight for key in common],
        documents=[mine[key].document for key in common],
        num_left_out=len(mine) + len(theirs) - 2 * len(common),
    )


def mean_over_seeds(seeds: Sequence[Units], *, retrieval: bool) -> Units:
    """One value per sample that every seed has: the mean over seeds. Seeds without any are left aside."""
    present = [units for units in seeds if units]
    if len(present) < 2:
        return dict(present[0]) if present else {}
    by_sample = [{sample_key(key, retrieval): unit for key, unit in units.items()} for units in present]
    return {
        key: unit._replace(value=sum(units[sample_key(key, retrieval)].value for units in by_sample) / len(by_sample))
        for key, unit in present[0].items()
        if all(sample_key(key, retrieval) in units for units in by_sample)
    }


def comparable(a: Entry, b: Entry) -> bool:
    """Whether samples of both may be paired at all: read from runs of ours, and of one tokenizer where that is told."""
    return not (a.imported or b.imported or (a.tokenizer and b.tokenizer and a.tokenizer != b.tokenizer))
