"""The prefill kernel against fp64 truth, beside the PyTorch form of the same type (`triton_case` says how it runs)."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from conftest import GOLDEN, needs_golden
from safetensors.torch import load_file
from triton_case import INTERPRETING, error, far_apart, in_pages, needs_triton, poisoned, rerun, surrounded

from atma_eval.errors import UserError
from atma_eval.kernels.polar import PolarOutput, PolarParameters, polar_attention, polar_reference
from atma_eval.kernels.softmax import softmax_reference
from atma_eval.state import KVState, PagePool

if INTERPRETING:
    from atma_eval.kernels import polar_triton
    from atma_eval.kernels.polar_triton import PagedPast, Tiles, polar_prefill, softmax_prefill

    pytestmark = [pytest.mark.usefixtures("poisoned")]
else:
    test_in_the_interpreter = rerun(__file__)

interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the process of test_in_the_interpreter")
assert poisoned  # a fixture

TINY = (32, 32, 16, 4, 2)  # boundaries everywhere; as shipped one tile often holds everything
NARROW = (16, 16, 16, 4, 2)
# heads, length of the past, new tokens, queries (the last of the new tokens), window, tile
SHAPES = [
    ((4, 1, 16), 0, 1, 1, None, TINY),
    ((4, 1, 16), 0, 133, 133, 33, TINY),
    ((2, 2, 48), 0, 77, 77, None, TINY),
    ((6, 2, 80), 70, 61, 50, None, TINY),  # a group of three: rows of one query straddle blocks
    ((8, 2, 96), 40, 37, 37, 1, NARROW),
    ((4, 2, 128), 129, 65, 65, 70, TINY),
    ((4, 2, 128), 129, 65, 65, 5000, TINY),
    ((3, 1, 16), 200, 3, 2, 40, NARROW),
    ((2, 1, 256), 31, 33, 33, None, TINY),
    ((4, 1, 64), 300, 190, 190, None, None),
    ((4, 1, 64), 300, 190, 190, 150, None),
    ((2, 1, 128), 0, 290, 290, None, None),
]
FLOOR = {torch.float32: (2e-6, 2e-6), torch.float16: (5e-4, 2e-6)}  # direction (its weights are rounded), the rest


def shape_id(value):
    return str(value).replace(" ", "")


def random_inputs(heads, num_keys, num_queries, dtype=torch.float32, batch=2, seed=0):
    num_heads, num_kv_heads, width = heads
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, num_heads, num_queries, width, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, num_keys, num_kv_heads, width, generator=generator).to(dtype)
    v_null = torch.randn(num_heads, width, generator=generator)
    spread = torch.randn(4, num_heads, generator=generator)
    parameters = PolarParameters(v_null, spread[0] + 2, spread[1] + 0.5, spread[2] - 1, spread[3] - 1.5)
    return q, k, v, parameters


def set_tiles(monkeypatch, sizes):
    if sizes is not None:
        monkeypatch.setattr(polar_triton, "tiles", lambda *_: Tiles(*sizes))


def placed(k, v, num_past, page_size, window=None):
    """Past in shuffled pages, those that the window has left behind dropped, and the rest as new tokens amid NaN."""
    first = 0 if window is None else max(0, (num_past - window + 1) // page_size * page_size)
    past = None
    if num_past:
        keys, values, tables = in_pages(k[:, :num_past], v[:, :num_past], page_size, first)
        past = PagedPast(keys, values, tables, num_past)
    return surrounded(k[:, num_past:], 1), surrounded(v[:, num_past:], 1), past


def check(got, same, truth, floors):
    """No worse than twice the error of the PyTorch form in the same type, and a little more."""
    for name, mine, torchs, true in zip(PolarOutput._fields, got, same, truth, strict=False):
        floor = floors[0] if name == "direction" else floors[1]
        assert error(mine, true) <= 2 * error(torchs, true) + floor, name


@interpreted
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize(("heads", "num_past", "num_new", "num_queries", "window", "sizes"), SHAPES, ids=shape_id)
def test_polar_is_as_exact_as_torch(heads, num_past, num_new, num_queries, window, sizes, dtype, monkeypatch):
    if dtype == torch.float16 and sizes is None:
        pytest.skip("once is enough")
    set_tiles(monkeypatch, sizes)
    q, k, v, parameters = random_inputs(heads, num_past + num_new, num_queries, dtype)
    truth = polar_reference(*(x.double() for x in (q, k, v)), parameters.to(torch.float64), window=window)
    same = polar_reference(q, k, v, parameters, window=window)
    new_k, new_v, past = placed(k, v, num_past, 64 if sizes else 256, window)
    got = polar_prefill(surrounded(q, 2), new_k, new_v, parameters, past=past, window=window, details=True)
    assert (got.direction.dtype, got.magnitude.dtype) == (dtype, dtype)
    assert (got.n_eff.dtype, got.null_mass.dtype) == (torch.float32, torch.float32)
    check(got, same, truth, FLOOR[dtype])


@interpreted
@pytest.mark.parametrize(("heads", "num_past", "num_new", "num_queries", "window", "sizes"), SHAPES[1:7], ids=shape_id)
def test_softmax_is_as_exact_as_torch(heads, num_past, num_new, num_queries, window, sizes, monkeypatch):
    set_tiles(monkeypatch, sizes)
    q, k, v, _ = random_inputs(heads, num_past + num_new, num_queries)
    truth = softmax_reference(*(x.double() for x in (q, k, v)), scale=0.12, window=window)
    same = softmax_reference(q, k, v, scale=0.12, window=window)
    new_k, new_v, past = placed(k, v, num_past, 64, window)
    got = softmax_prefill(surrounded(q, 2), new_k, new_v, scale=0.12, past=past, window=window)
    check([got], [same], [truth], FLOOR[torch.float32])


@interpreted
@pytest.mark.parametrize("window", [None, 50])
def test_streams_of_different_lengths(window, monkeypatch):
    """Each with its own past and absolute positions, among them one without a past."""
    set_tiles(monkeypatch, TINY)
    lengths, num_new = (130, 0, 77), 40
    q, k, v, parameters = random_inputs((4, 2, 16), 130 + num_new, num_new, batch=3)
    keys, values, tables = in_pages(k[:, :130], v[:, :130], 64)
    for b, length in enumerate(lengths):
        tables[b, -(-length // 64) :] = -1
    past = PagedPast(keys, values, tables, torch.tensor(lengths, dtype=torch.int32))
    got = polar_prefill(q, k[:, 130:], v[:, 130:], parameters, past=past, window=window, details=True)
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        own_k, own_v = (torch.cat([x[one, :length], x[one, 130:]], 1) for x in (k, v))
        truth = polar_reference(q[one], own_k, own_v, parameters, window=window)
        for mine, true in zip(got, truth, strict=True):
            torch.testing.assert_close(mine[one], true, atol=3e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("window", [None, 300])
def test_a_past_as_the_state_of_a_stream_holds_it(window):
    """Appended in pieces, forked, pages dropped by the window; in pieces as in one go."""
    q, k, v, parameters = random_inputs((2, 1, 16), 650, 650, batch=1)
    state = KVState(PagePool((1, 16, 16), torch.float32, torch.device("cpu"), 1), 1, window)
    outputs = []
    for a, z in pairwise((0, 300, 310, 650)):
        past = None
        if a:
            tables = torch.tensor(state.tables, dtype=torch.int32)
            past = PagedPast(state.pool.keys, state.pool.values, tables, a)
        part = (q[:, :, a:z], k[:, a:z], v[:, a:z])
        outputs.append(polar_prefill(*part, parameters, past=past, window=window))
        if a:
            same = polar_attention(*part, parameters, past=state.runs(), offset=a, window=window)
            torch.testing.assert_close(outputs[-1][:2], same[:2], atol=2e-6, rtol=1e-5)
        state.append(k[:, a:z], v[:, a:z])
        state = state.fork()
    whole = polar_reference(q, k, v, parameters, window=window)
    for i in range(2):
        torch.testing.assert_close(torch.cat([out[i] for out in outputs], 2), whole[i], atol=2e-6, rtol=1e-5)
    assert outputs[0].n_eff.numel() == outputs[0].null_mass.numel() == 0


@interpreted
def test_more_heads_than_are_handed_out_at_a_time(monkeypatch):
    """Three streams of seven key/value heads: the last section is not full, and no block is done twice or left out."""
    set_tiles(monkeypatch, TINY)
    q, k, v, parameters = random_inputs((14, 7, 16), 40, 40, batch=3)
    got = polar_prefill(q, k, v, parameters, details=True)
    for mine, true in zip(got, polar_reference(q, k, v, parameters), strict=True):
        torch.testing.assert_close(mine, true, atol=3e-6, rtol=1e-5)


@interpreted
def test_inputs_that_lie_otherwise(monkeypatch):
    """Heads before tokens, channels apart, streams further apart in one input than in another."""
    set_tiles(monkeypatch, TINY)
    q, k, v, parameters = random_inputs((4, 2, 16), 35, 35)
    want = polar_reference(q, k, v, parameters)
    lain = (q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2), surrounded(v, 1))
    for given in (lain, (q, k, surrounded(v, 1)), (q.transpose(1, 2).contiguous().transpose(1, 2), k, v)):
        for mine, true in zip(polar_prefill(*given, parameters, details=True), want, strict=True):
            torch.testing.assert_close(mine, true, atol=3e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("paged", [False, True])
def test_keys_that_are_gone(paged, monkeypatch):
    """Without a window to explain it: only keys from ``first`` on count, and the position still is absolute."""
    set_tiles(monkeypatch, TINY)
    q, k, v, parameters = random_inputs((2, 1, 16), 150, 50)
    if paged:
        keys, values, tables = in_pages(k[:, :100], v[:, :100], 32, first=70)
        given = (k[:, 100:], v[:, 100:])
        placing = {"past": PagedPast(keys, values, tables, 100, first=70)}
    else:
        given, placing = (k[:, 70:], v[:, 70:]), {"offset": 70}
    got = polar_prefill(q, *given, parameters, details=True, **placing)
    same = polar_attention(q, k[:, 70:], v[:, 70:], parameters, offset=70)
    for mine, true in zip(got, same, strict=True):
        torch.testing.assert_close(mine, true, atol=2e-6, rtol=1e-5)


@interpreted
@pytest.mark.parametrize("core", ["polar", "softmax"])
def test_a_hidden_nan_key_is_not_felt(core, monkeypatch):
    set_tiles(monkeypatch, TINY)
    q, k, v, parameters = random_inputs((2, 1, 16), 150, 150, batch=1)

    def attend():
        if core == "softmax":
            return softmax_prefill(q, k, v, scale=0.3, window=33)
        out = polar_prefill(q, k, v, parameters, window=33)
        return torch.cat([out.direction, out.magnitude[..., None]], -1)

    clean = attend()
    k[:, 70] = torch.nan
    dirty = attend()
    assert torch.equal(dirty[:, :, :70], clean[:, :, :70])
    assert dirty[:, :, 70:103].isnan().any(-1).all()
    assert torch.equal(dirty[:, :, 103:], clean[:, :, 103:])


@interpreted
def test_large_scores_stay_finite(monkeypatch):
    set_tiles(monkeypatch, TINY)
    q, k, v, parameters = random_inputs((2, 1, 48), 90, 90)
    got = polar_prefill(30 * q, 30 * k, v, parameters, details=True)
    assert all(x.isfinite().all() for x in got)
    truth = softmax_reference(30 * q.double(), 30 * k.double(), v.double(), scale=0.2)
    torch.testing.assert_close(softmax_prefill(30 * q, 30 * k, v, scale=0.2).double(), truth, atol=1e-3, rtol=0)


@interpreted
@pytest.mark.parametrize(("base", "at_most"), [(5, 0.9), (9, 1e-2), (15, 1e-6)])
def test_magnitude_keeps_its_digits_where_the_null_wins(base, at_most):
    """Down to masses that vanish beside one: relative error, not absolute."""
    q, k, v, parameters = random_inputs((2, 1, 16), 40, 40)
    parameters = parameters._replace(null_base=torch.full((2,), float(base)), len_gain_raw=torch.zeros(2))
    truth = polar_reference(*(x.double() for x in (q, k, v)), parameters.to(torch.float64))
    magnitude = polar_prefill(q, k, v, parameters).magnitude
    assert truth.magnitude.median() < at_most
    torch.testing.assert_close(magnitude.double(), truth.magnitude, atol=0, rtol=3e-5)


@interpreted
def test_offsets_beyond_32_bits(monkeypatch):
    """Queries, keys, values and pages whose second stream or page lies 2^31 elements behind the first."""
    set_tiles(monkeypatch, TINY)
    torch.use_deterministic_algorithms(False)  # or torch would fill those gigabytes
    q, k, v, parameters = random_inputs((2, 1, 16), 50, 18, torch.float16)
    want = polar_reference(q, k, v, parameters)
    pool = [far_apart(x[:, :32]) for x in (k, v)]  # page 0 is the past of stream 0, page 1 that of stream 1
    past = PagedPast(*pool, torch.tensor([[0], [1]], dtype=torch.int32), 32)
    got = polar_prefill(far_apart(q), far_apart(k[:, 32:]), far_apart(v[:, 32:]), parameters, past=past)
    torch.testing.assert_close(got[:2], want[:2], atol=1e-3, rtol=0)


def golden_tags():
    return sorted(json.loads((GOLDEN / "op_polar.json").read_text())) if GOLDEN.is_dir() else []


def golden(tag):
    tensors = load_file(GOLDEN / "op_polar.safetensors")
    t = {name.removeprefix(f"{tag}."): x for name, x in tensors.items() if name.startswith(f"{tag}.")}
    seen = 77 if tag.startswith("decode") else t["k"].shape[2]  # later keys are not handed to a causal kernel
    k, v = (t[name][:, :, :seen].transpose(1, 2).contiguous() for name in "kv")
    parameters = PolarParameters(*(t[name] for name in PolarParameters._fields))
    return t, k, v, parameters, json.loads((GOLDEN / "op_polar.json").read_text())[tag]["window"]


@interpreted
@needs_golden
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("tag", golden_tags())
def test_golden(tag, paged, monkeypatch):
    set_tiles(monkeypatch, (64, 64, 32, 4, 2))
    t, k, v, parameters, window = golden(tag)
    num_keys, num_queries = k.shape[1], t["q"].shape[2]
    num_past = (num_keys - num_queries or num_keys // 2) if paged else 0
    rows = slice(-min(num_queries, num_keys - num_past), None)
    new_k, new_v, past = placed(k, v, num_past, 64, window)
    got = polar_prefill(t["q"][:, :, rows], new_k, new_v, parameters, past=past, window=window, details=True)
    magnitude = t["mag_exact"] if "mag_exact" in t else t["mag"]
    for mine, true in zip(got, (t["c"], magnitude, t["n_eff"], t["w_null"]), strict=True):
        torch.testing.assert_close(mine, true[:, :, rows], atol=1e-5, rtol=1e-5)


@interpreted
@needs_golden
def test_golden_legacy_floor():
    t, k, v, parameters, window = golden("nulldom_t40")
    magnitude = polar_prefill(t["q"], k, v, parameters, window=window, q2_floor=1e-6).magnitude
    torch.testing.assert_close(magnitude, t["mag_floor1e-6"], atol=1e-6, rtol=0)


@interpreted
def test_what_the_kernel_does_not_serve():
    for width, dtype in ((18, torch.float32), (272, torch.float32), (16, torch.float64)):
        q, k, v, parameters = random_inputs((2, 1, width), 5, 5, dtype)
        with pytest.raises(UserError, match=f"{width}" if dtype == torch.float32 else "float64") as caught:
            polar_prefill(q, k, v, parameters)
        assert "torch" in caught.value.hint


@needs_triton
@pytest.mark.skipif(INTERPRETING, reason="there the CPU serves")
def test_without_a_device_the_reason_is_told():
    from atma_eval.kernels.polar_triton import softmax_prefill

    q, k, v, _ = random_inputs((2, 1, 16), 5, 5)
    with pytest.raises(UserError, match="CUDA device, not cpu"):
        softmax_prefill(q, k, v, scale=1.0)
