"""Models against each other: hand-made differences, who may be paired, and every format of the outcome."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import typer
from rows import row, write_run
from typer.testing import CliRunner

from atma_eval.commands import compare as command
from atma_eval.compare import CompareSpec, compare
from atma_eval.compare.columns import Column
from atma_eval.compare.data import as_data
from atma_eval.compare.effective import effective_sheet
from atma_eval.compare.formats import TerminalTables, render
from atma_eval.compare.published import published_sheet
from atma_eval.compare.sheets import NOTHING, main_sheet
from atma_eval.console import plain_console
from atma_eval.errors import UserError
from atma_eval.metrics import METRICS
from atma_eval.runs import read_models
from atma_eval.stats import wilson
from atma_eval.tasks.perplexity import position_buckets

SHORT, LONG = 2048, 4096


def needles(model, right, length=SHORT, **fields):
    """One row per trial, on a document of its own; ``right`` tells which are."""
    return [row(length=length, trial=trial, model=model, right=ok, **fields) for trial, ok in enumerate(right)]


def losses(model, values, length=SHORT, **fields):
    return [row("perplexity", length, trial, model=model, nll=nll, **fields) for trial, nll in enumerate(values)]


@pytest.fixture
def compared(tmp_path):
    """Compare lists of rows, each a run of its own; a dict goes to the manifest of the run before it."""

    def run(*given, **spec):
        folders = []
        for rows in given:
            if isinstance(rows, dict):
                (folders[-1] / "manifest.json").write_text(json.dumps(rows))
            else:
                folders.append(write_run(tmp_path / f"run{len(folders)}", rows, {"models": {}, "tasks": {}}))
        return compare(read_models(folders), CompareSpec(**spec))

    return run


@pytest.fixture
def call(tmp_path):
    """The command as a user calls it, with stdout and stderr apart."""
    app = typer.Typer()
    app.command()(command.compare)

    def run(*arguments):
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)

    return run


def refusal(compared, *given, **spec):
    with pytest.raises(UserError) as caught:
        compared(*given, **spec)
    return caught.value


def terminal(comparison, width=100, **options):
    console = plain_console(file=io.StringIO(), width=width)
    console.print(TerminalTables(comparison, **options))
    return console.file.getvalue()


def notes_of(comparison):
    return "\n".join(note for table in comparison.tables for note in main_sheet(table, comparison).footnotes)


# -- figures --------------------------------------------------------------------------------------------------


def test_exact_by_mcnemar_adjusted_over_the_grid(compared):
    """8 of 10 trials only the baseline has: p = 2 / 2^8; the other length's p is 1, so both count two tests."""
    found = compared(
        needles("a", [True] * 10)
        + needles("b", [True] * 2 + [False] * 8)
        + needles("a", [True] * 10, LONG)
        + needles("b", [True] * 10, LONG)
    )
    (table,) = found.tables
    short, long = (table.contrasts["b", Column(n)] for n in (SHORT, LONG))
    assert (table.baseline, found.num_tests) == ("a", 2)
    assert table.cells["b", Column(SHORT)].estimate == wilson(2, 10)
    assert short.difference.mean == pytest.approx(-0.8)
    assert -1 <= short.difference.low < -0.8 < short.difference.high < 0
    assert short.difference.p == pytest.approx(2 / 2**8)
    assert short.p_adjusted == pytest.approx(2 * 2 / 2**8) and short.resolved
    assert (long.difference.mean, long.difference.p, long.p_adjusted, long.resolved) == (0.0, 1.0, 1.0, False)
    assert long.difference.low < 0 < long.difference.high  # equal is not proved equal
    assert 0 < long.smallest < 1
    assert table.is_best("a", Column(SHORT)) and not table.is_best("a", Column(LONG))


def test_losses_are_paired_by_document(compared):
    """Documents differ by nats, models by 0.1 on each: seen only in pairs."""
    base = [0.5, 3.0, 1.5, 2.0, 2.5, 1.0, 0.8, 1.7]
    gains = [0.1, 0.11, 0.09, 0.1, 0.12, 0.08, 0.1, 0.1]
    given = losses("a", base) + losses("b", [x - g for x, g in zip(base, gains)])
    contrast = compared(given).tables[0].contrasts["b", Column(SHORT)]
    assert contrast.difference.mean == pytest.approx(-0.1)
    assert contrast.difference.p == pytest.approx(2 / 2**8)  # all signs alike
    half = 2.36462 * np.std(gains, ddof=1) / math.sqrt(8)
    assert contrast.difference.high == pytest.approx(-0.1 + half, rel=1e-4)
    ratio = compared(given, metric="perplexity").tables[0].contrasts["b", Column(SHORT)]
    assert ratio.difference.mean == pytest.approx(math.exp(-0.1))
    assert ratio.difference.low == pytest.approx(math.exp(-0.1 - half), rel=1e-4)
    assert ratio.null == 1.0 and ratio.resolved and 1 < ratio.smallest < 1.05


