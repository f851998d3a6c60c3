"""Logs of the ATMA authors as rows: figures as published, failures as failures, and nothing made up."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from atma_eval.commands.importing import import_logs as command
from atma_eval.errors import UserError
from atma_eval.export import export_run
from atma_eval.export.cells import cells_of
from atma_eval.importing import import_logs
from atma_eval.importing.figures import exact_share, value_tokens
from atma_eval.importing.files import mask
from atma_eval.importing.names import readable, repository_parts
from atma_eval.metrics import METRICS, estimate, units
from atma_eval.records import FIELDS
from atma_eval.runs import read_models, read_run
from atma_eval.stats import wilson

LOGS = Path(__file__).parent / "data" / "import"
STAGE1 = LOGS / "polar__reg-baseline__distr-0__mem-1__win-0.log"
OPEN = LOGS / "open__HuggingFaceTB__SmolLM2-360M.log"
SYNTHETIC, REAL, LONGDOC = (LOGS / f"{name}_polar.log" for name in ("retrieval_synthetic", "retrieval_real", "longdoc"))
MATRIX, RESULTS, SWEEP = (LOGS / f"{name}.json" for name in ("benchmark_matrix", "results", "clamp_sweep"))
CONFIG = {
    "attn_type": "wall",
    "memory": False,
    "eval_lengths": [2048, 4096],
    "needle_distances": [2048],
    "num_eval_docs": 16,
    "num_needle_trials": 16,
    "needle_val_len": 5,
    "clean_dataset": "some/text",
}


def imported(tmp_path, *logs):
    done = import_logs(logs, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.imported and done.num_rows == len(run.rows)
    return done, run


def at(source, task, length, control="none", depth=None):
    """The one row of a cell, of a run or of one model."""
    rows = [
        r
        for r in source.rows
        if (r["task"], r["length"], r["control"]) == (task, length, control) and depth in (None, r["depth"])
    ]
    assert len(rows) == 1
    return rows[0]


def figure(rows, metric, control="none"):
    return estimate(list(units(rows, METRICS[metric], control).values()), METRICS[metric])


def refusal(tmp_path, *logs):
    with pytest.raises(UserError) as caught:
        import_logs(logs, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    return caught.value


def block(name, value):
    return f"==={name}===\n{value if isinstance(value, str) else json.dumps(value)}\n===END===\n"


def write_log(path, config=None, evaluation=None, error=None):
    parts = {"ABLATION_CONFIG_JSON": config, "ABLATION_EVAL_JSON": evaluation, "ABLATION_ERROR_JSON": error}
    path.write_text("text\n" + "".join(block(name, value) for name, value in parts.items() if value is not None))
    return path


# -- ablation ---------------------------------------------------------------------------------------------


def test_a_stage_one_log(tmp_path):
    done, run = imported(tmp_path, STAGE1)
    assert done.models == ["polar+memory (imported)"]
    assert len(run.rows) == 6 + 6 + 6 + 1
    file_rows = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert all(list(r) == list(FIELDS) for r in file_rows)

    needle = at(run, "induction", 65536)
    assert needle["token_accuracy"] == 74 / 80  # 92.50000… in the log
    assert (needle["num_targets"], needle["gap"], needle["depth"]) == (80, 65536, 0.0)
    assert needle["nll_sum"] == pytest.approx(0.65533 * 80, abs=1e-2)
    for name in ("trial", "sample_hash", "target_ids", "predicted_ids", "nll", "exact", "first_token_correct"):
        assert needle[name] is None
    assert (needle["text_id"], needle["protocol"]) == ("codelion/finepdfs-100M", "authors-induction")
    accuracy = [figure([at(run, "induction", n)], "token_accuracy").mean for n in (2048, 4096, 8192, 16384, 32768)]
    assert accuracy == [73 / 80, 76 / 80, 74 / 80, 78 / 80, 77 / 80]
    assert figure([needle], "token_accuracy") == wilson(74 / 5, 16)  # 16 trials, not 80 digits
    assert figure([needle], "nll")[1:] == (None, None, 16)

    loss = at(run, "perplexity", 65536)
    assert loss["nll_sum"] / loss["num_targets"] == pytest.approx(1.960, abs=1e-3)
    assert (loss["num_targets"], loss["gap"], loss["depth"]) == (16 * 65536, None, None)
    assert figure([loss], "nll").n == 16
    assert at(run, "perplexity-junk", 2048)["text_id"] == "kjj0/finewebedu10B-gpt2"
    absent = at(run, "induction", 2048, "absent")  # measured at the shortest gap only
    assert absent["token_accuracy"] is None and 4.9 < absent["nll_sum"] / 80 < 8.2
    assert run.model("polar+memory (imported)")["architecture"] == "polar + memory"
    assert run.model("polar+memory (imported)")["num_parameters"] == 378220864


def test_an_open_model_scores_two_tokens_per_digit(tmp_path):
    done, run = imported(tmp_path, OPEN)
    assert any("scores 10 tokens per value" in note for note in done.notes)
    needle = at(run, "induction", 8192)
    assert (needle["num_targets"], needle["token_accuracy"]) == (160, 95 / 160)
    loss = at(run, "perplexity", 2048)
    bits = loss["nll_sum"] / math.log(2) / loss["num_bytes"]
    assert bits == pytest.approx(0.68961, rel=1e-5)
    assert run.model("SmolLM2-360M (imported)")["tokenizer"] == "native"


def test_results_json_and_a_log_of_the_same_run(tmp_path):
    """The log's run stands in the list too: its figures are kept once, and the other run is added."""
    done, run = imported(tmp_path, RESULTS, STAGE1)
    assert done.models == ["polar+memory (imported)", "nope+memory (imported)"]
    assert len(run.rows) == 38 and done.left_out == {"figures given twice": 19}
    nope = [r for r in run.rows if r["model"].startswith("nope") and r["task"] == "induction" and r["length"] == 65536]
    assert nope[0]["token_accuracy"] == 13 / 80


