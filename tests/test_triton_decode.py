"""Paged decode in Triton's interpreter (`triton_case`): parity, what lies in pages, pieces, and bytes read."""

from __future__ import annotations

import json
import math
import mmap
import random

import pytest
import torch
from conftest import GOLDEN, needs_golden
from safetensors.torch import load_file
from triton_case import INTERPRETING, error, launched_as_listed, needs_triton, poisoned, record_launches, rerun

from atma_eval.errors import UserError
from atma_eval.kernels import decode
from atma_eval.kernels.polar import PolarOutput, PolarParameters

UNUSED_PAGE = 2**30  # a page number that must not be followed


class Streams:
    """Streams of random keys and values in pages of random order; whatever no stream has stored is NaN."""

    def __init__(self, heads, lengths, num_queries, *, page=16, dtype=torch.float32, window=None, seed=0):
        num_heads, num_kv_heads, key_width, value_width = heads
        draw = torch.Generator().manual_seed(seed)
        num_pages = sum(-(-n // page) for n in lengths) + 5
        self.keys = torch.full((num_pages, page, num_kv_heads, key_width), torch.nan, dtype=dtype)
        self.values = torch.full((num_pages, page, num_kv_heads, value_width), torch.nan, dtype=dtype)
        self.tables = torch.full((len(lengths), -(-max(lengths) // page) + 2), UNUSED_PAGE, dtype=torch.int32)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.q = torch.randn(len(lengths), num_queries, num_heads, key_width, generator=draw).to(dtype).transpose(1, 2)
        self.plain = []  # keys and values of each stream, [1, n, G, width]
        order = torch.randperm(num_pages, generator=draw).tolist()
        for b, n in enumerate(lengths):
            k = torch.randn(n, num_kv_heads, key_width, generator=draw).to(dtype)
            v = torch.randn(n, num_kv_heads, value_width, generator=draw).to(dtype)
            first = decode.first_visible(n, num_queries, window) // page
            for index in range(-(-n // page)):
                self.tables[b, index] = -1 if index < first else order.pop()
                if index >= first:
                    part = slice(index * page, min(n, index * page + page))
                    self.keys[self.tables[b, index], : part.stop - part.start] = k[part]
                    self.values[self.tables[b, index], : part.stop - part.start] = v[part]
            self.plain.append((k[None], v[None]))
        spread = [torch.randn(num_heads, generator=draw) for _ in range(4)]
        v_null = torch.randn(num_heads, value_width, generator=draw)
        self.parameters = PolarParameters(v_null, spread[0] + 2, spread[1] + 0.5, spread[2] - 1, spread[3] - 1.5)
        self.window = window

    def paged(self):
        return self.q, self.keys, self.values, self.tables, self.lengths

    def each(self):
        """Queries, keys and values of the streams that have at least as many keys as queries, in fp64."""
        for b, (k, v) in enumerate(self.plain):
            if k.shape[1] >= self.q.shape[2]:
                yield b, self.q[b : b + 1].double(), k.double(), v.double()


if not INTERPRETING:
    test_in_the_interpreter = rerun(__file__)

    @needs_golden
    def test_the_pytorch_form_gives_the_golden_numbers():
        check_golden(decode.polar_decode)

    @pytest.mark.parametrize("window", [None, 20])
    def test_the_pytorch_form_is_as_exact_as_the_definition(window):
        from test_kernels import polar_truth, softmax_truth

        s = Streams((4, 2, 16, 24), [77, 150, 3, 0, 2], 3, window=window)
        polar = decode.polar_decode(*s.paged(), s.parameters, window=window)
        plain = decode.softmax_decode(*s.paged(), scale=0.12, window=window)
        for b, q, k, v in s.each():
            truth = polar_truth(q, k, v, s.parameters, window)
            for got, want in zip(polar, truth, strict=True):
                assert error(got[b : b + 1], want) < 2e-5
            assert error(plain[b : b + 1], softmax_truth(q, k, v, 0.12, window)) < 2e-6
        check_padding(s, polar, plain)

    @needs_triton
    @pytest.mark.parametrize("capability", [80, 90])
    @pytest.mark.parametrize(
        ("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 16), (torch.float16, 64)], ids=str
    )
    def test_kernels_are_launched_as_listed(dtype, width, capability, monkeypatch):
        from atma_eval.kernels import aot, decode_triton

        monkeypatch.setattr(decode_triton, "require_supported", lambda *_: None)
        monkeypatch.setattr(decode_triton, "shared_bytes", lambda _: aot.SHARED_BYTES[capability])
        listed = {c.name: c for c in decode_triton.configurations() if capability in c.targets}
        splits = record_launches(monkeypatch, decode_triton, "_split_kernel")
        merges = record_launches(monkeypatch, decode_triton, "_merge_kernel")
        kind = f"{decode_triton.TYPES[dtype]} d{width}"
        for num_queries, num_pages in ((1, 1), (3, 16), (1, 600)):
            s = Streams((8, 2, width, width), [17, 200], num_queries, page=256, dtype=dtype)
            q, keys, values, _, lengths = s.paged()
            paged = (q, keys, values, torch.zeros(2, num_pages, dtype=torch.int32), lengths)
            decode_triton.polar_decode(*paged, s.parameters, details=False)
            launched_as_listed(listed[f"polar decode {kind} rows 16"], *splits.pop())
            if width == 128:
                at_once = 4 if num_pages == 1 else 64
                launched_as_listed(listed[f"polar merge {kind} by {at_once}"], *merges.pop())
                decode_triton.softmax_decode(*paged, scale=0.12, window=16)
                launched_as_listed(listed[f"softmax decode {kind} rows 16 window"], *splits.pop())
        if width == 128:
            s = Streams((8, 2, width, width), [17, 200], 16, page=256, dtype=dtype)
            decode_triton.polar_decode(*s.paged(), s.parameters)
            launched_as_listed(listed[f"polar decode {kind} rows 64"], *splits.pop())

else:
    from test_kernels import polar_truth, softmax_truth
    from triton.runtime.interpreter import interpreter_builder

    from atma_eval.kernels import decode_triton
    from atma_eval.kernels.decode_plan import plan_splits, split_tile

    pytestmark = pytest.mark.usefixtures(poisoned.__name__)

    class Traffic:
        """Every address that the kernels load from some tensors, and store to them, by the byte.

        The interpreter hands each load and store its pointers and mask; what it does not mask, it fetches.
        """

        def __init__(self, monkeypatch, *tensors):
            self.loaded, self.stored = [], []
            self.inside = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in tensors]
            load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

            def counted_load(pointers, mask, *rest):
                self._note(self.loaded, pointers, mask)
                return load(pointers, mask, *rest)

            def counted_store(pointers, value, mask, *rest):
                self._note(self.stored, pointers, mask)
                return store(pointers, value, mask, *rest)

            monkeypatch.setattr(interpreter_builder, "create_masked_load", counted_load)
            monkeypatch.setattr(interpreter_builder, "create_masked_store", counted_store)

        def _note(self, seen, pointers, mask):
            size = pointers.get_element_ty().primitive_bitwidth // 8
            addresses = pointers.data[mask.data.astype(bool)]
            for start, stop in self.inside:
                seen += [(a, size) for a in addresses[(addresses >= start) & (addresses < stop)].tolist()]

        def num_bytes(self):
            return sum(size for _, size in self.loaded + self.stored)

        def once_each(self):
            return len(set(self.loaded)) == len(self.loaded) and len(set(self.stored)) == len(self.stored)

    # heads (H, G, K, V), lengths, new tokens, page, window, keys of a piece
    CASES = [
        ((4, 1, 16, 16), [1], 1, 16, None, None),
        ((8, 2, 128, 128), [77, 130], 1, 64, None, 64),
        ((8, 2, 48, 80), [150, 33], 3, 32, None, None),
        ((8, 2, 16, 16), [301], 16, 256, None, 128),
        ((6, 2, 96, 96), [70], 16, 16, 33, None),
        ((4, 4, 256, 32), [65], 1, 32, 1, None),
        ((2, 1, 64, 256), [190], 5, 64, 50, 64),
        ((9, 1, 16, 16), [40], 16, 16, None, None),  # 144 rows of a head: two blocks
        ((4, 2, 16, 16), [90, 20], 2, 48, 5000, 32),
        ((2, 1, 16, 256), [690], 6, 64, None, 16),  # 44 pieces, which the merge takes 32 at once
    ]

    @pytest.mark.parametrize("case", CASES, ids=str)
    @torch.no_grad()
    def test_as_exact_as_the_pytorch_form(case):
        heads, lengths, num_queries, page, window, split_keys = case
        s = Streams(heads, lengths, num_queries, page=page, window=window)
        options = {"window": window, "split_keys": split_keys}
        polar = decode_triton.polar_decode(*s.paged(), s.parameters, **options)
        plain = decode_triton.softmax_decode(*s.paged(), scale=0.12, **options)
        same = decode.polar_decode(*s.paged(), s.parameters, window=window)
        same_plain = decode.softmax_decode(*s.paged(), scale=0.12, window=window)
        for b, q, k, v in s.each():
            truth = polar_truth(q, k, v, s.parameters, window)
            one = slice(b, b + 1)
            for name in PolarOutput._fields:
                want = getattr(truth, name)
                assert error(getattr(polar, name)[one], want) <= 2 * error(getattr(same, name)[one], want) + 2e-6, name
            truth = softmax_truth(q, k, v, 0.12, window)
            assert error(plain[one], truth) <= 2 * error(same_plain[one], truth) + 1e-6

    @pytest.mark.parametrize("window", [None, 33])
    @torch.no_grad()
    def test_half_precision(window):
        """Weights are rounded to the values' type before they multiply them, as in every flash kernel; sums are not."""
        s = Streams((8, 2, 64, 64), [150], 3, page=32, dtype=torch.float16, window=window)
        polar = decode_triton.polar_decode(*s.paged(), s.parameters, window=window)
        assert polar.direction.dtype == polar.magnitude.dtype == torch.float16
        assert polar.n_eff.dtype == polar.null_mass.dtype == torch.float32
        _, q, k, v = next(s.each())
        truth = polar_truth(q, k, v, s.parameters, window)
        for name, allowed in (("direction", 4e-4), ("magnitude", 3e-4), ("n_eff", 2e-5), ("null_mass", 2e-6)):
            assert error(getattr(polar, name), getattr(truth, name)) <= allowed, name
        plain = decode_triton.softmax_decode(*s.paged(), scale=0.12, window=window)
        assert error(plain, softmax_truth(q, k, v, 0.12, window)) <= 4e-4

    @pytest.mark.parametrize("window", [None, 20])
    @torch.no_grad()
    def test_pieces_and_neighbours_do_not_change_a_stream(window):
        s = Streams((4, 2, 16, 16), [77, 200, 3, 0, 2], 3, window=window)
        whole = decode_triton.polar_decode(*s.paged(), s.parameters, window=window, split_keys=10_000)
        whole_plain = decode_triton.softmax_decode(*s.paged(), scale=0.12, window=window, split_keys=10_000)
        for split_keys in (16, 64):
            pieces = decode_triton.polar_decode(*s.paged(), s.parameters, window=window, split_keys=split_keys)
            for got, want in zip(pieces, whole, strict=True):
                torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
            plain = decode_triton.softmax_decode(*s.paged(), scale=0.12, window=window, split_keys=split_keys)
            torch.testing.assert_close(plain, whole_plain, atol=1e-6, rtol=1e-5)
        check_padding(s, whole, whole_plain)
        for b in (0, 2):
            q, keys, values, tables, lengths = s.paged()
            one = (q[b : b + 1], keys, values, tables[b : b + 1], lengths[b : b + 1])
            alone = decode_triton.polar_decode(*one, s.parameters, window=window, split_keys=10_000)
            assert all(torch.equal(x[0], y[b]) for x, y in zip(alone, whole, strict=True))

    @torch.no_grad()
    def test_tokens_together_are_as_tokens_one_by_one():
        s = Streams((4, 2, 16, 16), [150], 5)
        together = decode_triton.polar_decode(*s.paged(), s.parameters)
        q, keys, values, tables, lengths = s.paged()
        for t in range(5):
            earlier = (q[:, :, t : t + 1], keys, values, tables, lengths - 4 + t)
            one = decode_triton.polar_decode(*earlier, s.parameters)
            for got, want in zip(one, together, strict=True):
                torch.testing.assert_close(got[:, :, 0], want[:, :, t], atol=1e-6, rtol=1e-5)

    @torch.no_grad()
    def test_large_scores_stay_finite():
        s = Streams((4, 1, 16, 16), [90], 2)
        s.q, s.keys = s.q * 30, s.keys * 30
        k, v = s.plain[0]
        got = decode_triton.polar_decode(*s.paged(), s.parameters, split_keys=32)
        truth = polar_truth(s.q, k * 30, v, s.parameters, None)
        assert error(got.direction, truth.direction) < 2e-4 and error(got.magnitude, truth.magnitude) < 2e-4

    @torch.no_grad()
    def test_legacy_floor_and_outputs_nobody_asked_for():
        s = Streams((4, 1, 16, 16), [90], 2)
        high = s.parameters._replace(null_base=s.parameters.null_base + 4)
        want = decode.polar_decode(*s.paged(), high, q2_floor=1e-6)
        assert (want.magnitude - decode.polar_decode(*s.paged(), high).magnitude).abs().max() > 1e-3
        got = decode.polar_decode(*s.paged(), high, q2_floor=1e-6, impl="triton", details=False)
        torch.testing.assert_close(got.magnitude, want.magnitude, atol=1e-6, rtol=0)
        torch.testing.assert_close(got.direction, want.direction, atol=2e-6, rtol=0)
        assert got.n_eff.numel() == got.null_mass.numel() == 0
        plain = decode.softmax_decode(*s.paged(), scale=0.12, host_lengths=[90], impl="triton")
        torch.testing.assert_close(plain, decode.softmax_decode(*s.paged(), scale=0.12), atol=1e-6, rtol=1e-5)

    @torch.no_grad()
    def test_a_stream_longer_than_the_host_was_told_is_not_a_number():
        s = Streams((4, 1, 16, 16), [150, 40], 1)
        options = {"host_lengths": [40, 40], "split_keys": 64}
        plain = decode_triton.softmax_decode(*s.paged(), scale=0.12, **options)
        polar = decode_triton.polar_decode(*s.paged(), s.parameters, **options)
        for x in (plain, polar.direction, polar.magnitude):
            assert x[0].isnan().all() and x[1].isfinite().all()

    @needs_golden
    @torch.no_grad()
    def test_golden_numbers():
        check_golden(decode_triton.polar_decode)

    @torch.no_grad()
    def test_page_offsets_pass_32_bits():
        """A page's number and its stride fit 32 bits, their product does not. Memory between is never touched."""
        s = Streams((4, 2, 16, 16), [40], 1, dtype=torch.float16)
        want = decode_triton.polar_decode(*s.paged(), s.parameters)
        stride, far = 2**22, 520
        assert far * stride > 2**31 > stride
        memory = mmap.mmap(-1, 2 * stride * (far + 8), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = torch.frombuffer(memory, dtype=torch.float16)
        apart = []
        for pool, offset in ((s.keys, 0), (s.values, 4096)):
            wide = base.as_strided((far + 8, *pool.shape[1:]), (stride, *pool.stride()[1:]), offset)
            for page in s.tables[0, :3].tolist():
                wide[far + page] = pool[page]
            apart.append(wide)
        got = decode_triton.polar_decode(s.q, *apart, s.tables + far, s.lengths, s.parameters)
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))

    @pytest.mark.parametrize("window", [None, 33])
    @torch.no_grad()
    def test_each_key_is_fetched_once_for_all_that_share_it(monkeypatch, window):
        """Eight heads on two: a quarter of the bytes of the form that expands keys and values, whatever ``T``."""
        moved = {}
        for num_kv_heads, num_queries in ((2, 1), (2, 4), (8, 1)):
            s = Streams((8, num_kv_heads, 16, 16), [150, 47], num_queries, window=window, page=16)
            with monkeypatch.context() as patch:
                traffic = Traffic(patch, s.keys, s.values)
                decode_triton.polar_decode(*s.paged(), s.parameters, window=window, split_keys=64)
            moved[num_kv_heads, num_queries] = traffic.num_bytes()
            bound = decode.key_value_bytes([150, 47], s.keys, s.values, num_queries=num_queries, window=window)
            # the first tile, here of a page, may begin before the window does
            early = 0 if window is None else 2 * 15 * num_kv_heads * (16 + 16) * 4
            assert traffic.once_each()
            assert bound <= traffic.num_bytes() <= bound + early
        assert moved[8, 1] == 4 * moved[2, 1]

    def test_one_long_stream_fills_the_device_and_many_are_left_whole():
        block_n = split_tile(torch.bfloat16, 128, 4, 256, 232_448).block_n
        one = plan_splits([131_072], 2, 132, block_n)
        assert one.num_splits * 2 >= 3 * 132
        many = plan_splits([8192] * 256, 2, 132, block_n)
        assert many.num_splits <= 4
        # the keys that the busiest of 132 multiprocessors takes, if programs go to whoever is free: near the mean
        for batch, length in ((1, 131_072), (3, 100_000), (20, 30_000), (100, 8192), (256, 2048)):
            split = plan_splits([length] * batch, 2, 132, block_n)
            programs = (
                [min(split.split_keys, length - i * split.split_keys) for i in range(split.num_splits)] * 2 * batch
            )
            busy = [0] * 132
            for keys in programs:
                busy[busy.index(min(busy))] += keys
            assert max(busy) <= 1.25 * length * 2 * batch / 132

    def test_pieces_always_reach_the_end():
        draw = random.Random(0)
        for _ in range(500):
            extents = [
                draw.choice((0, 1, 15, 300, 4096, 70_000)) + draw.randrange(64) for _ in range(draw.randint(1, 9))
            ]
            block_n = draw.choice((16, 32, 64, 128))
            split = plan_splits(extents, draw.randint(1, 16), draw.randint(1, 200), block_n)
            assert split.split_keys % block_n == 0 and split.split_keys > 0
            assert split.split_keys * split.num_splits >= max(extents)

    def test_what_the_kernel_does_not_serve():
        s = Streams((4, 2, 16, 16), [40], 1)
        q, keys, values, *rest = s.paged()
        with pytest.raises(UserError, match="float64"):
            decode_triton.softmax_decode(q.double(), keys.double(), values.double(), *rest, scale=1.0)
        with pytest.raises(UserError, match="1 to 16 new tokens, not 17"):
            decode_triton.softmax_decode(q.expand(-1, -1, 17, -1), keys, values, *rest, scale=1.0)
        with pytest.raises(UserError, match="pages of 15 tokens"):
            decode_triton.softmax_decode(q, keys[:, :15], values[:, :15], *rest, scale=1.0)
        wide = keys.new_zeros(5, 16, 2, 272)
        with pytest.raises(UserError, match="width 272"):
            decode_triton.softmax_decode(q.new_zeros(1, 4, 1, 272), wide, wide, *rest, scale=1.0)
        with pytest.raises(ValueError, match="all, and each head in one piece"):
            decode_triton.softmax_decode(q, keys.half(), values, *rest, scale=1.0)
        with pytest.raises(ValueError, match="do not fit"):
            decode_triton.softmax_decode(q[:, :3], keys, values, *rest, scale=1.0)


def check_padding(s, polar, plain):
    """Streams of fewer keys than queries: the queries before their start see nothing."""
    num_queries = s.q.shape[2]
    null = torch.nn.functional.normalize(s.parameters.v_null, dim=-1)
    for b, length in enumerate(s.lengths.tolist()):
        for t in range(max(0, num_queries - length)):
            torch.testing.assert_close(polar.direction[b, :, t], null, atol=1e-6, rtol=1e-6)
            assert polar.magnitude[b, :, t].eq(0).all() and polar.null_mass[b, :, t].eq(1).all()
            assert polar.n_eff[b, :, t].eq(0).all() and plain[b, :, t].eq(0).all()
    assert all(x.isfinite().all() for x in (*polar, plain))


def check_golden(attend):
    """One query, 77 visible of 80 stored keys: the trailing three are NaN here, and behind the window is nothing."""
    notes = json.loads((GOLDEN / "op_polar.json").read_text())
    tensors = load_file(GOLDEN / "op_polar.safetensors")
    for tag in ("decode_n77", "decode_n77_w20"):
        t = {name.removeprefix(f"{tag}."): x for name, x in tensors.items() if name.startswith(f"{tag}.")}
        window, batch = notes[tag]["window"], len(t["q"])
        pools = []
        for x in (t["k"], t["v"]):
            stored = x.transpose(1, 2).contiguous()
            stored[:, 77:] = math.nan
            pools.append(stored.reshape(batch * 5, 16, *stored.shape[2:]))
        tables = torch.arange(batch * 5, dtype=torch.int32).view(batch, 5)
        if window is not None:
            tables[:, : (77 - window) // 16] = -1
        lengths = torch.full((batch,), 77, dtype=torch.int32)
        parameters = PolarParameters(*(t[name] for name in PolarParameters._fields))
        out = attend(t["q"], *pools, tables, lengths, parameters, window=window)
        for got, want in ((out.direction, t["c"]), (out.magnitude, t["mag"]), (out.null_mass, t["w_null"])):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
        torch.testing.assert_close(out.n_eff, t["n_eff"], atol=1e-5, rtol=1e-5)