def test_bits_per_byte_weighs_documents_by_bytes(compared):
    sizes = [2048, 8192]
    given = [
        row("perplexity", trial=t, model=m, nll=nll, num_bytes=size)
        for m, values in (("a", [1.0, 1.0]), ("b", [2.0, 1.5]))
        for t, (nll, size) in enumerate(zip(values, sizes))
    ]
    contrast = compared(given, metric="bits_per_byte").tables[0].contrasts["b", Column(SHORT)]
    assert contrast.difference.mean == pytest.approx((1.0 + 0.5) * 2048 / math.log(2) / sum(sizes))


def test_uplift_needs_the_control(compared):
    given = [
        row(trial=t, model=m, control=c, nll=nll + gain * (c == "format"))
        for m, gain in (("a", 2.0), ("b", 1.0))
        for t, nll in enumerate([0.1, 0.2, 0.3])
        for c in ("none", "format")
    ]
    table = compared(given, metric="uplift").tables[0]
    assert table.cells["a", Column(SHORT)].estimate.mean == pytest.approx(2.0)
    assert table.contrasts["b", Column(SHORT)].difference.mean == pytest.approx(-1.0)
    bare = refusal(compared, needles("a", [True]) + needles("b", [True]), metric="uplift")
    assert "format control" in bare.hint


def test_best_is_marked_only_where_it_is_resolved(compared):
    rows = needles("a", [True] * 12) + needles("b", [True] * 8 + [False] * 4) + needles("c", [False] * 12)
    (table,) = compared(rows).tables
    assert table.best[Column(SHORT)] == "a" and not table.is_best("a", Column(SHORT))  # 4 discordant of 12: p = 0.125
    assert "†" not in terminal(compared(rows))
    better = needles("a", [True] * 12) + needles("b", [True] * 4 + [False] * 8)
    assert "1.000†" in terminal(compared(better))
    assert "**1.000**†" in render(compared(better), "md")
    assert r"\textbf{1.000}$^\dagger$" in render(compared(better), "latex")


def test_baseline_by_name(compared):
    rows = needles("a", [True] * 8) + needles("b", [False] * 8)
    table = compared(rows, baseline="b").tables[0]
    assert table.contrasts.keys() == {("a", Column(SHORT))}
    assert table.contrasts["a", Column(SHORT)].difference.mean == 1.0
    assert "Baseline: a, the first model measured." in notes_of(compared(rows))
    assert "Baseline: b." in notes_of(compared(rows, baseline="b"))
    assert "did you mean abc" in refusal(compared, needles("abc", [True]), baseline="abd").hint


def test_effective_length(compared):
    """30 of 30 holds 85 % of itself; 20 of 30 does not."""
    lengths = [2048, 4096, 8192]
    rows = [r for n, right in zip(lengths, (30, 30, 20)) for r in needles("a", [i < right for i in range(30)], n)]
    rows += [r for n in lengths for r in needles("b", [True] * 30, n)]
    lengths = compared(rows).tables[0].effective_lengths
    assert (lengths["a"].length, lengths["a"].censored) == (4096, False)
    assert (lengths["b"].length, lengths["b"].censored) == (8192, True)
    text = terminal(compared(rows))
    assert "≥ 8,192" in text
    assert compared(rows, metric="nll").tables[0].effective_lengths == {}


def test_an_effective_length_of_few_trials_is_not_called_none(compared):
    """Four of four say nothing yet; none of four is a failure."""
    rows = needles("a", [True] * 4) + needles("b", [False] * 4)
    sheet = effective_sheet(compared(rows).tables[0])
    assert [[text.main for text in line.cells] for line in sheet.sections[0]] == [
        ["too few trials", NOTHING, "1.000"],
        ["none", "< 2,048", "0.000"],
    ]
    assert "it takes 22 trials" in sheet.footnotes[0]


def test_negative_bounds_have_a_minus_sign_in_every_format(compared):
    rows = [
        row(trial=t, model=m, control=c, nll=nll + gain * (c == "format"))
        for m in ("a", "b")
        for t, (nll, gain) in enumerate([(2.1, 1.0), (2.2, -1.0), (2.3, 0.5)])
        for c in ("none", "format")
    ]
    found = compared(rows, metric="uplift")
    low, high = found.tables[0].cells["a", Column(SHORT)].estimate[1:3]
    shown = f"−{-low:.3f}, {high:.3f}"
    assert low < 0 and shown in terminal(found) and shown in render(found, "md")
    assert shown.replace("−", "$-$") in render(found, "latex")
    assert str(low) in render(found, "csv") and str(low) in render(found, "json")


# -- seeds ----------------------------------------------------------------------------------------------------


def seeds_manifest(**changes):
    details = {"config": {"hidden_size": 64}, "tokenizer_fingerprint": "byte-v1"}
    models = {"m": {**details, "fingerprint": "1"}, "m-s2": {**details, "fingerprint": "2", **changes}}
    return {"models": models, "tasks": {}}


