"""Walk the prefix trees of every model and task, write rows, survive failures, and pick up where a run stopped."""

from __future__ import annotations

import gc
import hashlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from atma_eval.checkpoint import find_model, load_model
from atma_eval.errors import UserError
from atma_eval.plan import Account, Node, PrefixTree
from atma_eval.records import SCHEMA, RunDirectory
from atma_eval.source import LoadedModel, ModelSource
from atma_eval.spec import RunSpec, TaskSpec
from atma_eval.tasks.base import Sample, Scored, TaskText
from atma_eval.text import TextSource, open_text

if TYPE_CHECKING:
    from atma_eval.session import LanguageModel, Session

BRANCH_TOKENS = 2048  # state reserved beside a sample, for the branches that are open with it


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One model under one task: what is to be computed, checked before any model is loaded."""

    source: ModelSource
    spec: TaskSpec
    text: TaskText
    text_manifest: dict[str, Any]
    keys: frozenset[str]
    account: Account

    def groups(self) -> Iterator[list[Sample]]:
        return self.spec.task.groups(self.source.tokenizer, self.text)

    def row_key(self, sample: Sample) -> str:
        return _row_key(self.source, self.spec, sample)


@dataclass
class Events:
    """What a caller may watch; each a function that is called as things happen.

    ``on_tokens`` gets how many tokens of the plan are done, and whether they were computed now: those of rows that
    were there already take no time.
    """

    on_message: Callable[[str], None] = lambda text: None
    on_row: Callable[[dict[str, Any]], None] = lambda row: None
    on_tokens: Callable[[int, bool], None] = lambda count, computed: None


@dataclass
class RunResult:
    """Rows of the request (not of the whole folder), and how many were computed now."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    curves: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    num_new: int = 0

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row["status"] != "ok"]


def prepare(spec: RunSpec) -> list[Cell]:
    """Resolve models, texts and samples; every request that cannot be met ends here, without torch."""
    sources = [find_model(model) for model in spec.models]
    labels = [source.label for source in sources]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"two models are called {label}", "rename a folder, or leave one of them out")
    names = [task.task.name for task in spec.tasks]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"the task {name} stands twice in one run", "copy its preset under another name")
    texts: dict[str, TextSource] = {}
    chosen: dict[tuple[str, str], TaskText] = {}
    cells = []
    for source in sources:
        for task in spec.tasks:
            source.check_window(task.window)
            if task.text not in texts:
                texts[task.text] = open_text(task.text)
            at = (task.task.name, source.tokenizer.fingerprint)
            if at not in chosen:
                chosen[at] = task.task.select(texts[task.text], source.tokenizer)
            cells.append(_cell(source, task, texts[task.text], chosen[at]))
    return cells


def _row_key(source: ModelSource, spec: TaskSpec, sample: Sample) -> str:
    return f"{source.label}/{spec.task.name}/{sample.key}"


def _cell(source: ModelSource, spec: TaskSpec, origin: TextSource, text: TaskText) -> Cell:
    account = Account()
    keys: set[str] = set()
    for samples in spec.task.groups(source.tokenizer, text):
        account.add(samples)
        keys |= {_row_key(source, spec, sample) for sample in samples}
    if len(keys) != account.num_samples:
        raise AssertionError(f"{spec.task.name}: samples share a key")
    return Cell(
        source=source,
        spec=spec,
        text=text,
        text_manifest={
            **origin.manifest(list(text.documents)),
            "repeated": text.repeated,
            "documents_may_grow": spec.task.documents_may_grow,
        },
        keys=frozenset(keys),
        account=account,
    )


