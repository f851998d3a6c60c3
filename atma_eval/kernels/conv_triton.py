"""Depthwise causal convolution from a table of states, in place, or over a whole input: the Triton form of `conv`.

A program takes some tokens and channels. Tap by tap it reads the inputs that far back, from the state where they lie
before the first new token; in the short-convolution mixer what it reads is ``b * u``, and the output is multiplied by
``c`` on its way out, so that the three projections are read once and nothing between is stored. For the canon
convolutions the input is added to the output.
"""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atma_eval.errors import UserError
from atma_eval.kernels.aot import Configuration
from atma_eval.kernels.choice import MAX_STEPS
from atma_eval.kernels.common_triton import TYPES, WIDTHS, on_its_device, require_supported

NUM_STAGES = 3
MAX_TAPS = 5
BLOCK_T = MAX_STEPS  # tokens of a program; each reads a few rows again that its neighbour has just fetched


@triton.jit
def _inputs(
    i,
    x,
    b,
    state,
    dims,
    inside,
    num_tokens,
    stride_xt,
    stride_bt,
    channels,
    HAS_STATE: tl.constexpr,
    GATED: tl.constexpr,
    PAST: tl.constexpr,
):
    """Inputs of the convolution at tokens ``i`` of one stream; those before the first come from its state."""
    new = (i >= 0) & (i < num_tokens)
    row = i.to(tl.int64)
    value = tl.load(x + row[:, None] * stride_xt + dims[None, :], mask=new[:, None] & inside[None, :], other=0.0)
    if GATED:
        gate = tl.load(b + row[:, None] * stride_bt + dims[None, :], mask=new[:, None] & inside[None, :], other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(value.dtype)
    if HAS_STATE:
        old = (i < 0)[:, None] & inside[None, :]
        kept = tl.load(state + (i + PAST)[:, None] * channels + dims[None, :], mask=old, other=0.0)
        value = tl.where(old, kept, value)
    return value


@triton.jit(do_not_specialize=["num_tokens"])
def _conv_kernel(
    x,
    b,
    c,
    weight,  # [C, 1, taps]
    states,  # [slots, taps - 1, C]
    slots,
    y,  # [B, T, C]
    states_out,
    stride_xb,
    stride_xt,
    stride_bb,
    stride_bt,
    stride_cb,
    stride_ct,
    num_tokens,
    channels,
    TAPS: tl.constexpr,
    GATED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    HAS_STATE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    PAST: tl.constexpr = TAPS - 1
    stream = tl.program_id(2).to(tl.int64)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    dims = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = dims < channels
    wanted = (t < num_tokens)[:, None] & inside[None, :]
    out = y + (stream * num_tokens + t.to(tl.int64)[:, None]) * channels + dims[None, :]
    slot = stream if slots is None else tl.load(slots + stream)
    if slot < 0:  # padding: no state is its own
        tl.store(out, tl.zeros((BLOCK_T, BLOCK_C), tl.float32), mask=wanted)
        return

    x += stream * stride_xb
    b += stream * stride_bb
    state = states + slot * (PAST * channels)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for j in tl.static_range(TAPS):
        tap = tl.load(weight + dims * TAPS + j, mask=inside, other=0.0).to(tl.float32)
        taken = _inputs(
            t - PAST + j, x, b, state, dims, inside, num_tokens, stride_xt, stride_bt, channels, HAS_STATE, GATED, PAST
        )
        total += taken.to(tl.float32) * tap[None, :]
    if RESIDUAL:
        total += tl.load(x + t.to(tl.int64)[:, None] * stride_xt + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
    if GATED:
        c_rows = c + stream * stride_cb + t.to(tl.int64)[:, None] * stride_ct
        total *= tl.load(c_rows + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
    tl.store(out, total, mask=wanted)

    if tl.program_id(1) == tl.num_programs(1) - 1:
        s = tl.arange(0, BLOCK_S)
        i = num_tokens - PAST + s
        last = _inputs(i, x, b, state, dims, inside, num_tokens, stride_xt, stride_bt, channels, HAS_STATE, GATED, PAST)
        tl.debug_barrier()  # the state may be written in place: every thread must have read it
        place = states_out + slot * (PAST * channels) + s[:, None] * channels + dims[None, :]
        tl.store(place, last, mask=(s < PAST)[:, None] & inside[None, :])


def require_taps(num_taps: int) -> None:
    """Raise a `UserError` if the kernel does not serve filters of this width."""
    if not 2 <= num_taps <= MAX_TAPS:
        raise UserError(f"the convolution kernel takes 2 to {MAX_TAPS} taps, not {num_taps}", "use --impl torch")


@on_its_device
def _launch(
    x: Tensor,
    gates: tuple[Tensor, Tensor] | None,
    weight: Tensor,
    states: Tensor | None,
    slots: Tensor | None,
    states_out: Tensor,
    residual: bool,
) -> Tensor:
    batch, num_tokens, channels = x.shape
    num_taps = weight.shape[-1]
    require_supported(x.dtype, WIDTHS[0], x.device)  # there are no heads here: any width that is served will do
    require_taps(num_taps)
    x = x if x.stride(-1) == 1 else x.contiguous()
    b, c = (g if g.stride(-1) == 1 else g.contiguous() for g in gates) if gates is not None else (x, x)
    y = torch.empty(batch, num_tokens, channels, dtype=x.dtype, device=x.device)
    constants, num_warps = tile(num_taps, num_tokens)
    grid = (triton.cdiv(channels, constants["BLOCK_C"]), triton.cdiv(num_tokens, constants["BLOCK_T"]), batch)
    _conv_kernel[grid](
        x,
        b,
        c,
        weight.contiguous(),
        x if states is None else states,
        None if slots is None else slots.to(torch.int64),
        y,
        states_out,
        *x.stride()[:2],
        *b.stride()[:2],
        *c.stride()[:2],
        num_tokens,
        channels,
        GATED=gates is not None,
        RESIDUAL=residual,
        HAS_STATE=states is not None,
        **constants,
        num_warps=num_warps,
        num_stages=NUM_STAGES,
    )
    return y


def tile(num_taps: int, num_tokens: int) -> tuple[dict[str, int], int]:
    """Constants of `_conv_kernel`, and its warps: whole cache lines of channels, at most eight values to a thread."""
    block_t = min(BLOCK_T, triton.next_power_of_2(num_tokens))
    block_c = min(128, 1024 // block_t)
    block_s = triton.next_power_of_2(num_taps - 1)
    constants = {"TAPS": num_taps, "BLOCK_T": block_t, "BLOCK_C": block_c, "BLOCK_S": block_s}
    return constants, 8 if block_t == BLOCK_T else 4


def conv_step(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    slots: Tensor | None = None,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
    residual: bool = False,
) -> Tensor:
    """Convolve a few new tokens of some streams and shift their states, in place.

    Args:
        x: new inputs ``[B, T, C]``, ``T`` from 1 to 16; any strides but the last.
        weight: filters ``[C, 1, taps]``, 2 to 5 taps.
        table: states ``[slots, taps - 1, C]``, oldest first, contiguous, in the type of ``x``; shifted in place.
        slots: which of them each stream has, int64 ``[B]``, none twice. A negative one is padding: it reads as zeros
            and touches nothing. ``None``: stream ``b`` has slot ``b``.
        gates: ``(b, c)`` of the short-convolution mixer, each ``[B, T, C]``: the output is ``c * conv(b * x)``, and
            the state holds ``b * x``.
        residual: add ``x`` to the output, as the canon convolutions do; not together with gates.

    Returns:
        Outputs ``[B, T, C]`` in the type of ``x``; sums are taken in fp32.
    """
    if not 1 <= x.shape[1] <= MAX_STEPS:
        raise UserError(f"the Triton convolution step takes 1 to {MAX_STEPS} tokens, not {x.shape[1]}")
    if not table.is_contiguous() or table.shape[1:] != (weight.shape[-1] - 1, x.shape[2]) or table.dtype != x.dtype:
        raise ValueError(f"the table must be contiguous [slots, {weight.shape[-1] - 1}, {x.shape[2]}] in {x.dtype}")
    return _launch(x, gates, weight, table, slots, table, residual)


def conv_prefill(
    x: Tensor,
    weight: Tensor,
    state: Tensor | None = None,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
    residual: bool = False,
) -> tuple[Tensor, Tensor]:
    """`conv.causal_conv` in one pass, with the gates or the residual of `conv_step`.

    Returns outputs ``[B, T, C]`` and the new state ``[B, taps - 1, C]``; the given ``state`` is left alone.
    """
    batch, _, channels = x.shape
    after = torch.empty(batch, weight.shape[-1] - 1, channels, dtype=x.dtype, device=x.device)
    before = None if state is None else state.contiguous()
    y = _launch(x, gates, weight, before, None, after, residual)
    return y, after


def configurations() -> list[Configuration]:
    """The short convolution (3 taps, gated) and canon (4 taps, residual), one token and many."""
    listed = []
    for dtype, element in TYPES.items():
        for name, num_taps, gated in (("short", 3, True), ("canon", 4, False)):
            for what, num_tokens, has_state in (("step", 1, True), ("prefill", 64, False), ("chunk", 64, True)):
                constants, num_warps = tile(num_taps, num_tokens)
                strides = [name for name in _conv_kernel.arg_names if name.startswith("stride_")]
                signature: dict[str, str] = dict.fromkeys(
                    ("x", "b", "c", "weight", "states", "y", "states_out"), f"*{element}"
                )
                signature |= dict.fromkeys([*strides, "channels", "num_tokens"], "i32")
                flags = {"slots": None, "GATED": gated, "RESIDUAL": not gated, "HAS_STATE": has_state}
                listed.append(
                    Configuration(
                        name=f"{name} convolution {what} {element}",
                        kernel=_conv_kernel,
                        signature=signature,
                        constants=flags | constants,
                        divisible=tuple(name for name in signature if name != "num_tokens"),
                        num_warps=num_warps,
                        num_stages=NUM_STAGES,
                        spill_free=dtype.itemsize == 2,
                    )
                )
    return listed
