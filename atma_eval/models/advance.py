"""New tokens of a block over its state: which kernel serves, and how the state moves on.

Where the Triton kernels are chosen, a few tokens go to those that step in place (attention reads its pages where they
lie and shares the past out among programs), many to those that prefill. Both give the same numbers, to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from atma_eval.kernels.choice import MAX_STEPS, Choice, Impl
from atma_eval.kernels.decode import MAX_QUERIES, polar_decode, softmax_decode
from atma_eval.kernels.delta import gated_delta
from atma_eval.kernels.polar import PolarParameters, polar_attention
from atma_eval.kernels.softmax import softmax_attention
from atma_eval.state import ConvState, KVState, MemoryState


class Core(NamedTuple):
    """The attention of a global block.

    Attributes:
        polar: parameters of polar attention; ``None`` is softmax.
        scale: of softmax scores.
        window: keys a query may see, itself included; ``None`` for all.
        q2_floor: legacy floor of polar attention's participation ratio; ``None`` is exact.
    """

    polar: PolarParameters | None
    scale: float
    window: int | None
    q2_floor: float | None


Mixed = tuple[Tensor, Tensor | None]
"""Mixed values ``[B, H, T, V]`` (directions, for polar) and the magnitude ``[B, H, T]``, if there is one."""


def attend(core: Core, q: Tensor, k: Tensor, v: Tensor, kv: KVState | None, *, offset: int, impl: Impl) -> Mixed:
    """New tokens over their past and themselves; afterwards ``kv`` holds them too.

    Args:
        core: which attention.
        q: queries of the last ``T`` new tokens, ``[B, H, T, K]``.
        k, v: keys and values of all new tokens, ``[B, T', G, K]``.
        kv: the past; ``None`` where the new tokens are all there is.
        offset: absolute position of the first new token.
        impl: ``torch`` or ``triton``.
    """
    if impl == "triton" and kv is not None and q.shape[2] <= MAX_QUERIES:
        kv.append(k, v, pending=q.shape[2])
        return _decode(core, q, kv)
    out = (_prefill_triton if impl == "triton" else _prefill)(core, q, k, v, kv, offset)
    if kv is not None:
        kv.append(k, v)
    return out


def _prefill(core: Core, q: Tensor, k: Tensor, v: Tensor, kv: KVState | None, offset: int) -> Mixed:
    past = kv.runs() if kv is not None and offset else ()
    if core.polar is None:
        return softmax_attention(q, k, v, scale=core.scale, past=past, offset=offset, window=core.window), None
    placed: dict = {"past": past, "offset": offset, "window": core.window}
    out = polar_attention(q, k, v, core.polar, q2_floor=core.q2_floor, **placed)
    return out.direction, out.magnitude


def _prefill_triton(core: Core, q: Tensor, k: Tensor, v: Tensor, kv: KVState | None, offset: int) -> Mixed:
    from atma_eval.kernels.polar_triton import PagedPast, polar_prefill, softmax_prefill

    past = None
    if kv is not None and offset:
        past = PagedPast(kv.pool.keys, kv.pool.values, kv.table(), offset, kv.first_kept)
    if core.polar is None:
        return softmax_prefill(q, k, v, scale=core.scale, past=past, offset=offset, window=core.window), None
    placed: dict = {"past": past, "offset": offset, "window": core.window}
    out = polar_prefill(q, k, v, core.polar, q2_floor=core.q2_floor, **placed)
    return out.direction, out.magnitude


def _decode(core: Core, q: Tensor, kv: KVState) -> Mixed:
    """The last tokens of what ``kv`` holds already."""
    pages = (kv.pool.keys, kv.pool.values, kv.table(), kv.lengths())
    placed: dict = {"window": core.window, "host_lengths": [kv.length] * len(kv.tables), "impl": "triton"}
    if core.polar is None:
        return softmax_decode(q, *pages, scale=core.scale, **placed), None
    out = polar_decode(q, *pages, core.polar, q2_floor=core.q2_floor, details=False, **placed)
    return out.direction, out.magnitude


def advance_conv(
    x: Tensor,
    weight: Tensor,
    states: dict[str, ConvState] | None,
    name: str,
    *,
    gates: tuple[Tensor, Tensor] | None = None,
    residual: bool = False,
) -> Tensor:
    """A convolution with its gates or its residual in one kernel (`conv_triton.conv_step` has the arguments).

    Advances the state called ``name``; without ``states`` the tokens are a whole sequence.
    """
    from atma_eval.kernels.conv_triton import conv_prefill, conv_step

    if states is None:
        return conv_prefill(x, weight, gates=gates, residual=residual)[0]
    inputs = states[name].own() if x.shape[1] <= MAX_STEPS else states[name].inputs
    if inputs is not None and x.shape[1] <= MAX_STEPS:
        return conv_step(x, weight, inputs, gates=gates, residual=residual)
    y, inputs = conv_prefill(x, weight, inputs, gates=gates, residual=residual)
    states[name] = ConvState(inputs)
    return y


def advance_memory(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gamma_logit: Tensor,
    beta_logit: Tensor,
    memory: MemoryState | None,
    *,
    chunk: int,
    choice: Choice,
) -> Tensor:
    """Advance the memory over new tokens and read it at each: ``[B, T, H, V]`` in fp32.

    Args:
        q: ``[B, T, H, K]``.
        k, v: ``[B, T, G, K]`` and ``[B, T, G, V]``; each serves ``H / G`` heads.
        gamma_logit, beta_logit: ``[B, T, H]``, constants of the config included.
        memory: advanced; ``None`` starts from zero and keeps nothing.
        chunk: of `delta.gated_delta`.
        choice: which code computes it.
    """
    before = memory.matrix if memory is not None else None
    if choice.impl == "triton" and before is not None and q.shape[1] <= MAX_STEPS:
        from atma_eval.kernels.delta_triton import gated_delta_step

        assert memory is not None
        table = memory.own()
        assert table is not None
        return gated_delta_step(q, k, v, gamma_logit, beta_logit, table)
    group = q.shape[2] // k.shape[2]
    inputs = (q, k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2), gamma_logit, beta_logit)
    if choice.memory_prefill == "fla":
        from atma_eval.kernels.delta_triton import gated_delta_fla

        readout, after = gated_delta_fla(*inputs, before)
    else:
        readout, after = gated_delta(*inputs, before, chunk=chunk)
    if memory is not None:
        memory.matrix, memory.shared = after, False
    return readout
