"""The in-place memory step in Triton's interpreter (`triton_case`), and the bridge to flash-linear-attention."""

from __future__ import annotations

import json
import mmap
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import GOLDEN, needs_golden
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from triton_case import INTERPRETING, error, launched_as_listed, needs_triton, poisoned, record_launches, rerun

from atma_eval.errors import UserError
from atma_eval.kernels.delta import gated_delta, gated_delta_reference


def random_memory(num_tokens, heads=(4, 2, 16, 16), batch=2, dtype=torch.float32, seed=0):
    """``q`` of all heads, ``k`` and ``v`` of key/value heads only, and gate logits."""
    num_heads, num_kv_heads, key_width, value_width = heads
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, num_tokens, num_heads, key_width, generator=draw).to(dtype)
    k = torch.randn(batch, num_tokens, num_kv_heads, key_width, generator=draw).to(dtype)
    v = torch.randn(batch, num_tokens, num_kv_heads, value_width, generator=draw).to(dtype)
    gamma = torch.randn(batch, num_tokens, num_heads, generator=draw) + 3
    beta = torch.randn(batch, num_tokens, num_heads, generator=draw)
    return [q, k, v, gamma, beta]


def expanded(q, k, v, gamma, beta):
    group = q.shape[2] // k.shape[2]
    return q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), gamma, beta


if not INTERPRETING:
    test_in_the_interpreter = rerun(__file__)

    @needs_triton
    @pytest.mark.parametrize("num_steps", [1, 16])
    def test_the_kernel_is_launched_as_listed(num_steps, monkeypatch):
        from atma_eval.kernels import delta_triton

        monkeypatch.setattr(delta_triton, "require_supported", lambda *_: None)
        listed = {c.name: c for c in delta_triton.configurations()}
        launches = record_launches(monkeypatch, delta_triton, "_step_kernel")
        for batch in (1, 3):
            inputs = random_memory(num_steps, (8, 2, 128, 128), batch, torch.bfloat16)
            table = torch.zeros(batch, 8, 128, 128)
            delta_triton.gated_delta_step(*inputs, table)
            launched_as_listed(listed["memory step bf16 d128"], *launches.pop())

    @pytest.fixture
    def fake_fla(monkeypatch):
        """A module of that name whose kernel records how it was called and computes what the real one does."""
        calls = []

        def chunk_gated_delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel):
            calls.append(SimpleNamespace(**locals()))
            q, k = (x.float() / (x.float().square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            state = q.new_zeros(*q.shape[::2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
            out = []
            for t in range(q.shape[1]):
                state = g[:, t].exp()[..., None, None] * state
                written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
                state = state + k[:, t, :, :, None] * written[:, :, None]
                out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]).to(v.dtype))
            return torch.stack(out, 1), state

        for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module)
        sys.modules["fla.ops.gated_delta_rule"].chunk_gated_delta_rule = chunk_gated_delta_rule
        return calls

    @needs_triton
    @pytest.mark.parametrize("with_state", [False, True])
    def test_flash_linear_attention_is_asked_for_the_same_thing(fake_fla, with_state):
        from atma_eval.kernels.delta_triton import gated_delta_fla

        inputs = expanded(*random_memory(20, dtype=torch.bfloat16))
        inputs[3][0, 0] = -200.0  # the logarithm of a decay of zero is finite in this form only
        state = torch.randn(2, 4, 16, 16) if with_state else None
        got = gated_delta_fla(*inputs, state)
        want = gated_delta(*inputs, state)
        assert got[0].dtype == got[1].dtype == torch.float32
        torch.testing.assert_close(got[0], want[0], atol=2e-2, rtol=1e-2)  # it comes back in 16 bits
        torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=1e-4)
        (call,) = fake_fla
        assert call.scale == 1 and call.use_qk_l2norm_in_kernel and call.g.isfinite().all()

    @needs_triton
    def test_when_flash_linear_attention_does_not_serve(fake_fla, monkeypatch):
        from atma_eval.kernels.delta_triton import fla_refusal

        cuda = torch.device("cuda")
        assert fla_refusal(torch.bfloat16, 128, cuda) is None
        assert "GPU" in fla_refusal(torch.bfloat16, 128, torch.device("cpu"))
        assert "float32" in fla_refusal(torch.float32, 128, cuda)
        assert "512" in fla_refusal(torch.float16, 512, cuda)
        with monkeypatch.context() as broken:
            broken.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
            assert "cannot be imported" in fla_refusal(torch.bfloat16, 128, cuda)
        for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert "not installed" in fla_refusal(torch.bfloat16, 128, cuda)

else:
    from test_triton_decode import Traffic

    from atma_eval.kernels.delta_triton import gated_delta_step, step_bytes

    pytestmark = pytest.mark.usefixtures(poisoned.__name__)

    @pytest.mark.parametrize(
        ("heads", "num_tokens"),
        [
            ((4, 4, 16, 16), 1),
            ((4, 2, 16, 16), 16),
            ((2, 1, 128, 128), 3),
            ((3, 1, 48, 80), 2),
            ((2, 2, 256, 24), 1),
            ((2, 1, 80, 96), 3),
        ],
        ids=str,
    )
    @torch.no_grad()
    def test_as_exact_as_the_recurrence(heads, num_tokens):
        inputs = random_memory(num_tokens, heads)
        table = torch.randn(5, heads[0], *heads[2:])
        slots = torch.tensor([3, 0])
        whole = expanded(*inputs)
        truth, after = gated_delta_reference(*(x.double() for x in whole), table[slots].double())
        same, same_after = gated_delta_reference(*whole, table[slots])
        readout = gated_delta_step(*inputs, table, slots)
        assert error(readout, truth) <= 2 * error(same, truth) + 1e-6
        assert error(table[slots], after) <= 2 * error(same_after, after) + 1e-6
        again = torch.randn(5, heads[0], *heads[2:])
        again[slots] = same_after
        torch.testing.assert_close(table[slots], again[slots], atol=3e-6, rtol=1e-5)

    @torch.no_grad()
    def test_half_precision_inputs_are_computed_in_single():
        q, k, v, gamma, beta = random_memory(3, (4, 2, 48, 32), dtype=torch.float16)
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))  # any strides but the last
        table, slots = torch.randn(2, 4, 48, 32), torch.tensor([1, 0])
        wide = (x.double() for x in expanded(q, k, v, gamma, beta))
        truth, after = gated_delta_reference(*wide, table[slots].double())
        assert error(gated_delta_step(q, k, v, gamma, beta, table, slots), truth) < 2e-6
        assert error(table[slots], after) < 2e-6

    @torch.no_grad()
    def test_extreme_gates_and_vectors_of_no_length():
        q, k, v, gamma, beta = random_memory(6)
        gamma[0] = torch.tensor([-200.0, 200.0, -200.0, 0.0, 200.0, 200.0])[:, None]
        beta[1] = torch.tensor([200.0, -200.0, 200.0, 0.0, -200.0, -200.0])[:, None]
        k[0, 3], q[1, 2] = 0.0, 0.0
        table = torch.randn(2, 4, 16, 16)
        slots = torch.tensor([0, 1])
        truth, after = gated_delta_reference(*(x.double() for x in expanded(q, k, v, gamma, beta)), table.double())
        assert error(gated_delta_step(q, k, v, gamma, beta, table, slots), truth) < 2e-6
        assert error(table, after) < 2e-6
        gamma.fill_(200.0)  # gamma is exactly 1 ...
        beta.fill_(-200.0)  # ... and nothing is written
        before = table.clone()
        gated_delta_step(q, k, v, gamma, beta, table, slots)
        assert torch.equal(table, before)

    @torch.no_grad()
    def test_padding_touches_no_state():
        """The authors' steps wrote stale rows into live slots (architecture, trap 13b)."""
        inputs = random_memory(2, batch=4)
        for x in inputs:
            x[0], x[2] = torch.nan, torch.nan  # what padding rows hold is anybody's guess
        table = torch.randn(6, 4, 16, 16)
        before = table.clone()
        readout = gated_delta_step(*inputs, table, torch.tensor([-1, 4, -6, 1]))
        assert torch.equal(table[[0, 2, 3, 5]], before[[0, 2, 3, 5]])
        assert readout[[0, 2]].eq(0).all()
        live = [x[[1, 3]] for x in inputs]
        truth, after = gated_delta_reference(*(x.double() for x in expanded(*live)), before[[4, 1]].double())
        assert error(readout[[1, 3]], truth) < 2e-6 and error(table[[4, 1]], after) < 2e-6

    @needs_golden
    @pytest.mark.parametrize(
        "tag", sorted(json.loads((GOLDEN / "op_delta.json").read_text())) if GOLDEN.is_dir() else []
    )
    @torch.no_grad()
    def test_golden_numbers(tag):
        """Token by token, or sixteen at a time."""
        tensors = load_file(GOLDEN / "op_delta.safetensors")
        t = {name.removeprefix(f"{tag}."): x for name, x in tensors.items() if name.startswith(f"{tag}.")}
        inputs = [t[name].transpose(1, 2) for name in ("q", "k", "v", "gamma_logit", "beta_logit")]
        batch, num_tokens, num_heads, width = inputs[0].shape
        table = torch.full((batch + 1, num_heads, width, width), torch.nan)
        table[:batch] = t["state_initial"].mT if "state_initial" in t else 0.0
        slots = torch.arange(batch)
        step = 1 if num_tokens < 66 else 16
        readout = [
            gated_delta_step(*(x[:, i : i + step] for x in inputs), table, slots) for i in range(0, num_tokens, step)
        ]
        torch.testing.assert_close(torch.cat(readout, 1).transpose(1, 2), t["readout"], atol=2e-5, rtol=0)
        torch.testing.assert_close(table[:batch].mT, t["state_final"], atol=2e-5, rtol=0)

    @torch.no_grad()
    def test_slot_offsets_pass_32_bits():
        inputs = random_memory(1, (2, 1, 16, 16), batch=1)
        near, size = torch.randn(1, 2, 16, 16), 2 * 16 * 16
        slot = 2**31 // size + 1
        memory = mmap.mmap(-1, 4 * size * (slot + 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # never touched
        table = torch.frombuffer(memory, dtype=torch.float32).view(slot + 1, 2, 16, 16)
        table[slot] = near[0]
        far = gated_delta_step(*inputs, table, torch.tensor([slot]))
        assert torch.equal(far, gated_delta_step(*inputs, near))  # its slot is its place
        assert torch.equal(table[slot], near[0])

    class Copied(TorchDispatchMode):
        """Bytes that gathering from a table and scattering to it move: each is read once and written once."""

        def __init__(self):
            super().__init__()
            self.num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.index.Tensor:
                self.num_bytes += 2 * out.nbytes
            elif func is torch.ops.aten.index_put_.default:
                self.num_bytes += 2 * args[2].nbytes
            return out

    @torch.no_grad()
    def test_a_step_moves_a_third_of_what_gather_step_scatter_does(monkeypatch):
        inputs = random_memory(2, (4, 2, 16, 48))
        table = torch.randn(5, 4, 16, 48)
        slots = torch.tensor([3, 1])
        with monkeypatch.context() as patch:
            in_place = Traffic(patch, table)
            gated_delta_step(*inputs, table, slots)
        assert in_place.once_each()
        assert in_place.num_bytes() == step_bytes(2, table) == 2 * 2 * 4 * 16 * 48 * 4

        with Copied() as copied:
            gathered = table[slots]
        with monkeypatch.context() as patch:
            stepped = Traffic(patch, gathered)
            gated_delta_step(*inputs, gathered)
        with copied:
            table[slots] = gathered
        assert copied.num_bytes + stepped.num_bytes() == 3 * in_place.num_bytes()

    def test_what_the_kernel_does_not_serve():
        inputs = random_memory(17)
        table, slots = torch.zeros(2, 4, 16, 16), torch.tensor([0, 1])
        with pytest.raises(UserError, match="1 to 16 steps, not 17"):
            gated_delta_step(*inputs, table, slots)
        one = [x[:, :1] for x in inputs]
        with pytest.raises(UserError, match="float64"):
            gated_delta_step(*(x.double() for x in one), table, slots)
        with pytest.raises(UserError, match="width 272"):
            gated_delta_step(*one, torch.zeros(2, 4, 272, 16), slots)
        for wrong in (table.double(), table.mT, torch.zeros(2, 3, 16, 16)):
            with pytest.raises(ValueError, match="the table must be"):
                gated_delta_step(*one, wrong, slots)
