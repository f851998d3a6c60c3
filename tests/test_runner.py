"""Runs survive interruption at any point, grow, and refuse what would not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import rows
import torch
from conftest import TINY, tiny_model

from atma_eval import progress, runner, source
from atma_eval.errors import UserError
from atma_eval.kernels import tiles
from atma_eval.records import FIELDS, VOLATILE_FIELDS, RunDirectory, read_curves, read_rows
from atma_eval.runs import read_run
from atma_eval.spec import ModelSpec, RunSpec, TaskSpec, build_task, load_preset


def request(
    out, model, *, lengths=(100, 200, 400), trials=4, docs=2, seed=None, text="stdlib", models=None, window="train"
):
    niah = build_task(load_preset("induction"), lengths=lengths, trials=trials, docs=docs, seed=seed)
    loss = build_task(load_preset("perplexity"), lengths=lengths, docs=docs, seed=seed)
    return RunSpec(
        models=tuple(ModelSpec(name=name) for name in models or [model]),
        tasks=tuple(TaskSpec(task=task, text=text, window=window) for task in (niah, loss)),
        out=out,
    )


def run(spec, on_row=lambda row: None):
    with RunDirectory(spec.out) as directory:
        return runner.run(runner.prepare(spec), runner.Events(on_row=on_row), directory)


def stable(rows):
    """Rows by key, without what may differ between a run and its resumption."""
    return {row["key"]: {k: v for k, v in row.items() if k not in VOLATILE_FIELDS} for row in rows}


def on_disk(out):
    rows, _ = read_rows(out / "records.jsonl")
    return rows


@pytest.fixture
def finished(tmp_path, tiny_name):
    spec = request(tmp_path / "whole", tiny_name)
    run(spec)
    return spec, stable(on_disk(spec.out)), read_curves(spec.out / "curves.npz")


def test_rows_are_complete_and_flat(finished):
    _, rows, curves = finished
    assert len(rows) == 3 * 4 * 3 + 3 * 2  # lengths x trials x (task, format, absent), and lengths x documents
    for row in rows.values():
        assert set(row) == set(FIELDS) - set(VOLATILE_FIELDS)
        assert row["status"] == "ok"
        if row["task"] == "induction":
            assert row["num_targets"] == 5 == len(row["nll"]) == len(row["target_ids"]) == len(row["predicted_ids"])
            assert row["context_tokens"] == 1 + 12 + row["length"] + 6  # start, needle, gap, cue
            assert row["nll_sum"] == pytest.approx(sum(row["nll"]), rel=1e-5)
        else:
            assert row["num_targets"] == row["length"] == row["num_bytes"]
            assert row["target_ids"] is row["nll"] is row["exact"] is None
            sums, counts = curves[row["key"]]
            assert counts.sum() == row["length"]
            assert sums.sum() == pytest.approx(row["nll_sum"])


def test_a_text_of_fewer_documents_than_may_be_used_is_a_whole_run(tmp_path, tiny_name):
    (tmp_path / "book.txt").write_text("some words over and over, " * 100)
    loss = build_task(load_preset("perplexity"), lengths=(100, 200))
    assert loss.docs == 12
    out = tmp_path / "run"
    task = TaskSpec(task=loss, text=str(tmp_path / "book.txt"))
    run(RunSpec(models=(ModelSpec(name=tiny_name),), tasks=(task,), out=out))
    assert read_run(out).notes == ()
    (out / "records.jsonl").write_text((out / "records.jsonl").read_text().splitlines(keepends=True)[0])
    (note,) = read_run(out).notes
    assert "1 of 2 documents" in note


@pytest.mark.parametrize("stop_at", [1, 2, 5, 12, 25, 37, 40])
def test_interrupted_anywhere_then_continued(tmp_path, tiny_name, finished, stop_at):
    spec = dataclasses.replace(finished[0], out=tmp_path / "broken")
    seen = []

    def interrupt(row):
        seen.append(row)
        if len(seen) == stop_at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(spec, interrupt)
    assert len(on_disk(spec.out)) == stop_at
    result = run(spec)
    assert result.num_new == len(finished[1]) - stop_at
    assert stable(on_disk(spec.out)) == finished[1]
    curves = read_curves(spec.out / "curves.npz")
    assert curves.keys() == finished[2].keys()
    for key, (sums, _) in curves.items():
        np.testing.assert_array_equal(sums, finished[2][key][0])
    assert run(spec).num_new == 0


def test_tokens_of_rows_that_are_there_are_told_apart(tmp_path, tiny_name, finished):
    spec, _, _ = finished
    (tmp_path / "other.json").write_text(json.dumps({**TINY, "attn_type": "nope"}))
    cells = runner.prepare(request(spec.out, tiny_name, models=[tiny_name, f"random:{tmp_path / 'other.json'}"]))
    told = {False: 0, True: 0}

    def on_tokens(count, computed):
        told[computed] += count

    with RunDirectory(spec.out) as directory:
        runner.run(cells, runner.Events(on_tokens=on_tokens), directory)
    per_model = sum(cell.account.computed_tokens for cell in cells[:2])
    assert told == {False: per_model, True: per_model}


def test_the_time_left_is_that_of_what_is_computed_now(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    shown = progress.RunProgress(1000, {}, live=False, quiet=True)
    shown.row(rows.row())  # one that was there already
    shown.tokens(400, False)
    assert shown._left() == ""
    clock[0] = 59.7
    shown.tokens(300, True)
    assert shown._left() == "1:00 left"


def test_killed_and_repeated_from_the_command_line(tmp_path):
    """kill -9 three times, in the middle of rows as they come; in the end the rows are those of an unbroken run."""
    config = tmp_path / "tiny.json"
    config.write_text(json.dumps({**TINY, "num_hidden_layers": 8}))

    def command(out):
        options = ["--lengths", "500,1000,2000", "--trials", "4", "--docs", "2", "-o", str(out)]
        return [sys.executable, "-m", "atma_eval", "niah", "-m", f"random:{config}", *options]

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path / "whole"), env=environment, check=True, capture_output=True)
    whole = stable(on_disk(tmp_path / "whole"))
    records = tmp_path / "killed" / "records.jsonl"
    for enough in (1, 9, 20):
        process = subprocess.Popen(
            command(records.parent), env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        while process.poll() is None and (not records.exists() or records.read_bytes().count(b"\n") < enough):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with records.open("ab") as file:  # as if the kill had come inside a write
            file.write('{"schema": 1, "key": "torn é'.encode()[:-1])
    done = subprocess.run(command(records.parent), env=environment, check=True, capture_output=True, text=True)
    assert "repaired" in done.stderr
    assert stable(on_disk(records.parent)) == whole


def test_models_lengths_and_trials_may_be_added(tmp_path, tiny_name):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**TINY, "attn_type": "nope"}))
    out = tmp_path / "run"
    run(request(out, tiny_name))
    before = stable(on_disk(out))
    result = run(request(out, tiny_name, lengths=(100, 300, 400), trials=6, models=[tiny_name, f"random:{other}"]))
    after = stable(on_disk(out))
    assert {key: after[key] for key in before} == before
    assert len(result.rows) == 2 * (3 * 6 * 3 + 3 * 2)
    assert {row["model"] for row in result.rows} == {"random:tiny", "random:other"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["tasks"]["random:tiny"]["induction"]["lengths"] == [100, 200, 300, 400]
    assert len(manifest["invocations"]) == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [({"seed": 5}, "seed"), ({"window": 64}, "window"), ({"docs": 3}, "documents"), ({"text": "other"}, "text")],
)
def test_a_repeat_that_resolves_differently_is_refused(tmp_path, tiny_name, change, named):
    out = tmp_path / "run"
    run(request(out, tiny_name))
    if change.get("text"):
        path = tmp_path / "other.txt"
        path.write_text("some words over and over, " * 100)
        change = {"text": str(path), "docs": 1}
    before = (out / "records.jsonl").read_bytes(), (out / "manifest.json").read_bytes()
    with pytest.raises(UserError, match=named):
        run(request(out, tiny_name, **change))
    assert before == ((out / "records.jsonl").read_bytes(), (out / "manifest.json").read_bytes())


def test_a_document_under_another_name_is_refused(tmp_path, tiny_name):
    """Its rows would count as those of another document."""
    out, text = tmp_path / "run", tmp_path / "book.txt"
    text.write_text("some words over and over, " * 100)
    run(request(out, tiny_name, docs=1, text=str(text)))
    moved = text.rename(tmp_path / "novel.txt")
    with pytest.raises(UserError, match="text documents"):
        run(request(out, tiny_name, docs=1, text=str(moved)))


def test_a_request_that_came_to_no_row_binds_nobody(tmp_path, tiny_name, monkeypatch):
    out = tmp_path / "run"

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runner, "load_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(request(out, tiny_name, lengths=(50, 100)))
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "num_hidden_layers": 3}))
    run(request(out, tiny_name, lengths=(100,), seed=5, window=64))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["models"]["random:tiny"]["config"]["num_hidden_layers"] == 3
    asked = manifest["tasks"]["random:tiny"]["induction"]
    assert (asked["protocol"]["seed"], asked["window"], asked["lengths"]) == (5, 64, [100])


def test_a_model_that_changed_under_its_name_is_refused(tmp_path, tiny_name):
    out = tmp_path / "run"
    run(request(out, tiny_name))
    (tmp_path / "tiny.json").write_text(json.dumps({**TINY, "num_hidden_layers": 3}))
    with pytest.raises(UserError, match=r"fingerprint of model random:tiny"):
        run(request(out, tiny_name))


def test_trials_are_the_same_at_every_length_and_model(finished):
    by_trial = {}
    for row in finished[1].values():
        if row["task"] == "induction" and row["control"] != "format":
            by_trial.setdefault(row["trial"], set()).add((tuple(row["target_ids"]), row["text_id"]))
    assert all(len(values) == 1 for values in by_trial.values())
    assert len({next(iter(v)) for v in by_trial.values()}) == len(by_trial)


def test_nan_becomes_rows_and_the_run_goes_on(tmp_path, tiny_name, monkeypatch):
    load = runner.load_model

    def broken(source, window, details):
        loaded = load(source, window, details)
        forward = loaded.model.forward

        def failing(tokens, state=None, last=None):
            hidden = forward(tokens, state, last)
            return hidden * float("nan") if state.length > 250 else hidden

        loaded.model.forward = failing
        return loaded

    monkeypatch.setattr(runner, "load_model", broken)
    result = run(request(tmp_path / "run", tiny_name))
    by_length = {row["length"]: set() for row in result.rows}
    for row in result.rows:
        by_length[row["length"]].add(row["status"])
    assert by_length == {100: {"ok"}, 200: {"ok"}, 400: {"nan"}}
    text = (tmp_path / "run" / "records.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert len(result.failed) == 4 * 3 + 2


def test_too_little_memory_for_the_longest_still_gives_the_shorter(tmp_path, tiny_name, monkeypatch):
    load, reserved = runner.load_model, set()

    def tight(source, window, details):
        """Room for 300 tokens: neither more can be reserved, nor a state grow beyond."""
        loaded = load(source, window, details)
        init_state, forward = loaded.model.init_state, loaded.model.forward

        def reserving(batch_size=1, capacity=0):
            if capacity > 300:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more.")
            reserved.add(capacity)
            return init_state(batch_size, capacity)

        def growing(tokens, state=None, last=None):
            if state.length + tokens.shape[1] > 300:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more.")
            return forward(tokens, state, last)

        loaded.model.init_state, loaded.model.forward = reserving, growing
        return loaded

    monkeypatch.setattr(runner, "load_model", tight)
    monkeypatch.setattr(runner, "BRANCH_TOKENS", 50)
    rows = run(request(tmp_path / "run", tiny_name)).rows
    assert {(row["length"], row["status"]) for row in rows} == {(100, "ok"), (200, "ok"), (400, "oom")}
    assert reserved == {1 + 12 + 200 + 6 + 5 + 50, 1 + 200 + 50}  # the longest that fit: needles, losses
    whole = request(tmp_path / "whole", tiny_name, lengths=(100, 200), docs=2)
    monkeypatch.setattr(runner, "load_model", load)
    assert {r["key"]: r["nll_sum"] for r in rows if r["status"] == "ok"} == pytest.approx(
        {r["key"]: r["nll_sum"] for r in run(whole).rows}, rel=1e-5
    )


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_peak_memory_is_in_bytes(monkeypatch, platform):
    """The system says KiB on Linux and bytes on macOS."""
    unit = {"linux": 1024, "darwin": 1}[platform]
    usage = type("Usage", (), {"ru_maxrss": 5 * 2**20 // unit})
    monkeypatch.setattr(runner.resource, "getrusage", lambda who: usage)
    monkeypatch.setattr(runner.sys, "platform", platform)
    assert runner._peak_memory_bytes(tiny_model()) == 5 * 2**20


def test_damage_is_named_and_a_second_writer_is_refused(tmp_path, finished):
    out = finished[0].out
    with RunDirectory(out), pytest.raises(UserError, match="another atma-eval"):
        RunDirectory(out)
    records = out / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join([*lines[:3], b'{"key": NaN}\n', *lines[3:]]))
    with pytest.raises(UserError, match=r"records\.jsonl, line 4"):
        RunDirectory(out)
    records.write_bytes(b"".join([*lines, lines[0]]))
    with pytest.raises(UserError, match=r"stands on line 1 already"):
        RunDirectory(out)


@pytest.mark.parametrize(
    ("name", "content"),
    [("curves.npz", b""), ("curves.npz", b"PK..."), ("manifest.json", b"[1]"), ("manifest.json", b'{"models": {}}')],
)
def test_other_damage_is_named_too(finished, name, content):
    (finished[0].out / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        RunDirectory(finished[0].out)


def test_a_file_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "records.jsonl").write_text("my notes")
    with pytest.raises(UserError, match="not of a run"):
        RunDirectory(tmp_path)
    assert (tmp_path / "records.jsonl").read_text() == "my notes"


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_cut_off(finished, cut):
    spec, rows, _ = finished
    records = spec.out / "records.jsonl"
    records.write_bytes(records.read_bytes()[:-cut])
    messages = []
    with RunDirectory(spec.out) as directory:
        assert directory.torn_bytes > 0
        runner.run(runner.prepare(spec), runner.Events(on_message=messages.append), directory)
    assert "repaired" in messages[0]
    assert stable(on_disk(spec.out)) == rows


def test_records_load_elsewhere(finished):
    import datasets
    import pandas

    path = finished[0].out / "records.jsonl"
    frame = pandas.read_json(path, lines=True)
    assert len(frame) == len(finished[1])
    assert list(frame.columns) == FIELDS
    loaded = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache"))
    assert loaded.num_rows == len(finished[1])


def test_twenty_thousand_rows_open_quickly(tmp_path, finished):
    spec, _, _ = finished
    template = on_disk(spec.out)[0]
    with (spec.out / "records.jsonl").open("a") as file:
        for i in range(20_000):
            file.write(json.dumps({**template, "key": f"filler/{i}"}) + "\n")
    started = time.perf_counter()
    with RunDirectory(spec.out) as directory:
        assert len(directory.rows) > 20_000
    assert time.perf_counter() - started < 2


def test_rows_do_not_depend_on_threads(tmp_path, tiny_name, monkeypatch):
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(source, "_num_threads", lambda threads=threads: threads)
        results.append(stable(run(request(tmp_path / f"run{threads}", tiny_name, lengths=(100, 3000), docs=1)).rows))
    tiles.use_workers(1)
    assert results[0] == results[1]
