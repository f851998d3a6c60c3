"""What a trained checkpoint can do, measured on held-out text, and the model card that says so."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atma_eval.errors import ComputationError
from atma_eval.models.atma import Atma
from atma_eval.runner import walk
from atma_eval.session import Session
from atma_eval.spec import build_task, load_preset
from atma_eval.stats import wilson
from atma_eval.text import Document, TextSource
from atma_eval.tokenizer import ByteTokenizer
from atma_eval.training.loop import Step
from atma_eval.training.recipe import CARD_HEADING, Recipe
from atma_eval.training.synthetic import RECORD_BYTES
from atma_eval.training.trigram import ByteTrigram

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
    recall: tuple[Recall, ...]  # empty where the recipe plants no records
    loss: float  # nats per byte
    trigram_loss: float
    loss_bytes: int
    num_documents: int


def measure_recall(
    model: Atma, documents: Sequence[Document], trials_by_gap: dict[int, int], seed: int
) -> tuple[Recall, ...]:
    """Exact recall as ``atma-eval niah`` measures it; gaps for which no document is long enough are left out."""
    longest = max(len(document.data) for document in documents) - RECORD_BYTES
    right: dict[int, list[np.ndarray]] = {gap: [] for gap in sorted(trials_by_gap) if gap <= longest}
    if not right:
        return ()
    trials = max(trials_by_gap[gap] for gap in right)
    task = build_task(load_preset("induction"), lengths=tuple(right), trials=trials, seed=seed)
    tokenizer = ByteTokenizer()
    text = task.select(TextSource("held-out documents", tuple(documents), {}), tokenizer)
    for group in task.groups(tokenizer, text):
        samples = [s for s in group if s.control == "none" and s.trial < trials_by_gap[s.length]]
        for sample, scored, _, error in walk(model, samples):
            if scored is None:
                raise ComputationError(f"recall at a gap of {sample.length:,} could not be measured: {error}")
            right[sample.length].append(scored.argmax == sample.tokens[slice(*sample.span)])
    return tuple(
        Recall(
            gap=gap,
            num_trials=len(rows),
            num_exact=int(sum(row.all() for row in rows)),
            digit_accuracy=float(np.mean(rows)),
        )
        for gap, rows in right.items()
    )


def measure_loss(model: Atma, documents: Sequence[Document]) -> float:
    """Nats per byte over the starts of documents, the first two bytes of each left to the trigram's context."""
    losses = []
    for document in documents:
        session = Session(model)
        session.extend(np.array([ByteTokenizer.start_id]))
        nll = session.score(np.frombuffer(document.data[:LOSS_BYTES], dtype=np.uint8)).nll
        session.close()
        losses.append(nll[SKIPPED_BYTES:].astype(np.float64))
    return float(np.concatenate(losses).mean())


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
        num_documents=len(held_out),
    )


def loss_table(history: Sequence[tuple[int, Step]]) -> str:
    """CSV: the step, and means over the steps since the line before; empty where there was nothing to measure."""
    lines = [",".join(("step", *Step._fields))]
    for step, mean in history:
        lines.append(",".join([str(step), *("" if math.isnan(x) else f"{x:.6g}" for x in mean)]))
    return "\n".join(lines) + "\n"


def loss_curve(history: Sequence[tuple[int, Step]]) -> bytes:
    """A small PNG: the plain loss of text by step, and the share of value digits that were right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [step for step, _ in history]
    recall = [mean.recall for _, mean in history]
    figure = Figure(figsize=(5, 2.4), dpi=90, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    axis.plot(steps, [mean.text for _, mean in history], color="tab:blue", linewidth=1)
    axis.set_xlabel("step")
    axis.set_ylabel("loss of text, nats", color="tab:blue")
    if not all(map(math.isnan, recall)):
        right = axis.twinx()
        right.plot(steps, recall, color="tab:orange", linewidth=1)
        right.set_ylim(0, 1.02)
        right.set_ylabel("value digits right", color="tab:orange")
    image = io.BytesIO()
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()


def _recall(recipe: Recipe, measured: Measured) -> str:
    rows = []
    for r in measured.recall:
        interval = wilson(r.num_exact, r.num_trials)
        measures = f"{r.exact:.3f} | {interval.low:.3f} to {interval.high:.3f} | {r.digit_accuracy:.3f}"
        rows.append(f"| {r.gap:,} | {r.gap / recipe.training_length:g} | {r.num_trials} | {measures} |")
    table = "\n".join(rows)
    num_documents = min(measured.num_documents, max(r.num_trials for r in measured.recall))
    return f"""
Exact recall of a five-digit value behind a four-digit key (`#4821=59034.`): the record stands at the start,
held-out text of the given length follows, then `#4821=` asks. Exact means all five digits; the chance of that is
1 in 100,000. The interval is the 95 % Wilson interval over trials; trials share {num_documents} documents.

| gap (bytes) | x training length | trials | exact | interval | digits right |
|---:|---:|---:|---:|---|---:|
{table}
"""


def _what_it_does(recipe: Recipe, measured: Measured) -> str:
    beats = "below" if measured.loss < measured.trigram_loss else "not below"
    loss = f"{measured.loss:.4f} nats per byte** ({measured.loss / math.log(2):.4f} bits)"
    where = f"the first {LOSS_BYTES:,} of each of {measured.num_documents} documents"
    text = "`stdlib`" if recipe.data == "stdlib" else "`stdlib`, none of its own text"
    return f"""
## What it does
{_recall(recipe, measured) if measured.recall else ""}
Held-out loss over {measured.loss_bytes:,} bytes of {text} ({where}):
**{loss}, {beats} the {measured.trigram_loss:.4f} nats of an
interpolated byte trigram fitted on the training text.
"""


def model_card(
    *,
    name: str,
    recipe: Recipe,
    command: str,
    num_parameters: int,
    data: str,
    measured: Measured | None,
    history: Sequence[tuple[int, Step]],
    seconds: float,
    machine: str,
    dtype: str,
    commits: Sequence[str],
) -> str:
    """The ``README.md`` of a checkpoint folder; ``data`` is what the source says of itself."""
    c = recipe.model
    memory = "with" if c.mem_enabled else "without"
    core = "the gated-delta memory alone" if c.attn_type == "none" else f"{c.attn_type} attention {memory} memory"
    window = f", window {c.attn_window:,}" if c.attn_window else ""
    trained = recipe.training_length
    blocks = f"{c.num_hidden_layers} blocks ({c.num_global_blocks} global), {c.num_heads} heads of {c.head_dim}"
    final = history[-1][1]
    last = f"weighted loss {final.loss:.4f}, other tokens {final.text:.4f}"
    planted, limits = "", [f"Lengths above {trained:,} tokens are extrapolation."]
    if recipe.is_bytes:
        tokens = "A token is a byte; 256 starts a document."
    else:
        tokens = f"Tokens: {c.tokenizer or 'as in the shards'}, vocabulary {c.vocab_size:,}."
    if recipe.data == "stdlib":
        tokens += " It is nothing to build on: text and records are a toy."
        limits.append("The text it saw is narrow, and other text has a higher loss and may disturb recall.")
    if recipe.plants:
        last += f", digits right {final.recall:.4f}"
        limits += [
            "Records were trained in this one format. Recall of another format is untested and should not be expected.",
            "Haystacks hold no second record here. With many similar keys recall can be lower.",
        ]
        planted = (
            "\n* Records are planted in the text at random places and asked for later; the loss of the value digits of"
            f"\n  a question weighs {recipe.value_weight:g} times that of any other byte."
        )
    listed = "\n".join(f"* {limit}" for limit in limits)
    return f"""# {name}

A language model of the ATMA family, trained by `atma-eval`: {core}{window},
{num_parameters:,} parameters, {blocks}, training length {trained:,} tokens.
{tokens}
{_what_it_does(recipe, measured) if measured else ""}
## How it was made

    {command}

* Text: {data}{planted}
* {recipe.num_steps:,} steps, {recipe.num_tokens:,} tokens, seed {recipe.seed};
  {seconds / 60:.0f} minutes on {machine}, in {dtype}, torch {torch.__version__}.
* Code: {f"commit {', then '.join(commits)}" if commits else "no commit known"}.
* At the last report: {last}.

![loss by step](loss.png)

{CARD_HEADING}{recipe.to_yaml().rstrip()}
```

## Limits

{listed}
"""
