"""Every Eval Ever, schema 0.3: one aggregate file per model, and one line per scored trial beside it.

Files lie where its datastore wants them, ``data/atma-eval/<developer>/<model>/<uuid>.json`` and
``<uuid>_samples.jsonl``. The schema asks of each instance whether it is right, which a loss is not: only trials of
retrieval tasks have instances. Who runs an evaluation is not in a run, so the organisation is "not stated".
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import Any

from atma_eval import __version__
from atma_eval.export.cells import CONFIDENCE, Cell, cells_of
from atma_eval.export.samples import last_invocation, run_time, safe_name, sha256, source_of, tokens_text
from atma_eval.metrics import Row
from atma_eval.runs import ModelRows, Run

SCHEMA_VERSION = "0.3.0"
COLLECTION = "atma-eval"
LOCAL = "local"  # the developer of a checkpoint that is a folder
# metric -> family, unit, least and greatest value
_METRICS: dict[str, tuple[str, str, float | str, float | str]] = {
    "exact": ("accuracy", "proportion", 0.0, 1.0),
    "first_token": ("accuracy", "proportion", 0.0, 1.0),
    "token_accuracy": ("accuracy", "proportion", 0.0, 1.0),
    "nll": ("negative_log_likelihood", "nats_per_token", 0.0, "Infinity"),
    "uplift": ("negative_log_likelihood_difference", "nats_per_token", "-Infinity", "Infinity"),
    "perplexity": ("perplexity", "ratio", 1.0, "Infinity"),
    "bits_per_byte": ("bits_per_byte", "bits_per_byte", 0.0, "Infinity"),
}
_INSTANCE_METRIC = "exact"


def every_eval_ever_files(models: list[ModelRows]) -> Iterator[tuple[str, bytes]]:
    """The aggregate and, where it has trials to show, the instances of each model."""
    for model in models:
        cells = [cell for cell in cells_of(model) if cell.estimate.mean is not None]
        if not cells:
            continue  # nothing was scored: the schema has no place for that
        developer, name = _identity(model)
        path = f"data/{COLLECTION}/{safe_name(developer)}/{safe_name(name)}/{_uuid(model)}"
        instances = b"".join(_dump(instance) for instance in _instances(model, cells))
        aggregate = _aggregate(model, cells)
        if instances:
            aggregate["detailed_evaluation_results"] = {
                "format": "jsonl",
                "file_path": f"{path}_samples.jsonl",
                "hash_algorithm": "sha256",
                "checksum": hashlib.sha256(instances).hexdigest(),
                "total_rows": instances.count(b"\n"),
            }
        yield f"{path}.json", _dump(aggregate, indent=1)
        if instances:
            yield f"{path}_samples.jsonl", instances


def _identity(model: ModelRows) -> tuple[str, str]:
    """Developer and name: those of ``hf:owner/name``, else the model's name here as one of a local developer."""
    owner, slash, name = model.label.removeprefix("hf:").partition("/")
    if model.label.startswith("hf:") and slash and name:
        return owner, safe_name(name)
    return LOCAL, safe_name(model.name)


def _uuid(model: ModelRows) -> uuid.UUID:
    """The same for every export of one run and model; of the form of a random one, as the datastore asks."""
    identity = f"{model.run.manifest.get('run_id') or model.rows[0]['run_id']}/{model.name}"
    return uuid.UUID(bytes=hashlib.sha256(identity.encode()).digest()[:16], version=4)


def _evaluation_id(model: ModelRows) -> str:
    return f"{COLLECTION}/{'/'.join(_identity(model))}/{_seconds(model.run)}"


def _seconds(run: Run) -> str:
    return str(int(run_time(run).timestamp()))


def _aggregate(model: ModelRows, cells: list[Cell]) -> dict[str, Any]:
    run, details, invocation = model.run, model.details, last_invocation(model.run)
    developer, name = _identity(model)
    known = {
        "architecture": details.get("architecture"),
        "num_parameters": details.get("num_parameters"),
        "weights_sha256": details.get("fingerprint"),
        "dtype": details.get("dtype"),
        "device": details.get("device_name") or details.get("device"),
        "tokenizer": details.get("tokenizer"),
        "trained_window": details.get("trained_window"),
    }
    notes = {"imported": "figures of somebody else's logs"} if run.imported else {}
    notes |= {f"note_{i}": note for i, note in enumerate(run.notes, start=1)}
    aggregate: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": _evaluation_id(model),
        "evaluation_timestamp": _seconds(run),
        "retrieved_timestamp": _seconds(run),
        "source_metadata": {
            "source_name": COLLECTION,
            "source_type": "documentation" if run.imported else "evaluation_run",
            "source_organization_name": "not stated",
            "evaluator_relationship": "other",
            **({"additional_details": notes} if notes else {}),
        },
        "model_info": {
            "name": model.name,
            "id": f"{developer}/{name}",
            "developer": developer,
            "inference_engine": {"name": COLLECTION, "version": str(invocation.get("version", __version__))},
            "additional_details": {
                "deployment_type": "unknown" if run.imported else "self_deployed",
                "model_availability": "open_weights" if developer != LOCAL else "unknown",
                **_strings(known),
            },
        },
        "eval_library": {
            "name": COLLECTION,
            "version": str(invocation.get("version", __version__)),
            "additional_details": _strings(
                {"git_commit": invocation.get("git_commit"), "run_id": run.manifest.get("run_id")}
            ),
        },
        "evaluation_results": [_result(model, cell) for cell in cells],
    }
    if run.imported:
        # when the authors evaluated is not in their logs
        del aggregate["evaluation_timestamp"]
    return aggregate