def run(cells: list[Cell], events: Events, directory: RunDirectory) -> RunResult:
    """Compute what is missing of ``cells`` and return all their rows."""
    if directory.torn_bytes:
        events.on_message(
            f"repaired {directory.path}/records.jsonl: cut {directory.torn_bytes} bytes of an unfinished row"
        )
    details = _agree(directory, cells)
    result = RunResult()
    wanted = {key for cell in cells for key in cell.keys}
    for row in directory.rows:
        if row["key"] in wanted:
            result.rows.append(row)
            events.on_row(row)
    loaded: LoadedModel | None = None
    at: tuple[str, str | int] | None = None
    for cell, described in zip(cells, details, strict=True):
        if cell.text.num_too_short:
            events.on_message(
                f"{cell.spec.task.name}: {cell.text.num_too_short} documents of {cell.text_manifest['source']} are too "
                f"short for these lengths and left out; {len(cell.text.documents)} are used"
            )
        if cell.keys <= directory.keys:  # nothing to compute, and nothing to load
            events.on_tokens(cell.account.computed_tokens, False)
            continue
        if at != (cell.source.label, cell.spec.window):
            loaded = None  # free the last model before the next is loaded
            gc.collect()
            loaded = load_model(cell.source, cell.spec.window, described)
            at = (cell.source.label, cell.spec.window)
        assert loaded is not None
        for row in _run_cell(cell, loaded.model, directory, events):
            result.rows.append(row)
            result.num_new += 1
    result.curves = {key: directory.curves[key] for key in wanted if key in directory.curves}
    return result


def _agree(directory: RunDirectory, cells: list[Cell]) -> list[dict[str, Any]]:
    """Check every model's file and every cell against what the folder holds, before the first row; model details."""
    models: dict[str, Any] = {}
    tasks: dict[str, Any] = {}
    known: dict[tuple[str, str | int], dict[str, Any]] = {}  # a weight file is read and hashed once for all its tasks
    details = []
    for cell in cells:
        task, tokenizer = cell.spec.task, cell.source.tokenizer
        at = (cell.source.label, cell.spec.window)
        described = known[at] = known.get(at) or cell.source.describe(cell.spec.window)
        details.append(described)
        own = {name: value for name, value in described.items() if name != "window"}
        models[cell.source.label] = {
            **own,
            "tokenizer": tokenizer.name,
            "tokenizer_fingerprint": tokenizer.fingerprint,
        }
        tasks.setdefault(cell.source.label, {})[task.name] = {
            "protocol": task.protocol(),
            "window": described["window"],
            "text": cell.text_manifest,
            "lengths": list(task.lengths),
            "trials": task.num_trials(cell.text),
        }
    directory.agree(models, tasks)
    return details


def _run_cell(cell: Cell, model: LanguageModel, directory: RunDirectory, events: Events) -> Iterator[dict[str, Any]]:
    """Rows that are missing.

    A group with any row missing is computed again whole, so that its computation breaks where it always does.
    """
    for samples in cell.groups():
        tokens = PrefixTree.merge(samples).num_tokens
        missing = {id(sample) for sample in samples if cell.row_key(sample) not in directory.keys}
        if missing:
            started = time.perf_counter()
            for sample, scored, status, error in walk(model, samples):
                now = time.perf_counter()
                if id(sample) in missing:
                    row = _row(cell, directory, sample, scored, status, error)
                    row.update(elapsed_s=round(now - started, 6), peak_memory_bytes=_peak_memory_bytes(model))
                    curve = cell.spec.task.curve(scored) if scored is not None and row["status"] == "ok" else None
                    row = directory.append(row, curve)
                    events.on_row(row)
                    yield row
                started = now
        events.on_tokens(tokens, bool(missing))


def _row(
    cell: Cell, directory: RunDirectory, sample: Sample, scored: Scored | None, status: str, error: str | None
) -> dict[str, Any]:
    task = cell.spec.task
    if scored is not None and not np.isfinite(scored.nll).all():
        first = int(np.flatnonzero(~np.isfinite(scored.nll))[0])
        place = f"target {first + 1} of {len(scored.nll)}"
        scored, status, error = None, "nan", f"the loss of {place} is not finite"
    outcome = task.outcome(sample, scored) if scored is not None else {}
    return {
        "schema": SCHEMA,
        "run_id": directory.run_id,
        "key": cell.row_key(sample),
        "model": cell.source.label,
        "task": task.name,
        "protocol": task.protocol()["protocol"],
        "length": sample.length,
        "gap": sample.gap,
        "context_tokens": sample.span[0],
        "num_bytes": sample.num_bytes,
        "depth": sample.depth,
        "trial": sample.trial,
        "seed": task.seed,
        "text_id": sample.text_id,
        "status": status,
        "num_targets": sample.span[1] - sample.span[0],
        "control": sample.control,
        "sample_hash": _sample_hash(sample),
        "error": error,
        **outcome,
    }


