"""Exports of a run: read back by pandas and `datasets`, of the shape other tools expect, and never over other files."""

from __future__ import annotations

import json
import re
import time

import pandas as pd
import pytest
import typer
from rows import row, write_run
from typer.testing import CliRunner

from atma_eval.commands.export import export
from atma_eval.errors import UserError
from atma_eval.export import FORMATS, export_run
from atma_eval.export.files import INDEX
from atma_eval.export.samples import safe_name, tokens_text
from atma_eval.export.tables import CELL_TYPES
from atma_eval.metrics import METRICS, estimate, units
from atma_eval.records import FIELDS

MANIFEST = {
    "run_id": "0123456789ab",
    "updated": "2026-01-02T03:04:05+00:00",
    "models": {"m": {"tokenizer": "byte", "num_parameters": 5, "fingerprint": "f" * 64, "dtype": "float32"}},
    "tasks": {"m": {"induction": {"trials": 4, "lengths": [2048, 4096, 65536], "text": {"source": "stdlib"}}}},
    "invocations": [{"version": "9.9", "git_commit": "abc"}],
}


def rows_of(model="m"):
    """Two lengths of a needle with controls, one of them all failed, and two documents of a loss."""
    rows = [
        row(trial=trial, control=control, right=trial > 0 and control == "none", nll=nll, model=model)
        for trial in range(4)
        for control, nll in (("none", 0.25 + trial / 8), ("format", 3.0), ("absent", 2.5))
    ]
    rows += [row(length=65536, trial=trial, status="nan", model=model) for trial in range(4)]
    return rows + [row("perplexity", trial=trial, nll=1.5 + trial, model=model) for trial in range(2)]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run", rows_of(), MANIFEST)


def refusal(*arguments):
    with pytest.raises(UserError) as caught:
        export_run(*arguments)
    return caught.value


def strict(text):
    """JSON without NaN and Infinity."""

    def refuse(token):
        raise AssertionError(token)

    return json.loads(text, parse_constant=refuse)


# -- tables -----------------------------------------------------------------------------------------------


def test_csv_read_by_pandas(run, tmp_path):
    export_run(run, "csv", tmp_path / "out")
    table = pd.read_csv(tmp_path / "out" / "rows.csv", keep_default_na=False, na_values=[""])
    assert list(table) == list(FIELDS)
    for read, written in zip(table.to_dict("records"), rows_of(), strict=True):
        for name, value in written.items():
            if value is None:
                assert pd.isna(read[name]), name
            else:
                assert (json.loads(read[name]) if isinstance(value, list) else read[name]) == value, name
    raw = (tmp_path / "out" / "rows.csv").read_text().splitlines()
    assert raw[1].startswith(
        "1,0123456789ab,m/induction/2048/0/none,m,induction,induction-v1,2048,2048,2067,,0.0,0,1234,"
    )
    cells = pd.read_csv(tmp_path / "out" / "cells.csv", keep_default_na=False, na_values=[""])
    assert list(cells) == list(CELL_TYPES)


