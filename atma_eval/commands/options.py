"""Options that several commands share. Importing this module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
Trials = Annotated[
    int | None, typer.Option(help="Needles per length. Default: the preset's, 32; without --model 8.", metavar="N")
]
Docs = Annotated[
    int | None,
    typer.Option(
        help="Documents to share the trials among. Default: all that are long enough; without --model 4.", metavar="N"
    ),
]
PplDocs = Annotated[
    int | None, typer.Option("--docs", help="Documents to score. Default: 12; without --model 4.", metavar="N")
]
