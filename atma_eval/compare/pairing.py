"""Who is compared with whom: seeds of one recipe, and which samples of two models are the same. Needs no torch.

Two models pair where their samples have one key and one hash. Where the keys agree and the hashes do not, the runs
asked different things, and pairing them is refused with the fields that differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

from atma_eval.errors import UserError
from atma_eval.metrics import Row, Unit, UnitKey, is_retrieval
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
        return next((seed.details["tokenizer_fingerprint"] for seed in self.seeds if _has_tokenizer(seed)), None)


def _has_tokenizer(model: ModelRows) -> bool:
    return bool(model.details.get("tokenizer_fingerprint"))


def entries(models: Sequence[ModelRows], *, pool: bool = True) -> tuple[list[Entry], list[str]]:
    """Models of one task as lines of a table, seeds of one recipe in one line, and notes on what was not pooled.

    Seeds are told by their labels, which are equal up to ``-s2`` and the like, and their manifests, whose
    configurations must be equal where there are any.
    """
    recipes: dict[tuple[str, str], list[ModelRows]] = {}
    for model in models:
        recipe = _SEED.sub("", model.label) if pool else model.label
        recipes.setdefault((recipe, model.name.removeprefix(model.label)), []).append(model)
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
        if a.details.get("fingerprint") and a.details["fingerprint"] == b.details.get("fingerprint"):
            return "their weights are the same"
    return None


# -- which samples are the same -----------------------------------------------------------------------------


def sample_key(key: UnitKey, retrieval: bool) -> UnitKey:
    """What names a sample: a document of a loss is the same one whichever trial it was."""
    return key if retrieval else key._replace(trial=None)


def check_samples(found: Sequence[Entry], task: str) -> None:
    """Raise `UserError` where two models of one tokenizer were asked different samples."""
    models = [seed for entry in found if not entry.imported for seed in entry.seeds]
    for a, b in combinations(models, 2):
        if not other_tokenizer(a, b):
            _check_pair(a, b, task)


def other_tokenizer(a: ModelRows, b: ModelRows) -> bool:
    """Whether both manifests name a tokenizer and the names differ."""
    return _has_tokenizer(a) and _has_tokenizer(b) and _fingerprint(a) != _fingerprint(b)


def _fingerprint(model: ModelRows) -> Any:
    return model.details["tokenizer_fingerprint"]


def _check_pair(a: ModelRows, b: ModelRows, task: str) -> None:
    mine, theirs = _samples(a, task), _samples(b, task)
    common = mine.keys() & theirs.keys()
    unlike = [key for key in common if mine[key]["sample_hash"] != theirs[key]["sample_hash"]]
    lengths = {key.length for key in mine} & {key.length for key in theirs}
    fields = _row_differences(mine.values(), theirs.values())
    if not (fields or unlike or (lengths and not common)):
        return
    fields += _asked_differences(a, b, task)
    if not common and lengths:
        fields.append(f"text (for example {_first(mine).text_id} and {_first(theirs).text_id})")
    if unlike and not fields:
        where = min(unlike, key=str)
        fields.append(
            f"sample_hash of {len(unlike)} of {len(common)} samples, as at length {where.length:,}, {where.text_id}: "
            "their tokens differ, as with another tokenizer, needle or version of a document"
        )
    raise UserError(
        f"samples of {task} differ between {a.name} and {b.name}, so they cannot be paired: {'; '.join(fields)}",
        "measure both with the same task, seed, text and tokenizer",
    )


def _samples(model: ModelRows, task: str) -> dict[UnitKey, Row]:
    return {
        sample_key(UnitKey(row["length"], row["depth"], row["trial"], row["text_id"]), is_retrieval(row)): row
        for row in model.rows
        if row["task"] == task and row["control"] == "none" and row["sample_hash"] is not None
    }


def _first(samples: dict[UnitKey, Row]) -> UnitKey:
    return next(iter(samples))


def _row_differences(mine: Iterable[Row], theirs: Iterable[Row]) -> list[str]:
    """Of fields that every sample of a task shares."""
    differences = []
    rows = (list(mine), list(theirs))
    for name in ("protocol", "seed"):
        a, b = ({row[name] for row in side} for side in rows)
        if a and b and a != b:
            differences.append(f"{name} ({_words(a)} and {_words(b)})")
    return differences


def _words(values: set[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


def _asked_differences(a: ModelRows, b: ModelRows, task: str) -> list[str]:
    """What the manifests say that the rows do not: fields of the protocol, and the text."""
    mine, theirs = (m.run.manifest.get("tasks", {}).get(m.label, {}).get(task, {}) for m in (a, b))
    if not (mine and theirs):
        return []
    one, other = mine.get("protocol", {}), theirs.get("protocol", {})
    differences = [
        f"{name} ({one.get(name)!r} and {other.get(name)!r})"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name) and name not in ("protocol", "seed")
    ]
    documents = [
        {document["text_id"]: document["sha256"] for document in asked.get("text", {}).get("documents", [])}
        for asked in (mine, theirs)
    ]
    edited = [i for i in documents[0].keys() & documents[1].keys() if documents[0][i] != documents[1][i]]
    if edited:
        differences.append(f"text ({len(edited)} documents of one name have other content, as {min(edited)})")
    return differences


# -- pairs ----------------------------------------------------------------------------------------------------


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


def tokenizer_groups(found: Sequence[Entry]) -> list[str]:
    """Tokenizer fingerprints of the lines that have one, each once."""
    return list(dict.fromkeys(entry.tokenizer for entry in found if entry.tokenizer))


def comparable(a: Entry, b: Entry) -> bool:
    """Whether samples of both may be paired at all: read from runs of ours, and of one tokenizer where that is told."""
    return not (a.imported or b.imported or (a.tokenizer and b.tokenizer and a.tokenizer != b.tokenizer))
