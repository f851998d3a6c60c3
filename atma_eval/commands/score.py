"""``atma-eval score``: every token of one sequence. Importing this module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atma_eval.commands.options import MODEL_HELP, Device, Dtype, Floor, Impl, TokenizerName, Window
from atma_eval.console import say


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
