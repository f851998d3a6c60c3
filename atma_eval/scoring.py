"""One sequence, every token: the numbers behind ``atma-eval score``."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from atma_eval.checkpoint import find_model, load_model
from atma_eval.errors import ComputationError, UserError
from atma_eval.files import replacing
from atma_eval.runner import classify_failure
from atma_eval.spec import ModelSpec
from atma_eval.text import read_document
from atma_eval.weights import first_line


def _read_tokens(path: Path, vocab_size: int) -> np.ndarray:
    try:
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise UserError(f"cannot read tokens from {path}: {error}", "expected a .npy of whole numbers") from None
    if not isinstance(values, np.ndarray) or values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"{path} does not hold a one-dimensional array of whole numbers")
    if len(values) and (values.min() < 0 or values.max() >= vocab_size):
        raise UserError(
            f"{path} has ids from {values.min()} to {values.max()}", f"the model knows 0 to {vocab_size - 1}"
        )
    return values.astype(np.int64)


@contextmanager
def _replacement(out: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of ``out`` when it is complete; an earlier result stays until then."""
    try:
        if out.is_dir():
            raise UserError(f"cannot write {out}: it is a folder")
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as partial, partial.open("wb") as file:
            yield file
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from None


def score_file(
    spec: ModelSpec, out: Path, *, text: Path | None, tokens: Path | None, chunk: int | None, window: str | int
) -> str:
    """Write ``tokens`` ``[T]``, ``nll`` and ``argmax`` ``[T - 1]`` of a text or token file; returns a summary line."""
    if (text is None) == (tokens is None):
        raise UserError("score takes either --text or --tokens")
    if chunk is not None and chunk < 1:
        raise UserError(f"--chunk is {chunk}", "allowed: at least 1")
    if out.suffix != ".npz":
        raise UserError(f"--out is {out}", "the result is a .npz file")
    source = find_model(spec)
    if tokens is not None:
        sequence = _read_tokens(tokens, source.vocab_size)
    else:
        assert text is not None
        ids = source.tokenizer.encode(read_document(text, text.name).text)
        sequence = np.concatenate([[source.tokenizer.start_id], ids]).astype(np.int64)
    if len(sequence) < 2:
        raise UserError(f"{text or tokens} gives {len(sequence)} tokens; at least 2 are needed to score one")
    with _replacement(out) as file:
        loaded = load_model(source, window)
        limit = loaded.model.max_length
        if limit is not None and len(sequence) > limit:
            raise UserError(f"{text or tokens} gives {len(sequence)} tokens; {source.label} takes at most {limit}")
        from atma_eval.session import DEFAULT_CHUNK, Session

        failure = None
        try:
            session = Session(loaded.model, chunk=chunk or DEFAULT_CHUNK, capacity=len(sequence))
            session.extend(sequence[:1])
            scores = session.score(sequence[1:])
        except Exception as error:
            failure = ComputationError(f"{source.label}: {classify_failure(error)}: {first_line(error)}")
        if failure is not None:  # outside the except, whose traceback would keep the tensors alive
            raise failure
        bad = np.flatnonzero(~np.isfinite(scores.nll))
        if len(bad):
            raise ComputationError(f"{source.label}: the loss of token {bad[0] + 1} of {len(sequence)} is not finite")
        np.savez(file, tokens=sequence, nll=scores.nll, argmax=scores.argmax)
    return f"{len(sequence):,} tokens, {scores.nll.mean(dtype=np.float64):.4f} nats per token, in {out}"
