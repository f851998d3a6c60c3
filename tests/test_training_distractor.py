"""The distractor losses against the golden vectors, and what they must leave alone."""

from __future__ import annotations

import pytest
import torch
from conftest import GOLDEN, needs_golden, tiny_model
from safetensors.torch import load_file

from atma_eval.kernels.distractor import polar_distractor, softmax_distractor
from atma_eval.kernels.polar import PolarParameters
from atma_eval.kernels.softmax import softmax_reference, softmax_training
from atma_eval.models.atma import GlobalMixer


def golden(prefix):
    tensors = load_file(GOLDEN / "op_misc.safetensors")
    return {name.removeprefix(prefix + "."): t for name, t in tensors.items() if name.startswith(prefix + ".")}


@needs_golden
def test_the_mass_of_polar_attention_on_random_keys():
    case = golden("distractor_polar")
    parameters = PolarParameters(*(case[name] for name in PolarParameters._fields))
    loss = polar_distractor(case["q"], case["k_rand"].transpose(1, 2), parameters, case["n_keys"])
    torch.testing.assert_close(loss, case["loss"][0], atol=1e-6, rtol=1e-5)


@needs_golden
def test_the_change_of_softmax_attention_by_random_keys():
    case = golden("distractor_softmax")
    k, v, k_rand, v_rand = (case[name].transpose(1, 2) for name in ("k", "v", "k_rand", "v_rand"))
    scale = case["q"].shape[-1] ** -0.5
    mixed = softmax_reference(case["q"], k, v, scale=scale)
    loss = softmax_distractor(case["q"], k, v, k_rand, v_rand, mixed, scale=scale)
    torch.testing.assert_close(loss, case["loss"][0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 256])
def test_row_blocks_do_not_change_the_gradient(rows, monkeypatch):
    monkeypatch.setattr("atma_eval.kernels.distractor.ROWS", rows)
    generator = torch.Generator().manual_seed(1)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    keys, num_keys = random(2, 6, 1, 4), torch.arange(1, 8)
    inputs = [random(2, 4, 7, 4), random(4, 4), *(random(4) for _ in range(4))]

    def loss(q, *parameters):
        return polar_distractor(q, keys, PolarParameters(*parameters), num_keys)

    assert torch.autograd.gradcheck(loss, [t.requires_grad_() for t in inputs])


@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
def test_the_loss_is_of_training_passes_alone(core):
    model = tiny_model(attn_type=core, attn_window=9)
    tokens = torch.arange(24)[None] % 7
    (mixer,) = (m for m in model.modules() if isinstance(m, GlobalMixer))
    with torch.no_grad():
        before = model(tokens)
    mixer.random_inputs = torch.randn(1, 16, 32)
    with torch.no_grad():
        assert torch.equal(model(tokens), before)
        assert torch.equal(model(tokens, model.init_state(1)), before)
    assert mixer.distractor_loss is None
    hidden = model(tokens)
    torch.testing.assert_close(hidden, before, atol=1e-5, rtol=1e-5)
    mixer.distractor_loss.backward()
    assert mixer.q.weight.grad.abs().sum() > 0
    assert (mixer.k.weight.grad is None) == (core == "polar")  # real keys pass gradients, random ones never
    learnt = [mixer.len_gain_raw, mixer.null_base, mixer.null_slope_raw] if core == "polar" else []
    assert all(p.grad.abs().sum() > 0 for p in learnt)


@pytest.mark.parametrize("window", [None, 3, 300])
def test_the_training_path_of_softmax_attention(window):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 8, 9, 4), (2, 9, 2, 4), (2, 9, 2, 4)
    q, k, v = (torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes)
    truth = softmax_reference(q, k, v, scale=0.3, window=window)
    ours = softmax_training(q, k, v, scale=0.3, window=window)
    torch.testing.assert_close(ours, truth, atol=1e-12, rtol=1e-12)
    wanted = torch.autograd.grad(truth.square().sum(), (q, k, v))
    for a, b in zip(torch.autograd.grad(ours.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)
