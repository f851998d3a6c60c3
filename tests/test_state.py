"""Pages, forks and windows: who shares what, when it is copied, and that every page comes back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from atma_eval.kernels.polar import PolarParameters, polar_attention
from atma_eval.kernels.softmax import softmax_attention
from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.state import DROPPED, PAGE_SIZE, KVState, LayerStates, PagePool

G, K, V = 2, 3, 5  # key/value heads, key width, value width


def new_state(num_pages: int = 40, batch_size: int = 1, window: int | None = None) -> KVState:
    pool = PagePool((G, K, V), torch.float32, torch.device("cpu"), num_pages)
    return KVState(pool, batch_size, window)


def tokens(count: int, batch_size: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, count, G, K), torch.randn(batch_size, count, G, V)


def content(state: KVState) -> tuple[Tensor, Tensor]:
    """Keys and values ``[B, S, G, K | V]`` as the kernels read them."""
    streams = [[torch.cat(parts) for parts in zip(*runs, strict=True)] for runs in state.runs()]
    return torch.stack([k for k, _ in streams]), torch.stack([v for _, v in streams])


def assert_holds(state: KVState, k: Tensor, v: Tensor) -> None:
    have_k, have_v = content(state)
    assert torch.equal(have_k, k)
    assert torch.equal(have_v, v)


def pages_in_use(pool: PagePool) -> int:
    assert all(count >= 0 for count in pool.references)
    free = [page for page, count in enumerate(pool.references) if count == 0]
    assert sorted(pool._free) == free
    return len(pool.references) - len(free)


@pytest.mark.parametrize("pieces", [(1,), (256,), (257, 255), (1, 1, 1, 600, 3), (100,) * 9, (255, 1, 1, 511)], ids=str)
def test_append_in_any_pieces(pieces):
    state = new_state(batch_size=2)
    k, v = tokens(sum(pieces), 2)
    ends = [sum(pieces[:i]) for i in range(len(pieces) + 1)]
    for a, z in pairwise(ends):
        state.append(k[:, a:z], v[:, a:z])
        assert_holds(state, k[:, :z], v[:, :z])
    num_pages = 2 * -(-sum(pieces) // PAGE_SIZE)
    assert pages_in_use(state.pool) == num_pages
    assert state.num_bytes == num_pages * PAGE_SIZE * G * (K + V) * 4


def test_one_stream_lies_in_one_piece():
    state = new_state()
    state.append(*tokens(5 * PAGE_SIZE + 7))
    ((run,),) = state.runs()
    assert run[0].untyped_storage().data_ptr() == state.pool.keys.untyped_storage().data_ptr()


def test_growth_keeps_the_content():
    state = new_state(num_pages=0)
    k, v = tokens(3000)
    for start in range(0, 3000, 500):
        state.append(k[:, start : start + 500], v[:, start : start + 500])
    assert_holds(state, k, v)
    twin = state.fork()
    more = tokens(2000)
    twin.append(*more)
    assert_holds(state, k, v)
    assert_holds(twin, torch.cat([k, more[0]], 1), torch.cat([v, more[1]], 1))


def test_a_fork_shares_pages_and_copies_only_the_last():
    state = new_state()
    k, v = tokens(3 * PAGE_SIZE + 10)
    state.append(k, v)
    twin = state.fork()
    assert twin.tables == state.tables
    assert pages_in_use(state.pool) == 4
    assert twin.num_bytes == state.num_bytes  # shared pages counted in full

    state.pool.keys[state.tables[0][3], 10:] = 7.0  # what an empty page holds is anybody's: make it comparable
    before = state.pool.keys[state.tables[0]].clone()
    more_k, more_v = tokens(5)
    twin.append(more_k, more_v)
    assert twin.tables[0][:3] == state.tables[0][:3]
    assert twin.tables[0][3] != state.tables[0][3]
    assert pages_in_use(state.pool) == 5
    assert torch.equal(state.pool.keys[state.tables[0]], before)
    assert_holds(twin, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1))

    last = state.tables[0][3]  # now the trunk's alone: written in place
    other_k, other_v = tokens(2)
    state.append(other_k, other_v)
    assert state.tables[0][3] == last
    assert_holds(state, torch.cat([k, other_k], 1), torch.cat([v, other_v], 1))
    assert_holds(twin, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1))


def test_a_fork_at_a_page_end_copies_nothing():
    state = new_state()
    state.append(*tokens(2 * PAGE_SIZE))
    twin = state.fork()
    twin.append(*tokens(1))
    state.append(*tokens(1))
    assert twin.tables[0][:2] == state.tables[0][:2]
    assert pages_in_use(state.pool) == 4


@pytest.mark.parametrize("window", [None, 1, 300, 512, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_any_tree_of_forks(seed, window):
    """Random forks, forks of forks, appends and releases; every stream always holds just its own tokens."""
    rng = random.Random(seed)
    root = new_state(num_pages=2, batch_size=2, window=window)
    pool = root.pool
    alive = [(root, *tokens(0, 2))]
    for _ in range(60):
        index = rng.randrange(len(alive))
        state, k, v = alive[index]
        action = rng.random()
        if action < 0.3:
            alive.append((state.fork(), k, v))
        elif action < 0.45 and len(alive) > 1:
            state.release()
            del alive[index]
        else:
            more_k, more_v = tokens(rng.choice([1, 3, 100, 256, 700]), 2)
            state.append(more_k, more_v)
            alive[index] = (state, torch.cat([k, more_k], 1), torch.cat([v, more_v], 1))
        for state, k, v in alive:
            if state.length:
                needed = min(state.length, (window or state.length + 1) - 1)  # what the next token may see of the past
                kept = content(state)[0].shape[1] if needed else 0
                assert needed <= kept <= min(state.length, needed + 2 * PAGE_SIZE)
                if kept:
                    assert_holds(state, k[:, -kept:], v[:, -kept:])
        held = {page for state, _, _ in alive for table in state.tables for page in table if page != DROPPED}
        assert pages_in_use(pool) == len(held)
    for state, _, _ in alive:
        state.release()
        state.release()  # harmless
    assert pages_in_use(pool) == 0


def test_a_window_bounds_the_pages():
    state = new_state(window=1000)
    for _ in range(50):
        state.append(*tokens(311))
        assert state.num_bytes <= (1000 // PAGE_SIZE + 2) * PAGE_SIZE * G * (K + V) * 4
    assert len(state.pool.references) == 40  # never grown
    assert content(state)[0].shape[1] >= 999


@pytest.mark.parametrize("core", ["polar", "softmax"])
@torch.no_grad()
def test_dropped_pages_are_not_missed(core):
    """Windowed attention over a state that drops pages equals the same window over a state that keeps them all."""
    window, heads, width = 300, 4, 16
    pool = PagePool((1, width, width), torch.float32, torch.device("cpu"), 8)
    dropping, keeping = KVState(pool, 1, window), KVState(pool, 1)
    parameters = PolarParameters(torch.randn(heads, width), *torch.randn(4, heads))
    for count in (1, 300, 257, 700, 1, 1, 511, 40):
        q, k, v = torch.randn(1, heads, count, width), *torch.randn(2, 1, count, 1, width)
        outputs = []
        for state in (dropping, keeping):
            placed = {"past": state.runs() if state.length else (), "offset": state.length, "window": window}
            if core == "polar":
                outputs.append(torch.cat([x.flatten() for x in polar_attention(q, k, v, parameters, **placed)]))
            else:
                outputs.append(softmax_attention(q, k, v, scale=0.25, **placed))
            state.append(k, v)
        assert torch.equal(*outputs)
    assert dropping.num_bytes < keeping.num_bytes


def config(core: str, window: int | None = None, memory: bool = True) -> AtmaConfig:
    return AtmaConfig(
        vocab_size=64,
        num_hidden_layers=4,
        hidden_size=64,
        head_dim=16,
        attn_type=core,
        attn_window=window,
        mem_enabled=memory,
    )


def ids(count: int, seed: int = 0) -> Tensor:
    return torch.randint(64, (1, count), generator=torch.Generator().manual_seed(seed))


def kv_of(state: LayerStates) -> KVState:
    (kv,) = [layer.kv for layer in state.layers if layer.kv is not None]
    return kv


@torch.no_grad()
def test_forking_a_model_state_copies_no_page():
    model = Atma(config("polar")).init_weights(0)
    state = model.init_state(1, capacity=4096)
    model(ids(3000), state)
    pool = kv_of(state).pool
    used = pages_in_use(pool)
    branches = [state.fork() for _ in range(20)]
    assert pages_in_use(pool) == used == 12
    for branch in branches:
        model(ids(2), branch)
    assert pages_in_use(pool) == used + 20  # each copied the last, unfinished page
    for branch in branches:
        branch.release()
    assert pages_in_use(pool) == used
    assert len(pool.references) <= 4096 // PAGE_SIZE * 3
    state.release()
    assert pages_in_use(pool) == 0


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
@torch.no_grad()
def test_where_the_pages_lie_changes_no_bit(core, window):
    """A stream that was forked at every step, its pages scattered, gives the very bits of an undisturbed one."""
    model = Atma(config(core, window)).init_weights(0)
    whole, stray = ids(6300), ids(500, seed=1)
    straight, forked = model.init_state(1, 6300), model.init_state(1, 1024)
    for step, start in enumerate(range(0, 6300, 700)):
        twin = forked.fork()
        model(stray[:, : 300 + 9 * step], forked)  # the trunk goes astray and keeps its pages
        forked = twin
        piece = whole[:, start : start + 700]
        assert torch.equal(model(piece, straight), model(piece, forked))
    if window is None:
        assert len(kv_of(straight).runs()[0]) == 1
        assert len(kv_of(forked).runs()[0]) > 3


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("window", [None, 700, 1024])
@pytest.mark.parametrize("core", ["polar", "rope", "none"])
@torch.no_grad()
def test_state_bytes_foretells_the_size(core, window, memory):
    if core == "none" and not memory:
        return
    model = Atma(config(core, window, memory)).init_weights(0)
    page = PAGE_SIZE * 2 * 16 * 4
    state = model.init_state(1)
    for _ in range(5):
        model(ids(1111), state)
        convs = sum(conv.num_bytes for layer in state.layers for conv in layer.convs.values())
        assert abs(model.state_bytes(state.length) - (state.num_bytes - convs)) <= page
        assert convs < page


@pytest.mark.parametrize("core", ["polar", "none"])
@torch.no_grad()
def test_states_do_not_keep_activations_alive(core):
    """Convolution and memory states own their storage: a few rows must not pin a whole chunk."""
    model = Atma(config(core)).init_weights(0)
    state = model.init_state(1)
    model(ids(2000), state)
    for layer in state.layers:
        small = [conv.inputs for conv in layer.convs.values()] + ([layer.memory.matrix] if layer.memory else [])
        for x in small:
            assert x is not None
            assert x.untyped_storage().nbytes() == x.nbytes
