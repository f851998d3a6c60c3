"""Tables from rows alone: what they say, and that they fit."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rows import row

from atma_eval.console import plain_console
from atma_eval.report import Tables, summary
from atma_eval.tasks.perplexity import position_buckets


def text_of(rows, curves=None, width=100):
    console = plain_console(file=io.StringIO(), width=width)
    console.print(Tables(summary(rows, curves), {"induction": {"exact": 1e-5, "first_token": 0.1}}))
    return console.file.getvalue()


LENGTHS = [2048 * 2**i for i in range(8)]


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("num_lengths", [1, 6, 8])
@pytest.mark.parametrize("task", ["induction", "perplexity"])
def test_nothing_is_cut_off(task, num_lengths, width):
    controls = ["none", "absent", "format"] if task == "induction" else ["none"]
    rows = [
        row(task, length, trial, control=control, nll=nll, right=trial % 3 > 0)
        for length in LENGTHS[:num_lengths]
        for control in controls
        for trial, nll in enumerate([1.234, 2.345, 1.111, 9.876])
    ]
    text = text_of(rows, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert all(f"{length:,}" in text for length in LENGTHS[:num_lengths])


def test_figures_of_a_loss_table():
    rows = [row("perplexity", 100, trial, nll=nll) for trial, nll in enumerate([1.0, 2.0, 3.0])]
    (cell,) = summary(rows)
    assert cell["nll"]["mean"] == pytest.approx(2.0)
    assert cell["nll"]["high"] == pytest.approx(2.0 + 4.3027 / math.sqrt(3), rel=1e-4)
    assert cell["perplexity"]["mean"] == pytest.approx(math.exp(2.0))
    assert cell["bits_per_byte"]["mean"] == pytest.approx(2.0 / math.log(2) / 2)
    assert cell["n"] == cell["num_documents"] == 3


def test_failures_are_named_and_left_out():
    rows = [row(trial=0), row(trial=1, status="oom"), row(trial=2, status="nan"), row(length=4096, status="too_long")]
    cells = summary(rows)
    assert [cell["n"] for cell in cells] == [1, 0]
    assert cells[0]["statuses"] == {"ok": 1, "oom": 1, "nan": 1}
    text = text_of(rows)
    assert "m, induction at 2,048: 1 oom, 1 nan" in text
    assert "m, induction at 4,096: 1 too_long" in text


@pytest.mark.parametrize("status", ["ok", "oom"])
@pytest.mark.parametrize("task", ["induction", "perplexity"])
def test_one_trial_or_all_failed_still_gives_a_table(task, status):
    text = text_of([row(task, status=status)])
    assert ("oom" in text) == (status == "oom")
    assert "nan" not in text.lower().replace("nll (nats)", "")


def test_a_loss_too_large_for_perplexity_keeps_its_nll():
    (cell,) = summary([row("perplexity", 100, trial, nll=800.0 + trial) for trial in range(2)])
    assert cell["perplexity"]["mean"] is None
    assert cell["nll"]["mean"] == pytest.approx(800.5)
    assert "overflow" in text_of([row("perplexity", 100, trial, nll=800.0 + trial) for trial in range(2)])


def test_loss_by_position_pools_documents():
    rows = [row("perplexity", 100, trial) for trial in range(2)]
    losses = np.arange(100, dtype=np.float32)
    curves = {rows[0]["key"]: position_buckets(losses), rows[1]["key"]: position_buckets(losses + 2)}
    (cell,) = summary(rows, curves)
    buckets = cell["loss_by_position"]
    assert [b["first"] for b in buckets] == [1, 2, 4, 8, 16, 32, 64]
    assert buckets[-1]["last"] == 100
    assert sum(b["num_targets"] for b in buckets) == 200
    assert buckets[1]["nll"] == pytest.approx(np.mean([1, 2, 3, 4]))
    assert "64–100" in text_of(rows, curves)
