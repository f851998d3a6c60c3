"""The delta rule with RMS-normed keys diverges; with unit keys its state stays as large as it was."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from atma_eval.kernels.delta import gated_delta
from atma_eval.training import stability

LONG = tuple(length for length in stability.LENGTHS if length >= 256)


@pytest.fixture(scope="module")
def curves():
    return stability.curves()


def test_rms_normed_keys_diverge(curves):
    norms = curves["RMS-normed keys"]
    assert all(a < b for a, b in pairwise(norms) if np.isfinite(a))
    assert not any(norms[stability.LENGTHS.index(256) :] < stability.FP32_MAX)


@pytest.mark.parametrize("name", ["L2-normed keys", "L2-normed keys, no forgetting"])
def test_unit_keys_keep_the_state_norm_flat(curves, name):
    norms = curves[name][-len(LONG) :]
    assert norms.max() < 1.5 * norms.min()
    assert norms.max() < 3 * curves[name][4]


def test_the_memory_of_the_models_is_the_rule_with_unit_keys(curves):
    tokens = stability.random_tokens(LONG[-1])
    keys, values, gamma_logit, beta_logit = (torch.from_numpy(x).float()[None] for x in tokens)
    state, done, norms = None, 0, []
    for length in LONG:
        part = slice(done, length)
        inputs = (keys[:, part], keys[:, part], values[:, part], gamma_logit[:, part], beta_logit[:, part])
        _, state = gated_delta(*inputs, state)
        norms.append(state.norm(dim=(2, 3)).mean().item())
        done = length
    assert norms == pytest.approx(curves["L2-normed keys"][-len(LONG) :], rel=1e-4)


def test_the_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(stability, "curves", lambda: {name: np.arange(1.0, 16.0) for name in "abc"})
    monkeypatch.setattr(sys, "argv", ["stability", "--out", str(tmp_path / "docs" / "keys.png")])
    stability.main()
    assert 5_000 < (tmp_path / "docs" / "keys.png").stat().st_size < 60_000
