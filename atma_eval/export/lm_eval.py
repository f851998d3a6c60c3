"""lm-evaluation-harness 0.4: one ``results_<time>.json`` per model and one ``samples_<task>_<time>.jsonl`` per cell.

The harness knows no lengths, so each length of a task is a task of its own (``induction_gap2048``), and all of them
are a group. A control is what the harness calls a filter: ``exact,none`` is the task, ``exact,format`` its control.
``_stderr`` is that of a normal interval as wide as ours, and "N/A", as the harness writes, where there is none; our
own intervals stand under ``atma_eval``. A cell that could not be scored is absent.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from atma_eval import __version__
from atma_eval.export.cells import CONFIDENCE, Cell, cells_of
from atma_eval.export.samples import (
    last_invocation,
    run_time,
    safe_name,
    sha256,
    source_of,
    tokens_text,
)
from atma_eval.metrics import Row, is_retrieval
from atma_eval.runs import ModelRows


def lm_eval_files(models: list[ModelRows]) -> Iterator[tuple[str, bytes]]:
    """``<model>/results_<time>.json`` and ``<model>/samples_<task>_<time>.jsonl`` of each model."""
    for model in models:
        folder = safe_name(model.name)
        time = run_time(model.run).strftime("%Y-%m-%dT%H-%M-%S.%f")
        by_name: dict[str, list[Cell]] = defaultdict(list)
        for cell in cells_of(model):
            by_name[cell.name].append(cell)
        # an imported row is a mean: there are no samples to show
        samples = {} if model.run.imported else {name: _samples(model, cells) for name, cells in by_name.items()}
        scored = {name: cells for name, cells in by_name.items() if any(cell.rows for cell in cells)}
        yield f"{folder}/results_{time}.json", _dump(_results(model, scored, by_name, samples), indent=2)
        for name in scored:
            if samples.get(name):
                yield f"{folder}/samples_{name}_{time}.jsonl", b"".join(_dump(sample) for sample in samples[name])


def _results(
    model: ModelRows, scored: dict[str, list[Cell]], every: dict[str, list[Cell]], samples: dict[str, list[dict]]
) -> dict[str, Any]:
    run, details, invocation = model.run, model.details, last_invocation(model.run)
    groups: dict[str, list[str]] = defaultdict(list)
    for name, cells in scored.items():
        groups[cells[0].task].append(name)
    seeds = {row["seed"] for row in model.rows}
    seed = seeds.pop() if len(seeds) == 1 else None
    return {
        "results": {name: _metrics(name, cells) for name, cells in scored.items()},
        "group_subtasks": dict(groups),
        "configs": {name: _config(model, name, cells) for name, cells in scored.items()},
        "versions": {name: _version(cells[0].protocol) for name, cells in scored.items()},
        "n-shot": dict.fromkeys(scored, 0),
        "higher_is_better": {
            name: {cell.metric.name: cell.metric.higher_is_better for cell in cells} for name, cells in scored.items()
        },
        "n-samples": {
            name: {
                "original": model.asked(cells[0].task).get("trials") or len(cells[0].rows) + cells[0].num_failed,
                "effective": _num_scored(cells),
            }
            for name, cells in scored.items()
        },
        "config": {
            "model": "atma-eval",
            "model_args": {"pretrained": model.name},
            "model_num_parameters": details.get("num_parameters"),
            "model_dtype": details.get("dtype"),
            "model_sha": details.get("fingerprint"),
            "batch_size": 1,
            "batch_sizes": [],
            "device": details.get("device"),
            "use_cache": None,
            "limit": None,
            "bootstrap_iters": 0,
            "gen_kwargs": None,
            "random_seed": seed,
            "numpy_seed": seed,
            "torch_seed": seed,
            "fewshot_seed": seed,
        },
        "git_hash": invocation.get("git_commit"),
        "date": run_time(run).timestamp(),
        "task_hashes": {
            name: sha256("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in of_task))
            for name, of_task in samples.items()
            if of_task
        },
        "model_source": "atma-eval",
        "model_name": model.name,
        "model_name_sanitized": safe_name(model.name),
        "system_instruction": None,
        "system_instruction_sha": None,
        "fewshot_as_multiturn": None,
        "chat_template": None,
        "chat_template_sha": None,
        "total_evaluation_time_seconds": str(sum(row["elapsed_s"] or 0.0 for row in model.rows)),
        "atma_eval": {
            "version": invocation.get("version", __version__),
            "run_id": run.manifest.get("run_id"),
            "source": run.manifest.get("source"),
            "notes": list(run.notes),
            "intervals": {name: _intervals(cells) for name, cells in scored.items()},
            "failed": {
                name: {cell.control: cell.num_failed for cell in cells if cell.num_failed}
                for name, cells in every.items()
                if any(cell.num_failed for cell in cells)
            },
        },
    }


def _num_scored(cells: list[Cell]) -> int:
    """Scored samples of the task itself; of its controls where it has none."""
    return max((len(cell.rows) for cell in cells if cell.control == "none"), default=0) or max(
        len(cell.rows) for cell in cells
    )


def _metrics(name: str, cells: list[Cell]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "alias": name, "sample_len": _num_scored(cells)}
    for cell in cells:
        if cell.estimate.mean is not None:
            error = cell.standard_error
            found[f"{cell.metric.name},{cell.control}"] = float(cell.estimate.mean)
            found[f"{cell.metric.name}_stderr,{cell.control}"] = "N/A" if error is None else float(error)
    return found


def _intervals(cells: list[Cell]) -> dict[str, dict[str, Any]]:
    found = {}
    for cell in cells:
        mean, low, high, n = cell.estimate
        if mean is not None:
            bounds = {"low": None, "high": None} if low is None or high is None else {"low": low, "high": high}
            found[f"{cell.metric.name},{cell.control}"] = {
                **{bound: None if value is None else float(value) for bound, value in bounds.items()},
                "level": CONFIDENCE,
                "method": cell.method,
                "n": n,
                "num_documents": cell.num_documents,
            }
    return found


def _config(model: ModelRows, name: str, cells: list[Cell]) -> dict[str, Any]:
    asked = model.asked(cells[0].task)
    metrics = {cell.metric.name: cell.metric for cell in cells}
    return {
        "task": name,
        "tag": cells[0].task,
        "dataset_path": source_of(model, cells[0].task),
        "output_type": "loglikelihood" if _is_retrieval(cells) else "loglikelihood_rolling",
        "num_fewshot": 0,
        "repeats": 1,
        "metric_list": [
            {"metric": metric.name, "aggregation": "mean", "higher_is_better": metric.higher_is_better}
            for metric in metrics.values()
        ],
        "filter_list": [{"name": control} for control in dict.fromkeys(cell.control for cell in cells)],
        "metadata": {
            "version": _version(cells[0].protocol),
            "length": cells[0].length,
            "window": asked.get("window"),
            **asked.get("protocol", {"protocol": cells[0].protocol}),
        },
    }


def _is_retrieval(cells: list[Cell]) -> bool:
    return any(is_retrieval(row) for cell in cells for row in cell.rows)


def _version(protocol: str) -> float | None:
    found = re.search(r"-v(\d+)$", protocol)
    return float(found[1]) if found else None


# -- samples ----------------------------------------------------------------------------------------------


def _samples(model: ModelRows, cells: list[Cell]) -> list[dict[str, Any]]:
    """One object per scored row, as the harness logs a request of the type ``loglikelihood`` (or its rolling form)."""
    rows = {row["key"]: row for cell in cells for row in cell.rows}
    tokenizer = model.details.get("tokenizer")
    return [_sample(i, row, tokenizer, _is_retrieval(cells)) for i, row in enumerate(rows.values())]


def _sample(index: int, row: Row, tokenizer: str | None, retrieval: bool) -> dict[str, Any]:
    names = "task length gap depth trial seed text_id context_tokens num_bytes target_ids".split()
    doc = {name: row[name] for name in names}
    target = tokens_text(row["target_ids"], tokenizer)
    loglikelihood = str(-row["nll_sum"])
    response = [loglikelihood, str(row["exact"])] if retrieval else loglikelihood
    values: dict[str, float] = {"nll": row["nll_sum"] / row["num_targets"]}
    if retrieval:
        flags = {"exact": row["exact"], "first_token": row["first_token_correct"]}
        values |= {name: float(flag) for name, flag in flags.items() if flag is not None}
        if row["token_accuracy"] is not None:
            values["token_accuracy"] = row["token_accuracy"]
    return {
        "doc_id": row["trial"] if row["trial"] is not None else index,
        "doc": doc,
        "target": target,
        # rows hold the hash of the context, not the context
        "arguments": {"gen_args_0": {"arg_0": f"sample {row['sample_hash']}", "arg_1": target}},
        "resps": [[response]],
        "filtered_resps": [response],
        "filter": row["control"],
        "metrics": list(values),
        "doc_hash": sha256(json.dumps(doc, ensure_ascii=False)),
        "prompt_hash": row["sample_hash"] or "",
        "target_hash": sha256(target),
        **values,
        "num_targets": row["num_targets"],
        "predicted": tokens_text(row["predicted_ids"], tokenizer),
    }


def _dump(value: Any, indent: int | None = None) -> bytes:
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n").encode()