def _result_id(name: str, control: str, metric: str) -> str:
    return f"{name}/{control}/{metric}"


def _result(model: ModelRows, cell: Cell) -> dict[str, Any]:
    name = cell.name
    family, unit, least, greatest = _METRICS[cell.metric.name]
    mean, low, high, n = cell.estimate
    uncertainty: dict[str, Any] = {"num_samples": n}
    if low is not None and high is not None:
        uncertainty["confidence_interval"] = {
            "lower": float(low),
            "upper": float(high),
            "confidence_level": CONFIDENCE,
            "method": cell.method,
        }
    return {
        "evaluation_result_id": _result_id(name, cell.control, cell.metric.name),
        "evaluation_name": name if cell.control == "none" else f"{name}/{cell.control}",
        "source_data": {
            "dataset_name": source_of(model, cell.task),
            "source_type": "other",
            "additional_details": _strings({"num_documents": cell.num_documents}),
        },
        "metric_config": {
            "evaluation_description": f"{cell.task} at length {cell.length}, protocol {cell.protocol}",
            "metric_id": f"{COLLECTION}.{cell.metric.name}",
            "metric_name": cell.metric.label,
            "metric_kind": family,
            "metric_unit": unit,
            "metric_parameters": {"task": cell.task, "length": cell.length, "control": cell.control},
            "lower_is_better": not cell.metric.higher_is_better,
            "score_type": "continuous",
            "min_score": least,
            "max_score": greatest,
        },
        "score_details": {
            "score": float(mean),  # type: ignore[arg-type]  # cells without a mean were left out
            "details": {"num_failed": str(cell.num_failed)},
            "uncertainty": uncertainty,
        },
    }


def _instances(model: ModelRows, cells: list[Cell]) -> Iterator[dict[str, Any]]:
    """One object per scored trial and control of the retrieval tasks; an imported mean has none."""
    if model.run.imported:
        return
    tokenizer = model.details.get("tokenizer")
    for cell in cells:
        if cell.metric.name == _INSTANCE_METRIC:
            for row in cell.rows:
                if row["exact"] is not None:
                    yield _instance(model, cell.name, row, tokenizer)


def _instance(model: ModelRows, name: str, row: Row, tokenizer: str | None) -> dict[str, Any]:
    target, predicted = (tokens_text(row[ids], tokenizer) for ids in ("target_ids", "predicted_ids"))
    # rows hold the hash of the context, not the context
    raw = f"{name}, {row['text_id']}, trial {row['trial']}, control {row['control']}, sample {row['sample_hash']}"
    context, answer = row["context_tokens"], row["num_targets"]
    known = {
        "row_key": row["key"],
        "sample_hash": row["sample_hash"],
        "seed": row["seed"],
        "depth": row["depth"],
        "gap": row["gap"],
        "nll_sum": row["nll_sum"],
        "token_accuracy": row["token_accuracy"],
        "first_token_correct": row["first_token_correct"],
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": _evaluation_id(model),
        "model_id": "/".join(_identity(model)),
        "evaluation_name": name if row["control"] == "none" else f"{name}/{row['control']}",
        "evaluation_result_id": _result_id(name, row["control"], _INSTANCE_METRIC),
        "sample_id": f"{row['length']}/{row['depth']}/{row['trial']}/{row['control']}",
        "sample_hash": sha256(raw + target),
        "interaction_type": "single_turn",
        "input": {"raw": raw, "reference": [target]},
        "output": {"raw": [predicted]},
        "messages": None,
        "answer_attribution": [
            {
                "turn_idx": 0,
                "source": "output.raw",
                "extracted_value": predicted,
                "extraction_method": "argmax_under_teacher_forcing",
                "is_terminal": True,
            }
        ],
        "evaluation": {"score": float(row["exact"]), "is_correct": row["exact"]},
        "token_usage": None
        if context is None
        else {"input_tokens": context, "output_tokens": answer, "total_tokens": context + answer},
        "metadata": _strings(known),
    }


def _strings(values: dict[str, Any]) -> dict[str, str]:
    """The values that are there, as text: the schema's free fields hold nothing else."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in values.items()
        if value is not None
    }


def _dump(value: Any, indent: int | None = None) -> bytes:
    return (json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent) + "\n").encode()