def test_null_cells_are_failures_and_never_zeros(tmp_path):
    values = {
        "clean_ppl": {"2048": 2.5, "4096": None},
        "junk_ppl": {"2048": math.nan},
        "needle": {"2048": {"ce": 1.0, "acc": 50.0}, "4096": None},
        "num_clean_docs": 16,
    }
    _, run = imported(tmp_path, write_log(tmp_path / "a.log", CONFIG, values))
    for task in ("perplexity", "induction"):
        row = at(run, task, 4096)
        assert (row["status"], row["nll_sum"], row["token_accuracy"]) == ("oom", None, None)
        assert "null in the log" in row["error"] and figure([row], "nll").n == 0
    assert at(run, "perplexity-junk", 2048)["status"] == "nan"
    assert at(run, "induction", 2048)["token_accuracy"] == 0.5


@pytest.mark.parametrize(("error", "status"), [("CUDA out of memory. /home/who/x", "oom"), ("it broke", "error")])
def test_a_failed_run_has_rows_of_what_it_would_have_scored(tmp_path, error, status):
    done, run = imported(tmp_path, write_log(tmp_path / "a.log", CONFIG, None, {"error": error}))
    losses = {(task, length) for task in ("perplexity", "perplexity-junk") for length in (2048, 4096)}
    assert {(r["task"], r["length"]) for r in run.rows} == losses | {("induction", 2048)}
    assert len(run.rows) == 5
    assert all(r["status"] == status and "who" not in r["error"] for r in run.rows)
    assert "failed" in done.notes[0]


def test_what_a_log_does_not_say_is_a_note(tmp_path):
    values = {"clean_ppl": {"2048": 2.5}, "needle": {"2048": {"ce": 1.0, "acc": 33.3}}}
    path = write_log(tmp_path / "rope__reg-weak__distr-1__mem-0__win-1.log", None, values)
    done, run = imported(tmp_path, path)
    assert done.models == ["rope, reg weak, distractor, window (imported)"]
    notes = " ".join(done.notes)
    for words in ("has no config", "how many documents", "how many needles", "not shares of 1 x 5 tokens"):
        assert words in notes
    assert at(run, "induction", 2048)["token_accuracy"] == pytest.approx(0.333)  # not of any grid: left as it is


