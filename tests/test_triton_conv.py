"""Causal convolutions in Triton's interpreter (`triton_case`): steps in place, whole inputs, gates and residual."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from conftest import GOLDEN, needs_golden
from safetensors.torch import load_file
from triton_case import INTERPRETING, error, launched_as_listed, needs_triton, poisoned, record_launches, rerun

from atma_eval.errors import UserError
from atma_eval.kernels.conv import causal_conv

CHANNELS = 150  # more than one block, and no multiple of one
FORMS = ["plain", "gated", "residual"]

if not INTERPRETING:
    test_in_the_interpreter = rerun(__file__)

    @needs_triton
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_the_kernel_is_launched_as_listed(dtype, monkeypatch):
        from atma_eval.kernels import conv_triton

        monkeypatch.setattr(conv_triton, "require_supported", lambda *_: None)
        listed = {c.name: c for c in conv_triton.configurations()}
        launches = record_launches(monkeypatch, conv_triton, "_conv_kernel")
        for batch, channels in ((1, 64), (3, 1024)):
            for name, taps, gated in (("short", 3, True), ("canon", 4, False)):
                for what, num_tokens in (("step", 1), ("prefill", 64), ("prefill", 2048), ("chunk", 100)):
                    b, c, u = torch.zeros(batch, num_tokens, 3 * channels, dtype=dtype).chunk(3, -1)
                    weight = torch.zeros(channels, 1, taps, dtype=dtype)
                    state = torch.zeros(batch, taps - 1, channels, dtype=dtype)
                    options = {"gates": (b, c)} if gated else {"residual": True}
                    if what == "step":
                        conv_triton.conv_step(u, weight, state, **options)
                    else:
                        conv_triton.conv_prefill(u, weight, state if what == "chunk" else None, **options)
                    launched_as_listed(listed[f"{name} convolution {what} {conv_triton.TYPES[dtype]}"], *launches.pop())

else:
    from test_triton_decode import Traffic

    from atma_eval.kernels.conv_triton import conv_prefill, conv_step

    pytestmark = pytest.mark.usefixtures(poisoned.__name__)

    def case(form, taps, num_tokens, batch=2, dtype=torch.float32):
        """Input, filters, and the options of a form; the three projections lie side by side, as they come."""
        b, c, u = torch.randn(batch, num_tokens, 3 * CHANNELS).to(dtype).chunk(3, -1)
        weight = torch.randn(CHANNELS, 1, taps).to(dtype)
        return u, weight, {"plain": {}, "gated": {"gates": (b, c)}, "residual": {"residual": True}}[form]

    def want(x, weight, options, state=None):
        """The same by the PyTorch form, with every product between rounded to the type."""
        b, c = options.get("gates", (None, None))
        y, after = causal_conv(x if b is None else b * x, weight, state)
        y = y if c is None else c * y
        return y + x if options.get("residual") else y, after

    def cast(options, dtype):
        return {name: tuple(x.to(dtype) for x in v) if name == "gates" else v for name, v in options.items()}

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize(("taps", "num_tokens"), [(3, 1), (3, 3), (3, 16), (4, 1), (4, 2), (4, 16), (2, 1), (5, 3)])
    def test_step(form, taps, num_tokens):
        x, weight, options = case(form, taps, num_tokens)
        table = torch.randn(4, taps - 1, CHANNELS)
        before, slots = table.clone(), torch.tensor([2, 0])
        truth, after = want(x.double(), weight.double(), cast(options, torch.float64), before[slots].double())
        assert error(conv_step(x, weight, table, slots, **options), truth) < 4e-6
        if form == "gated":
            torch.testing.assert_close(table[slots].double(), after, atol=1e-6, rtol=1e-6)
        else:
            assert torch.equal(table[slots].double(), after)
        assert torch.equal(table[[1, 3]], before[[1, 3]])

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("with_state", [False, True])
    @pytest.mark.parametrize("num_tokens", [2, 37])
    def test_prefill(form, with_state, num_tokens):
        for taps in (3, 4):
            x, weight, options = case(form, taps, num_tokens)
            state = torch.randn(2, taps - 1, CHANNELS) if with_state else None
            before = None if state is None else state.clone()
            y, after = conv_prefill(x, weight, state, **options)
            wide = None if state is None else state.double()
            truth, truth_after = want(x.double(), weight.double(), cast(options, torch.float64), wide)
            assert error(y, truth) < 4e-6 and error(after, truth_after) < 1e-6
            assert state is None or torch.equal(state, before)

    @pytest.mark.parametrize("form", FORMS)
    def test_half_precision(form):
        """No worse than the PyTorch form, which rounds every product between."""
        x, weight, options = case(form, 3, 40, dtype=torch.float16)
        truth, _ = want(x.double(), weight.double(), cast(options, torch.float64))
        same, same_after = want(x, weight, options)
        y, after = conv_prefill(x, weight, **options)
        assert y.dtype == torch.float16 and torch.equal(after, same_after)
        assert error(y, truth) <= error(same, truth) + 1e-4

    @pytest.mark.parametrize("form", FORMS)
    def test_in_any_pieces(form):
        x, weight, options = case(form, 4, 40)
        whole, end = conv_prefill(x, weight, **options)
        table, slots = torch.zeros(2, 3, CHANNELS), torch.tensor([0, 1])
        pieces = []
        for a, z in pairwise((0, 1, 3, 19, 20, 36, 40)):
            part = {name: tuple(g[:, a:z] for g in v) if name == "gates" else v for name, v in options.items()}
            pieces.append(conv_step(x[:, a:z], weight, table, slots, **part))
        assert torch.equal(torch.cat(pieces, 1), whole) and torch.equal(table, end)

    @pytest.mark.parametrize("form", FORMS)
    def test_padding_touches_no_state(form):
        x, weight, options = case(form, 3, 2, batch=3)
        for tensor in (x, *options.get("gates", ())):
            tensor[1] = torch.nan
        table = torch.randn(4, 2, CHANNELS)
        before = table.clone()
        y = conv_step(x, weight, table, torch.tensor([3, -2, 1]), **options)
        assert y[1].eq(0).all() and torch.equal(table[[0, 2]], before[[0, 2]])
        live = {name: tuple(g[[0, 2]] for g in v) if name == "gates" else v for name, v in options.items()}
        truth, after = want(x[[0, 2]], weight, live, before[[3, 1]])
        torch.testing.assert_close(y[[0, 2]], truth, atol=2e-6, rtol=2e-6)
        assert torch.equal(table[[3, 1]], after)

    def test_a_step_moves_the_state_once(monkeypatch):
        x, weight, options = case("residual", 4, 1)
        table = torch.randn(3, 3, CHANNELS)
        traffic = Traffic(monkeypatch, table)
        conv_step(x, weight, table, torch.tensor([2, 0]), **options)
        assert len(set(traffic.loaded)) == len(set(traffic.stored)) == len(traffic.stored) == 2 * 3 * CHANNELS

    @needs_golden
    @pytest.mark.parametrize("taps", [3, 4])
    def test_golden_numbers(taps):
        t = load_file(GOLDEN / "op_misc.safetensors")
        for num_tokens in (1, 2, 3, 37):
            x, weight, y, final = (t[f"conv.k{taps}.t{num_tokens}.{n}"] for n in ("x", "weight", "y", "final_state"))
            got, after = conv_prefill(x.mT.contiguous(), weight)
            torch.testing.assert_close(got.mT, y, atol=1e-6, rtol=1e-6)
            assert torch.equal(after.mT, final)
        x, weight, y, before, after = (t[f"convstep.k{taps}.{n}"] for n in ("x", "weight", "y", "state", "state_new"))
        x = x[:, None] if x.dim() == 2 else x.mT
        table = before.mT.contiguous()
        got = conv_step(x, weight, table)  # a stream's slot is its place
        torch.testing.assert_close(got.flatten(), y.flatten(), atol=1e-6, rtol=1e-6)
        assert torch.equal(table.mT, after)

    def test_what_the_kernel_does_not_serve():
        x, weight, _ = case("plain", 3, 17)
        table, slots = torch.zeros(2, 2, CHANNELS), torch.tensor([0, 1])
        with pytest.raises(UserError, match="1 to 16 tokens, not 17"):
            conv_step(x, weight, table, slots)
        with pytest.raises(UserError, match="2 to 5 taps, not 6"):
            conv_prefill(x, torch.zeros(CHANNELS, 1, 6))
        with pytest.raises(UserError, match="float64"):
            conv_prefill(x.double(), weight.double())
        for wrong in (table.double(), table[:, :1], table.mT.contiguous().mT):
            with pytest.raises(ValueError, match="the table must be"):
                conv_step(x[:, :1], weight, wrong, slots)