def test_seeds_of_a_recipe_are_pooled(compared):
    rows = needles("base", [True] * 10) + needles("m", [True] * 8 + [False] * 2) + needles("m-s2", [False] * 10)
    found = compared(rows, seeds_manifest())
    (table,) = found.tables
    assert [entry.name for entry in table.entries] == ["base", "m (2 seeds)"]
    cell = table.cells["m (2 seeds)", Column(SHORT)]
    assert cell.estimate.mean == pytest.approx(0.4)
    assert cell.seed_means == {"m": 0.8, "m-s2": 0.0}
    contrast = table.contrasts["m (2 seeds)", Column(SHORT)]
    assert contrast.difference.mean == pytest.approx(-0.6) and contrast.difference.n == 10  # samples, not rows
    assert -1 <= contrast.difference.low < -0.6 < contrast.difference.high
    assert "0.000–0.800" in terminal(found)
    assert found.tables[0].baseline == "base"
    for name in ("m", "m-s2", "m (2 seeds)"):
        assert compared(rows, seeds_manifest(), baseline=name).tables[0].baseline == "m (2 seeds)"
    apart = compared(rows, seeds_manifest(), pool=False)
    assert [entry.name for entry in apart.tables[0].entries] == ["base", "m", "m-s2"]


def test_seeds_are_right_or_wrong_as_one(compared):
    """Where they agree they are one; where they do not, counts are shared out, and there is an interval too."""
    right, wrong = [True] * 10, [False] * 10
    alone = compared(needles("base", right) + needles("m", wrong)).tables[0]
    rows = needles("base", right) + needles("m", wrong) + needles("m-s2", wrong)
    pooled = compared(rows, seeds_manifest()).tables[0]
    assert pooled.contrasts["m (2 seeds)", Column(SHORT)] == alone.contrasts["m", Column(SHORT)]
    split = compared(needles("base", right) + needles("m", wrong) + needles("m-s2", right), seeds_manifest()).tables[0]
    contrast = split.contrasts["m (2 seeds)", Column(SHORT)]
    half = (
        compared(needles("base", right) + needles("m", right[:5] + wrong[:5])).tables[0].contrasts["m", Column(SHORT)]
    )
    assert contrast.difference[:3] == half.difference[:3] and contrast.smallest == half.smallest
    assert not contrast.binary and contrast.difference.p == 2 / 2**10  # sign flips: all documents say the same


def test_a_worse_mean_of_seeds_has_no_higher_bound(compared):
    """One trial of sixty-four wrong: the bound lies below that of none wrong."""
    right = [True] * 32
    found = [
        compared(needles("m", right) + needles("m-s2", last), seeds_manifest()).tables[0]
        for last in (right, [*right[:-1], False])
    ]
    best, worse = (table.cells["m (2 seeds)", Column(SHORT)].estimate for table in found)
    assert worse.mean < best.mean and worse.low < best.low and worse.high < best.high


def test_seeds_have_effective_lengths_of_their_own(compared):
    """Their mean is no model: pooled, it held what no seed held, or nothing where one of them did."""
    rows = needles("base", [True] * 22) + needles("m", [True] * 22) + needles("m-s2", [False] * 22)
    lengths = compared(rows, seeds_manifest()).tables[0].effective_lengths
    assert {name: of.length for name, of in lengths.items()} == {"base": SHORT, "m": SHORT, "m-s2": None}


def test_what_could_be_detected_is_of_what_was_not(compared):
    """A model that fails outright is told apart, and its many discordant pairs would hide what the other's allow."""
    rows = needles("base", [True] * 32) + needles("near", [True] * 31 + [False]) + needles("far", [False] * 32)
    found = compared(rows)
    near, far = (found.tables[0].contrasts[name, Column(SHORT)] for name in ("near", "far"))
    assert far.resolved and not near.resolved and near.smallest < 0.3 < far.smallest
    for given, smallest in ((rows, near.smallest), ([r for r in rows if r["model"] != "near"], far.smallest)):
        lines = terminal(compared(given)).splitlines()
        (line,) = (line for line in lines if line.startswith(" detectable"))
        assert line.split()[-1] == f"{smallest:.3f}"


def test_another_run_of_one_seed_leaves_a_run_its_seeds(compared):
    rows = [needles(name, [True] * 10) for name in ("m", "m-s2")]
    found = compared(rows[0] + rows[1], seeds_manifest(), rows[0])
    assert [entry.name for entry in found.tables[0].entries] == ["m (run0) (2 seeds)", "m (run1)"]
    apart = compared(rows[0], seeds_manifest(), rows[1], seeds_manifest())
    assert [entry.name for entry in apart.tables[0].entries] == ["m (2 seeds)"]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"config": {"hidden_size": 32}}, "configurations differ"), ({"fingerprint": "1"}, "weights are the same")],
)
def test_other_recipes_are_not_pooled(compared, change, words):
    found = compared(needles("m", [True]) + needles("m-s2", [False]), seeds_manifest(**change))
    assert [entry.name for entry in found.tables[0].entries] == ["m", "m-s2"]
    (note,) = found.notes
    assert words in note