def test_parquet_read_by_pandas_and_datasets(run, tmp_path):
    from datasets import load_dataset

    export_run(run, "parquet", tmp_path / "out")
    export_run(run, "csv", tmp_path / "out")
    path = tmp_path / "out" / "rows.parquet"
    table = pd.read_parquet(path, dtype_backend="numpy_nullable")
    assert table["gap"].dtype == "Int64" and table["exact"].dtype == "boolean"  # whole numbers stay whole beside nulls
    loaded = load_dataset("parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded.to_list() == rows_of()  # every field, type and null
    read = load_dataset(
        "csv",
        data_files=str(tmp_path / "out" / "rows.csv"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
        keep_default_na=False,
        na_values=[""],
    )
    assert [r["status"] for r in read] == [r["status"] for r in rows_of()]
    assert [r["nll_sum"] for r in read] == [r["nll_sum"] for r in rows_of()]


def test_types_do_not_depend_on_what_a_run_holds(tmp_path):
    """A column of nothing but nulls has the type it has elsewhere, so files can be laid one under the other."""
    import pyarrow.parquet as pq

    for name, rows in (("a", [row("perplexity", status="oom")]), ("b", [row()])):
        export_run(write_run(tmp_path / name, rows), "parquet", tmp_path / "out" / name)
    for file in ("rows.parquet", "cells.parquet"):
        schemas = [pq.read_schema(tmp_path / "out" / name / file) for name in ("a", "b")]
        assert schemas[0].equals(schemas[1])


def test_cells_are_the_estimates_of_the_rows(run, tmp_path):
    export_run(run, "parquet", tmp_path / "out")
    cells = pd.read_parquet(tmp_path / "out" / "cells.parquet").to_dict("records")
    at = {(c["task"], c["length"], c["control"], c["metric"]): c for c in cells}
    assert len(at) == len(cells)
    rows = [r for r in rows_of() if r["length"] == 2048]
    for (task, length, control, metric), cell in at.items():
        if length == 2048:
            mine = [r for r in rows if r["task"] == task]
            expected = estimate(list(units(mine, METRICS[metric], control).values()), METRICS[metric])
            assert cell["n"] == expected.n
            assert cell["mean"] == pytest.approx(expected.mean)
            for name in ("low", "high"):
                bound = getattr(expected, name)
                assert pd.isna(cell[name]) if bound is None else cell[name] == pytest.approx(bound), (metric, name)
    exact = at["induction", 2048, "none", "exact"]
    assert (exact["mean"], exact["n"], exact["interval"]) == (0.75, 4, "Wilson over trials")
    assert at["induction", 2048, "none", "uplift"]["mean"] == pytest.approx(3.0 - 0.4375)
    assert ("induction", 2048, "format", "uplift") not in at
    failed = at["induction", 65536, "none", "exact"]  # never a zero
    assert pd.isna(failed["mean"]) and failed["n"] == 0 and failed["num_failed"] == 4


# -- lm-evaluation-harness --------------------------------------------------------------------------------


def test_lm_eval_results(run, tmp_path):
    _, files = export_run(run, "lm-eval", tmp_path / "out")
    assert [f.relative_to(tmp_path / "out").as_posix() for f in files] == [
        "m/results_2026-01-02T03-04-05.000000.json",
        "m/samples_induction_gap2048_2026-01-02T03-04-05.000000.jsonl",
        "m/samples_perplexity_length2048_2026-01-02T03-04-05.000000.jsonl",
    ]
    found = strict(files[0].read_text())
    # a cell that failed is absent from all tables, and named apart
    for table in ("results", "configs", "versions", "n-shot", "higher_is_better", "n-samples"):
        assert set(found[table]) == {"induction_gap2048", "perplexity_length2048"}, table
    assert found["atma_eval"]["failed"] == {"induction_gap65536": {"none": 4}}
    assert found["group_subtasks"] == {
        "induction": ["induction_gap2048"],
        "perplexity": ["perplexity_length2048"],
    }
    needle = found["results"]["induction_gap2048"]
    assert needle["exact,none"] == 0.75 and needle["exact,format"] == 0.0 and needle["sample_len"] == 4
    assert needle["exact_stderr,format"] > 0  # none of four right is not certainty
    interval = found["atma_eval"]["intervals"]["induction_gap2048"]["exact,none"]
    assert interval["low"] < 0.75 < interval["high"] and interval["level"] == 0.95 and interval["n"] == 4
    width = 2 * 1.959963984540054 * needle["exact_stderr,none"]
    assert width == pytest.approx(interval["high"] - interval["low"])
    assert found["higher_is_better"]["perplexity_length2048"] == {
        "nll": False,
        "perplexity": False,
        "bits_per_byte": False,
    }
    assert found["n-samples"]["induction_gap2048"] == {"original": 4, "effective": 4}
    assert found["versions"]["induction_gap2048"] == 1
    assert (found["git_hash"], found["model_name"], found["config"]["model_sha"]) == ("abc", "m", "f" * 64)
    assert found["configs"]["induction_gap2048"]["dataset_path"] == "stdlib"


def test_lm_eval_samples(run, tmp_path):
    _, files = export_run(run, "lm-eval", tmp_path / "out")
    samples = [strict(line) for line in files[1].read_text().splitlines()]
    assert len(samples) == 12 and {s["filter"] for s in samples} == {"none", "format", "absent"}
    first = next(s for s in samples if s["doc_id"] == 1 and s["filter"] == "none")
    source = next(r for r in rows_of() if r["trial"] == 1)
    assert first["target"] == "11234" and first["predicted"] == "11234"  # byte ids 49 49 50 51 52
    assert first["resps"] == [[[str(-source["nll_sum"]), "True"]]] and first["filtered_resps"] == first["resps"][0]
    assert set(first["metrics"]) == {"nll", "exact", "first_token", "token_accuracy"}
    assert all(isinstance(first[metric], float) for metric in first["metrics"])
    assert all(re.fullmatch(r"[0-9a-f]{64}", first[name]) for name in ("doc_hash", "target_hash"))
    results = strict(files[0].read_text())
    for metric in first["metrics"]:  # the mean of the samples is the figure
        values = [s[metric] for s in samples if s["filter"] == "none"]
        assert results["results"]["induction_gap2048"][f"{metric},none"] == pytest.approx(sum(values) / len(values))
    rolling = [strict(line) for line in files[2].read_text().splitlines()]
    assert [s["filtered_resps"] for s in rolling] == [[str(-1.5 * 2048)], [str(-2.5 * 2048)]]


# -- Every Eval Ever --------------------------------------------------------------------------------------

# What schema 0.3.0 asks for, in our words; the real schema and the project's own validator were run on these files
# by hand. Name: type; a star marks what must be there.
NUMBER, LIMIT = (int, float), (int, float, str)
AGGREGATE = {
    "schema_version*": str,
    "evaluation_id*": str,
    "evaluation_timestamp": str,
    "retrieved_timestamp*": str,
    "source_metadata*": {
        "source_name": str,
        "source_type*": {"documentation", "evaluation_run"},
        "source_organization_name*": str,
        "evaluator_relationship*": {"first_party", "third_party", "collaborative", "other"},
        "additional_details": "strings",
    },
    "eval_library*": {"name*": str, "version*": str, "additional_details": "strings"},
    "model_info*": {
        "name*": str,
        "id*": str,
        "developer": str,
        "inference_engine": {"name": str, "version": str},
        "additional_details*": "strings",
    },
    "evaluation_results*": [
        {
            "evaluation_result_id": str,
            "evaluation_name*": str,
            "source_data*": {"dataset_name*": str, "source_type*": {"other"}, "additional_details": "strings"},
            "metric_config*": {
                "evaluation_description": str,
                "metric_id": str,
                "metric_name": str,
                "metric_kind": str,
                "metric_unit": str,
                "metric_parameters": dict,
                "lower_is_better*": bool,
                "score_type": {"continuous"},
                "min_score*": LIMIT,
                "max_score*": LIMIT,
            },
            "score_details*": {
                "score*": NUMBER,
                "details": "strings",
                "uncertainty": {
                    "num_samples": int,
                    "confidence_interval": {
                        "lower*": NUMBER,
                        "upper*": NUMBER,
                        "confidence_level": NUMBER,
                        "method": str,
                    },
                },
            },
        }
    ],
    "detailed_evaluation_results": {
        "format*": {"jsonl"},
        "file_path*": str,
        "hash_algorithm": {"sha256"},
        "checksum": str,
        "total_rows": int,
    },
}
INSTANCE = {
    "schema_version*": str,
    "evaluation_id*": str,
    "model_id*": str,
    "evaluation_name*": str,
    "evaluation_result_id": str,
    "sample_id*": str,
    "sample_hash": str,
    "interaction_type*": {"single_turn"},
    "input*": {"raw*": str, "reference*": [str]},
    "output*": {"raw*": [str]},
    "messages": type(None),
    "answer_attribution*": [
        {
            "turn_idx*": int,
            "source*": str,
            "extracted_value*": str,
            "extraction_method*": str,
            "is_terminal*": bool,
        }
    ],
    "evaluation*": {"score*": NUMBER, "is_correct*": bool},
    "token_usage": {"input_tokens*": int, "output_tokens*": int, "total_tokens*": int},
    "metadata": "strings",
}


def conform(value, shape, where="top"):
    """Assert that ``value`` has the keys and types of ``shape``, and no key beside."""
    if isinstance(shape, dict):
        assert isinstance(value, dict), where
        names = {name.rstrip("*") for name in shape}
        required = {name.rstrip("*") for name in shape if name.endswith("*")}
        assert required <= value.keys() <= names, f"{where}: {value.keys() ^ names}"
        for name, inner in shape.items():
            if name.rstrip("*") in value:
                conform(value[name.rstrip("*")], inner, f"{where}.{name.rstrip('*')}")
    elif isinstance(shape, list):
        assert isinstance(value, list), where
        for item in value:
            conform(item, shape[0], where)
    elif isinstance(shape, set):
        assert value in shape, f"{where}: {value}"
    elif shape == "strings":
        assert isinstance(value, dict) and all(isinstance(v, str) for v in value.values()), where
    else:
        assert isinstance(value, shape) and (shape is bool or not isinstance(value, bool)), f"{where}: {value!r}"


def test_the_validator_can_fail():
    whole = {"turn_idx": 0, "source": "s", "extracted_value": "", "extraction_method": "m", "is_terminal": True}
    shape = INSTANCE["answer_attribution*"][0]
    conform(whole, shape)
    for wrong in ({**whole, "turn_idx": True}, {**whole, "more": 1}, {k: v for k, v in whole.items() if k != "source"}):
        with pytest.raises(AssertionError):
            conform(wrong, shape)


def test_every_eval_ever(run, tmp_path):
    _, files = export_run(run, "every-eval-ever", tmp_path / "out")
    aggregate_path, instances_path = (f.relative_to(tmp_path / "out").as_posix() for f in files)
    uuid4 = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    assert re.fullmatch(rf"data/atma-eval/local/m/{uuid4}\.json", aggregate_path)
    assert instances_path == aggregate_path.removesuffix(".json") + "_samples.jsonl"
    aggregate = strict(files[0].read_text())
    conform(aggregate, AGGREGATE)
    instances = [strict(line) for line in files[1].read_text().splitlines()]
    for instance in instances:
        conform(instance, INSTANCE)
    details = aggregate["detailed_evaluation_results"]
    assert (details["file_path"], details["total_rows"]) == (instances_path, len(instances))
    assert {i["evaluation_id"] for i in instances} == {aggregate["evaluation_id"]}
    assert {i["model_id"] for i in instances} == {aggregate["model_info"]["id"]} == {"local/m"}
    assert set(aggregate["model_info"]["additional_details"]) >= {"deployment_type", "model_availability"}

    results = {r["evaluation_result_id"]: r for r in aggregate["evaluation_results"]}
    assert len(results) == len(aggregate["evaluation_results"])
    assert not any("65536" in name for name in results)  # failed cells have no score
    exact = results["induction_gap2048/none/exact"]
    bounds = exact["score_details"]["uncertainty"]["confidence_interval"]
    assert exact["score_details"]["score"] == 0.75 and bounds["lower"] < 0.75 < bounds["upper"]
    for result in results.values():
        low, high = (
            float(result["metric_config"][name].replace("Infinity", "inf"))
            if isinstance(result["metric_config"][name], str)
            else result["metric_config"][name]
            for name in ("min_score", "max_score")
        )
        assert low <= result["score_details"]["score"] <= high
    mine = [i for i in instances if i["evaluation_result_id"] == "induction_gap2048/none/exact"]
    assert sum(i["evaluation"]["score"] for i in mine) / len(mine) == 0.75
    assert not any(i["evaluation_name"].startswith("perplexity") for i in instances)  # a loss is not right or wrong


# -- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_can_be_repeated_and_is_the_same(run, tmp_path, to):
    out = tmp_path / "out"
    _, files = export_run(run, to, out)
    before = {f: f.read_bytes() for f in files}
    _, again = export_run(run, to, out)
    assert {f: f.read_bytes() for f in again} == before
    there = {p for p in out.rglob("*") if p.is_file()}
    assert there == {*files, out / INDEX}  # no temporary file stays


def test_a_later_export_takes_away_what_an_earlier_one_left(run, tmp_path):
    out = tmp_path / "out"
    export_run(run, "csv", out)
    export_run(run, "lm-eval", out)
    write_run(run, rows_of(), {**MANIFEST, "updated": "2026-02-02T00:00:00+00:00"})
    _, files = export_run(run, "lm-eval", out)
    assert set((out / "m").iterdir()) == set(files)
    assert (out / "rows.csv").is_file()  # of another format


def test_other_files_are_never_overwritten(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "cells.csv").write_text("mine")
    assert "cells.csv exists and is not an export of ours" in refusal(run, "csv", out).message
    assert [p.name for p in out.iterdir()] == ["cells.csv"] and (out / "cells.csv").read_text() == "mine"
    (out / "cells.csv").unlink()
    export_run(run, "csv", out)
    edited = out / "rows.csv"
    edited.write_text(edited.read_text() + "a line by hand\n")
    assert "was edited since" in refusal(run, "csv", out).message
    assert edited.read_text().endswith("a line by hand\n")
    edited.unlink()
    edited.mkdir()
    assert "rows.csv exists" in refusal(run, "csv", out).message


def test_what_cannot_be_exported_is_refused(run, tmp_path):
    assert "did you mean parquet" in refusal(run, "parket", tmp_path / "out").hint
    assert "no run at" in refusal(tmp_path / "nothing", "csv", tmp_path / "out").message
    (tmp_path / "file").write_text("")
    assert "cannot write to" in refusal(run, "csv", tmp_path / "file" / "out").message
    for change, words in (
        ({"elapsed_s": "long"}, "elapsed_s is 'long', not a number or null"),
        ({"target_ids": 5}, "target_ids is 5, not a list, each a whole number or null"),
        ({"seed": 2**70}, f"seed is {2**70}, not a whole number or null"),
    ):
        edited = write_run(tmp_path / "edited", [row(), row(trial=1, **change)])
        assert f"row m/induction/2048/1/none: {words}" in refusal(edited, "parquet", tmp_path / "out").message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row(right=False)],
        [row(status="oom")],
        [row("perplexity")],
        [row("perplexity", nll=900.0)],
        [row(control="absent")],
        [row(model="a/b:c=" + "x" * 300)],
    ],
    ids=["one", "wrong", "failed", "loss", "overflow", "control", "long-name"],
)
def test_small_and_odd_runs(tmp_path, rows, to):
    """One trial, all wrong, all failed, a perplexity beyond numbers, no manifest: whatever there is, as strict JSON."""
    run = write_run(tmp_path / "run", rows)
    if to == "every-eval-ever" and rows[0]["status"] != "ok":
        assert "no cell of" in refusal(run, to, tmp_path / "out").message
        return
    _, files = export_run(run, to, tmp_path / "out")
    assert files
    for file in files:
        if file.suffix == ".json":
            found = strict(file.read_text())
            if to == "every-eval-ever":
                conform(found, AGGREGATE)
        elif file.suffix == ".jsonl":
            assert all(strict(line) for line in file.read_text().splitlines())


