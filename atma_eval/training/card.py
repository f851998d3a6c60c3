"""What a trained checkpoint can do, measured on held-out text, and the model card that says so."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from atma_eval.models.atma import Atma
from atma_eval.state import LayerStates
from atma_eval.stats import wilson
from atma_eval.text import Document
from atma_eval.tokenizer import ByteTokenizer
from atma_eval.training.recipe import CARD_HEADING, Recipe
from atma_eval.training.synthetic import CUE_BYTES, KEY_DIGITS, VALUE_DIGITS, record
from atma_eval.training.trigram import ByteTrigram

DOCUMENT_START = ByteTokenizer.start_id
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
    for trial in range(max(trials_by_gap.values(), default=0)):
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


def loss_curve(history: Sequence[Sequence[float]]) -> bytes:
    """A small PNG: the plain loss of text by step, and the share of value digits that were right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, _, other, values, _ = zip(*history, strict=True)
    figure = Figure(figsize=(5, 2.4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(steps, other, color="tab:blue", linewidth=1)
    axis.set_xlabel("step")
    axis.set_ylabel("loss of text, nats", color="tab:blue")
    if not all(map(math.isnan, values)):
        right = axis.twinx()
        right.plot(steps, values, color="tab:orange", linewidth=1)
        right.set_ylim(0, 1.02)
        right.set_ylabel("value digits right", color="tab:orange")
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _what_it_does(recipe: Recipe, measured: Measured, num_held_out: int) -> str:
    beats = "below" if measured.loss < measured.trigram_loss else "not below"
    rows = []
    for r in measured.recall:
        interval = wilson(r.num_exact, r.num_trials)
        measures = f"{r.exact:.3f} | {interval.low:.3f} to {interval.high:.3f} | {r.digit_accuracy:.3f}"
        rows.append(f"| {r.gap:,} | {r.gap / recipe.training_length:g} | {r.num_trials} | {measures} |")
    table = "\n".join(rows)
    loss = f"{measured.loss:.4f} nats per byte** ({measured.loss / math.log(2):.4f} bits)"
    where = f"the first {LOSS_BYTES:,} of each of {num_held_out} documents"
    return f"""
## What it does

Exact recall of a five-digit value behind a four-digit key (`#4821=59034.`): the record stands at the start,
held-out text of the given length follows, then `#4821=` asks. Exact means all five digits; the chance of that is
1 in 100,000. The interval is the 95 % Wilson interval over trials; trials share {num_held_out} documents.

| gap (bytes) | x training length | trials | exact | interval | digits right |
|---:|---:|---:|---:|---|---:|
{table}

Held-out loss over {measured.loss_bytes:,} bytes of `stdlib` ({where}):
**{loss}, {beats} the {measured.trigram_loss:.4f} of an
interpolated byte trigram fitted on the training text.
"""


def model_card(
    *,
    name: str,
    recipe: Recipe,
    command: str,
    model: Atma,
    data: str,
    num_held_out: int,
    measured: Measured | None,
    final: dict[str, float],
    seconds: float,
    machine: str,
    commit: str | None,
    has_curve: bool = False,
) -> str:
    """The ``README.md`` of a checkpoint folder; ``data`` is what the source says of itself."""
    c = recipe.model
    num_parameters = sum(p.numel() for p in model.parameters())
    memory = "with" if c.mem_enabled else "without"
    core = "the gated-delta memory alone" if c.attn_type == "none" else f"{c.attn_type} attention {memory} memory"
    window = f", window {c.attn_window:,}" if c.attn_window else ""
    trained = recipe.training_length
    blocks = f"{c.num_hidden_layers} blocks ({c.num_global_blocks} global), {c.num_heads} heads of {c.head_dim}"
    last = f"weighted loss {final['loss']:.4f}, other tokens {final['other']:.4f}"
    limits = [f"Lengths above {trained:,} tokens are extrapolation."]
    if recipe.is_bytes:
        last += f", digits right {final['values']:.4f}"
        limits += [
            "The text it saw is narrow, and other text has a higher loss and may disturb recall.",
            "Records were trained in this one format. Recall of another format is untested and should not be expected.",
            "Haystacks hold no second record here. With many similar keys recall can be lower.",
        ]
        tokens = "A token is a byte; 256 starts a document. It is nothing to build on: text and records are a toy."
        planted = (
            "\n* Records are planted in the text at random places and asked for later; the loss of the value digits of"
            f"\n  a question weighs {recipe.value_weight:g} times that of any other byte."
        )
    else:
        tokens, planted = f"Tokens: {c.tokenizer or 'as in the shards'}, vocabulary {c.vocab_size:,}.", ""
    picture = "\n![loss by step](loss.png)\n" if has_curve else ""
    listed = "\n".join(f"* {limit}" for limit in limits)
    return f"""# {name}

A language model of the ATMA family, trained by `atma-eval`: {core}{window},
{num_parameters:,} parameters, {blocks}, training length {trained:,} tokens.
{tokens}
{_what_it_does(recipe, measured, num_held_out) if measured else ""}
## How it was made

    {command}

* Text: {data}{planted}
* {recipe.num_steps:,} steps, {recipe.num_tokens:,} tokens, seed {recipe.seed};
  {seconds / 60:.0f} minutes on {machine}, torch {torch.__version__}.
* Code: {f"commit {commit}" if commit else "no commit known"}.
* Over the last {final["steps"]:.0f} steps: {last}.
{picture}
{CARD_HEADING}{recipe.to_yaml().rstrip()}
```

## Limits

{listed}
"""