# -- which samples pair ---------------------------------------------------------------------------------------


def asked(model, text="1", **protocol):
    return {
        "models": {},
        "tasks": {
            model: {
                "induction": {
                    "protocol": {"cue": "#{key}=", **protocol},
                    "text": {"documents": [{"text_id": "d0", "sha256": text}]},
                    "lengths": [SHORT],
                    "trials": 2,
                }
            }
        },
    }


@pytest.mark.parametrize(
    ("fields", "manifest", "words"),
    [
        ({"seed": 99}, {}, "seed (1234 and 99)"),
        ({"protocol": "induction-v2"}, {}, "protocol (induction-v1 and induction-v2)"),
        ({"sample_hash": "0" * 16}, {}, "sample_hash of 2 of 2 samples, as at length 2,048, d0"),
        ({"sample_hash": "0" * 16}, {"cue": "The code is"}, "cue ('#{key}=' and 'The code is')"),
        ({"sample_hash": "0" * 16}, {"text": "2"}, "text (other content in 1 document of the same name, as d0)"),
        ({"text_id": "book.txt"}, {}, "text (for example d0 and book.txt)"),
    ],
)
def test_other_samples_are_refused_with_what_differs(compared, fields, manifest, words):
    error = refusal(
        compared,
        needles("a", [True, True]),
        asked("a"),
        needles("b", [True, True], **fields),
        asked("b", **manifest),
    )
    assert "samples of induction differ between a and b" in error.message
    assert words in error.message
    assert "same task, seed, text and tokenizer" in error.hint


def test_what_one_side_alone_has_is_left_out_and_counted(compared):
    found = compared(needles("a", [True] * 9), needles("b", [True] * 7))
    contrast = found.tables[0].contrasts["b", Column(SHORT)]
    assert (contrast.difference.n, contrast.num_left_out) == (7, 2)
    assert "b and a: 2 samples of only one side, left out" in notes_of(found)
    assert "n=9" in terminal(found) and "n=7" in terminal(found)


def test_a_document_of_a_loss_pairs_whichever_trial_it_was(compared):
    other = [{**r, "trial": 5 - r["trial"]} for r in losses("b", [1.0, 2.0, 3.0])]
    contrast = compared(losses("a", [1.5, 2.5, 3.5]), other).tables[0].contrasts["b", Column(SHORT)]
    assert contrast.difference.n == 3
    assert contrast.difference.mean == pytest.approx(-0.5)


def test_models_without_a_common_length_are_shown_and_not_paired(compared):
    found = compared(needles("a", [True] * 3), needles("b", [True] * 3, LONG))
    assert found.num_tests == 0
    assert "Not paired with a: b (no scored sample in common)." in notes_of(found)


def test_other_tokenizers_are_not_paired(compared):
    def tokenizer(model, fingerprint, name=None):
        return {"models": {model: {"tokenizer_fingerprint": fingerprint, "tokenizer": name}}, "tasks": {}}

    given = (
        losses("a", [1.0] * 8),
        tokenizer("a", "byte-v1"),
        losses("b", [3.0] * 8, sample_hash="0" * 16),
        tokenizer("b", "json-123", "gpt2"),
    )
    found = compared(*given, metric="nll")
    assert found.num_tests == 0 and not found.tables[0].best
    (note,) = found.notes
    assert "byte-v1, gpt2" in note and "does not compare; bits_per_byte does" in note
    assert "Not paired with a: b (another tokenizer)." in notes_of(found)
    bits = compared(*given)  # of itself what compares
    assert "a length in tokens is more or less text" in bits.notes[0] and len(bits.notes) == 1
    assert bits.tables[0].cells["b", Column(SHORT)].estimate.mean == pytest.approx(3.0 / math.log(2) / 2)
    same = (given[0], tokenizer("a", "json-456", "gpt2"), *given[2:])
    assert "(gpt2 json-456, gpt2 json-123)" in compared(*same).notes[0]


def test_losses_by_position_of_other_tokenizers_are_warned_of(tmp_path):
    runs = []
    for name, fingerprint in (("a", "byte-v1"), ("b", "gpt2")):
        rows = losses(name, [2.0, 2.5])
        details = {"models": {name: {"tokenizer_fingerprint": fingerprint}}, "tasks": {}}
        runs.append(write_run(tmp_path / name, rows, details))
        buckets = [position_buckets(np.full(SHORT, 2.0)) for _ in rows]
        curves = {"keys": np.array([r["key"] for r in rows])}
        curves |= {"nll_sums": np.stack([b[0] for b in buckets]), "num_targets": np.stack([b[1] for b in buckets])}
        np.savez(runs[-1] / "curves.npz", **curves)
    found = compare(read_models(runs), CompareSpec(by="bucket"))
    assert "per token and does not compare" in found.notes[0]


