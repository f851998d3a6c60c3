"""Depthwise causal convolution, in any number of pieces (spec: architecture, section 2)."""

from __future__ import annotations

import torch
from torch import Tensor


def causal_conv(x: Tensor, weight: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own short filter over the past.

    ``y[t] = sum_j weight[j] * x[t - (K - 1) + j]``: the last tap meets the current token.

    Args:
        x: new inputs ``[B, T, C]``.
        weight: filters ``[C, 1, K]``.
        state: the last ``K - 1`` inputs before ``x``, oldest first, ``[B, K - 1, C]``;
            ``None`` at the start of a sequence, where the past is zero.

    Returns:
        Outputs ``[B, T, C]`` and the state after ``x``, ``[B, K - 1, C]``.
    """
    num_taps = weight.shape[-1]
    num_new = x.shape[1]
    if state is None:
        state = x.new_zeros(x.shape[0], num_taps - 1, x.shape[2])
    padded = torch.cat([state, x], dim=1)
    taps = weight[:, 0, :]
    # A few shifted multiply-adds beat a grouped conv1d on the CPU, and keep the [B, T, C] layout.
    y = padded[:, :num_new] * taps[:, 0]
    for j in range(1, num_taps):
        y = torch.addcmul(y, padded[:, j : j + num_new], taps[:, j])
    # A copy, so that a state of a few rows does not keep the whole padded input alive.
    return y, padded[:, num_new:].clone()
