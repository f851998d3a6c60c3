"""Runs as their readers see them, and the metrics of their rows."""

from __future__ import annotations

import json
import math

import pytest
from rows import row, write_run

from atma_eval.errors import UserError
from atma_eval.metrics import METRICS, Unit, estimate, metric_for, units
from atma_eval.runs import read_models, read_run
from atma_eval.stats import wilson


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    return caught.value


def test_a_run_is_read_by_folder_or_file(tmp_path):
    folder = write_run(tmp_path / "a", [row(), row(trial=1)], {"models": {"m": {"architecture": "polar"}}})
    for name in (folder, str(folder), folder / "records.jsonl"):
        run = read_run(name)
        assert (run.name, len(run.rows), run.notes) == ("a", 2, ())
        assert run.model("m") == {"architecture": "polar"} and run.model("other") == {}


def test_half_a_last_row_is_left_out_and_said(tmp_path):
    folder = write_run(tmp_path / "a", [row(), row(trial=1)], {"models": {}})
    path = folder / "records.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    run = read_run(folder)
    assert len(run.rows) == 1
    assert run.notes == (f"{path} ends in half a row, which is left out",)


def test_an_unfinished_run_says_so(tmp_path):
    asked = {"induction": {"trials": 3, "lengths": [2048, 4096]}}
    manifest = {"models": {}, "tasks": {"m": asked, "other": asked}}
    run = read_run(write_run(tmp_path / "a", [row(), row(control="absent"), row(trial=1)], manifest))
    assert run.notes == (
        f"{run.path} is unfinished: 2 of 6 trials of induction for m, not counting controls",
        f"{run.path} is unfinished: nothing of induction yet for other",
    )
    whole = [row(length=n, trial=i, model=m) for m in ("m", "other") for n in (2048, 4096) for i in range(3)]
    assert read_run(write_run(tmp_path / "b", whole, manifest)).notes == ()
    manifest["tasks"] |= dict.fromkeys("abcd", asked)
    assert read_run(write_run(tmp_path / "a", [row()], manifest)).notes[1:] == (
        f"{run.path} is unfinished: nothing of induction yet for other, a, b and 2 more",
    )


def test_without_a_manifest_rows_can_still_be_read(tmp_path):
    run = read_run(write_run(tmp_path / "a", [row()]))
    assert run.notes == (f"{run.path} has no manifest: models are told apart by name alone",)
    assert run.model("m") == {} and run.curves == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"length": "2048"}, "line 2: length is '2048', not int"),
        ({"length": True}, "line 2: length is True, not int"),
        ({"exact": 1}, "line 2: exact is 1, not bool or null"),
        ({"nll_sum": None}, "line 2: a row that is ok has no loss"),
        ({"num_targets": 0}, "line 2: a row that is ok has no loss"),
        ({"length": 0}, "line 2: length is 0; allowed: a number of tokens"),
        ({"length": 10**30}, "a number of tokens"),
        ({"status": "great"}, "line 2: status is 'great'; allowed: ok, oom, nan, too_long, error"),
        ({"control": "no"}, "line 2: control is 'no'"),
        ({"depth": 3.0}, "line 2: depth is 3.0; allowed: between 0 and 1"),
        ({"token_accuracy": 7.0}, "line 2: token_accuracy is 7.0"),
        ({"nll_sum": -50.0}, "line 2: nll_sum is -50.0; allowed: a loss, never negative"),
        ({"schema": 7}, "line 2: schema 7, this version reads 1"),
    ],
)
def test_rows_edited_by_hand_are_refused_with_their_line(tmp_path, change, words):
    folder = write_run(tmp_path / "a", [row(), {**row(trial=1), **change}])
    assert words in refusal(read_run, folder).message


def test_a_row_without_a_field_is_refused(tmp_path):
    short = row(trial=1)
    del short["gap"], short["status"]
    assert "line 2: the row has no gap, status" in refusal(read_run, write_run(tmp_path / "a", [row(), short])).message