def test_a_model_under_two_windows_is_told_apart(compared):
    def under(window):
        manifest = asked("m")
        manifest["tasks"]["m"]["induction"]["window"] = window
        return manifest

    rows = needles("m", [True, False])
    (note,) = compared(rows, under(None), rows, under(256)).notes
    assert note.endswith("m (run0) with full attention; m (run1) with a window of 256 tokens")
    assert compared(rows, under(256), rows, under(256)).notes == ()
    assert compared(rows, under(256), rows).notes == ()  # not known is not other


def test_seeds_under_two_windows_are_not_pooled(compared):
    def seed(label, window):
        manifest = asked(label)
        manifest["tasks"][label]["induction"]["window"] = window
        return manifest

    given = (needles("m", [True, True]), seed("m", None), needles("m-s2", [True, True]))
    assert len(compared(*given, seed("m-s2", None)).tables[0].entries) == 1  # one line, though of two runs
    found = compared(*given, seed("m-s2", 256))
    assert len(found.tables[0].entries) == 2 and "their windows differ" in found.notes[0]


def test_imported_means_are_not_paired(compared):
    means = [{**needles("paper", [True])[0], "token_accuracy": 0.9, "exact": None, "num_trials": 16}]
    means[0] |= {"protocol": "atma-stage1", "first_token_correct": None, "sample_hash": None}
    given = (means, {"source": "imported", "models": {}, "tasks": {}}, needles("a", [True] * 3))
    alone = compared(*given[:2])
    assert alone.notes == ("no row of induction has exact: token_accuracy is shown",)
    assert alone.tables[0].cells["paper", Column(SHORT)].estimate == wilson(0.9 * 16, 16)
    assert re.search(r"n \(documents\) +– ", terminal(alone))  # the one name in its rows is of a whole data set
    assert as_data(alone)["tables"][0]["cells"][0]["num_documents"] is None
    books = [{**losses("paper", [2.0])[0], "sample_hash": None, "num_trials": 16}]
    assert re.search(r"n \(documents\) +16 ", terminal(compared(books, given[1])))
    found = compared(*given, metric="token_accuracy")
    assert found.tables[0].cells["paper", Column(SHORT)].estimate.n == 16
    assert found.num_tests == 0
    assert "imported shares: Wilson over the trials behind them" in notes_of(found)
    assert "n=16" in terminal(found) and "atma-stage1 and induction-v1" in terminal(found)
    assert "Not paired with a: paper (imported figures have no samples)." in notes_of(found)


# -- other columns --------------------------------------------------------------------------------------------


def test_by_depth(compared):
    rows = [
        row(trial=t, model=m, depth=depth, right=m == "a", sample_hash=f"{t}/{depth}", key=f"{m}/{t}/{depth}")
        for m in ("a", "b")
        for t in range(4)
        for depth in (0.0, 0.5, 1.0)
    ]
    (table,) = compared(rows, by="depth").tables
    assert [column.label("depth") for column in table.columns] == ["0", "0.5", "1"]
    assert table.length == SHORT and table.cells["a", Column(SHORT, 0.5)].estimate == wilson(4, 4)
    (whole,) = compared([{**r, "gap": None} for r in rows]).tables
    assert main_sheet(whole, compared(rows)).stub == "length, tokens"
    assert len(whole.cells["a", Column(SHORT)].units) == 12
    assert "nothing to show by depth" in refusal(compared, needles("a", [True]), by="depth").message


def test_by_position(compared):
    rows = needles("a", [True] * 6) + needles("b", [True] * 6)
    for r in rows[6:9]:
        r["predicted_ids"] = [*r["predicted_ids"][:4], 0]
    (table,) = compared(rows, by="position").tables
    assert [column.part for column in table.columns] == [1, 2, 3, 4, 5]
    assert table.cells["b", Column(SHORT, 1)].estimate == wilson(6, 6)
    assert table.cells["b", Column(SHORT, 5)].estimate == wilson(3, 6)
    assert table.contrasts["b", Column(SHORT, 5)].difference.p == pytest.approx(2 / 2**3)
    loss = compared(rows, by="position", metric="nll").tables[0]
    assert loss.cells["a", Column(SHORT, 3)].estimate.mean == pytest.approx(0.5)
    rows[0] = {**row(model="a", status="oom"), "key": rows[0]["key"]}
    assert notes_of(compared(rows, by="position")).count("1 oom") == 1
    assert "a: 1 sample of only one side" in notes_of(compared(rows, by="position"))
    assert "no exact by position" in refusal(compared, rows, by="position", metric="exact").message


