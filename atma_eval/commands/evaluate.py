"""``atma-eval niah``, ``ppl`` and ``run``: one request, one folder. Importing this module imports nothing heavy."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from atma_eval.commands.options import (
    AsJson,
    Device,
    Docs,
    DryRun,
    Dtype,
    Floor,
    Impl,
    Lengths,
    Model,
    Out,
    PplDocs,
    PresetName,
    Quiet,
    Repeat,
    Seed,
    TextSource,
    TokenizerName,
    Trials,
    Window,
)
from atma_eval.console import EXIT_INTERRUPTED, say, wide_console
from atma_eval.errors import UserError
from atma_eval.words import plural, times

EXIT_FAILED_CELLS = 1  # bad input is 2, interrupted 130
SHORTER_HINT = "ask for shorter --lengths or fewer --trials"
DEMO_MODEL, DEMO_TRIALS, DEMO_DOCS = "atma", 8, 4
MAX_LISTED_FAILURES = 3


def niah(
    model: Model = None,
    lengths: Lengths = None,
    trials: Trials = None,
    docs: Docs = None,
    text: TextSource = "stdlib",
    preset: PresetName = None,
    seed: Seed = None,
    window: Window = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    tokenizer: TokenizerName = None,
    q2_floor: Floor = None,
    impl: Impl = "auto",
    out: Out = None,
    repeat: Repeat = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Induction needle in a haystack: is a record at the start still recalled after a gap of text?

    Lengths name the gap. Every trial is scored with its controls: the needle absent, and another value of the
    same form. Repeating a command continues an interrupted run.
    """
    changes = {"lengths": lengths, "trials": trials, "docs": docs, "seed": seed, "repeat": repeat or None}
    if not model:
        changes |= _demo_defaults(trials=trials, docs=docs)
    _evaluate("niah", preset or "induction", changes, **_options(locals()))


