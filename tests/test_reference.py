"""The published figures: those of the study, with what must be said of them."""

from __future__ import annotations

import csv
import json

import pytest
from conftest import SHARED

from atma_eval.reference import published, published_metric, rows_like, texts
from atma_eval.stats import wilson

REFERENCE = SHARED / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="the figures are not beside this checkout")


def figure(name, metric):
    (row,) = [row for row in published() if (row.name, row.metric) == (name, metric)]
    return row


def test_the_headline_is_one_run_with_its_interval():
    """74 of 80 digits at 64K; counted as 16 trials, for digits of a trial hang together."""
    row = figure("polar+memory", "token_accuracy")
    assert [row.values[2048 * 2**i] for i in range(6)] == [0.9125, 0.95, 0.925, 0.975, 0.9625, 0.925]
    assert row.estimate(65536) == wilson(0.925 * 16, 16)
    assert row.estimate(65536).low < 0.75
    assert row.estimate(131072) is None
    assert {"I02"} <= set(row.notes)


def test_losses_are_nats_without_an_interval():
    row = figure("polar+memory", "nll")
    assert row.estimate(2048) == (2.70304, None, None, 16)
    assert row.values[4096] == 2.57747  # not the 2.45 that the paper prints
    assert {"I01", "I06"} <= set(row.notes)


def test_rows_are_whole_and_every_note_is_told():
    rows = published()
    assert len({(row.name, row.metric) for row in rows}) == len(rows)
    for row in rows:
        assert set(row.values) >= {2048 * 2**i for i in range(6)}
        assert row.num_trials == {"1B": 16, "10B": 64}[row.study]
        assert row.source.startswith(("ablation/", "scaled_ablation/", "archive/"))
        assert row.metric == "nll" or all(0 <= value <= 1 for value in row.values.values())
    noted = {note for row in rows for note in row.notes}
    assert noted == texts()["notes"].keys()


def test_rows_like_an_architecture():
    def names(attention, memory, window=None, distractor=False):
        config = {"attn_type": attention, "mem_enabled": memory, "attn_window": window}
        return [row.name for row in rows_like([config], "nll", distractor=distractor)]

    assert names("rope", True) == ["rope+memory", "rope+memory (10B)"]
    assert names("rope", False, window=256) == ["rope (window)"]
    assert names("polar", False, distractor=True) == ["polar", "polar (distractor)"]
    assert names("none", True) == []  # the study has no memory alone
    assert not any(row.window for row in rows_like([], "nll", distractor=False))
    assert [published_metric(name, retrieval=True) for name in ("exact", "nll")] == ["token_accuracy", None]
    assert [published_metric(name, retrieval=False) for name in ("nll", "bits_per_byte")] == ["nll", None]


@needs_reference
def test_figures_are_those_of_the_repository():
    cells = {row["run_id"]: row for row in csv.DictReader((REFERENCE / "stage1_cells.csv").open())}
    runs = [json.loads(line) for line in (REFERENCE / "other_runs_intrinsic.jsonl").read_text().splitlines()]
    logs = {run["source"]: run for run in runs}
    for row in published():
        if row.study == "10B":
            found = logs[row.source]["needle_acc_pct" if row.metric == "token_accuracy" else "clean_nats"]
            theirs = {int(length): value for length, value in found.items()}
        else:
            regulariser = row.name.partition("(")[2].partition(" regulariser")[0] if "regul" in row.name else "baseline"
            axes = f"distr-{row.distractor:d}__mem-{row.memory:d}__win-{row.window:d}"
            cell = cells[f"{row.attention}__reg-{regulariser}__{axes}"]
            prefix = "needle_acc_pct_" if row.metric == "token_accuracy" else "clean_nats_"
            theirs = {int(k.removeprefix(prefix)): float(v) for k, v in cell.items() if k.startswith(prefix)}
        scale = 100 if row.metric == "token_accuracy" else 1
        assert row.values.keys() == theirs.keys()
        for length, value in row.values.items():
            assert value * scale == pytest.approx(theirs[length], abs=0.006 if scale == 100 else 1e-9)
