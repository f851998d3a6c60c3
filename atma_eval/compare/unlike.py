"""What sets models apart that stand in one table or picture: samples, tokenizers, windows. Needs no torch.

Where the keys of samples agree and their hashes do not, the runs asked different things. `compare` then refuses and
says which fields differ; a picture is drawn all the same and says it below.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from atma_eval.compare.pairing import sample_key
from atma_eval.errors import UserError
from atma_eval.metrics import Metric, Row, UnitKey, is_retrieval, metrics_of
from atma_eval.runs import ModelRows
from atma_eval.words import plural

Samples = dict[UnitKey, Row]


def apart(models: Sequence[ModelRows], task: str, metric: Metric) -> Iterator[str]:
    """All that sets models apart which are shown together all the same."""
    yield from tokenizer_notes(models, task, metric)
    yield from window_notes(models, task)
    yield from groups_that_pair(models, task)[1]


# -- samples ------------------------------------------------------------------------------------------------


def check_samples(models: Sequence[ModelRows], task: str) -> None:
    """Raise `UserError` where two models of one tokenizer were asked different samples."""
    _, reasons = groups_that_pair(models, task)
    if reasons:
        raise UserError(reasons[0], "measure both with the same task, seed, text and tokenizer")


def groups_that_pair(models: Sequence[ModelRows], task: str) -> tuple[list[list[ModelRows]], list[str]]:
    """Models in groups in which no samples contradict each other, and why each further group is not one with the first.

    Imported models have no samples, and those of other tokenizers are never paired: they contradict nobody.
    """
    samples = {id(model): _samples(model, task) for model in models}
    groups: list[list[ModelRows]] = []
    reasons = []
    for model in models:
        first_reason = None
        for group in groups:
            reason = next((r for other in group if (r := _why_not(other, model, samples, task))), None)
            if reason is None:
                group.append(model)
                break
            first_reason = first_reason or reason
        else:
            groups.append([model])
            reasons += [first_reason] if first_reason else []
    return groups, reasons


def _samples(model: ModelRows, task: str) -> Samples:
    return {
        sample_key(UnitKey(row["length"], row["depth"], row["trial"], row["text_id"]), is_retrieval(row)): row
        for row in model.rows
        if row["task"] == task and row["control"] == "none" and row["sample_hash"] is not None
    }


def _why_not(a: ModelRows, b: ModelRows, samples: dict[int, Samples], task: str) -> str | None:
    """Why samples of two models cannot be paired, where they would have to be the same."""
    if a.run.imported or b.run.imported or _other_tokenizer(a, b):
        return None
    mine, theirs = samples[id(a)], samples[id(b)]
    common = mine.keys() & theirs.keys()
    unlike = [key for key in common if mine[key]["sample_hash"] != theirs[key]["sample_hash"]]
    lengths = {key.length for key in mine} & {key.length for key in theirs}
    fields = _row_differences(mine.values(), theirs.values())
    if not (fields or unlike or (lengths and not common)):
        return None
    fields += _asked_differences(a.asked(task), b.asked(task))
    if not common and lengths:
        fields.append(f"text (for example {next(iter(mine)).text_id} and {next(iter(theirs)).text_id})")
    if unlike and not fields:
        where = min(unlike, key=str)
        fields.append(
            f"sample_hash of {len(unlike)} of {plural(len(common), 'sample')}, as at length {where.length:,}, "
            f"{where.text_id}: their tokens differ, as with another tokenizer, needle or version of a document"
        )
    return f"samples of {task} differ between {a.name} and {b.name}, so they cannot be paired: {'; '.join(fields)}"


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


def _asked_differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What the manifests say that the rows do not: fields of the protocol, and the text."""
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
        num = plural(len(edited), "document")
        differences.append(f"text (other content in {num} of the same name, as {min(edited)})")
    return differences


# -- tokenizers ---------------------------------------------------------------------------------------------


def _other_tokenizer(a: ModelRows, b: ModelRows) -> bool:
    """Whether both manifests tell a tokenizer and they differ."""
    return bool(a.tokenizer and b.tokenizer) and a.tokenizer != b.tokenizer


def tokenizer_names(models: Sequence[ModelRows]) -> list[str]:
    """The tokenizers of models, each once, by name; where two have one name, with the fingerprint."""
    names = {model.tokenizer: str(model.details.get("tokenizer") or model.tokenizer) for model in models}
    names.pop(None, None)
    count = Counter(names.values())
    return [name if count[name] == 1 else f"{name} {fingerprint}" for fingerprint, name in names.items()]


def headline_metrics(models: Sequence[ModelRows], row: Row) -> tuple[str, ...]:
    """Metrics of a task, the one to show first: of a loss under several tokenizers bits per byte, which compare."""
    names = metrics_of(row)
    if "bits_per_byte" in names and len(tokenizer_names(models)) > 1:
        return ("bits_per_byte", *(name for name in names if name != "bits_per_byte"))
    return names


def tokenizer_notes(models: Sequence[ModelRows], task: str, metric: Metric) -> Iterator[str]:
    """That models have different tokenizers, and what this does to the metric shown."""
    names = tokenizer_names(models)
    if len(names) < 2:
        return
    words = f"models of {task} have different tokenizers ({', '.join(names)}): they are not paired"
    retrieval = any(is_retrieval(row) for model in models for row in model.rows if row["task"] == task)
    if metric.kind in ("mean", "exponential"):
        better = "" if retrieval else "; bits_per_byte does, of the text each read"
        yield f"{words}, and {metric.label} is per token and does not compare{better}"
    elif metric.kind == "ratio":
        yield f"{words}; {metric.label} compare, but of the text each read: a length in tokens is more or less text"
    else:
        yield f"{words}, and a length in tokens is more or less text"


# -- windows ------------------------------------------------------------------------------------------------


def window_notes(models: Sequence[ModelRows], task: str) -> Iterator[str]:
    """Which window each run gave a model of one name, where they differ."""
    for label in dict.fromkeys(model.label for model in models):
        windows = {model.name: model.window(task) for model in models if model.label == label and model.window(task)}
        if len(set(windows.values())) > 1:
            of = "; ".join(
                f"{name} with {'full attention' if window == 'full' else f'a window of {window:,} tokens'}"
                for name, window in windows.items()
            )
            yield f"one model of {task} was measured under several windows: {of}"
