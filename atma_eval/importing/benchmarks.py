"""Benchmark logs: passkey and needle grids over depth, and fixed-target loss.

BABILong, base tasks and serving are counted and left out: a row holds a loss, and these have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atma_eval.errors import UserError
from atma_eval.importing.figures import LONGDOC, RETRIEVAL, UNKNOWN_TEXT, VALUE_DIGITS, Figure, ModelFigures, Parsed
from atma_eval.importing.files import (
    Block,
    LogFile,
    expect_count,
    expect_dict,
    expect_length,
    expect_number,
    expect_share,
    mask,
    short,
)
from atma_eval.importing.names import architecture, readable

MARKERS = {f"{name}_RESULTS_JSON" for name in ("RETRIEVAL", "BABILONG", "BASE", "LONGDOC", "SERVING")}
SYNTHETIC = "synthetic-filler"
# the logs name a set of documents by alias, the matrix by repository
TEXTS = {
    "pg19": "emozilla/pg19",
    "proof_pile": "hoskinson-center/proof-pile",
    "finepdfs": "codelion/finepdfs-1B",
}
TARGET_TOKENS = 256  # of each document, in fixed-target-v1
SMOKE_SAMPLES = 2


def parse_log(file: LogFile, blocks: list[Block]) -> Parsed:
    """One benchmark of one model: the last block counts, earlier ones are of runs that were repeated."""
    parsed = Parsed()
    last = [block for block in blocks if block.name in MARKERS][-1]
    where = f"{file.path}, line {last.line}"
    data = expect_dict(last.value, where)
    kind = last.name.removesuffix("_RESULTS_JSON").lower()
    if kind not in ("retrieval", "longdoc"):
        parsed.left_out[f"{kind} logs (a row holds a loss, they have none)"] += 1
        return parsed
    config = expect_dict(data.get("model_config"), f"{where}: model_config")
    stem = file.path.name.split(".")[0]
    name = readable(stem, config)
    if kind == "retrieval" and data.get("protocol") != RETRIEVAL:
        parsed.left_out[f"retrieval logs of protocol {data.get('protocol')}, not {RETRIEVAL}"] += 1
        return parsed
    if data.get("stage") == "smoke" or (kind == "retrieval" and _samples(data, where) <= SMOKE_SAMPLES):
        parsed.left_out["smoke logs"] += 1
        return parsed
    figures = list(_retrieval(data, where) if kind == "retrieval" else _longdoc(data, where))
    authors = str(config.get("arch_type") or config.get("attn_type") or stem)  # no log says which checkpoint
    details = {"architecture": architecture(stem, config), "tokenizer": "gpt2", "authors_run_id": authors}
    parsed.models.append(
        ModelFigures(name=name, hint="benchmarks", identity=("benchmark", authors), details=details, figures=figures)
    )
    return parsed


def _samples(data: dict[str, Any], where: str) -> int:
    samples = expect_count(data.get("num_samples"), f"{where}: num_samples")
    if not samples:
        raise UserError(f"{where}: num_samples is {short(data.get('num_samples'))}", "it must be at least 1")
    return samples


def _retrieval(data: dict[str, Any], where: str) -> Iterator[Figure]:
    samples = _samples(data, where)
    haystack = str(data.get("haystack") or UNKNOWN_TEXT)
    suite = "synthetic" if haystack == SYNTHETIC else "real"
    digits = expect_count(data.get("value_tokens"), f"{where}: value_tokens") or VALUE_DIGITS
    seed = data.get("seed")
    tables = {
        name: expect_dict(data.get(name), f"{where}: {name}") for name in ("results", "exact_results", "nll_results")
    }
    for task, by_length in tables["results"].items():
        for label, by_depth in expect_dict(by_length, f"{where}: {task}").items():
            for depth, percent in expect_dict(by_depth, f"{where}: {task} at {label}").items():
                here = f"{where}: {task} at {label}, depth {depth}"
                yield retrieval_figure(
                    task=f"{task}-{suite}",
                    length=expect_length(label, here),
                    depth=depth_of(depth, here),
                    text_id=haystack,
                    samples=samples,
                    digits=digits,
                    accuracy=expect_share(percent, here),
                    exact=expect_share(_at(tables, "exact_results", (task, label, depth), where), f"{here}: exact"),
                    nll=expect_number(_at(tables, "nll_results", (task, label, depth), where), f"{here}: nll"),
                    oom=bool(data.get("oom_cells")),
                    seed=seed if isinstance(seed, int) else None,
                )


def _at(tables: dict[str, Any], name: str, keys: tuple[str, ...], where: str) -> Any:
    value: Any = tables[name]
    for key in keys:
        value = expect_dict(value, f"{where}: {name}").get(key)
    return value


def depth_of(label: Any, where: str) -> float:
    try:
        depth = float(label)
    except (TypeError, ValueError):
        depth = -1.0
    if not 0 <= depth <= 1:
        raise UserError(f"{where}: the depth is {short(label)}", "allowed: a share from 0 to 1")
    return depth


def retrieval_figure(
    *,
    task: str,
    length: int,
    depth: float,
    text_id: str,
    samples: int,
    digits: int,
    accuracy: float | None,
    exact: float | None,
    nll: float | None,
    oom: bool,
    seed: int | None = None,
) -> Figure:
    """A cell of the depth grid: shares of value tokens and of whole values, nats per value token."""
    failed: dict[str, Any] = {}
    if nll is None:
        reason = "out of memory in one sample voids the cell" if oom else "null in the log"
        failed = {"status": "oom" if oom else "error", "error": reason}
    return Figure(
        task=task,
        protocol=RETRIEVAL,
        length=length,
        context_tokens=length,
        depth=depth,
        text_id=text_id,
        seed=seed,
        num_trials=samples,
        num_targets=samples * digits,
        nll=nll,
        accuracy=accuracy,
        num_exact=None if exact is None else round(exact * samples),
        **failed,
    )


def _longdoc(data: dict[str, Any], where: str) -> Iterator[Figure]:
    for alias, entry in expect_dict(data.get("results"), f"{where}: results").items():
        entry = expect_dict(entry, f"{where}: {alias}")
        for label, cell in expect_dict(entry.get("lengths"), f"{where}: {alias}: lengths").items():
            here = f"{where}: {alias} at {label}"
            cell = expect_dict(cell, here)
            documents, tokens, num_bytes = (
                expect_count(cell.get(name), f"{here}: {name}")
                for name in ("documents", "target_tokens", "target_bytes")
            )
            yield longdoc_figure(
                alias=alias,
                length=expect_length(label, here),
                documents=documents or 1,
                nll=expect_number(cell.get("nll_nats_per_token"), here),
                bits_per_byte=expect_number(cell.get("bits_per_byte"), here),
                num_targets=tokens or None,
                num_bytes=num_bytes or None,
                oom=bool(cell.get("oom")),
                error=mask(str(cell["error"]))[:500] if cell.get("error") else None,
            )


def longdoc_figure(
    *,
    alias: str,
    length: int,
    documents: int,
    nll: float | None,
    bits_per_byte: float | None,
    num_targets: int | None = None,
    num_bytes: int | None = None,
    oom: bool = False,
    error: str | None = None,
) -> Figure:
    """Loss of the same target after contexts of growing length; each set of documents is a task of its own."""
    text = TEXTS.get(alias, alias)
    alias = next((name for name, repository in TEXTS.items() if repository == text), alias.rsplit("/", 1)[-1])
    failed: dict[str, Any] = {}
    if nll is None:
        failed = {
            "status": "oom" if oom else "error",
            "error": error or ("out of memory" if oom else "null in the log"),
        }
    return Figure(
        task=f"longdoc-{alias}",
        protocol=LONGDOC,
        length=length,
        context_tokens=length,
        text_id=text,
        num_trials=documents,
        num_targets=num_targets or documents * TARGET_TOKENS,
        num_bytes=num_bytes,
        bits_per_byte=bits_per_byte,
        nll=nll,
        **failed,
    )