def test_by_bucket(tmp_path):
    rows = losses("a", [1.0, 2.0], 100) + losses("b", [2.0, 3.0], 100) + losses("a", [1.0, 1.0], 50)
    folder = write_run(tmp_path / "r", rows, {"models": {}, "tasks": {}})
    curves = [position_buckets(np.full(r["length"], r["nll_sum"] / r["length"], np.float32)) for r in rows]
    np.savez(
        folder / "curves.npz",
        keys=np.array([r["key"] for r in rows]),
        nll_sums=np.stack([sums for sums, _ in curves]),
        num_targets=np.stack([counts for _, counts in curves]),
    )
    (table,) = compare(read_models([folder]), CompareSpec(by="bucket")).tables
    assert table.length == 100
    assert [column.label("bucket") for column in table.columns][-2:] == ["32–63", "64–100"]
    assert table.cells["a", Column(100, 5)].estimate.mean == pytest.approx(1.5)
    assert table.contrasts["b", Column(100, 6)].difference.mean == pytest.approx(1.0)


# -- what is asked --------------------------------------------------------------------------------------------


def test_tasks_and_metrics_by_name(compared):
    rows = needles("a", [True]) + needles("b", [True]) + losses("a", [1.0]) + losses("b", [2.0])
    assert [(t.task, t.metric.name) for t in compared(rows).tables] == [("induction", "exact"), ("perplexity", "nll")]
    assert [t.task for t in compared(rows, metric="perplexity").tables] == ["perplexity"]
    assert [t.task for t in compared(rows, task="induction").tables] == ["induction"]
    assert "did you mean induction" in refusal(compared, rows, task="inducton").hint
    error = refusal(compared, rows, metric="exakt")
    assert "unknown metric 'exakt'" in error.message and "did you mean exact?" in error.hint
    assert all(name in refusal(compared, rows, metric="nosuch").hint for name in METRICS)
    assert (
        "no task here has the metric 'uplift'"
        in refusal(compared, [*losses("a", [1.0]), row("longdoc", SHORT, model="a")], metric="uplift").message
    )
    assert "has no metric 'uplift'" in refusal(compared, rows, task="perplexity", metric="uplift").message
    assert "no two models share a task" in refusal(compared, needles("a", [True]), losses("b", [1.0])).message


def test_a_model_of_two_runs_with_other_tasks_keeps_its_name(compared):
    found = compared(needles("a", [True]) + needles("b", [True]), losses("a", [1.0]) + losses("b", [1.0]))
    assert [[entry.name for entry in table.entries] for table in found.tables] == [["a", "b"], ["a", "b"]]


def test_a_baseline_that_a_task_lacks_is_said(compared):
    rows = needles("a", [True]) + needles("b", [True]) + losses("b", [1.0]) + losses("c", [1.0])
    assert "perplexity has no a: no differences there" in compared(rows, baseline="a").notes


# -- every outcome in every format ----------------------------------------------------------------------------

OUTCOMES = {
    "one trial": needles("a", [True]) + needles("b", [False]),
    "all right": needles("a", [True] * 7) + needles("b", [True] * 7),
    "all wrong": needles("a", [False] * 7) + needles("b", [False] * 7),
    "all failed": needles("a", [True] * 3, status="oom") + needles("b", [True] * 3, status="nan"),
    "one failed": needles("a", [True] * 3) + needles("b", [True] * 3, status="oom"),
    "one model": needles("a", [True, False]),
    "one document": losses("a", [1.0]) + losses("b", [2.0]),
    "loss failed": losses("a", [1.0], status="oom") + losses("b", [2.0, 3.0]),
    "overflow": losses("a", [800.0, 801.0]) + losses("b", [2.0, 3.0]),
}


@pytest.mark.parametrize("form", ["terminal", "md", "latex", "csv", "json"])
@pytest.mark.parametrize("name", OUTCOMES)
def test_any_outcome_gives_a_correct_table(compared, name, form):
    metric = "perplexity" if name == "overflow" else None
    found = compared(OUTCOMES[name], metric=metric)
    text = render(found, form, against_paper=form != "terminal")
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"\d nan", "", text.lower()))  # "3 nan" counts failures
    failed = {"all failed": "a at 2,048: 3 oom; b at 2,048: 3 nan", "one failed": "b at 2,048: 3 oom"}.get(name)
    if failed and form != "csv":
        assert failed in " ".join(text.split()) or failed in text
    if name == "overflow" and form in ("terminal", "md", "latex"):
        assert "overflow" in text
    if name == "one trial" and form == "terminal":
        assert "0.207–1.000" in text and "−1.000" in text and "−1.000*" not in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
@pytest.mark.parametrize("metric", ["exact", "nll"])
def test_terminal_tables_fit(compared, metric, width):
    lengths = [2048 * 2**i for i in range(6)]
    names = ["atma", "softmax+memory", "a-very-long-name-of-a-model-without-a-break", "with spaces in its name"]
    rows = [
        row(length=n, trial=t, model=name, nll=[1.234, 2.345, 9.876][t], right=t < i)
        for n in lengths
        for i, name in enumerate(names)
        for t in range(3)
    ]
    found = compared(rows, metric=metric)
    text = terminal(found, width=width, against_paper=True)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    assert all(f"{n:,}" in text for n in lengths)
    if width == 100 and metric == "exact":
        heads = next(line for line in text.splitlines() if "2,048" in line)
        assert "65,536" in heads  # six lengths side by side


def test_markdown_is_a_table_whatever_the_names(compared):
    text = render(compared(needles("a|b*_<x>", [True] * 2) + needles("c", [True] * 2)), "md")
    table = [re.sub(r"\\\|", "", line) for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table[:6]} == {3}
    assert r"a\|b\*\_\<x\>" in text


@pytest.fixture
def pdflatex(tmp_path):
    """Compile tables in a document of usual margins; what it prints."""
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed")

    def run(tables):
        packages = "\\usepackage{booktabs}\\usepackage[margin=2.5cm]{geometry}"
        document = f"\\documentclass{{article}}{packages}\\begin{{document}}\n{tables}\\end{{document}}\n"
        (tmp_path / "t.tex").write_text(document, encoding="utf-8")
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace", timeout=120)
        assert done.returncode == 0, done.stdout[-2000:]
        return done.stdout

    return run


def test_latex_compiles_and_fits(compared, pdflatex):
    rows = [
        row(length=n, trial=t, model=m, right=m == "polar+memory" or t % 2 > 0)
        for m in ("polar+memory", "softmax", "a recipe of some length (12 seeds)")
        for n in [1024 * 2**i for i in range(9)]
        for t in range(12)
    ]
    text = render(compared(rows), "latex", against_paper=True)
    assert text.count("\\toprule") == text.count("\\bottomrule") == 5  # 2 of estimates, 1 of lengths, 2 published
    said = pdflatex(text)
    assert "Overfull" not in said and "Float too large" not in said


def test_latex_of_many_models_fits_its_pages(compared, pdflatex):
    """Fourteen models and all published ones below them, two lines each, then the notes: too much for one page."""
    models = [f"softmax+memory, recipe {i:02}" for i in range(14)]
    rows = [row(length=n, trial=t, model=m, right=t % 3 > 0) for m in models for n in (SHORT, LONG) for t in range(8)]
    text = render(compared(rows, metric="token_accuracy"), "latex", against_paper=True)
    assert all(text.count(f"\n{name} &") == 5 for name in models[1:])  # mean, difference, length, and twice beside them
    said = pdflatex(text)
    assert "Overfull" not in said and "Float too large" not in said


def test_latex_compiles_whatever_the_names(compared, pdflatex):
    name = 'a_b%&#$^~\\{}<>|"üß—模−'
    text = render(compared(losses(name, [1.0, 2.0, 3.0]) + losses("z", [2.0, 3.0, 5.0])), "latex", against_paper=True)
    assert "(U+6A21)" in text
    pdflatex(text)


def test_csv_and_json_hold_the_same_figures(compared):
    found = compared(needles("a", [True] * 10) + needles("b", [False] * 10) + losses("a", [1, 2]) + losses("b", [3, 5]))
    lines = list(csv.DictReader(io.StringIO(render(found, "csv"))))
    data = json.loads(render(found, "json"))
    cells = [(table, cell) for table in data["tables"] for cell in table["cells"]]
    assert len(lines) == len(cells) == 4
    for line, (table, cell) in zip(lines, cells):
        assert (line["task"], line["metric"], line["model"]) == (table["task"], table["metric"], cell["model"])
        for name in ("mean", "low", "diff", "diff_low", "p_adjusted", "smallest_at_80_power"):
            assert line[name] == ("" if cell[name] is None else str(cell[name]))
    assert lines[1]["diff"] == "-1.0" and lines[1]["resolved"] == "True" and lines[0]["diff"] == ""
    assert data["num_tests"] == 2
    assert as_data(found)["tables"][0]["effective_lengths"]["a"]["reference"] == 1.0


# -- the command ----------------------------------------------------------------------------------------------


def test_data_on_stdout_notes_on_stderr(call, tmp_path):
    folder = write_run(tmp_path / "r", needles("a", [True] * 3) + needles("b", [False] * 3))
    for form in ("terminal", "md", "latex", "csv", "json"):
        done = call(folder, "--format", form)
        assert done.exit_code == 0, done.output
        assert "has no manifest" in done.stderr
        assert form == "json" or "manifest" not in done.stdout
        assert "\x1b" not in done.stdout
    assert json.loads(call(folder, "--format", "json").stdout)["tables"]