def test_the_first_block_counts(tmp_path):
    path = write_log(tmp_path / "a.log", CONFIG, {"clean_ppl": {"2048": 2.5}, "num_clean_docs": 16})
    path.write_text(path.read_text() + block("ABLATION_EVAL_JSON", {"clean_ppl": {"2048": 9.0}}))
    _, run = imported(tmp_path, path)
    assert figure([at(run, "perplexity", 2048)], "nll").mean == pytest.approx(2.5)


# -- benchmarks -------------------------------------------------------------------------------------------


def test_a_retrieval_log_by_its_last_result(tmp_path):
    done, run = imported(tmp_path, SYNTHETIC)
    assert done.models == ["polar+memory (imported)"]
    assert len(run.rows) == 2 * 2 * 3
    row = at(run, "passkey-synthetic", 2048, depth=0.1)
    assert (row["gap"], row["context_tokens"], row["num_targets"], row["seed"]) == (None, 2048, 250, 1234)
    assert (row["protocol"], row["text_id"]) == ("teacher-forced-needle-v2", "synthetic-filler")
    assert row["token_accuracy"] > 0.9  # the first result says 0
    assert row["num_trials"] == 50 and row["exact"] is None
    far = [r for r in run.rows if r["length"] == 262144]
    # 68.4 % of tokens and a mean of both tasks and three depths, as published
    assert sum(r["token_accuracy"] for r in far) / 6 == pytest.approx(0.684, abs=5e-4)
    exact = figure([r for r in far if r["task"] == "passkey-synthetic"], "exact")
    assert exact == wilson(41, 150)


def test_longdoc_is_one_task_per_text(tmp_path):
    _, run = imported(tmp_path, LONGDOC)
    bits = {
        length: [figure([r], "bits_per_byte").mean for r in run.rows if r["length"] == length]
        for length in (2048, 262144)
    }
    assert len(bits[2048]) == 3
    assert sum(bits[2048]) / 3 == pytest.approx(1.4508, abs=1e-4)  # the published means of three texts
    assert sum(bits[262144]) / 3 == pytest.approx(1.8255, abs=1e-4)
    row = at(run, "longdoc-pg19", 2048)
    assert (row["num_targets"], row["num_bytes"], row["num_trials"]) == (1280, 5039, 5)


def test_the_matrix_says_what_the_logs_say(tmp_path):
    done, from_matrix = imported(tmp_path / "a", MATRIX)
    assert done.left_out == {"smoke rows": 36, "babilong rows (a row holds a loss, they have none)": 2}
    _, from_logs = imported(tmp_path / "b", SYNTHETIC, REAL, LONGDOC)

    def figures(run):
        names = ("task", "length", "depth", "num_targets", "token_accuracy", "num_trials")
        rows = [(*(r[name] for name in names), r.get("num_exact"), round(r["nll_sum"], 3)) for r in run.rows]
        return sorted(rows, key=str)

    assert figures(from_matrix) == figures(from_logs)
    both, run = imported(tmp_path / "c", MATRIX, SYNTHETIC, REAL, LONGDOC)
    assert len(run.rows) == 30 and both.left_out["figures given twice"] == 30
    assert at(run, "niah-real", 2048, depth=0.5)["text_id"] == "codelion/finepdfs-1B"  # the matrix does not say
    assert "somebody" not in (tmp_path / "c" / "run" / "manifest.json").read_text()


def test_an_out_of_memory_cell_is_void(tmp_path):
    lines = SYNTHETIC.read_text().splitlines()
    data = json.loads(lines[-2])
    for table in ("results", "exact_results", "nll_results"):
        data[table]["niah"]["256k"]["0.5"] = None
    data["oom_cells"] = ["niah/256k/0.5"]
    (tmp_path / "r.log").write_text(block("RETRIEVAL_RESULTS_JSON", data))
    _, run = imported(tmp_path, tmp_path / "r.log")
    row = at(run, "niah-synthetic", 262144, depth=0.5)
    assert (row["status"], row["nll_sum"], row["token_accuracy"]) == ("oom", None, None)


