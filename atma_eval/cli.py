"""The command line: parse, call one function, render. Importing this module imports no torch."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from atma_eval import __version__
from atma_eval.commands.compare import compare
from atma_eval.commands.export import export
from atma_eval.commands.importing import import_logs
from atma_eval.commands.plot import plot
from atma_eval.commands.report import report
from atma_eval.console import EXIT_INTERRUPTED, refuse, say, wide_console
from atma_eval.errors import UserError
from atma_eval.words import plural, times

EXIT_FAILED_CELLS = 1  # bad input is 2, interrupted 130
SHORTER_HINT = "ask for shorter --lengths or fewer --trials"
DEMO_MODEL, DEMO_TRIALS, DEMO_DOCS = "atma", 8, 4
MAX_LISTED_FAILURES = 3

app = typer.Typer(
    name="atma-eval",
    help="Measure how long-context language models behave as the context grows.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"atma-eval {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


MODEL_HELP = "Bundled name, checkpoint folder, hf:owner/name[@revision], or random:CONFIG.json."
MODELS_HELP = MODEL_HELP + " Repeats. Default: the bundled demonstration model."
Model = Annotated[list[str] | None, typer.Option("--model", "-m", help=MODELS_HELP, metavar="NAME")]
Lengths = Annotated[str | None, typer.Option(help="2k..64k (doubling), 2k,3000,1m; k = 1,024.", metavar="LIST")]
TextSource = Annotated[
    str, typer.Option(help="stdlib, a file, a folder, or a .jsonl with a text field.", metavar="SOURCE")
]
PresetName = Annotated[
    str | None, typer.Option("--preset", "--task", help="See `atma-eval list`, or a path.", metavar="NAME")
]
Seed = Annotated[int | None, typer.Option(help="Decides needles and documents. Default: 1234.")]
Window = Annotated[
    str | None, typer.Option(help="train (as the checkpoint was trained), full, or a number of keys.", metavar="W")
]
Dtype = Annotated[str, typer.Option(help="auto (fp32 on a CPU, bf16 on a GPU), fp32, bf16, fp16.", metavar="TYPE")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.", metavar="NAME")]
TokenizerName = Annotated[
    str | None, typer.Option("--tokenizer", help="byte, gpt2, or a path. Default: the model's.", metavar="NAME")
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", help="Folder of the run. Default: one under results/, by request.", metavar="DIR"),
]
Repeat = Annotated[bool, typer.Option("--repeat", help="Repeat documents that are too short; their rows say so.")]
Floor = Annotated[
    float | None,
    typer.Option("--q2-floor", help="Floor of polar's participation ratio, 1e-6 as in older kernels. Default: exact."),
]
Impl = Annotated[
    str, typer.Option(help="auto (Triton on a GPU it serves, else torch), torch, or triton, an error where it cannot.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show cells, exact lengths and cost, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Trials = Annotated[int | None, typer.Option(help="Needles per length. Default: 32.", metavar="N")]
Docs = Annotated[
    int | None,
    typer.Option(help="Documents to share the trials among. Default: all that are long enough.", metavar="N"),
]
PplDocs = Annotated[int | None, typer.Option("--docs", help="Documents to score. Default: 12.", metavar="N")]


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A bundled recipe (a name in configs/train) or a .yaml file.")],
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Checkpoint folder to write. Default: models/<recipe>.", metavar="DIR"),
    ] = None,
    work: Annotated[
        Path | None, typer.Option(help="Folder of the resumable state. Default: runs/<recipe>.", metavar="DIR")
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(help="Stop at this step; without it the same command goes on.", metavar="N")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    save_dtype: Annotated[str, typer.Option(help="Type of the written weights: fp32, bf16.", metavar="TYPE")] = "fp32",
    threads: Annotated[int, typer.Option(help="CPU threads; another number may change the last bits.")] = 1,
    trials: Annotated[
        int, typer.Option(help="Recall trials of the model card at gaps up to 4,096; 0 measures none.", metavar="N")
    ] = 100,
    long_trials: Annotated[int, typer.Option(help="Recall trials at longer gaps.", metavar="N")] = 20,
    quiet: Quiet = False,
) -> None:
    """Train a checkpoint from a recipe. Repeating a command continues an interrupted run, on a CPU to equal bits.

    The folder of the resumable state is one that --model takes: a run that is under way can be evaluated.
    Several GPUs or processes: torchrun --nproc-per-node N -m atma_eval.training RECIPE
    """
    from atma_eval.training.run import TrainSpec, train

    spec = TrainSpec(
        recipe=recipe,
        out=out,
        work=work,
        stop_after=stop_after,
        device=device,
        dtype=dtype,
        save_dtype=save_dtype,
        threads=threads,
        trials=trials,
        long_trials=long_trials,
        quiet=quiet,
    )
    try:
        train(spec)
    except KeyboardInterrupt:
        say("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None


@app.command()
def score(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help=MODEL_HELP, metavar="NAME"),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Result: tokens [T], nll [T-1], argmax [T-1].", metavar="FILE.npz")
    ],
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file; the model's start token is put before it.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option(help="A .npy of token ids, scored as they are.")] = None,
    chunk: Annotated[
        int | None, typer.Option(help="Tokens per step; changes speed and rounding only.", metavar="N")
    ] = None,
    window: Window = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    tokenizer: TokenizerName = None,
    q2_floor: Floor = None,
    impl: Impl = "auto",
) -> None:
    """Loss and argmax of every token of one sequence; entry i scores token i + 1."""
    from atma_eval.scoring import score_file
    from atma_eval.spec import ModelSpec, parse_dtype, parse_window

    spec = ModelSpec(
        name=model, tokenizer=tokenizer, dtype=parse_dtype(dtype), device=device, q2_floor=q2_floor, impl=impl
    )
    line = score_file(spec, out, text=text, tokens=tokens, chunk=chunk, window=parse_window(window or "train"))
    say(line)


@app.command(name="list")
def list_all(as_json: AsJson = False) -> None:
    """Bundled models, task presets, suites and training recipes."""
    from atma_eval.bundled import bundled_models, bundled_presets, bundled_suites
    from atma_eval.models.config import AtmaConfig
    from atma_eval.spec import load_preset, read_yaml
    from atma_eval.training.recipe import bundled_recipes, read_recipe

    models = []
    for name, path in bundled_models().items():
        config = AtmaConfig.from_dict(json.loads((path / "config.json").read_text()), str(path / "config.json"))
        size = sum(p.stat().st_size for p in path.glob("weights.*"))
        models.append(
            {
                "name": name,
                "architecture": config.architecture,
                "training_length": config.training_length,
                "num_bytes": size,
            }
        )
    presets = [
        {
            "name": preset.name,
            "command": "ppl" if preset.family == "perplexity" else "niah",
            "description": preset.description,
        }
        for preset in map(load_preset, bundled_presets())
    ]
    suites = [
        {"name": name, "description": str(read_yaml(path).get("description", ""))}
        for name, path in bundled_suites().items()
    ]
    recipes = [
        {"name": name, "architecture": recipe.model.architecture, "num_tokens": recipe.num_tokens}
        for name, recipe in ((name, read_recipe(path)) for name, path in bundled_recipes().items())
    ]
    if as_json:
        typer.echo(json.dumps({"models": models, "presets": presets, "suites": suites, "recipes": recipes}, indent=1))
        return
    console = wide_console()
    for title, entries in (("models", models), ("presets", presets), ("suites", suites), ("recipes", recipes)):
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for column in entries[0] if entries else ["name"]:
            table.add_column(
                column.replace("_", " "),
                justify="right" if column in ("num_bytes", "num_tokens", "training_length") else "left",
                overflow="fold",  # a name is there to be typed
                no_wrap=column == "name",
            )
        for entry in entries:
            table.add_row(
                *(f"{v:,}" if isinstance(v, int) else str(v) if v is not None else "unknown" for v in entry.values())
            )
        console.print(table)


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
        if (spec.out / "records.jsonl").is_file():
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


app.command()(compare)
app.command()(plot)
app.command()(report)
app.command()(export)
app.command(name="import")(import_logs)


def main() -> None:
    """Entry point: user errors become two short lines and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without the signs of a table gets question marks
    sys.argv[1:] = [_home(argument) for argument in sys.argv[1:]]
    try:
        try:
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except UserError as error:
        refuse(error)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered has nowhere to go
        refuse(UserError("the output cannot be written: the disk is full", "finished rows of a run are safe"))


def _home(argument: str) -> str:
    """``--out=~/x`` with the home folder in it: a shell expands the sign only where it begins a word."""
    option, equals, value = argument.partition("=")
    return f"{option}={os.path.expanduser(value)}" if equals and option.startswith("--") else argument