def test_a_file_is_written_in_the_format_of_its_name(call, tmp_path):
    folder = write_run(tmp_path / "r", needles("a", [True] * 3) + needles("b", [False] * 3))
    starts = {"t.md": "### ", "t.tex": "% needs", "t.csv": "source,", "t.json": "{", "t.txt": "induction"}
    for name, start in starts.items():
        out = tmp_path / "new" / "folder" / name
        done = call(folder, "-o", out)
        assert done.exit_code == 0 and done.stdout == ""
        assert out.read_text(encoding="utf-8").startswith(start)
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "t.md", tmp_path):
        error = call(folder, "-o", out).exception
        assert isinstance(error, UserError) and f"cannot write {out}" in error.message


def test_an_unfinished_run_is_compared_with_what_it_has(call, tmp_path):
    task = {"induction": {"trials": 3, "lengths": [SHORT]}}
    manifest = {"models": {}, "tasks": {"a": task, "b": task}}
    folder = write_run(tmp_path / "r", needles("a", [True] * 3) + needles("b", [False] * 3), manifest)
    records = folder / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-30])
    done = call(folder)
    assert done.exit_code == 0
    assert "ends in half a row" in done.stderr
    assert "is unfinished: 2 of 3 trials of induction for b, not counting controls" in done.stderr
    assert "n=2" in done.stdout
    error = call(folder, "--by", "depth", "--against", "paper").exception
    assert isinstance(error, UserError) and "no published figures by depth" in error.message


def test_importing_the_command_is_cheap():
    code = "import sys, atma_eval.commands.compare; assert not {'numpy', 'torch', 'yaml'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, atma_eval.compare.formats; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- published figures ----------------------------------------------------------------------------------------

POLAR = {"models": {"a": {"config": {"attn_type": "polar", "mem_enabled": True, "attn_window": None}}}, "tasks": {}}


def test_published_figures_stand_beside_and_apart(compared):
    given = (needles("a", [True] * 10) + needles("b", [False] * 10), POLAR)
    found = compared(*given)
    text = terminal(found, against_paper=True)
    assert "published, not" in text and "Not paired and not tested" in " ".join(text.split())
    assert "The study has no exact for this probe" in " ".join(text.split())
    assert "I02" in text and "I03" in text and "16 trials" in " ".join(text.split())
    assert "0.912" in text  # under token accuracy
    assert found.num_tests == 1
    assert text.startswith(terminal(found))
    data = as_data(found, against_paper=True)
    assert {p["metric"] for p in data["published"]} == {"token_accuracy"}
    assert "published" not in as_data(found) and "I02" in data["published_texts"]["notes"]
    lines = list(csv.DictReader(io.StringIO(render(found, "csv", against_paper=True))))
    published = [line for line in lines if line["source"] != "run"]
    assert len(published) == len(data["published"]) and all(line["diff"] == "" for line in published)
    assert published[0]["source"].startswith("ablation/results.json")


def test_published_figures_stand_beside_pooled_seeds(compared):
    """Seeds that are all right are as sure as one of them, in both tables."""
    rows = needles("m", [True] * 10) + needles("m-s2", [True] * 10) + needles("b", [False] * 10)
    found = compared(rows, seeds_manifest(), metric="token_accuracy")
    pooled = found.tables[0].cells["m (2 seeds)", Column(SHORT)].estimate
    assert pooled.low == wilson(10, 10).low
    published = published_sheet(found.tables[0])
    line = next(line for line in published.sections[0] if line.label == "m (2 seeds)")
    (ours,) = (text for text in line.cells if text.main != NOTHING)
    assert ours.under == f"{pooled.low:.3f}–1.000"


@pytest.mark.parametrize(
    ("metric", "words"),
    [("uplift", "has no control"), ("first_token", "how often the first"), ("nll", "losses of needles are not")],
)
def test_what_the_study_lacks_is_said(compared, metric, words):
    rows = [row(trial=t, model=m, control=c) for t in range(3) for m in "ab" for c in ("none", "format")]
    assert words in " ".join(terminal(compared(rows, metric=metric), against_paper=True).split())


def test_published_figures_are_of_two_tasks_only(compared):
    found = compared(needles("a", [True], gap=None) + needles("b", [True], gap=None), POLAR)
    assert "not of this task" in " ".join(terminal(found, against_paper=True).split())
    assert as_data(found, against_paper=True)["published"] == []


def test_published_losses_have_no_interval(compared):
    found = compared(losses("a", [1.0, 2.0]) + losses("b", [1.5, 2.5]), POLAR, metric="perplexity")
    text = terminal(found, against_paper=True)
    assert "2.703" in text and "I01" in text
    assert all(p["low"] is None for p in as_data(found, against_paper=True)["published"])


def test_an_output_that_knows_few_signs_gets_question_marks(tmp_path):
    run = write_run(tmp_path / "a", [row(trial=trial, model=m) for trial in range(3) for m in ("m", "n")])
    code = "import sys; from atma_eval.cli import main; sys.argv = ['atma-eval', 'compare', sys.argv[1]]; main()"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, env=environment, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout
