"""What a picture supports and what it does not: the sentences that stand under it in a report.

The reasons are those of the protocol notes: the first token alone cannot leak (W3, W4), chance and controls (W5, W6),
a needle that is always first (W8), loss that falls because the text does (W14), and one run for a recipe (W2).
"""

from __future__ import annotations

from typing import NamedTuple

from atma_eval.plots.charts import Chart, ForestChart, HeatChart, LineChart


class Claims(NamedTuple):
    supports: str
    does_not: str


def claims_of(chart: Chart) -> Claims:
    """Of the pictures that a report holds."""
    if isinstance(chart, ForestChart):
        return Claims(
            "whether a model differs from the baseline on the very samples both were asked, length by length, after "
            "adjusting for how many differences were looked at.",
            "that models are alike where nothing is resolved: few samples resolve only large differences. And it "
            "speaks of these checkpoints; of a recipe only where several seeds of it were trained.",
        )
    if isinstance(chart, HeatChart):
        where = "at which depth and length the value is lost" if chart.by_depth else "where each model begins to fail"
        return Claims(
            f"{where}, in one look.",
            "differences between single cells: each rests on few samples, and its interval is wide.",
        )
    assert isinstance(chart, LineChart)
    if chart.kind == "position":
        return Claims(
            "where in a document the loss rises or falls, on the same documents for every model.",
            "that distant context is used: position and content go together, so a loss that falls with position may "
            "only say that later text is easier.",
        )
    if chart.protocol.startswith("fixed-target"):
        return Claims(
            "what context is worth: the same targets are predicted with shorter and with longer context, so a loss "
            "that falls with length is due to the text before them.",
            "which part of that context helped, nor recall of a single fact in it; and the targets are few.",
        )
    if not chart.retrieval:
        return Claims(
            "how well models predict the first tokens of the same documents, up to each length, and whether the loss "
            "breaks down beyond the training length.",
            "that long context is used: a falling prefix loss comes as well from text that becomes easier. That takes "
            "the loss of fixed targets with shorter and longer context.",
        )
    if chart.kind == "accuracy":
        against = (
            "The absent control is what the model scores without the needle, the format control how often it gives "
            "another value of the same form."
            if chart.controls
            else "These rows have no controls beside them, so only chance says what guessing would score."
        )
        return Claims(
            "how often the whole value is recalled. Scored under teacher forcing, all tokens right is the same event "
            f"as greedy generation of the value, so later tokens cannot leak into it. {against}",
            "that two models differ because their means do (see the paired differences), nor anything of needles, "
            "texts and places of the needle other than those measured.",
        )
    adds = " Its distance to the format control is what the planted value adds." if chart.controls else ""
    return Claims(
        f"how much probability the true value gets.{adds}",
        "recall: a loss far below the absent control may only mean that the model has learnt to answer in digits, "
        "which already scores ln 10 = 2.303 nats; later digits also profit from the true ones before them.",
    )