def test_names_and_texts():
    assert safe_name("hf:a/b?c") == "hf__a__b__c" and safe_name("data") != "data" and safe_name("..") != ".."
    assert len(safe_name("ü" * 300)) < 120 and safe_name("x" * 300) != safe_name("x" * 301)
    assert tokens_text([53, 57], "byte") == "59" and tokens_text([256, 53], "byte") == "256 53"
    assert tokens_text([642, 860], "gpt2") == "642 860" and tokens_text(None, "byte") == ""
    assert tokens_text([0xC3, 0x28], "byte") == "\\xc3("  # half a character


def test_models_of_one_run_stand_apart(tmp_path):
    run = write_run(tmp_path / "run", rows_of("a") + rows_of("b"))
    _, files = export_run(run, "lm-eval", tmp_path / "out")
    assert {f.parent.name for f in files} == {"a", "b"}
    _, files = export_run(run, "every-eval-ever", tmp_path / "out")
    assert len({f.name.removesuffix("_samples.jsonl").removesuffix(".json") for f in files}) == 2


def test_the_command_prints_the_files(run, tmp_path):
    app = typer.Typer()
    app.command()(export)
    done = CliRunner().invoke(app, [str(run), "--to", "csv", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert done.stdout.split() == [str(tmp_path / "out" / name) for name in ("rows.csv", "cells.csv")]
    assert "is unfinished" in done.stderr and "keep_default_na" in done.stderr


def test_a_run_of_many_rows_is_quick(tmp_path):
    rows = [row(length=1024 * n, trial=t, text_id=f"d{t % 9}") for n in range(1, 41) for t in range(100)]
    before = time.process_time()
    export_run(write_run(tmp_path / "run", rows), "every-eval-ever", tmp_path / "out")
    assert time.process_time() - before < 10


def test_a_run_keeps_its_folder_to_itself(tmp_path):
    folder = write_run(tmp_path / "a", [row()])
    with pytest.raises(UserError, match="is the folder of a run"):
        export_run(folder, "csv", folder)
    assert sorted(p.name for p in folder.iterdir()) == ["records.jsonl"]
