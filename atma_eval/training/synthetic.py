"""Key-value records planted in text and asked for later: what teaches recall.

A record is ``#4821=59034.``; a query is the same bytes again, of which the model is to produce the value.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

KEY_DIGITS, VALUE_DIGITS = 4, 5
CUE_BYTES = KEY_DIGITS + 2  # "#4821="
RECORD_BYTES = CUE_BYTES + VALUE_DIGITS + 1
SHORTEST_WITH_RECORDS = 4 * RECORD_BYTES  # two records and their queries
KINDS = {
    "records": "nothing but records and repeated queries",
    "plain": "text alone",
    "single": "text, one record, one query",
    "several": "text, two or more records, one query of each",
}
TEXT_BYTES_PER_RECORD = 64  # "several" plants at most one record and its query per so many tokens


def record(key: int, value: int) -> bytes:
    return b"#%0*d=%0*d." % (KEY_DIGITS, key, VALUE_DIGITS, value)


def plant(
    rng: Generator, text: np.ndarray, num_records: int, num_queries: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Spread records and queries over a text that opens with the document-start token.

    Returns ``length`` tokens and a mask of the value digits of queries. Every record is asked for at least once,
    and chance asks again up to ``num_queries``. In every second sequence the first record stands right behind the
    start and a query of it ends the sequence, which is how the evaluation asks.
    """
    keys = rng.choice(10**KEY_DIGITS, size=num_records, replace=False)
    values = rng.integers(10**VALUE_DIGITS, size=num_records)
    planted = [record(int(key), int(value)) for key, value in zip(keys, values, strict=True)]
    places = np.sort(rng.random((num_records, 2)), axis=1)
    at_ends = num_records > 0 and rng.random() < 0.5
    if at_ends:
        places[0] = 0.0, 1.0
    again = rng.integers(max(1, num_records), size=num_queries - num_records)
    events = [(place, is_query, i) for i, pair in enumerate(places) for is_query, place in zip((False, True), pair)]
    events += [(rng.uniform(places[i, 0], 1.0), True, i) for i in again]
    body = length - 1 - len(events) * RECORD_BYTES + at_ends  # at the ends, the last value digit is the last token

    pieces, masks, used = [text[:1]], [np.zeros(1, dtype=bool)], 1
    for place, is_query, i in sorted(events):
        until = 1 + round(place * body)
        pieces += [text[used:until], np.frombuffer(planted[i], dtype=np.uint8)]
        mask = np.zeros(until - used + RECORD_BYTES, dtype=bool)
        mask[-VALUE_DIGITS - 1 : -1] = is_query
        masks.append(mask)
        used = until
    pieces.append(text[used : 1 + body])
    masks.append(np.zeros(len(pieces[-1]), dtype=bool))
    return np.concatenate(pieces)[:length], np.concatenate(masks)[:length]


def how_many(rng: Generator, kind: str, length: int) -> tuple[int, int]:
    """Records and queries of a sequence of this kind."""
    if kind == "records":
        fit = length // RECORD_BYTES
        num_records = int(rng.integers(1, fit // 2 + 1, size=2).min())  # few records are learnt first
        return num_records, fit - num_records
    if kind == "several":
        num_records = int(rng.integers(2, max(2, length // TEXT_BYTES_PER_RECORD) + 1))
        return num_records, num_records
    return (1, 1) if kind == "single" else (0, 0)
