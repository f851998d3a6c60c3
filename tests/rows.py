"""Rows as a run writes them, for tests of what reads them."""

from __future__ import annotations

import hashlib
import json

from atma_eval.records import FIELDS, SCHEMA


def row(task="induction", length=2048, trial=0, status="ok", control="none", nll=0.5, right=True, model="m", **fields):
    """One whole row; ``nll`` in nats per target, ``text_id`` one of four documents for a retrieval task."""
    retrieval = task == "induction"
    ok = status == "ok"
    num_targets = 5 if retrieval else length
    same = f"{task}/{length}/{trial}/{control}"
    values = {
        "schema": SCHEMA,
        "run_id": "0123456789ab",
        "key": f"{model}/{same}",
        "model": model,
        "task": task,
        "protocol": "induction-v1" if retrieval else "perplexity-prefix-v1",
        "length": length,
        "gap": length if retrieval else None,
        "context_tokens": length + 19 if retrieval else 1,
        "num_bytes": None if retrieval else 2 * length,
        "depth": 0.0 if retrieval and control != "absent" else None,
        "trial": trial,
        "seed": 1234,
        "text_id": f"d{trial}",
        "status": status,
        "num_targets": num_targets,
        "nll_sum": nll * num_targets if ok else None,
        "target_ids": [48 + trial % 10, 49, 50, 51, 52] if ok and retrieval else None,
        "predicted_ids": ([48 + trial % 10, 49, 50, 51, 52] if right else [65] * 5) if ok and retrieval else None,
        "nll": [nll] * 5 if ok and retrieval else None,
        "token_accuracy": float(right) if ok and retrieval else None,
        "first_token_correct": right if ok and retrieval else None,
        "exact": right if ok and retrieval else None,
        "control": control,
        "sample_hash": hashlib.sha256(same.encode()).hexdigest()[:16],
        "elapsed_s": 0.1,
        "peak_memory_bytes": 2**20,
        "error": None if ok else "it failed",
    }
    assert list(values) == list(FIELDS)
    return {**values, **fields}


def write_run(folder, rows, manifest=None):
    """A run's folder of these rows, as ``runs.read_run`` takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "records.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if manifest is not None:
        (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder
