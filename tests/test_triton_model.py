"""The whole model through the Triton kernels, by Triton's interpreter: the authors' numbers, pieces, forks, windows."""

from __future__ import annotations

import itertools

import pytest
import torch
from triton_case import INTERPRETING, rerun

if not INTERPRETING:
    test_in_the_interpreter = rerun(__file__)
else:
    from conftest import TINY, golden_case, needs_golden

    from atma_eval.kernels.choice import Choice
    from atma_eval.models.atma import Atma
    from atma_eval.models.config import AtmaConfig
    from atma_eval.session import Session
    from atma_eval.state import PAGE_SIZE

    TRITON = Choice(impl="triton")
    TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}
    CASES = ("polar_nomem", "polar_mem_window", "rope_mem", "rope_window", "nope_mem", "nope_mem_window")

    @needs_golden
    @pytest.mark.parametrize("name", CASES)
    @torch.inference_mode()
    def test_golden_models_in_pieces(name):
        """Many tokens prefill, few decode: a long piece, single tokens, a middling one, and a long one on top."""
        config, _, weights, others = golden_case(name)
        model = Atma(AtmaConfig.from_dict(config), choice=TRITON)
        model.load_state_dict(weights, strict=True)
        model.cast(torch.float32).eval()
        ids = others["input_ids"]
        breaks = [0, 30, 31, 32, 45, min(75, ids.shape[1]), ids.shape[1]]
        state = model.init_state(ids.shape[0])
        pieces = [ids[:, a:z] for a, z in itertools.pairwise(breaks) if z > a]
        logits = model.logits(torch.cat([model(piece, state) for piece in pieces], dim=1))
        torch.testing.assert_close(logits, others["logits"], **TOLERANCE)

    def twins(**changes) -> tuple[Atma, Atma]:
        """The same random model, computed by the kernels and by PyTorch; its memory and gates all at work."""
        config = AtmaConfig.from_dict({**TINY, "num_hidden_layers": 3, "hidden_size": 64, "head_dim": 16, **changes})
        models = [Atma(config, choice=choice).init_weights(0) for choice in (TRITON, Choice())]
        generator = torch.Generator().manual_seed(1)
        for parameter in models[0].parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator) / parameter[0].numel() ** 0.5
        models[1].load_state_dict(models[0].state_dict())
        return models[0].eval(), models[1].eval()

    @pytest.mark.parametrize("attn_type", ["polar", "nope", "none"])
    @pytest.mark.parametrize("window", [None, 150])
    @torch.inference_mode()
    def test_beyond_a_page_and_through_forks(attn_type, window):
        """Short pieces step in place: a fork, and the trunk after it, must not feel each other's steps."""
        if attn_type == "none" and window:
            pytest.skip("memory alone has no window")
        kernels, torch_model = twins(attn_type=attn_type, attn_window=window)
        ids = torch.randint(0, 256, (2, PAGE_SIZE + 40), generator=torch.Generator().manual_seed(0))
        astray = ids.flip(1)
        logits = []
        for model in (kernels, torch_model):
            state = model.init_state(2)
            out = [model(ids[:, :PAGE_SIZE], state)]
            for start, stop in ((0, 3), (3, 4), (4, 20), (20, 40)):
                fork = state.fork()
                out.append(model(astray[:, :3], fork))
                out.append(model(ids[:, PAGE_SIZE + start : PAGE_SIZE + stop], state))
                out.append(model(astray[:, 3:5], fork))
                fork.release()
            logits.append(model.logits(torch.cat(out, dim=1)))
        torch.testing.assert_close(logits[0], logits[1], **TOLERANCE)

    def test_gradients_are_those_of_pytorch():
        """The kernels go forward only: a whole sequence with gradients takes none of them."""
        grads = []
        for model in twins():
            model.logits(model(torch.arange(40)[None])).sum().backward()
            grads.append([parameter.grad for parameter in model.parameters()])
        assert all(grad is not None for grad in grads[0])
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))

    def test_sessions_score_and_generate_alike():
        import numpy as np

        tokens = np.random.default_rng(0).integers(0, 256, 90)
        scores, generated = [], []
        for model in twins():
            session = Session(model, chunk=64)
            session.extend(tokens[:70])
            parts = [session.score(tokens[70:71]), session.score(tokens[71:])]
            scores.append(np.concatenate([part.nll for part in parts]))
            generated.append(session.generate(3))
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-4, atol=1e-4)
        assert np.array_equal(*generated)

    @torch.inference_mode()
    def test_few_wanted_positions_of_many_tokens(monkeypatch):
        """One query over a long new piece is decoded: the kernel that splits the past is made for it."""
        from atma_eval.models import advance

        calls = []
        decode = advance.polar_decode
        monkeypatch.setattr(advance, "polar_decode", lambda q, *a, **k: calls.append(q.shape[2]) or decode(q, *a, **k))
        kernels, torch_model = twins()
        ids = torch.randint(0, 256, (1, 60), generator=torch.Generator().manual_seed(0))
        out = [model.logits(model(ids, model.init_state(1), last=1)) for model in (kernels, torch_model)]
        torch.testing.assert_close(*out, **TOLERANCE)
        assert calls == [1]
