"""The authors' own numbers: model cases whole, in pieces and through forks, and the operations alone."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, golden_case, needs_golden
from safetensors.torch import load_file

from atma_eval.kernels.conv import causal_conv
from atma_eval.kernels.delta import gated_delta, gated_delta_reference
from atma_eval.kernels.polar import PolarParameters, polar_attention, polar_reference
from atma_eval.models.atma import MLP, Atma, Rotary, softcap, unweighted_norm
from atma_eval.models.config import AtmaConfig

pytestmark = needs_golden
CASES = sorted(p.stem for p in GOLDEN.glob("*.safetensors") if not p.stem.startswith("op_"))
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


def build(name: str, dtype: torch.dtype = torch.float32):
    config, case, weights, others = golden_case(name)
    model = Atma(AtmaConfig.from_dict(config))
    model.load_state_dict(weights, strict=True)
    return model.cast(dtype).eval(), case, others


def in_chunks(model: Atma, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    state = model.init_state(ids.shape[0])
    hidden = [model(ids[:, i : i + chunk], state) for i in range(0, ids.shape[1], chunk)]
    return model.logits(torch.cat(hidden, dim=1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
@torch.no_grad()
def test_model_in_chunks(name, chunk):
    model, _, others = build(name)
    logits = in_chunks(model, others["input_ids"], chunk)
    torch.testing.assert_close(logits, others["logits"], **TOLERANCE)
    loss = F.cross_entropy(logits.flatten(0, 1), others["targets"].flatten(), reduction="sum")
    torch.testing.assert_close(loss, others["loss_sum"][0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_model_differentiable_path_and_hidden_states(name):
    model, _, others = build(name)
    seen: dict[str, torch.Tensor] = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _m, _a, out, i=i: seen.update({f"hidden.{i}": out}))
    logits = model.logits(model(others["input_ids"]))
    torch.testing.assert_close(logits, others["logits"], **TOLERANCE)
    for key in (k for k in others if k.startswith("hidden.")):
        torch.testing.assert_close(seen[key], others[key], atol=1e-4, rtol=1e-4)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_model_through_forks(name):
    """A fork at every 13th token, led astray before the trunk goes on, must not disturb the trunk, nor it the fork."""
    model, _, others = build(name)
    ids, expected = others["input_ids"], others["logits"]
    state = model.init_state(ids.shape[0])
    for start in range(0, ids.shape[1], 13):
        astray, twin = state.fork(), state.fork()
        model(ids.flip(1)[:, :29], astray)
        logits = model.logits(model(ids[:, start : start + 13], state))
        again = model.logits(model(ids[:, start : start + 13], twin))
        torch.testing.assert_close(logits, expected[:, start : start + 13], **TOLERANCE)
        assert torch.equal(logits, again)
        astray.release()
        twin.release()


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_only_the_last_positions(name):
    """Leaving out work that nobody asked for changes neither the wanted outputs nor the state."""
    model, _, others = build(name)
    ids, expected = others["input_ids"], others["logits"]
    state = model.init_state(ids.shape[0])
    for start in range(0, ids.shape[1], 24):
        hidden = model(ids[:, start : start + 24], state, last=2)
        wanted = expected[:, start : start + 24][:, -2:]
        torch.testing.assert_close(model.logits(hidden), wanted, **TOLERANCE)


@torch.no_grad()
def test_double_precision():
    model, _, others = build("polar_nomem_f64", torch.float64)
    seen = {}
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _m, _a, out, i=i: seen.update({f"hidden64.{i}": out}))
    final = model.norm(model(others["input_ids"]))
    for key in (k for k in others if k.startswith("hidden64.")):
        torch.testing.assert_close(seen[key], others[key].double(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(final, others["final_norm64"].double(), atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_bf16_path():
    model, _, others = build("polar_mem_bf16path", torch.bfloat16)
    error = (in_chunks(model, others["input_ids"], 10_000) - others["logits_bf16path"]).abs()
    assert error.mean() < 0.03 and error.max() < 0.3


def polar_case(tag):
    t = {
        k.removeprefix(f"{tag}."): v
        for k, v in load_file(GOLDEN / "op_polar.safetensors").items()
        if k.startswith(f"{tag}.")
    }
    notes = json.loads((GOLDEN / "op_polar.json").read_text())[tag]
    parameters = PolarParameters(*(t[name] for name in PolarParameters._fields))
    num_visible = int(t["n_keys"].max()) if notes["window"] is None else None
    if tag.startswith(("decode", "offset")):
        num_visible = {"decode_n77": 77, "decode_n77_w20": 77}.get(tag, t["k"].shape[2])
    stored = slice(0, num_visible)  # keys beyond the last visible one are not handed to a causal kernel
    k, v = t["k"][:, :, stored].transpose(1, 2), t["v"][:, :, stored].transpose(1, 2)
    return t, parameters, k, v, notes["window"]


POLAR_TAGS = sorted(json.loads((GOLDEN / "op_polar.json").read_text())) if GOLDEN.is_dir() else []


@pytest.mark.parametrize("tag", POLAR_TAGS)
@pytest.mark.parametrize("form", ["reference", "tiled", "paged"])
def test_polar_operation(tag, form):
    t, parameters, k, v, window = polar_case(tag)
    if form == "reference":
        out = polar_reference(t["q"], k, v, parameters, window=window)
    elif form == "tiled":
        out = polar_attention(t["q"], k, v, parameters, window=window)
    else:
        cut = k.shape[1] - t["q"].shape[2]  # everything before the queries comes as two runs of a past
        half = cut // 2
        past = [[(k[b, a:z], v[b, a:z]) for a, z in ((0, half), (half, cut)) if z > a] for b in range(len(k))]
        out = polar_attention(t["q"], k[:, cut:], v[:, cut:], parameters, past=past, offset=cut, window=window)
    expected = t["mag_exact"] if "mag_exact" in t else t["mag"]
    for got, want in ((out.direction, t["c"]), (out.magnitude, expected), (out.null_mass, t["w_null"])):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    torch.testing.assert_close(out.n_eff, t["n_eff"], atol=1e-5, rtol=1e-5)


def test_polar_legacy_floor():
    t, parameters, k, v, window = polar_case("nulldom_t40")
    for attend in (polar_reference, polar_attention):
        out = attend(t["q"], k, v, parameters, window=window, q2_floor=1e-6)
        torch.testing.assert_close(out.magnitude, t["mag_floor1e-6"], atol=1e-6, rtol=0)


DELTA_TAGS = sorted(json.loads((GOLDEN / "op_delta.json").read_text())) if GOLDEN.is_dir() else []


@pytest.mark.parametrize("tag", DELTA_TAGS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 200, None])
def test_delta_operation(tag, chunk):
    t = {
        k.removeprefix(f"{tag}."): v
        for k, v in load_file(GOLDEN / "op_delta.safetensors").items()
        if k.startswith(f"{tag}.")
    }
    inputs = [t[name].transpose(1, 2) for name in ("q", "k", "v", "gamma_logit", "beta_logit")]
    state = t["state_initial"].mT if "state_initial" in t else None
    if chunk is None:
        readout, state = gated_delta_reference(*inputs, state)
    else:
        readout, state = gated_delta(*inputs, state, chunk=chunk)
    torch.testing.assert_close(readout.transpose(1, 2), t["readout"], atol=2e-5, rtol=0)
    torch.testing.assert_close(state.mT, t["state_final"], atol=2e-5, rtol=0)


MISC = load_file(GOLDEN / "op_misc.safetensors") if GOLDEN.is_dir() else {}


@pytest.mark.parametrize("taps", [3, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 37])
def test_convolution(taps, length):
    t = {name: MISC[f"conv.k{taps}.t{length}.{name}"] for name in ("x", "weight", "y", "final_state")}
    y, state = causal_conv(t["x"].mT, t["weight"])
    torch.testing.assert_close(y.mT, t["y"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(state.mT, t["final_state"], atol=0, rtol=0)


@pytest.mark.parametrize("taps", [3, 4])
def test_convolution_step(taps):
    t = {name: MISC[f"convstep.k{taps}.{name}"] for name in ("state", "weight", "x", "y", "state_new")}
    x = t["x"][:, None] if t["x"].dim() == 2 else t["x"].mT
    y, state = causal_conv(x, t["weight"], t["state"].mT)
    torch.testing.assert_close(y.flatten(), t["y"].flatten(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(state.mT, t["state_new"], atol=0, rtol=0)


@pytest.mark.parametrize("width", [8, 16, 128])
def test_rotary(width):
    rotary = Rotary(width)
    torch.testing.assert_close(rotary.angular_freq, MISC[f"rope.d{width}.angular_freq"], atol=1e-7, rtol=1e-6)
    x = MISC[f"rope.d{width}.x"]
    torch.testing.assert_close(rotary(x, 0), MISC[f"rope.d{width}.y"], atol=2e-6, rtol=1e-6)
    torch.testing.assert_close(rotary(x[:, 3:], 3), MISC[f"rope.d{width}.y"][:, 3:], atol=2e-6, rtol=1e-6)


def test_small_operations():
    torch.testing.assert_close(unweighted_norm(MISC["rms.x"]), MISC["rms.y_noweight_default_eps"], atol=1e-6, rtol=1e-6)
    weighted = F.rms_norm(MISC["rms.x"], MISC["rms.weight"].shape, MISC["rms.weight"], 1e-6)
    torch.testing.assert_close(weighted, MISC["rms.y_weight_eps1e-6"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(softcap(MISC["softcap.x"]), MISC["softcap.y"], atol=1e-6, rtol=1e-6)
    mlp = MLP(MISC["mlp.x"].shape[-1])
    mlp.load_state_dict({k.removeprefix("mlp."): v for k, v in MISC.items() if k.startswith(("mlp.fc", "mlp.proj"))})
    torch.testing.assert_close(mlp(MISC["mlp.x"]), MISC["mlp.y"], atol=1e-5, rtol=1e-5)
