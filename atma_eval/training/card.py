"""What a trained checkpoint can do, measured on held-out text, and the model card that says so."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from atma_eval.models.atma import Atma
from atma_eval.state import LayerStates
from atma_eval.stats import wilson
from atma_eval.text import Document
from atma_eval.training.data import CUE_BYTES, DOCUMENT_START, KEY_DIGITS, VALUE_DIGITS, record
from atma_eval.training.loop import Recipe
from atma_eval.training.trigram import ByteTrigram

CHUNK = 2048  # tokens given to the model at once
LOSS_BYTES = 8192  # of the start of every held-out document
SKIPPED_BYTES = 2  # a trigram has nothing to say on them


@dataclass(frozen=True, kw_only=True)
class Recall:
    """Trials at one gap: how many had all value digits right, and the share of digits that were."""

    gap: int
    num_trials: int
    num_exact: int
    digit_accuracy: float

    @property
    def exact(self) -> float:
        return self.num_exact / self.num_trials


@dataclass(frozen=True, kw_only=True)
class Measured:
    recall: tuple[Recall, ...]
    loss: float  # nats per byte
    trigram_loss: float
    loss_bytes: int


def _extend(model: Atma, state: LayerStates, tokens: np.ndarray, last: int) -> torch.Tensor:
    """Advance over ``tokens`` in chunks; hidden states of the last ``last``, which lie in one chunk."""
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    for chunk in ids.split(CHUNK, dim=1):
        hidden = model(chunk, state, last=last)
    return hidden


@torch.no_grad()
def measure_recall(
    model: Atma, documents: Sequence[Document], trials_by_gap: dict[int, int], seed: int
) -> tuple[Recall, ...]:
    """Needle at the start, then ``gap`` bytes of text, then the question; one pass of a trial serves all its gaps."""
    right: dict[int, list[np.ndarray]] = {gap: [] for gap in sorted(trials_by_gap)}
    for trial in range(max(trials_by_gap.values())):
        text = np.frombuffer(documents[trial % len(documents)].data, dtype=np.uint8)
        rng = np.random.default_rng([seed, trial])
        needle = record(int(rng.integers(10**KEY_DIGITS)), int(rng.integers(10**VALUE_DIGITS)))
        question = np.frombuffer(needle[: CUE_BYTES + VALUE_DIGITS], dtype=np.uint8)
        state = model.init_state(1)
        _extend(model, state, np.concatenate([[DOCUMENT_START], np.frombuffer(needle, dtype=np.uint8)]), 1)
        done = 0
        for gap in right:
            if trial >= trials_by_gap[gap] or gap > len(text):
                continue
            if gap > done:
                _extend(model, state, text[done:gap], 1)
                done = gap
            branch = state.fork()
            hidden = _extend(model, branch, question[:-1], VALUE_DIGITS)
            branch.release()
            predicted = model.logits(hidden)[0].argmax(-1).numpy()
            right[gap].append(predicted == question[-VALUE_DIGITS:])
        state.release()
    return tuple(
        Recall(
            gap=gap,
            num_trials=len(rows),
            num_exact=int(sum(row.all() for row in rows)),
            digit_accuracy=float(np.mean(rows)),
        )
        for gap, rows in right.items()
        if rows
    )


@torch.no_grad()
def measure_loss(model: Atma, documents: Sequence[Document]) -> float:
    """Nats per byte over the starts of documents, the first two bytes of each left to the trigram's context."""
    total, count = 0.0, 0
    for document in documents:
        data = np.frombuffer(document.data[:LOSS_BYTES], dtype=np.uint8)
        tokens = torch.from_numpy(np.concatenate([[DOCUMENT_START], data]).astype(np.int64))
        state = model.init_state(1)
        pieces = []
        for inputs, targets in zip(tokens[:-1].split(CHUNK), tokens[1:].split(CHUNK), strict=True):
            logits = model.logits(model(inputs[None], state))[0]
            pieces.append(F.cross_entropy(logits, targets, reduction="none"))
        nll = torch.cat(pieces)
        state.release()
        total, count = total + nll[SKIPPED_BYTES:].sum().item(), count + len(nll) - SKIPPED_BYTES
    return total / count


