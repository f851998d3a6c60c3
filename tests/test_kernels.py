"""Operations against truths written out in fp64 here, on shapes that divide nothing, and against abuse."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atma_eval.kernels import delta, softmax, tiles
from atma_eval.kernels.conv import causal_conv
from atma_eval.kernels.delta import gated_delta, gated_delta_reference
from atma_eval.kernels.polar import PolarOutput, PolarParameters, polar_attention, polar_reference, polar_training
from atma_eval.kernels.softmax import softmax_attention, softmax_reference
from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig

HEADS = [(4, 1, 16), (8, 2, 48), (8, 2, 128)]
WINDOWS = [None, 1, 33, 5000]
# lengths of the runs of the past, new tokens, queries (the last of the new tokens)
PIECES = [((), 1, 1), ((), 7, 7), ((130, 77), 333, 333), ((5, 1, 600), 129, 50), ((1000,), 1, 1), ((), 701, 700)]


def heads_id(heads):
    return "{}/{}x{}".format(*heads)


@pytest.fixture(params=["tiles as shipped", "tiny tiles"])
def tile_sizes(request, monkeypatch):
    """At these lengths one tile often holds everything; tiny ones put a boundary everywhere."""
    if request.param == "tiny tiles":
        for name, size in (("TILE_ROWS", 60), ("TILE_KEYS", 47), ("MAX_TILE_KEYS", 90), ("MIN_WINDOW_STEP", 5)):
            monkeypatch.setattr(tiles, name, size)
        monkeypatch.setattr(softmax, "SPAN_KEYS", 101)


def random_attention(heads, num_keys, num_queries, value_width=None, seed=0):
    num_heads, num_kv_heads, width = heads
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, num_heads, num_queries, width, generator=generator)
    k = torch.randn(2, num_keys, num_kv_heads, width, generator=generator)
    v = torch.randn(2, num_keys, num_kv_heads, value_width or width, generator=generator)
    v_null = torch.randn(num_heads, value_width or width, generator=generator)
    spread = [torch.randn(num_heads, generator=generator) for _ in range(4)]
    parameters = PolarParameters(v_null, spread[0] + 2, spread[1] + 0.5, spread[2] - 1, spread[3] - 1.5)
    return q, k, v, parameters


def as_past(k: Tensor, v: Tensor, lengths: tuple[int, ...]):
    """Hand over the first tokens as runs of the given lengths; the rest is new."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    past = [[(k[b, a:z], v[b, a:z]) for a, z in pairwise(ends)] for b in range(len(k))]
    return k[:, ends[-1] :], v[:, ends[-1] :], {"past": past, "offset": ends[-1]}