def test_smoke_logs_other_benchmarks_and_other_protocols_are_counted(tmp_path):
    data = json.loads(SYNTHETIC.read_text().splitlines()[-2])
    logs = {
        "smoke_retrieval.log": data,
        "gate.log": {**data, "num_samples": 2},
        "old.log": {**data, "protocol": "needle-v1"},
        "good.log": data,
    }
    for name, value in logs.items():
        (tmp_path / name).write_text(block("RETRIEVAL_RESULTS_JSON", value))
    (tmp_path / "speed.log").write_text(block("SERVING_RESULTS_JSON", {"results": {}}))
    (tmp_path / "good.console.log").write_text(block("RETRIEVAL_RESULTS_JSON", data))
    done, run = imported(tmp_path, tmp_path)
    assert len(run.rows) == 12
    assert done.left_out == {
        "smoke logs": 2,
        "retrieval logs of protocol needle-v1, not teacher-forced-needle-v2": 1,
        "serving logs (a row holds a loss, they have none)": 1,
        "console logs": 1,
    }


def test_only_the_newest_attempt_counts(tmp_path):
    for name, loss in (("a.attempt-1.log", 1.0), ("a.attempt-10.log", 3.0), ("a.attempt-9.log", 2.0)):
        write_log(tmp_path / name, CONFIG, {"clean_ppl": {"2048": loss}, "num_clean_docs": 16})
    done, run = imported(tmp_path, *tmp_path.glob("*.log"))
    assert figure(run.rows, "nll").mean == pytest.approx(3.0)
    assert done.left_out == {"superseded attempts": 2}
    write_log(tmp_path / "a.log", CONFIG, {"clean_ppl": {"2048": 4.0}, "num_clean_docs": 16})
    _, run = imported(tmp_path, *tmp_path.glob("*.log"))
    assert figure(run.rows, "nll").mean == pytest.approx(4.0)


# -- checkpoints ------------------------------------------------------------------------------------------


def test_a_sweep_has_a_model_per_condition(tmp_path):
    done, _ = imported(tmp_path, SWEEP)
    assert done.models == [
        "polar+memory, atma-10b-L40S-mbs16 (imported)",
        "polar+memory, atma-10b-L40S-mbs16, hl-256 (imported)",
    ]
    models = read_models([tmp_path / "run"])
    accuracy = [at(model, "induction", 262144)["token_accuracy"] for model in models]
    assert accuracy == [20 / 40, 26 / 40]
    loss = at(models[0], "perplexity", 2048)
    assert (loss["num_targets"], loss["num_trials"], loss["text_id"]) == (4 * 2048, 4, "codelion/finepdfs-1B")
    assert at(models[0], "induction", 2048, "absent")["num_trials"] == 8


def test_what_ran_out_of_memory_in_part_says_so(tmp_path):
    data = json.loads(SWEEP.read_text())
    metrics = next(iter(data["checkpoints"].values()))["conditions"]["baseline"]["metrics"]
    metrics["clean"]["262144"] = {"loss_nats": None, "tokens": 0, "completed": 0, "oom": 4}
    metrics["needle"]["by_distance"]["262144"] |= {"completed": 6, "oom": 2}
    metrics["stress"] = {"by_length": {}}
    (tmp_path / "sweep.json").write_text(json.dumps(data))
    done, _ = imported(tmp_path, tmp_path / "sweep.json")
    model = read_models([tmp_path / "run"])[0]
    failed = at(model, "perplexity", 262144)
    assert (failed["status"], failed["error"], failed["nll_sum"]) == ("oom", "out of memory, 4 times", None)
    assert at(model, "induction", 262144)["num_trials"] == 6
    assert any("rests on 6 items; 2 ran out of memory" in note for note in done.notes)
    assert done.left_out == {"stress probes": 1}


# -- all together -----------------------------------------------------------------------------------------


def test_a_folder_of_everything(tmp_path):
    done, run = imported(tmp_path, LOGS)
    assert len(set(done.models)) == len(done.models) == 6
    # two checkpoints of one architecture stay apart: the benchmarks are not of the 1,900-step run
    assert {"polar+memory (imported)", "polar+memory (imported, 1900 steps)"} <= set(done.models)
    assert {r["model"] for r in run.rows} == set(done.models) == set(run.manifest["models"])
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    imported(tmp_path, LOGS)  # an import is replaced, and is the same again
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before
    for to in ("csv", "parquet", "lm-eval", "every-eval-ever"):
        export_run(tmp_path / "run", to, tmp_path / "out" / to)
    assert not list((tmp_path / "out").rglob("*samples*"))  # a mean has no samples
    assert any(cell.metric.name == "exact" for model in read_models([tmp_path / "run"]) for cell in cells_of(model))


