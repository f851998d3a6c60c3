"""Choosing the documents of a task: long enough, in an order that the seed decides, repeated only when asked."""

from __future__ import annotations

import hashlib

import numpy as np

from atma_eval.errors import UserError
from atma_eval.tasks.base import TaskText
from atma_eval.text import Document, TextSource
from atma_eval.tokenizer import Tokenizer


def select_documents(
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    required: int,
    docs: int | None,
    docs_at_most: bool,
    repeat: bool,
    shuffle: str | None,
    what: str,
) -> TaskText:
    """Documents of at least ``required`` tokens, with ids and byte counts.

    Args:
        docs: how many; ``None`` for all. With ``docs_at_most`` fewer will do.
        repeat: repeat a document that is too short until it is long enough; its rows say so.
        shuffle: decides the order; ``None`` keeps that of the source. Each document has its own place in it, so
            leaving some out does not change the order of the others.
    """
    documents = list(source.documents)
    if shuffle is not None:
        documents.sort(key=lambda d: hashlib.sha256(f"{shuffle}:{d.sha256}".encode()).digest())
    chosen: list[Document] = []
    skipped: list[Document] = []
    all_ids, all_bytes, num_own = [], [], []
    for document in documents:
        if len(chosen) == docs:
            break
        # A token covers at least a byte but for rare special cases, so a document of fewer bytes cannot do.
        if not repeat and len(document.data) < required and len(documents) > 1:
            skipped.append(document)
            continue
        ids, num_bytes = tokenizer.encode_with_bytes(document.text)
        own = len(ids)
        if own < required:
            if not repeat or not own:
                skipped.append(document)
                continue
            times = -(-required // own)
            ids, num_bytes = np.tile(ids, times), np.tile(num_bytes, times)
        chosen.append(document)
        num_own.append(own)
        all_ids.append(ids[:required])
        all_bytes.append(num_bytes[:required])
    if not chosen:
        longest = max(len(tokenizer.encode(document.text)) for document in skipped) if skipped else 0
        raise UserError(
            f"{what} needs a document of {required:,} tokens; the longest in {source.name} has {longest:,}",
            "ask for shorter --lengths, give a longer --text, or allow repetition with --repeat",
        )
    if docs is not None and len(chosen) < docs and not docs_at_most:
        raise UserError(
            f"{docs} documents of at least {required:,} tokens were asked for; {source.name} has {len(chosen)}",
            f"use --docs {len(chosen)}, shorter --lengths, or another --text",
        )
    return TaskText(
        documents=tuple(chosen),
        ids=tuple(all_ids),
        num_bytes=tuple(all_bytes),
        num_own=tuple(num_own),
        num_too_short=len(skipped),
    )
