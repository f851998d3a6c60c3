"""Ablation logs and ``ablation/results.json``: loss by length, junk loss, and the induction needle of one run each.

The authors' code skips what runs out of memory without a word, so a mean may rest on fewer documents or trials than
the log names; only where nothing was left does it write null.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
    value_tokens,
)
from atma_eval.importing.files import (
    Block,
    LogFile,
    expect_count,
    expect_dict,
    expect_length,
    expect_list,
    expect_number,
    expect_share,
    mask,
)
from atma_eval.importing.names import architecture, axes_of, readable

CONFIG, EVAL, ERROR = "ABLATION_CONFIG_JSON", "ABLATION_EVAL_JSON", "ABLATION_ERROR_JSON"
AXES = ("attn_type", "reg_mode", "distractor", "memory", "window")
_NULL: dict[str, Any] = {"status": "oom", "error": "null in the log: nothing of this cell could be scored"}


def parse_log(file: LogFile, blocks: list[Block]) -> Parsed:
    """One run, from the first block of each name; blocks may be missing."""
    first: dict[str, Block] = {}
    for block in blocks:
        first.setdefault(block.name, block)
    where = {name: f"{file.path}, line {block.line}" for name, block in first.items()}
    config = expect_dict(first[CONFIG].value, where[CONFIG]) if CONFIG in first else {}
    parsed = Parsed()
    if not config:
        parsed.note(f"{file.label} has no config: its settings are taken from its name")
    run = _Run(
        source=file.label,
        where=where.get(EVAL, str(file.path)),
        run_id=str(config.get("run_id") or file.path.name.split(".log")[0]),
        config=config,
        values=expect_dict(first[EVAL].value, where[EVAL]) if EVAL in first else None,
        error=first[ERROR].value if ERROR in first else None,
        parsed=parsed,
    )
    run.add()
    return parsed


def parse_results(file: LogFile, entries: list[Any]) -> Parsed:
    """All runs of a ``results.json``."""
    parsed = Parsed()
    for i, entry in enumerate(entries):
        where = f"{file.path}, entry {i}"
        entry = expect_dict(entry, where)
        axes: dict[str, Any] = {name: entry[name] for name in AXES if name in entry}
        config = axes | expect_dict(entry.get("config"), f"{where}: config")
        run_id = str(entry.get("run_id") or config.get("run_id") or f"entry {i}")
        run = _Run(
            source=file.label,
            where=f"{where} ({run_id})",
            run_id=run_id,
            config=config,
            values=expect_dict(entry["eval"], f"{where}: eval") if entry.get("eval") is not None else None,
            error=entry.get("error"),
            parsed=parsed,
        )
        run.add()
    return parsed


def _string(value: Any) -> str | None:
    return None if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One run: ``values`` of its evaluation, or the ``error`` that kept it from one.

    ``source`` names the file in notes, ``where`` file and place in errors; what is found goes to ``parsed``.
    """

    source: str
    where: str
    run_id: str
    config: dict[str, Any]
    values: dict[str, Any] | None
    error: Any
    parsed: Parsed

    def add(self) -> None:
        """Add the run to ``parsed``, or a note where it holds no figure."""
        who = f"{self.source}: {self.run_id}"
        if self.values is None and self.error is None:
            self.parsed.note(f"{who} has no evaluation; it was not finished, or is of another kind")
            return
        if self.values is None:
            figures = list(self._failed())
            self.parsed.note(f"{who} failed: its {len(figures)} cells are rows without figures")
        else:
            figures = [*self._losses(self.values), *self._needle(self.values)]
        if not figures:
            self.parsed.note(f"{who} names no length, so it has no cells")
            return
        steps = self._optional("train_steps")
        details = {
            "architecture": architecture(self.run_id, self.config),
            "num_parameters": self._optional("num_params"),
            "config": axes_of(self.run_id, self.config) or None,
            "dtype": _string((self.values or {}).get("effective_dtype")),
            "device": _string(self.config.get("device")),
            "tokenizer": "native" if self.run_id.startswith("open__") else "gpt2",
            "authors_run_id": self.run_id,
            "train_steps": steps,
        }
        self.parsed.models.append(
            ModelFigures(
                name=readable(self.run_id, self.config),
                hint="ablation" if steps is None else f"{steps} steps",
                identity=("ablation", self.run_id, steps, self._text, len(figures)),
                details=details,
                figures=figures,
            )
        )

    @property
    def _text(self) -> str:
        return str(self.config.get("clean_dataset") or UNKNOWN_TEXT)

    def _optional(self, name: str) -> int | None:
        """A count of the evaluation, else of the config; ``None`` where neither has it."""
        return expect_count((self.values or {}).get(name) or self.config.get(name), f"{self.where}: {name}")

    def _count(self, names: str, meaning: str, default: int = 1) -> int:
        """The first of these counts that is there; otherwise ``default`` and a note."""
        for name in names.split():
            if count := self._optional(name):
                return count
        self.parsed.note(f"{self.source} does not say {meaning}: {default} is taken")
        return default

    def _losses(self, values: dict[str, Any]) -> Iterator[Figure]:
        for key in LOSSES:
            by_length = expect_dict(values.get(f"{key}_ppl"), f"{self.where}: {key}_ppl")
            bits = expect_dict(values.get(f"{key}_bpb"), f"{self.where}: {key}_bpb")
            counts = "num_clean_docs num_eval_docs" if key == "clean" else "num_eval_docs num_clean_docs"
            for label, nats in by_length.items():
                nll = expect_number(nats, f"{self.where}: {key}_ppl at {label}")
                yield loss_figure(
                    key,
                    expect_length(label, f"{self.where}: {key}_ppl"),
                    text_id=self._text,
                    num_trials=self._count(counts, "how many documents it scored"),
                    nll=nll,
                    bits_per_byte=expect_number(bits.get(label), f"{self.where}: {key}_bpb at {label}"),
                    **({} if nll is not None else _NULL),
                )

    def _needle(self, values: dict[str, Any]) -> Iterator[Figure]:
        cells = expect_dict(values.get("needle"), f"{self.where}: needle")
        if not cells:
            return
        trials = self._count("num_needle_trials", "how many needles it tried")
        digits = self._count("needle_val_len", "how long a value is", VALUE_DIGITS)
        found: dict[int, dict[str, Any]] = {}
        for label, cell in cells.items():
            here = f"{self.where}: needle at {label}"
            cell = expect_dict(cell, here)
            nll = expect_number(cell.get("ce"), f"{here}: ce")
            found[expect_length(label, here)] = {
                "num_trials": expect_count(cell.get("trials"), f"{here}: trials") or trials,
                "nll": nll,
                "accuracy": expect_share(cell.get("acc"), f"{here}: acc"),
                **({} if nll is not None else _NULL),
            }
        shares = [cell["accuracy"] for cell in found.values() if cell["accuracy"] is not None]
        per_value = value_tokens(shares, trials, digits)
        if per_value is None:
            self.parsed.note(f"{self.source}: accuracies of {self.run_id} are not shares of {trials} x {digits} tokens")
        elif per_value != digits:
            self.parsed.note(f"{self.source}: by its accuracies, {self.run_id} scores {per_value} tokens per value")
        common: dict[str, Any] = {"text_id": self._text, "tokens_per_value": per_value or digits}
        for gap, cell in found.items():
            yield needle_figure(gap, **common, **cell)
        absent = values.get("needle_baseline")
        absent = expect_number(
            absent.get("ce") if isinstance(absent, dict) else absent, f"{self.where}: needle_baseline"
        )
        if absent is not None:  # the authors measure it at the shortest gap only
            yield needle_figure(min(found), control="absent", num_trials=trials, nll=absent, accuracy=None, **common)

    def _failed(self) -> Iterator[Figure]:
        """The cells the run would have had."""
        error = mask(str(self.error))[:500]
        failed: dict[str, Any] = {"status": "oom" if "out of memory" in error.lower() else "error", "error": error}
        docs, trials = (self._optional(name) or 1 for name in ("num_eval_docs", "num_needle_trials"))
        digits = self._optional("needle_val_len") or VALUE_DIGITS
        for key in LOSSES:
            for label in expect_list(self.config.get("eval_lengths"), f"{self.where}: eval_lengths"):
                length = expect_length(label, f"{self.where}: eval_lengths")
                yield loss_figure(key, length, text_id=self._text, num_trials=docs, nll=None, **failed)
        for label in expect_list(self.config.get("needle_distances"), f"{self.where}: needle_distances"):
            yield needle_figure(
                expect_length(label, f"{self.where}: needle_distances"),
                text_id=self._text,
                num_trials=trials,
                tokens_per_value=digits,
                nll=None,
                accuracy=None,
                **failed,
            )