def test_disagreeing_logs_of_one_run_are_two_models(tmp_path):
    for folder, loss in (("one", 2.0), ("two", 3.0)):
        (tmp_path / folder).mkdir()
        values = {"clean_ppl": {"2048": loss}, "num_clean_docs": 16}
        write_log(tmp_path / folder / "a.log", {**CONFIG, "run_id": "a"}, values)
    done, run = imported(tmp_path, tmp_path / "one" / "a.log", tmp_path / "two" / "a.log")
    assert done.models == ["wall (imported)", "wall (imported, ablation)"]
    assert len(run.rows) == 2


def test_another_run_is_never_replaced(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "records.jsonl").write_text("")
    with pytest.raises(UserError, match="holds a run that is not an import"):
        import_logs([STAGE1], folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="holds a run that is not an import"):
        import_logs([STAGE1], folder)
    with pytest.raises(UserError, match="is not a folder"):
        import_logs([STAGE1], folder / "records.jsonl")
    assert (folder / "records.jsonl").read_text() == ""


# -- bad input --------------------------------------------------------------------------------------------


def test_half_a_file_is_an_error_with_its_line(tmp_path):
    text = STAGE1.read_text()
    (tmp_path / "cut.log").write_text(text[: text.index('"needle"')])
    line = text[: text.index('"needle"')].count("\n") + 1
    assert (
        f"cut.log, line {line}: the block ABLATION_EVAL_JSON is not JSON"
        in refusal(tmp_path, tmp_path / "cut.log").message
    )
    (tmp_path / "cut.log").write_text(text[: text.index("===ABLATION_EVAL_JSON")])
    assert "has no evaluation" in refusal(tmp_path, tmp_path / "cut.log").message
    for path in (RESULTS, MATRIX, SWEEP):
        (tmp_path / "cut.json").write_text(path.read_text()[:-30])
        assert "cut.json, line 1: not JSON" in refusal(tmp_path, tmp_path / "cut.json").message


def test_files_with_nothing_to_import(tmp_path):
    (tmp_path / "notes.log").write_text("hello\n")
    (tmp_path / "other.json").write_text('{"a": 1}')
    for name in ("notes.log", "other.json"):
        error = refusal(tmp_path, tmp_path / name)
        assert f"{name}: nothing to import" in error.message and "ABLATION_EVAL_JSON" in error.hint
    assert "left out: 2 files of another kind" in refusal(tmp_path, tmp_path).message
    (tmp_path / "empty").mkdir()
    assert "holds no .log and no .json file" in refusal(tmp_path, tmp_path / "empty").message
    assert "no log at" in refusal(tmp_path, tmp_path / "nothing.log").message
    shutil.copy(SYNTHETIC, tmp_path / "smoke_retrieval.log")
    assert "left out: 1 smoke logs" in refusal(tmp_path, tmp_path / "smoke_retrieval.log").message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"clean_ppl": [1, 2]}, "clean_ppl is [1, 2], not an object"),
        ({"clean_ppl": {"2048": "low"}}, 'clean_ppl at 2048 is "low", not a number or null'),
        ({"clean_ppl": {"2 048": 1.0}}, '"2 048" is not a length'),
        ({"needle": {"2048": {"ce": 1.0, "acc": 140.0}}}, "acc is 140.0, not a percentage"),
        ({"needle": {"2048": {"ce": 1.0, "acc": 40.0, "trials": 1.5}}}, "trials is 1.5, not a count"),
    ],
)
def test_logs_edited_by_hand(tmp_path, change, words):
    path = write_log(tmp_path / "a.log", CONFIG, {"clean_ppl": {"2048": 2.0}, "num_clean_docs": 16} | change)
    message = refusal(tmp_path, path).message
    assert words in message and "a.log, line 6" in message


WRONG = [None, "x", -1, 0, 1e999, math.nan, [], {}, True, 10**400, "2k", [1], {"a": 1}, 3.7]


def edited(value, rng):
    """The value with one part of it, at any depth, replaced, renamed or gone."""
    holders = [value]
    for holder in holders:
        inner = holder.values() if isinstance(holder, dict) else holder
        holders += [part for part in inner if isinstance(part, (dict, list)) and part]
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    if isinstance(holder, dict) and rng.random() < 0.3:
        part = holder.pop(key)
        if rng.random() < 0.5:
            holder[rng.choice(["-1", "9k", ""])] = part
    else:
        holder[key] = rng.choice(WRONG)
    return value


@pytest.mark.parametrize("path", [STAGE1, SYNTHETIC, LONGDOC, MATRIX, RESULTS, SWEEP], ids=lambda path: path.stem[:12])
def test_no_edit_ends_in_a_traceback(tmp_path, path):
    """Whatever stands in a file, it is imported into a run that can be read, or refused in words."""
    rng = random.Random(path.name)
    outcomes = set()
    for _ in range(40):
        if path.suffix == ".json":
            text = json.dumps(edited(json.loads(path.read_text()), rng))
        else:
            lines = path.read_text().splitlines()
            number = rng.choice([i for i, line in enumerate(lines) if line.startswith("{")])
            lines[number] = json.dumps(edited(json.loads(lines[number]), rng))
            text = "\n".join(lines)
        (tmp_path / path.name).write_text(text)
        try:
            imported(tmp_path, tmp_path / path.name)
            for model in read_models([tmp_path / "run"]):
                cells_of(model)
            outcomes.add("imported")
        except UserError:
            outcomes.add("refused")
    assert outcomes == {"imported", "refused"}


def test_counts_edited_by_hand(tmp_path):
    imported(tmp_path, SYNTHETIC)
    path = tmp_path / "run" / "manifest.json"
    manifest = json.loads(path.read_text())
    key = next(iter(manifest["counts"]))
    for wrong in ({"num_trials": "50"}, {"num_exact": 3}, {"num_trials": 5, "num_exact": 6}, 5):
        path.write_text(json.dumps({**manifest, "counts": {key: wrong}}))
        with pytest.raises(UserError, match="counts of"):
            read_run(tmp_path / "run")


def test_the_command_says_what_it_did(tmp_path):
    app = typer.Typer()
    app.command()(command)
    done = CliRunner().invoke(app, [str(MATRIX), str(OPEN), "-o", str(tmp_path / "run")])
    assert done.exit_code == 0
    assert done.stdout.strip() == str(tmp_path / "run")
    for words in ("benchmark_matrix.json: 30 rows", "left out: 36 smoke rows", "49 rows of 2 models", "10 tokens per"):
        assert words in done.stderr


# -- pieces -----------------------------------------------------------------------------------------------


def test_shares_and_tokens():
    assert exact_share(0.9250000044703484, 80) == 74 / 80
    assert exact_share(0.333, 80) == 0.333
    assert value_tokens([0.925, 0.5], 16, 5) == 5
    assert value_tokens([0.59375, 1.0], 16, 5) == 10
    assert value_tokens([0.333], 16, 5) is None


def test_home_folders_are_masked():
    assert mask("/home/who/atma/x.log, /Users/who/y, /root/z, C:\\Users\\who\\q") == "~/atma/x.log, ~/y, ~/z, ~\\q"
    assert mask("/data/rooted/x") == "/data/rooted/x"


def test_names():
    assert readable("nope__reg-strong__distr-1__mem-1__win-1", {}) == "nope+memory, reg strong, distractor, window"
    assert readable("open__Qwen__Qwen2.5-0.5B", {"attn_type": "open"}) == "Qwen2.5-0.5B"
    assert readable("x", {"arch_type": "raven", "attn_type": "polar"}) == "raven"
    assert readable("something else", {}) == "something else"
    repository = "Someone/atma-10b-L40S-mbs16-rope__reg-baseline__distr-0__mem-1__win-0"
    assert repository_parts(repository) == ("rope__reg-baseline__distr-0__mem-1__win-0", "atma-10b-L40S-mbs16")
    assert repository_parts("Someone/other") == ("other", "")