def dense_scores(q: Tensor, k: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """``q . k`` of each pair, hidden ones at -inf, and the number of visible keys, in the type of the inputs."""
    num_queries, num_keys = q.shape[2], k.shape[1]
    i = torch.arange(num_keys - num_queries, num_keys)[:, None]
    j = torch.arange(num_keys)[None, :]
    visible = (j <= i) & (j > i - (window or num_keys))
    scores = torch.einsum("bhik,bjhk->bhij", q, k.repeat_interleave(q.shape[1] // k.shape[2], dim=2))
    return scores.masked_fill(~visible, -math.inf), visible.sum(-1).to(q.dtype)


def softmax_truth(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    weights = torch.softmax(dense_scores(q, k, window)[0] * scale, -1)
    return torch.einsum("bhij,bjhv->bhiv", weights, v.repeat_interleave(q.shape[1] // k.shape[2], dim=2))


def polar_truth(q: Tensor, k: Tensor, v: Tensor, parameters: PolarParameters, window: int | None) -> PolarOutput:
    """Architecture, section 5, line by line: one softmax over the keys and the null."""
    q, k, v, p = q.double(), k.double(), v.double(), parameters.to(torch.float64)
    n = dense_scores(q, k, window)[1]
    temperature = 1 + F.softplus(p.len_gain_raw)[:, None] * n.log()
    scores = dense_scores(q * (temperature / math.sqrt(q.shape[-1]))[..., None], k, window)[0]
    null = p.null_base[:, None] + F.softplus(p.null_slope_raw)[:, None] * (n + 1).log().sqrt()
    null = (temperature * null)[..., None].expand(len(q), -1, -1, 1)
    weights = torch.softmax(torch.cat([scores, null], -1), -1)
    real, sink = weights[..., :-1], weights[..., -1]
    values = v.repeat_interleave(q.shape[1] // k.shape[2], dim=2)
    mixed = torch.einsum("bhij,bjhv->bhiv", real, values) + sink[..., None] * p.v_null[:, None]
    n_eff = real.sum(-1).square() / real.square().sum(-1)
    magnitude = torch.tanh(F.softplus(p.mag_beta_raw)[:, None] * torch.log1p(n_eff * real.sum(-1)))
    return PolarOutput(mixed / mixed.norm(dim=-1, keepdim=True).clamp(min=1e-6), magnitude, n_eff, sink)


def error(got: Tensor, truth: Tensor) -> float:
    assert got.shape == truth.shape
    return ((got.double() - truth) / truth.abs().clamp(min=1)).abs().max().item()


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@torch.no_grad()
def test_polar_is_as_exact_as_the_dense_form(heads, pieces, window, tile_sizes):
    lengths, num_new, num_queries = pieces
    q, k, v, parameters = random_attention(heads, sum(lengths) + num_new, num_queries)
    truth = polar_truth(q, k, v, parameters, window)
    dense = polar_reference(q, k, v, parameters, window=window)
    new_k, new_v, placed = as_past(k, v, lengths)
    tiled = polar_attention(q, new_k, new_v, parameters, window=window, **placed)
    for name in PolarOutput._fields:
        allowed = 2 * error(getattr(dense, name), getattr(truth, name)) + 2e-6
        assert error(getattr(tiled, name), getattr(truth, name)) <= allowed, name


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("pieces", PIECES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@torch.no_grad()
def test_softmax_is_as_exact_as_the_dense_form(heads, pieces, window, tile_sizes):
    lengths, num_new, num_queries = pieces
    for value_width in (heads[2], 24):  # values of another width do not fit the stock kernel
        q, k, v, _ = random_attention(heads, sum(lengths) + num_new, num_queries, value_width)
        truth = softmax_truth(q, k, v, 0.12, window)
        dense = error(softmax_reference(q, k, v, scale=0.12, window=window), truth)
        new_k, new_v, placed = as_past(k, v, lengths)
        assert error(softmax_attention(q, new_k, new_v, scale=0.12, window=window, **placed), truth) <= 2 * dense + 1e-6


@pytest.mark.parametrize("window", [None, 33])
@torch.no_grad()
def test_sixteen_bit_inputs_are_computed_in_single_precision(window):
    q, k, v, parameters = random_attention((8, 2, 48), 301, 150)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    new_k, new_v, placed = as_past(k, v, (100,))
    polar = polar_attention(q, new_k, new_v, parameters, window=window, **placed)
    truth = polar_truth(q, k, v, parameters, window)
    assert (polar.direction.dtype, polar.n_eff.dtype) == (torch.bfloat16, torch.float32)
    assert error(polar.n_eff, truth.n_eff) < 2e-5
    rounding = 2**-8  # half a unit in the last of bfloat16's 8 digits, with room
    assert error(polar.direction, truth.direction) < rounding
    assert error(polar.magnitude, truth.magnitude) < rounding
    out = softmax_attention(q, new_k, new_v, scale=0.12, window=window, **placed)
    truth = softmax_truth(q, k, v, 0.12, window)
    assert out.dtype == torch.bfloat16
    assert error(out, truth) <= 2 * error(softmax_reference(q, k, v, scale=0.12, window=window), truth) + rounding


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@torch.no_grad()
def test_stock_flash_and_tiles_agree(heads):
    q, k, v, _ = random_attention(heads, 777, 300)
    new_k, new_v, placed = as_past(k, v, (400, 50))
    flash = softmax_attention(q, new_k, new_v, scale=0.2, **placed)
    for b in range(len(q)):
        one = slice(b, b + 1)
        tiled = softmax._tiled(q[one], new_k[one], new_v[one], placed["past"][b], 0.2, placed["offset"], None)
        torch.testing.assert_close(tiled, flash[one], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS, ids=heads_id)
@torch.no_grad()
def test_participation_ratio_from_two_log_sum_exps(heads):
    """``sum p^2 / (sum p)^2 = exp(LSE(2a) - 2 LSE(a))``: a check of n_eff that shares no code with the tiles."""
    q, k, v, parameters = random_attention(heads, 500, 500)
    num_keys = torch.arange(1, 501, dtype=torch.float32)
    scaled = q * parameters.temperature(num_keys)[..., None]
    scale = heads[2] ** -0.5
    single = softmax._flash(scaled, k, v, scale, is_causal=True)[1]
    double = softmax._flash(2 * scaled, k, v, scale, is_causal=True)[1]
    n_eff = polar_attention(q, k, v, parameters).n_eff
    torch.testing.assert_close(n_eff, (2 * single - double).exp(), atol=0, rtol=3e-5)


def test_what_we_rely_on_of_the_private_flash_operator():
    """Output and natural-log LSE; grouped heads taken as they are; a causal mask aligned at the top left."""
    q, k, v, _ = random_attention((8, 2, 48), 90, 40)
    q64, k64, v64 = q.double(), k.double(), v.double()
    out, lse = softmax._flash(q, k, v, 0.3)
    scores = 0.3 * torch.einsum("bhik,bjhk->bhij", q64, k64.repeat_interleave(4, 2))
    values = v64.repeat_interleave(4, 2)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    want = torch.einsum("bhij,bjhv->bhiv", scores.softmax(-1), values)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    out, lse = softmax._flash(q, k, v, 0.3, is_causal=True)
    scores = scores.masked_fill(torch.arange(90) > torch.arange(40)[:, None], -math.inf)
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=1e-5, rtol=1e-5)
    want = torch.einsum("bhij,bjhv->bhiv", scores.softmax(-1), values)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 9])
def test_polar_gradients(window):
    """The training form in row blocks, and the reference, against autograd through the formulas as written."""
    q, k, v, parameters = random_attention((4, 1, 16), 75, 75)
    inputs = [x.double() for x in (q, k, v, *parameters)]

    def gradients(attend):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = attend(*leaves[:3], PolarParameters(*leaves[3:]), window)
        (out.direction.sin().sum() + out.magnitude.square().sum()).backward()
        return [leaf.grad for leaf in leaves]

    truth = gradients(polar_truth)
    for attend in (polar_training, polar_reference):
        mine = gradients(lambda *leaves, attend=attend: attend(*leaves[:-1], window=leaves[-1]))
        for got, want in zip(mine, truth, strict=True):
            torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-8)


def attend_by(core: str, q: Tensor, k: Tensor, v: Tensor, parameters: PolarParameters, window: int | None) -> Tensor:
    if core == "softmax":
        return softmax_attention(q, k, v, scale=q.shape[-1] ** -0.5, window=window)
    out = polar_attention(q, k, v, parameters, window=window)
    return torch.cat([out.direction, torch.stack(out[1:], -1)], -1)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("core", ["polar", "softmax"])
@torch.no_grad()
def test_large_scores_stay_finite(core, window, tile_sizes):
    q, k, v, parameters = random_attention((8, 2, 48), 300, 300)
    out = attend_by(core, 30 * q, 30 * k, v, parameters, window)
    assert out.isfinite().all()
    if core == "softmax":
        truth = softmax_truth(30 * q, 30 * k, v, 48**-0.5, window)
        torch.testing.assert_close(out.double(), truth, atol=1e-3, rtol=0)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("core", ["polar", "softmax"])
@torch.no_grad()
def test_a_hidden_nan_key_is_not_felt(core, window, tile_sizes):
    q, k, v, parameters = random_attention((4, 1, 16), 300, 300)
    clean = attend_by(core, q, k, v, parameters, window)
    k[:, 100] = math.nan
    dirty = attend_by(core, q, k, v, parameters, window)
    assert torch.equal(dirty[:, :, :100], clean[:, :, :100])
    assert dirty[:, :, 100].isnan().any(-1).all()
    if window is not None:
        assert torch.equal(dirty[:, :, 100 + window :], clean[:, :, 100 + window :])


def random_memory(num_tokens, num_heads=3, width=16, value_width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, num_tokens, num_heads, width, generator=generator)
    v = torch.randn(2, num_tokens, num_heads, value_width, generator=generator)
    gamma, beta = torch.randn(2, 2, num_tokens, num_heads, generator=generator)
    return [q, k, v, gamma + 3.9, beta]


@pytest.mark.parametrize("segment", [1024, 20])
@pytest.mark.parametrize("chunk", [1, 5, 64, 500])
@pytest.mark.parametrize(
    ("num_tokens", "width", "value_width"), [(1, 16, 16), (64, 48, 48), (65, 128, 128), (201, 16, 24)]
)
def test_memory_in_chunks(num_tokens, width, value_width, chunk, segment, monkeypatch):
    monkeypatch.setattr(delta, "SEGMENT", segment)
    inputs = random_memory(num_tokens, width=width, value_width=value_width)
    before = torch.randn(2, 3, width, value_width, generator=torch.Generator().manual_seed(1))
    truth = gated_delta_reference(*(x.double() for x in inputs), before.double())
    for state, want in zip(gated_delta(*inputs, before, chunk=chunk), truth, strict=True):
        assert state.dtype == torch.float32
        torch.testing.assert_close(state.double(), want, atol=5e-6, rtol=1e-5)
    double = gated_delta(*(x.double() for x in inputs), before.double(), chunk=chunk)
    for state, want in zip(double, truth, strict=True):
        torch.testing.assert_close(state, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130, 199])
def test_memory_handed_over_anywhere(cut):
    inputs = random_memory(200)
    readout, state = gated_delta(*inputs)
    first, between = gated_delta(*(x[:, :cut] for x in inputs))
    second, after = gated_delta(*(x[:, cut:] for x in inputs), between)
    torch.testing.assert_close(torch.cat([first, second], 1), readout, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(after, state, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_memory_with_extreme_gates(chunk):
    """Forgets everything, nothing, writes everything, nothing; in turns and throughout."""
    for extremes in ([-200.0], [200.0], [-200.0, 200.0, 0.0]):
        inputs = random_memory(150)
        turns = torch.tensor(extremes)[torch.randint(len(extremes), (2, 2, 150, 3))]
        for gamma, beta in ((turns[0], inputs[4]), (inputs[3], turns[1]), (turns[0], turns[1])):
            changed = [*inputs[:3], gamma, beta]
            truth = gated_delta_reference(*(x.double() for x in changed))
            for got, want in zip(gated_delta(*changed, chunk=chunk), truth, strict=True):
                torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=1e-4)


def test_memory_that_never_forgets_keeps_every_bit():
    inputs = random_memory(150)
    inputs[3].fill_(200.0)  # gamma is exactly 1 ...
    inputs[4].fill_(-200.0)  # ... and nothing is written
    before = torch.randn(2, 3, 16, 16)
    assert torch.equal(gated_delta(*inputs, before)[1], before)


def test_memory_is_exact_after_it_forgot():
    """Ratios of decays after a burst of forgetting: sums of logs cancel there, in fp32 to four digits only."""
    inputs = random_memory(512)
    inputs[3] = inputs[3] + torch.where(torch.arange(512) % 64 < 32, -14.0, 8.0)[:, None]
    truth, _ = gated_delta_reference(*(x.double() for x in inputs))
    in_steps = error(gated_delta_reference(*inputs)[0], truth)
    assert error(gated_delta(*inputs)[0], truth) <= 2 * in_steps + 1e-6


def test_memory_gradients(monkeypatch):
    monkeypatch.setattr(delta, "SEGMENT", 32)
    inputs = [x.double() for x in random_memory(75)]

    def gradients(scan):
        leaves = [x.clone().requires_grad_() for x in inputs]
        readout, state = scan(*leaves)
        (readout.sin().sum() + state.cos().sum()).backward()
        return [leaf.grad for leaf in leaves]

    chunked = gradients(lambda *leaves: gated_delta(*leaves, chunk=16))
    for got, want in zip(chunked, gradients(gated_delta_reference), strict=True):
        torch.testing.assert_close(got, want, atol=1e-11, rtol=1e-10)


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("cuts", [(1, 2, 3, 4), (2, 30), (36,), (5, 6, 20)], ids=str)
def test_convolution_in_any_pieces(taps, cuts):
    x, weight = torch.randn(2, 37, 24), torch.randn(24, 1, taps)
    whole, end = causal_conv(x, weight)
    want = F.conv1d(F.pad(x.mT, (taps - 1, 0)).double(), weight.double(), groups=24).mT
    torch.testing.assert_close(whole.double(), want, atol=1e-6, rtol=1e-5)
    pieces, state = [], None
    for a, z in pairwise((0, *cuts, 37)):
        piece, state = causal_conv(x[:, a:z], weight, state)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=1e-7, rtol=1e-6)
    assert torch.equal(state, end)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation put out."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, Tensor):
                self.numel = max(self.numel, x.numel())
        return out


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("core", ["polar", "nope", "rope", "none"])
@torch.no_grad()
def test_nothing_is_ever_as_large_as_the_square_of_the_length(core, window):
    config = AtmaConfig(
        vocab_size=64,
        num_hidden_layers=4,
        hidden_size=32,
        head_dim=8,
        attn_type=core,
        attn_window=window,
        mem_enabled=True,
    )
    model = Atma(config).init_weights(0)
    num_tokens = 4096
    with LargestTensor() as largest:
        model.logits(model(torch.randint(64, (1, num_tokens)), model.init_state(1, num_tokens)))
    # the widest thing that is linear in the length is the MLP's 8 x hidden_size = 256 per token
    assert num_tokens * 256 <= largest.numel <= num_tokens * num_tokens // 16