def ppl(
    model: Model = None,
    lengths: Lengths = None,
    docs: PplDocs = None,
    text: TextSource = "stdlib",
    preset: PresetName = None,
    seed: Seed = None,
    window: Window = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    tokenizer: TokenizerName = None,
    q2_floor: Floor = None,
    impl: Impl = "auto",
    out: Out = None,
    repeat: Repeat = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity by length: nested prefixes of whole documents, each token scored once, and loss by position."""
    changes = {"lengths": lengths, "docs": docs, "seed": seed, "repeat": repeat or None}
    if not model:
        changes |= _demo_defaults(docs=docs)
    _evaluate("ppl", preset or "perplexity", changes, **_options(locals()))


def run(
    suite: Annotated[str, typer.Argument(help="A bundled suite (see `atma-eval list`) or a .yaml file.")],
    out: Out = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Many models times many tasks, as a suite says, into one folder."""
    from atma_eval.spec import load_suite

    _execute(load_suite(suite, out), dry_run, as_json, quiet)


# -- shared pieces ----------------------------------------------------------------------------------------

_OPTIONS = "model text window dtype device tokenizer q2_floor impl out dry_run as_json quiet".split()


def _options(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in _OPTIONS}


def _demo_defaults(**given: int | None) -> dict[str, int | bool]:
    """Few trials and documents, so that the first command a newcomer types ends soon; what was given stays."""
    defaults = {"trials": DEMO_TRIALS, "docs": DEMO_DOCS}
    filled = {name: defaults[name] if value is None else value for name, value in given.items()}
    return filled | {"docs_at_most": given["docs"] is None}


def _evaluate(
    command: str,
    preset_name: str,
    changes: dict[str, Any],
    *,
    model: list[str] | None,
    text: str,
    window: str | None,
    dtype: str,
    device: str,
    tokenizer: str | None,
    q2_floor: float | None,
    impl: str,
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    from atma_eval import spec

    preset = spec.load_preset(preset_name, spec.COMMAND_FAMILIES[command])
    if changes["lengths"] is not None:
        changes["lengths"] = spec.parse_lengths(changes["lengths"])
    for name in ("trials", "docs"):
        if changes.get(name) is not None and changes[name] < 1:
            raise UserError(f"--{name} is {changes[name]}", "allowed: at least 1")
    task = spec.build_task(preset, **changes)
    task_spec = spec.TaskSpec(
        task=task, text=text, window=spec.parse_window(window if window is not None else preset.window)
    )
    names = model or [DEMO_MODEL]
    models = tuple(
        spec.ModelSpec(
            name=name,
            tokenizer=tokenizer,
            dtype=spec.parse_dtype(dtype),
            device=device,
            q2_floor=q2_floor,
            impl=impl,
        )
        for name in names
    )
    if not model and not quiet:
        documents = ("" if text == "stdlib" else "up to ") + f"{changes['docs']} documents"
        what = f"{changes['trials']} trials over {documents}" if command == "niah" else documents
        say(f"no --model given: evaluating the bundled {DEMO_MODEL} with {what}")
    if out is None:
        # Another protocol, text or window gets another folder, where it meets no unlike rows.
        where = text if text == "stdlib" else str(Path(text).absolute())
        docs = None if task.documents_may_grow else task.docs
        settings = [where, task_spec.window, models[0].dtype, device, tokenizer, q2_floor, impl, docs]
        identity = json.dumps([task.protocol(), *settings], sort_keys=True)
        out = Path("results") / f"{command}-{preset.name}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    _execute(spec.RunSpec(models=models, tasks=(task_spec,), out=out), dry_run, as_json, quiet)


def _execute(spec: Any, dry_run: bool, as_json: bool, quiet: bool) -> None:
    from atma_eval import runner
    from atma_eval.progress import RunProgress
    from atma_eval.records import RunDirectory
    from atma_eval.report import Tables, summary

    if dry_run:
        _show_plan(runner.prepare(spec), as_json)
        return
    chance = {t.task.name: t.task.chance for t in spec.tasks if t.task.chance is not None}
    console = wide_console()
    try:
        with RunDirectory(spec.out) as directory:  # first of all: a folder that cannot be written costs no work
            try:
                cells = runner.prepare(spec)
            except MemoryError:
                raise UserError("there is not enough memory for samples of this length", SHORTER_HINT) from None
            total = sum(cell.account.computed_tokens for cell in cells)
            live = console.is_terminal and not (as_json or quiet)
            with RunProgress(total, chance, live=live, quiet=quiet) as progress:
                events = runner.Events(on_message=progress.message, on_row=progress.row, on_tokens=progress.tokens)
                result = runner.run(cells, events, directory)
    except KeyboardInterrupt:
        records = spec.out / "records.jsonl"
        if records.is_file() and records.stat().st_size:
            say(f"interrupted; finished rows are in {spec.out}, and the same command continues")
        else:
            say("interrupted before the first row")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    cells_summary = summary(result.rows, result.curves)
    if as_json:
        typer.echo(
            json.dumps({"out": str(spec.out), "num_rows": len(result.rows), "cells": cells_summary}, allow_nan=False)
        )
    else:
        console.print(Tables(cells_summary, chance))
    if not quiet:
        kept = len(result.rows) - result.num_new
        say(
            f"{plural(len(result.rows), 'row')} in {spec.out}/records.jsonl"
            + (f" ({kept:,} there already)" if kept else "")
        )
    for row in result.failed[:MAX_LISTED_FAILURES]:
        say(f"{row['key']}: {row['status']}: {row['error']}")
    if len(result.failed) > MAX_LISTED_FAILURES:
        say(f"and {plural(len(result.failed) - MAX_LISTED_FAILURES, 'more row')} not ok")
    if result.failed:
        raise typer.Exit(EXIT_FAILED_CELLS)


def _show_plan(cells: list[Any], as_json: bool) -> None:
    computed = sum(cell.account.computed_tokens for cell in cells)
    naive = sum(cell.account.naive_tokens for cell in cells)
    plan = [
        {
            "model": cell.source.label,
            "task": cell.spec.task.name,
            "tokenizer": cell.source.tokenizer.name,
            "lengths": {length: dataclasses.asdict(at) for length, at in sorted(cell.account.by_length.items())},
            "num_samples": cell.account.num_samples,
            "num_documents": len(cell.text.documents),
            "longest_sequence": cell.account.longest,
            "training_length": cell.source.training_length,
            "computed_tokens": cell.account.computed_tokens,
            "naive_tokens": cell.account.naive_tokens,
        }
        for cell in cells
    ]
    if as_json:
        typer.echo(json.dumps({"computed_tokens": computed, "naive_tokens": naive, "cells": plan}))
        return
    console = wide_console()
    for entry in plan:
        documents = plural(entry["num_documents"], "document")
        title = f"{entry['task']} · {entry['model']}, {documents}, {entry['tokenizer']} tokenizer"
        table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
        for column in ("length", "samples", "controls", "tokens of a sequence", "x training length"):
            table.add_column(column, justify="right")
        for length, at in entry["lengths"].items():
            span = f"{at['shortest']:,}" + (f"–{at['longest']:,}" if at["longest"] > at["shortest"] else "")
            trained = entry["training_length"]
            factor = times(length / trained) if trained else "unknown"
            table.add_row(f"{length:,}", str(at["num_samples"]), str(at["num_controls"]), span, factor)
        console.print(table)
    console.print(
        f"{computed:,} tokens to compute; {naive:,} if every sample were its own sequence "
        f"({naive / computed:.1f} times as many)"
    )
