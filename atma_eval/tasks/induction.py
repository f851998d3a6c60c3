"""Induction needle: a record at the start, a gap of text, and the question for its value.

    start  cue value end  <gap tokens of one document>  cue  | value

The targets after the bar are scored under teacher forcing. ``length`` names the gap (protocols, section 4). Three
controls stand beside every trial: the needle absent, another value of the same form in the same context, and chance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

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
            Their documents come in the order of the source.
        docs: how many documents to share the trials among; ``None`` for all that are long enough. With
            ``docs_at_most`` fewer will do.
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
    docs_at_most: bool = True
    repeat: bool = False
    documents_may_grow: ClassVar[bool] = False

    def num_trials(self, text: TaskText) -> int:
        return self.trials

    def protocol(self) -> dict[str, Any]:
        fields = asdict(self)
        for name in ("name", "lengths", "trials", "docs", "docs_at_most"):
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

    def required_tokens(self) -> int:
        """Tokens a document must have: the longest gap, and text in the needle's place for the absent control."""
        cue = self.cue.format(key=10**self.key_digits - 1)
        needle = cue + self._value([9] * self.num_digits) + self.end
        return max(self.lengths) + len(needle.encode())  # a token takes a byte at least

    def select(self, source: TextSource, tokenizer: Tokenizer) -> TaskText:
        text = select_documents(
            source,
            tokenizer,
            required=self.required_tokens(),
            docs=self.docs,
            docs_at_most=self.docs_at_most,
            repeat=self.repeat,
            shuffle=None if self.draws == "sequence" else f"{self.seed}:{self.name}",
            what=self.name,
        )
        needles = self.needles([document.text for document in text.documents])
        for value in (value for needle in needles for value in (needle.value, needle.other)):
            if len(tokenizer.encode(value)) != self.num_digits:
                raise UserError(
                    f"{self.name}: the {tokenizer.name} tokenizer takes the {self.num_digits} digits of {value!r} "
                    f"as {len(tokenizer.encode(value))} tokens, so no digit could be scored on its own",
                    "take a preset in which each digit is one token (induction for bytes, access-code for GPT-2), "
                    "or by --tokenizer the one the model was trained with",
                )
        minimum = max(len(tokenizer.encode(needle.cue)) for needle in needles) + self.num_digits
        if min(self.lengths) < minimum:
            raise UserError(
                f"a gap of {min(self.lengths)} tokens is shorter than cue and value of {self.name}",
                f"the shortest length for these needles and the {tokenizer.name} tokenizer is {minimum}",
            )
        return text

    # -- samples ------------------------------------------------------------------------------------------

    def groups(self, tokenizer: Tokenizer, text: TaskText) -> Iterator[list[Sample]]:
        needles = self.needles([document.text for document in text.documents])
        num_documents = len(text.documents)
        for trial in range(self.trials):
            yield self._samples(tokenizer, text, needles[trial], trial, ("none", "format"))
        for index in range(min(num_documents, self.trials)):
            # one pass over a document serves the absent control of all its trials
            yield [
                sample
                for trial in range(index, self.trials, num_documents)
                for sample in self._samples(tokenizer, text, needles[trial], trial, ("absent",))
            ]

    def _gap(self, tokenizer: Tokenizer, text: TaskText, trial: int, num_tokens: int) -> np.ndarray:
        ids = text.ids[trial % len(text.documents)]
        if self.inner_start:
            return np.concatenate([[tokenizer.start_id], ids[: num_tokens - 1]])
        return ids[:num_tokens]

    def _samples(
        self, tokenizer: Tokenizer, text: TaskText, needle: Needle, trial: int, controls: tuple[str, ...]
    ) -> list[Sample]:
        """The samples of one trial at every length, in the given forms."""
        cue, value, other = (tokenizer.encode(part) for part in (needle.cue, needle.value, needle.other))
        planted = np.concatenate([cue, value, tokenizer.encode(self.end)])
        index = trial % len(text.documents)
        samples = []
        for length in self.lengths:
            for control in controls:
                # the absent control has text in the needle's place: it is as long as the trial itself
                num_gap = length + len(planted) * (control == "absent")
                gap = self._gap(tokenizer, text, trial, num_gap)
                body = [gap] if control == "absent" else [planted, gap]
                context = np.concatenate([[tokenizer.start_id], *body, cue]).astype(np.int32)
                # exact lengths are the point of the tool: never trust, always check
                if len(context) != 1 + len(planted) + length + len(cue):
                    raise AssertionError(f"{length}/{trial}/{control}: {len(context)} tokens of context")
                target = other if control == "format" else value
                sample = Sample(
                    key=f"{length}/{trial}/{control}",
                    tokens=np.concatenate([context, target]),
                    span=(len(context), len(context) + len(target)),
                    length=length,
                    gap=length,
                    depth=None if control == "absent" else 0.0,
                    trial=trial,
                    text_id=text.text_id(index, num_gap - self.inner_start),
                    control=control,
                )
                samples.append(sample)
        return samples

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

    def curve(self, scored: Scored) -> tuple[np.ndarray, np.ndarray] | None:
        return None
