"""A stream's numbers do not depend on how it is walked; trees compute each shared token once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import assert_forks_are_isolated, tiny_model

from atma_eval.plan import PrefixTree
from atma_eval.runner import walk
from atma_eval.session import Session
from atma_eval.tasks.base import Sample

CORES = [
    {"attn_type": "polar"},
    {"attn_type": "polar", "mem_enabled": False},
    {"attn_type": "polar", "attn_window": 50},
    {"attn_type": "nope"},
    {"attn_type": "nope", "attn_window": 50, "mem_enabled": False},
    {"attn_type": "rope"},
    {"attn_type": "none"},
]


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 257, count)


def full_logits(model, ids: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(torch.as_tensor(ids)[None]))[0]


@pytest.mark.parametrize("core", CORES, ids=str)
@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_score_equals_full_logits(core, chunk):
    model, ids = tiny_model(**core), tokens(333)
    session = Session(model, chunk=chunk)
    session.extend(ids[:1])
    scores = session.score(ids[1:])
    logits = full_logits(model, ids)[:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.as_tensor(ids[1:]), reduction="none").numpy()
    np.testing.assert_allclose(scores.nll, expected, atol=2e-5)
    assert (scores.argmax == logits.argmax(-1).numpy()).mean() > 0.99


@pytest.mark.parametrize("core", CORES, ids=str)
def test_any_partition_and_selection(core):
    """Scoring some tokens, in uneven calls, gives the numbers of scoring all of them at once."""
    model, ids = tiny_model(**core), tokens(400, seed=1)
    whole = Session(model)
    whole.extend(ids[:1])
    every = whole.score(ids[1:])
    rng = np.random.default_rng(2)
    wanted = rng.random(400) < 0.1
    wanted[0] = False
    session, at, nll = Session(model, chunk=64), 0, []
    while at < 400:
        stop = min(400, at + int(rng.integers(1, 90)))
        nll.append(session.score(ids[at:stop], wanted[at:stop]).nll)
        at = stop
    np.testing.assert_allclose(np.concatenate(nll), every.nll[wanted[1:]], atol=2e-5)


def test_equal_breaks_give_equal_bits():
    model, ids = tiny_model(), tokens(500, seed=3)
    results = []
    for _ in range(2):
        session = Session(model, chunk=128)
        session.extend(ids[:300])
        results.append(session.score(ids[300:]).nll)
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_forks_are_isolated(core):
    branches = [tokens(290, seed=seed) for seed in range(3)]
    assert_forks_are_isolated(tiny_model(**core), tokens(700, seed=4), 300, branches)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_generate_is_greedy(core):
    model, ids = tiny_model(**core), tokens(60, seed=5)
    session = Session(model)
    session.extend(ids)
    generated = session.generate(8)
    sequence = list(ids)
    for token in generated:
        assert token == int(full_logits(model, np.array(sequence))[-1].argmax())
        sequence.append(token)


def test_the_first_token_cannot_be_scored():
    with pytest.raises(ValueError, match="first token"):
        Session(tiny_model()).score(tokens(3))


# -- trees ------------------------------------------------------------------------------------------------


def sample(key: str, ids: np.ndarray, span: tuple[int, int]) -> Sample:
    return Sample(key=key, tokens=ids.astype(np.int32), span=span, length=len(ids), trial=0, text_id="t")


def bushy_samples() -> list[Sample]:
    """Prefixes of prefixes, branches in the middle, a duplicate, and one that shares nothing."""
    trunk, other = tokens(300, seed=6), tokens(120, seed=7)
    built = [sample(f"prefix{n}", trunk[:n], (max(1, n - 5), n)) for n in (10, 100, 299, 300)]
    for at in (50, 100, 200):
        for seed in (8, 9):
            ids = np.concatenate([trunk[:at], tokens(20, seed=seed)])
            built.append(sample(f"branch{at}/{seed}", ids, (at + 10, at + 20)))
    built.append(sample("all", trunk[:250], (1, 250)))
    return [*built, sample("other", other, (3, 7)), sample("twin", trunk[:100], (1, 100))]


def test_tree_counts_each_shared_token_once():
    samples = bushy_samples()
    prefixes = {tuple(s.tokens[:n].tolist()) for s in samples for n in range(1, len(s.tokens) + 1)}
    tree = PrefixTree.merge(samples)
    assert tree.num_tokens == len(prefixes)
    assert tree.longest == 300
    assert sorted(s.key for s in tree.samples(tree.root)) == sorted(s.key for s in samples)


@pytest.mark.parametrize("core", CORES, ids=str)
def test_walk_scores_as_each_sample_alone(core):
    model, samples = tiny_model(**core), bushy_samples()
    seen = {}
    for each, scored, status, _ in walk(model, samples):
        assert status == "ok"
        seen[each.key] = scored
    assert seen.keys() == {s.key for s in samples}
    for each in samples:
        start, stop = each.span
        alone = Session(model)
        alone.extend(each.tokens[:start])
        np.testing.assert_allclose(seen[each.key].nll, alone.score(each.tokens[start:stop]).nll, atol=2e-5)


def test_walk_leaves_no_page_behind():
    model = tiny_model()
    pools = []
    init_state = model.init_state

    def watched(*args, **kwargs):
        state = init_state(*args, **kwargs)
        pools.extend(layer.kv.pool for layer in state.layers if layer.kv is not None)
        return state

    model.init_state = watched
    list(walk(model, bushy_samples()))
    assert pools
    assert all(count == 0 for pool in pools for count in pool.references)


class Failing:
    """A model that fails once a stream reaches a length."""

    def __init__(self, model, at: int, failure: Exception | None):
        self._model, self._at, self._failure = model, at, failure
        self.max_length = None

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __call__(self, ids, state, last=None):
        hidden = self._model(ids, state, last)
        if state.length <= self._at:
            return hidden
        if self._failure is not None:
            raise self._failure
        return hidden * float("nan")


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (MemoryError(), "oom"),
        (ZeroDivisionError("x"), "error"),
    ],
)
def test_failure_takes_down_only_what_lies_beyond(failure, status):
    samples = bushy_samples()
    found = {s.key: state for s, _, state, _ in walk(Failing(tiny_model(), 110, failure), samples)}
    assert len(found) == len(samples)
    assert {key for key, state in found.items() if state == "ok"} == {
        "prefix10", "prefix100", "branch50/8", "branch50/9", "twin",
    }  # fmt: skip
    assert set(found.values()) == {"ok", status}


def test_too_long_is_an_outcome():
    model = Failing(tiny_model(), 10_000, None)
    model.max_length = 150
    found = {s.key: (state, error) for s, _, state, error in walk(model, bushy_samples())}
    assert found["prefix300"][0] == "too_long"
    assert "150" in found["prefix300"][1]
    assert found["prefix100"][0] == "ok"