def measure(
    model: Atma,
    training: Sequence[Document],
    held_out: Sequence[Document],
    trials_by_gap: dict[int, int],
    seed: int,
) -> Measured:
    trigram = ByteTrigram(training)
    nll = np.concatenate([trigram.nll(d.data[:LOSS_BYTES]) for d in held_out])
    return Measured(
        recall=measure_recall(model, held_out, trials_by_gap, seed),
        loss=measure_loss(model, held_out),
        trigram_loss=float(nll.mean()),
        loss_bytes=len(nll),
    )


def data_hash(documents: Sequence[Document]) -> str:
    """One hash over all documents in their order."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(bytes.fromhex(document.sha256))
    return digest.hexdigest()


def model_card(
    *,
    name: str,
    recipe: Recipe,
    recipe_text: str,
    command: str,
    model: Atma,
    training: Sequence[Document],
    num_held_out: int,
    measured: Measured,
    final: dict[str, float],
    seconds: float,
) -> str:
    """The ``README.md`` of a checkpoint folder."""
    c = recipe.model
    num_parameters = sum(p.numel() for p in model.parameters())
    num_bytes = sum(len(d.data) for d in training)
    memory = "with" if c.mem_enabled else "without"
    beats = "below" if measured.loss < measured.trigram_loss else "not below"
    trained = max(stage.length for stage in recipe.stages)
    rows = []
    for r in measured.recall:
        interval = wilson(r.num_exact, r.num_trials)
        measures = f"{r.exact:.3f} | {interval.low:.3f} to {interval.high:.3f} | {r.digit_accuracy:.3f}"
        rows.append(f"| {r.gap:,} | {r.gap / trained:g} | {r.num_trials} | {measures} |")
    table = "\n".join(rows)
    blocks = f"{c.num_hidden_layers} blocks ({c.num_global_blocks} global), {c.num_heads} heads of {c.head_dim}"
    loss = f"{measured.loss:.4f} nats per byte** ({measured.loss / math.log(2):.4f} bits)"
    where = f"the first {LOSS_BYTES:,} of each of {num_held_out} documents"
    threads = torch.get_num_threads()
    cost = f"{seconds / 60:.0f} minutes on {threads} thread(s) of a shared CPU, torch {torch.__version__}"
    last = f"weighted loss {final['loss']:.4f}, other bytes {final['other']:.4f}, digits right {final['values']:.4f}"
    return f"""# {name}

A small byte-level language model of the ATMA family, trained to show what `atma-eval` measures:
{c.attn_type} attention {memory} the gated-delta memory, {num_parameters:,} parameters in fp32,
{blocks}, training length {trained:,} bytes.
A token is a byte; 256 starts a document. It is nothing to build on: it has seen Python's standard library and
made-up records.

## What it does

Exact recall of a five-digit value behind a four-digit key (`#4821=59034.`): the record stands at the start,
held-out text of the given length follows, then `#4821=` asks. Exact means all five digits; the chance of that is
1 in 100,000. The interval is the 95 % Wilson interval over trials; trials share {num_held_out} documents.

| gap (bytes) | x training length | trials | exact | interval | digits right |
|---:|---:|---:|---:|---|---:|
{table}

Held-out loss over {measured.loss_bytes:,} bytes ({where}):
**{loss}, {beats} the {measured.trigram_loss:.4f} of an
interpolated byte trigram fitted on the training half.

## How it was made

    {command}

* Text: the training half of `stdlib`, {len(training)} modules, {num_bytes:,} bytes, Python {platform.python_version()}.
  sha256 over the documents' sha256: `{data_hash(training)}`
* Records are planted in the text at random places and asked for later; the loss of the value digits of a question
  weighs {recipe.value_weight:g} times that of any other byte.
* {recipe.num_steps:,} steps, {recipe.num_tokens:,} tokens, seed {recipe.seed};
  {cost}.
* Over the last {final["steps"]:.0f} steps: {last}.

The recipe:

```yaml
{recipe_text.rstrip()}
```

## Limits

* The text is Python source; other text has a higher loss and may disturb recall.
* Records were trained in this one format. Recall of another format is untested and should not be expected.
* Lengths above {trained:,} bytes are extrapolation: the table says how far it holds, on how many trials.
* Haystacks hold no second record here. With many similar keys recall can be lower.
"""
