"""Results of published checkpoints, and sweeps of retention caps over them: many models in one JSON file.

``{settings, checkpoints: {repository: {metrics | conditions: {name: {metrics}}}}}``; every cell says how many items
were completed and how many ran out of memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atma_eval.importing.figures import (
    LOSSES,
    UNKNOWN_TEXT,
    VALUE_DIGITS,
    Figure,
    ModelFigures,
    Parsed,
    loss_figure,
    needle_figure,
)
from atma_eval.importing.files import LogFile, expect_count, expect_dict, expect_length, expect_number, expect_share
from atma_eval.importing.names import architecture, axes_of, readable, repository_parts

_FIGURES = {"clean", "junk", "needle"}


def parse_checkpoints(file: LogFile, data: dict[str, Any]) -> Parsed:
    """One model per checkpoint and condition; ``baseline`` is the checkpoint itself."""
    parsed = Parsed()
    settings = expect_dict(data.get("settings"), f"{file.path}: settings")
    for repository, entry in expect_dict(data.get("checkpoints"), f"{file.path}: checkpoints").items():
        where = f"{file.path}: {repository}"
        entry = expect_dict(entry, where)
        conditions = {
            name: expect_dict(condition, f"{where}, {name}").get("metrics")
            for name, condition in expect_dict(entry.get("conditions"), f"{where}: conditions").items()
        } or {"baseline": entry.get("metrics")}
        config = expect_dict(entry.get("model_config"), f"{where}: model_config")
        for condition, metrics in conditions.items():
            metrics = expect_dict(metrics, f"{where}, {condition}: metrics")
            for name in metrics.keys() - _FIGURES:
                parsed.left_out[f"{name} probes"] += 1
            figures = list(_figures(parsed, file, f"{where}, {condition}", settings, metrics))
            if not figures:
                parsed.note(f"{file.label}: no figures for {repository}, {condition}")
                continue
            run_id, before = repository_parts(repository)
            parts = [readable(run_id, config), before, "" if condition == "baseline" else condition]
            details = {
                "architecture": architecture(run_id, config),
                "config": axes_of(run_id, config) or None,
                "tokenizer": "gpt2",
                "repository": repository,
                "condition": condition,
            }
            parsed.models.append(
                ModelFigures(
                    name=", ".join(part for part in parts if part),
                    hint="checkpoint",
                    identity=("checkpoint", repository, condition, str(settings.get("num_docs"))),
                    details=details,
                    figures=figures,
                )
            )
    return parsed


def _figures(
    parsed: Parsed, file: LogFile, where: str, settings: dict[str, Any], metrics: dict[str, Any]
) -> Iterator[Figure]:
    text = next((str(settings[n]) for n in ("clean_dataset", "hf_dataset", "dataset") if settings.get(n)), UNKNOWN_TEXT)
    for key in LOSSES:
        for label, cell in expect_dict(metrics.get(key), f"{where}: {key}").items():
            here = f"{where}: {key} at {label}"
            cell = expect_dict(cell, here)
            nll = expect_number(cell.get("loss_nats"), f"{here}: loss_nats")
            yield loss_figure(
                key,
                expect_length(label, here),
                text_id=text,
                num_targets=expect_count(cell.get("tokens"), f"{here}: tokens"),
                nll=nll,
                **_state(parsed, file, here, cell, nll),
            )
    needle = expect_dict(metrics.get("needle"), f"{where}: needle")
    cells = expect_dict(needle.get("by_distance"), f"{where}: by_distance")
    digits = expect_count(settings.get("needle_val_len"), f"{where}: needle_val_len") or VALUE_DIGITS
    gaps = {
        expect_length(label, f"{where}: by_distance"): expect_dict(cell, f"{where}: needle at {label}")
        for label, cell in cells.items()
    }
    forms = [("none", gap, cell) for gap, cell in gaps.items()]
    absent = needle.get("absent_baseline")
    if absent is not None and gaps:  # of the shortest gap, and of its trials where it does not say
        absent = expect_dict(absent if isinstance(absent, dict) else {"ce_nats": absent}, f"{where}: absent_baseline")
        forms.append(("absent", min(gaps), {"completed": gaps[min(gaps)].get("completed"), **absent}))
    for control, gap, cell in forms:
        here = f"{where}: needle ({control}) at {gap}"
        nll = expect_number(cell.get("ce_nats"), f"{here}: ce_nats")
        yield needle_figure(
            gap,
            control=control,
            text_id=text,
            tokens_per_value=digits,
            nll=nll,
            accuracy=expect_share(cell.get("accuracy_pct"), f"{here}: accuracy_pct"),
            **_state(parsed, file, here, cell, nll),
        )


def _state(parsed: Parsed, file: LogFile, here: str, cell: dict[str, Any], nll: float | None) -> dict[str, Any]:
    """Trials the mean rests on, and how the cell failed where it did."""
    completed, oom = (expect_count(cell.get(name), f"{here}: {name}") for name in ("completed", "oom"))
    if nll is None:
        trials = completed or oom or 1
        if oom:
            return {"num_trials": trials, "status": "oom", "error": f"out of memory, {oom} times"}
        return {"num_trials": trials, "status": "error", "error": "null in the log"}
    if completed is None:
        parsed.note(f"{file.label} does not say how many items a cell rests on: 1 is taken")
    if oom:
        cell_name = here.replace(str(file.path), file.label)
        parsed.note(f"{cell_name} rests on {completed} items; {oom} ran out of memory")
    return {"num_trials": completed or 1}