def _sample_hash(sample: Sample) -> str:
    """Identifies tokens and span, for pairing rows across models and runs."""
    digest = hashlib.sha256(sample.tokens.astype("<i4").tobytes())
    digest.update(repr(sample.span).encode())
    return digest.hexdigest()[:16]


def _peak_memory_bytes(model: LanguageModel) -> int:
    """Most memory so far: allocated on the model's GPU, or resident of this process."""
    import torch

    device = next(iter(model.parameters())).device
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# -- the walk ---------------------------------------------------------------------------------------------


def walk(model: LanguageModel, samples: list[Sample]) -> Iterator[tuple[Sample, Scored | None, str, str | None]]:
    """Score samples over their common tree, shorter branches first; each sample comes out once, with a status.

    A failure takes down the samples that lie beyond it, and nothing else.
    """
    limit = model.max_length
    fitting = [s for s in samples if limit is None or len(s.tokens) <= limit]
    for sample in samples:
        if limit is not None and len(sample.tokens) > limit:
            yield sample, None, "too_long", f"{len(sample.tokens)} tokens; the model takes at most {limit}"
    if not fitting:
        return
    tree = PrefixTree.merge(fitting)
    nll = np.full(tree.longest, np.nan, dtype=np.float32)
    argmax = np.full(tree.longest, -1, dtype=np.int64)

    # Scores are kept by position. Depth first, a branch overwrites only what lies beyond its own start, so
    # whatever a sample's path has scored is in place when the sample ends.
    pending: list[tuple[Node, Session | None]] = [(tree.root, None)]
    while pending:
        node, session = pending.pop()
        status, error = None, None
        try:
            if session is None:
                session = _open_session(model, {len(sample.tokens) for sample in fitting})
            wanted = tree.wanted(node)
            if len(node.tokens):
                scores = session.score(node.tokens, wanted)
                places = node.start + np.flatnonzero(wanted)
                nll[places], argmax[places] = scores.nll, scores.argmax
        except Exception as failure:  # recorded as an outcome; the run goes on
            status, error = classify_failure(failure), " ".join(f"{type(failure).__name__}: {failure}".split())[:500]
        if status is not None:  # outside the except, whose traceback would keep the tensors alive
            if session is not None:
                session.close()
            session = None
            _free_memory()
            for sample in tree.samples(node):
                yield sample, None, status, error
            continue
        assert session is not None
        for sample in node.ends:
            part = slice(*sample.span)
            yield sample, Scored(nll[part].copy(), argmax[part].copy()), "ok", None
        if not node.children:
            session.close()
        # The last (longest) child goes on with this state; the others get forks and are walked before it.
        branches = [(child, session.fork()) for child in node.children[:-1]]
        pending.extend((child, session) for child in node.children[-1:])
        pending.extend(reversed(branches))


def _open_session(model: LanguageModel, lengths: set[int]) -> Session:
    """A session with room for the longest of ``lengths`` that memory has room for; beyond that it grows, or fails.

    So the samples that are short enough are scored before the longest fails.
    """
    from atma_eval.session import Session

    for length in sorted(lengths, reverse=True):
        try:
            return Session(model, capacity=length + BRANCH_TOKENS)
        except Exception as failure:
            if classify_failure(failure) != "oom":
                raise
        _free_memory()
    return Session(model)


def classify_failure(failure: Exception) -> str:
    """The status of a row whose computation raised: ``oom`` or ``error``."""
    import torch

    if isinstance(failure, MemoryError | torch.OutOfMemoryError):
        return "oom"
    if isinstance(failure, RuntimeError) and "can't allocate memory" in str(failure):  # torch's CPU allocator
        return "oom"
    return "error"


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