def test_what_is_no_run_is_refused(tmp_path):
    assert "no run at" in refusal(read_run, tmp_path / "nothing").message
    assert "holds no records.jsonl" in refusal(read_run, tmp_path).message
    assert "holds no whole row" in refusal(read_run, write_run(tmp_path / "empty", [])).message
    broken = write_run(tmp_path / "b", [row()])
    (broken / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in refusal(read_run, broken).message
    (broken / "manifest.json").write_text("[]")
    assert "not the manifest of a run" in refusal(read_run, broken).message


def test_models_of_two_runs(tmp_path):
    """A label in two runs is told apart where the task is the same, and only there."""
    a = write_run(tmp_path / "a", [row(), row(model="n")])
    b = write_run(tmp_path / "b", [row(), row(task="perplexity", model="n")])
    found = read_models([a, b])
    assert [(m.name, m.label, m.tasks) for m in found] == [
        ("m (a)", "m", ["induction"]),
        ("n", "n", ["induction"]),
        ("m (b)", "m", ["induction"]),
        ("n", "n", ["perplexity"]),
    ]
    assert "is given twice" in refusal(read_models, [a, str(a) + "/"]).message


def test_runs_in_folders_of_one_name_are_told_apart(tmp_path):
    runs = [write_run(tmp_path / name, [row()]) for name in ("x/run", "y/run", "y/other")]
    assert [model.name for model in read_models(runs)] == ["m (x/run)", "m (y/run)", "m (other)"]


def test_values_and_pairs():
    rows = [row(nll=0.5, trial=0), row(nll=2.5, trial=0, control="format"), row(trial=1, nll=1.0, right=False)]
    rows.append(row(trial=2, status="oom"))
    exact = units(rows, METRICS["exact"])
    assert [unit.value for unit in exact.values()] == [1.0, 0.0]  # the failed row is left out
    assert estimate(exact.values(), METRICS["exact"]) == wilson(1, 2)
    uplift = units(rows, METRICS["uplift"])
    assert [unit.value for unit in uplift.values()] == [2.0]  # only where the contrast was scored
    assert len(exact.keys() & uplift.keys()) == 1
    assert [u.value for u in units(rows, METRICS["nll"], "format").values()] == [2.5]


def test_bits_per_byte_is_a_ratio_of_sums():
    rows = [row("perplexity", trial=0, nll=1.0, num_bytes=2048), row("perplexity", trial=1, nll=2.0, num_bytes=8192)]
    bits = estimate(units(rows, METRICS["bits_per_byte"]).values(), METRICS["bits_per_byte"])
    assert bits.mean == pytest.approx(2048 * 3.0 / math.log(2) / (2048 + 8192))
    assert bits.low < bits.mean < bits.high
    loss = estimate(units(rows, METRICS["perplexity"]).values(), METRICS["perplexity"])
    assert loss.mean == pytest.approx(math.exp(1.5))


def test_an_imported_mean_counts_its_trials():
    """80 digits of 16 trials: as wide as 16 observations, for nobody knows how digits of a trial hang together."""
    unit = Unit(0.925, 1.0, "paper", None, 16)
    found = estimate([unit], METRICS["token_accuracy"])
    assert found == wilson(14.8, 16)
    assert found.n == 16
    assert estimate([unit], METRICS["nll"]) == (0.925, None, None, 16)


def test_metrics_by_name():
    assert metric_for(row(), None).name == "exact"
    assert metric_for(row("perplexity"), None).name == "nll"
    assert "did you mean uplift" in refusal(metric_for, row(), "uplit").hint
    assert "task perplexity has no metric 'exact'" in refusal(metric_for, row("perplexity"), "exact").message


def test_json_of_a_row_survives(tmp_path):
    kept = row(text_id="ü", nll=1e-9)
    assert read_run(write_run(tmp_path / "a", [kept])).rows == [json.loads(json.dumps(kept))]
