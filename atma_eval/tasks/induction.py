"""Induction needle: a record at the start, a gap of text, and the question for its value.

    start  cue value end  <gap tokens of one document>  cue  | value

The targets after the bar are scored under teacher forcing. ``length`` names the gap (protocols, section 4). Three
controls stand beside every trial: the needle absent, another value of the same form in the same context, and chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from atma_eval.errors import UserError
from atma_eval.tasks.base import Sample, Scored, TaskText
from atma_eval.tasks.documents import select_documents
from atma_eval.text import TextSource
from atma_eval.tokenizer import Tokenizer

VERSION = 1
MAX_REDRAWS = 1000


@dataclass(frozen=True)
class Needle:
    """One trial's record: ``cue``, its true ``value``, and ``other``, a value that differs in every digit."""

    cue: str
    value: str
    other: str


@dataclass(frozen=True, kw_only=True)
class Induction:
    """The task. Text fields may use ``{key}`` (in ``cue``); the value is digits, each after ``digit_prefix``.

    Args:
        end: text after the planted value, not after the question.
        inner_start: put the start token between needle and gap too, as the authors do; their gap counts it.
        draws: ``trial`` seeds each trial on its own; ``sequence`` draws all trials from one stream, as the authors do.
        docs: how many documents to share the trials among; ``None`` for all that are long enough.
    """

    name: str
    lengths: tuple[int, ...]
    trials: int
    seed: int
    cue: str
    end: str = ""
    digit_prefix: str = ""
    key_digits: int = 4
    num_digits: int = 5
    inner_start: bool = False
    draws: str = "trial"
    docs: int | None = None
    repeat: bool = False
    family: str = "induction"

    @property
    def num_trials(self) -> int:
        return self.trials

    def protocol(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("name", "lengths", "trials", "docs", "family"):
            del fields[name]
        return {"protocol": f"induction-v{VERSION}", **fields}

    @property
    def chance(self) -> dict[str, float]:
        """What guessing digits would score."""
        return {"exact": 10.0**-self.num_digits, "first_token": 0.1}

    # -- needles ------------------------------------------------------------------------------------------

    def _value(self, digits: list[int]) -> str:
        return "".join(f"{self.digit_prefix}{digit}" for digit in digits)

    def _draw(self, rng: random.Random) -> tuple[int, list[int]]:
        key = rng.randint(10 ** (self.key_digits - 1), 10**self.key_digits - 1)
        return key, [rng.randint(0, 9) for _ in range(self.num_digits)]

    def needles(self, documents: list[str]) -> list[Needle]:
        """One needle per trial, the same at every length and for every model.

        A needle whose cue or value already stands in its document is drawn again, except in the authors' stream,
        which must stay as it is.
        """
        stream = random.Random(self.seed)
        needles = []
        for trial in range(self.trials):
            own = random.Random(f"{self.seed}:{self.name}:{trial}")
            text = documents[trial % len(documents)]
            for _ in range(MAX_REDRAWS):
                key, digits = self._draw(stream if self.draws == "sequence" else own)
                cue, value = self.cue.format(key=key), self._value(digits)
                if self.draws == "sequence" or (cue not in text and value not in text):
                    break
            else:
                raise UserError(
                    f"{self.name}: no needle could be drawn that the text does not already contain",
                    "use longer keys or values (key_digits, num_digits), or another --text",
                )
            shift = random.Random(f"{self.seed}:{self.name}:{trial}:other")
            other = [(digit + shift.randint(1, 9)) % 10 for digit in digits]
            needles.append(Needle(cue, value, self._value(other)))
        return needles

    # -- text ---------------------------------------------------------------------------------------------

    def minimum_length(self, tokenizer: Tokenizer) -> int:
        """The shortest gap allowed: cue and value of the longest needle."""
        highest = 10**self.key_digits - 1
        return len(tokenizer.encode(self.cue.format(key=highest))) + len(
            tokenizer.encode(self._value([9] * self.num_digits))
        )

    def required_tokens(self) -> int:
        # the absent control replaces the needle by text, which takes a little more of the document
        return max(self.lengths) + 64

    def select(self, source: TextSource, tokenizer: Tokenizer) -> TaskText:
        minimum = self.minimum_length(tokenizer)
        if min(self.lengths) < minimum:
            raise UserError(
                f"a gap of {min(self.lengths)} tokens is shorter than cue and value of {self.name}",
                f"the shortest length for this needle and the {tokenizer.name} tokenizer is {minimum}",
            )
        text = select_documents(
            source, tokenizer, required=self.required_tokens(), wanted=None, repeat=self.repeat, what=self.name
        )
        if self.docs is not None and self.docs > len(text.documents):
            raise UserError(
                f"{self.docs} documents of at least {self.required_tokens():,} tokens were asked for; "
                f"{source.name} has {len(text.documents)}",
                f"use --docs {len(text.documents)}, shorter --lengths, or another --text",
            )
        # Each trial's document is drawn by seed: the pool is shuffled once and dealt out in turn.
        order = list(range(len(text.documents)))
        random.Random(f"{self.seed}:{self.name}:documents").shuffle(order)
        return text.pick(order[: self.docs])

    # -- samples ------------------------------------------------------------------------------------------

    def groups(self, tokenizer: Tokenizer, text: TaskText) -> Iterator[list[Sample]]:
        needles = self.needles([document.text for document in text.documents])
        num_documents = len(text.documents)
        for trial in range(self.trials):
            yield self._trial(tokenizer, text, needles[trial], trial)
        for index in range(min(num_documents, self.trials)):
            # one pass over a document serves the absent control of all its trials
            yield [
                sample
                for trial in range(index, self.trials, num_documents)
                for sample in self._absent(tokenizer, text, needles[trial], trial)
            ]

    def _sample(
        self,
        tokenizer: Tokenizer,
        parts: list[Any],
        value: np.ndarray,
        length: int,
        trial: int,
        control: str,
        text: TaskText,
    ) -> Sample:
        index = trial % len(text.documents)
        context = np.concatenate([[tokenizer.start_id], *parts]).astype(np.int32)
        return Sample(
            key=f"{length}/{trial}/{control}",
            group=f"absent/{index}" if control == "absent" else f"trial/{trial}",
            tokens=np.concatenate([context, value]),
            span=(len(context), len(context) + len(value)),
            length=length,
            gap=length,
            depth=None if control == "absent" else 0.0,
            trial=trial,
            text_id=text.text_id(index, length),
            control=control,
        )

    def _gap(self, tokenizer: Tokenizer, text: TaskText, trial: int, num_tokens: int) -> np.ndarray:
        ids = text.ids[trial % len(text.documents)]
        if self.inner_start:
            return np.concatenate([[tokenizer.start_id], ids[: num_tokens - 1]])
        return ids[:num_tokens]

    def _trial(self, tokenizer: Tokenizer, text: TaskText, needle: Needle, trial: int) -> list[Sample]:
        cue, value, other = (tokenizer.encode(part) for part in (needle.cue, needle.value, needle.other))
        end = tokenizer.encode(self.end)
        samples = []
        for length in self.lengths:
            parts = [cue, value, end, self._gap(tokenizer, text, trial, length), cue]
            for control, target in (("none", value), ("format", other)):
                sample = self._sample(tokenizer, parts, target, length, trial, control, text)
                # exact lengths are the point of the tool: never trust, always check
                expected = 1 + 2 * (len(cue)) + len(value) + len(end) + length + len(target)
                if len(sample.tokens) != expected:
                    raise AssertionError(f"{sample.key}: {len(sample.tokens)} tokens built, {expected} intended")
                samples.append(sample)
        return samples

    def _absent(self, tokenizer: Tokenizer, text: TaskText, needle: Needle, trial: int) -> list[Sample]:
        cue, value = tokenizer.encode(needle.cue), tokenizer.encode(needle.value)
        planted = len(cue) + len(value) + len(tokenizer.encode(self.end))
        return [  # as long as the trial itself: the needle is replaced by text
            self._sample(
                tokenizer,
                [self._gap(tokenizer, text, trial, length + planted), cue],
                value,
                length,
                trial,
                "absent",
                text,
            )
            for length in self.lengths
        ]

    # -- rows ---------------------------------------------------------------------------------------------

    def outcome(self, sample: Sample, scored: Scored) -> dict[str, Any]:
        targets = sample.tokens[slice(*sample.span)]
        right = scored.argmax == targets
        return {
            "nll_sum": float(scored.nll.sum(dtype=np.float64)),
            "target_ids": targets.tolist(),
            "predicted_ids": scored.argmax.tolist(),
            "nll": [float(x) for x in scored.nll],
            "token_accuracy": float(right.mean()),
            "first_token_correct": bool(right[0]),
            "exact": bool(right.all()),
        }
