"""Checkpoints load strictly or not at all, in both layouts, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY, golden_case, needs_golden, tiny_model
from safetensors.torch import save_file

from atma_eval.bundled import MODEL_ALIASES, bundled_models
from atma_eval.checkpoint import find_model, load_model
from atma_eval.errors import UserError
from atma_eval.models.atma import FP32_PARAMETERS, Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.spec import ModelSpec
from atma_eval.weights import MAX_LISTED_KEYS


def open_model(name: str | Path, window: str | int = "train", **options: str):
    return load_model(find_model(ModelSpec(name=str(name), **options)), window)


def refusal(name: str | Path, **options: str) -> UserError:
    with pytest.raises(UserError) as caught:
        open_model(name, **options)
    return caught.value


@torch.no_grad()
def logits_of(model, ids) -> torch.Tensor:
    return model.logits(model(torch.as_tensor(ids)))


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return tiny_model().state_dict()


def write_folder(folder: Path, weights, config=TINY, *, ours: bool = True) -> Path:
    """Our layout, or the authors' with whatever object ``weights`` is."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if ours:
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "weights.safetensors")
    else:
        torch.save(weights, folder / "weights.pt")
    return folder


# -- both layouts, against the authors' numbers -----------------------------------------------------------


def renamed(weights, prefix: str):
    return {prefix + key: value for key, value in weights.items()}


def with_bf16_embedding(weights):
    return {**weights, "embed.weight": weights["embed.weight"].bfloat16()}


LAYOUTS = {
    "under model": lambda w: {"model": w, "step": 7},
    "bare": lambda w: w,
    "compiled": lambda w: {"model": renamed(w, "_orig_mod.")},
    "nested prefixes": lambda w: renamed(w, "module._orig_mod."),
    "prefixes the other way": lambda w: renamed(w, "_orig_mod.module._orig_mod."),
    "bf16 embedding": lambda w: {"model": with_bf16_embedding(w)},
    "all bf16 but the islands": lambda w: {
        k: v if k.rsplit(".", 1)[-1] in (*FP32_PARAMETERS, "angular_freq") else v.bfloat16() for k, v in w.items()
    },
}


@needs_golden
@pytest.mark.parametrize(
    ("case", "layout"),
    [(case, layout) for case in ("polar_mem", "rope_mem", "nope_mem") for layout in LAYOUTS]
    + [("nope_nomem", "bf16 embedding")],  # the types of real files
)
def test_authors_layout_gives_golden_logits(tmp_path, case, layout):
    config, _, weights, others = golden_case(case)
    loaded = open_model(write_folder(tmp_path, LAYOUTS[layout](weights), config, ours=False))
    torch.testing.assert_close(logits_of(loaded.model, others["input_ids"]), others["logits"], atol=1e-4, rtol=1e-4)
    assert loaded.details["dtype"] == "float32"


@needs_golden
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
@pytest.mark.parametrize("case", ["polar_mem_window", "rope_window"])
def test_our_layout_gives_golden_logits(tmp_path, case, prefix):
    config, _, weights, others = golden_case(case)
    loaded = open_model(write_folder(tmp_path, renamed(with_bf16_embedding(weights), prefix), config))
    torch.testing.assert_close(logits_of(loaded.model, others["input_ids"]), others["logits"], atol=1e-4, rtol=1e-4)


@needs_golden
def test_authors_run_in_bf16(tmp_path):
    """The dtype islands after ``--dtype bf16``, and the tolerance the golden vectors state."""
    config, _, weights, others = golden_case("polar_mem_bf16path")
    loaded = open_model(write_folder(tmp_path, {"model": weights}, config, ours=False), dtype="bfloat16")
    got = logits_of(loaded.model, others["input_ids"])
    assert got.dtype == torch.float32
    difference = (got - others["logits_bf16path"]).abs()
    assert difference.mean() < 0.03
    assert difference.max() < 0.3


def test_dtype_islands(tmp_path):
    for core in ("polar", "rope"):
        weights = tiny_model(attn_type=core).state_dict()
        model = open_model(write_folder(tmp_path, weights, {**TINY, "attn_type": core}), dtype="bfloat16").model
        kinds = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        wide = {name for name, kind in kinds.items() if kind == torch.float32}
        islands = set(FP32_PARAMETERS) if core == "polar" else {"angular_freq"}
        assert {name.rsplit(".", 1)[-1] for name in wide} == islands
        assert {kinds[name] for name in kinds.keys() - wide} == {torch.bfloat16}


def test_safetensors_come_first_and_label_is_the_folder(tmp_path, weights):
    folder = write_folder(tmp_path / "my=model:1", weights)
    (folder / "weights.pt").write_bytes(b"not read")
    loaded = open_model(folder)
    assert loaded.label == "my=model:1"
    assert loaded.details["num_parameters"] == sum(p.numel() for p in tiny_model().parameters())
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_fingerprint_follows_the_weights(tmp_path, weights):
    first = open_model(write_folder(tmp_path, weights)).details["fingerprint"]
    assert open_model(tmp_path, "full").details["fingerprint"] == first
    weights["norm.weight"][0] += 1e-6
    assert open_model(write_folder(tmp_path, weights)).details["fingerprint"] != first


# -- strictness -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
def test_every_wrong_key_is_listed(tmp_path, weights, ours):
    del weights["blocks.0.mlp.fc.weight"], weights["norm.weight"]
    weights["blocks.9.extra"] = torch.zeros(2)
    weights["proj.weight"] = weights["proj.weight"][:-1]
    weights["blocks.2.attn.v_null"] = weights["blocks.2.attn.v_null"].T
    message = refusal(write_folder(tmp_path, weights, ours=ours)).message
    assert str(tmp_path) in message
    assert "2 missing: blocks.0.mlp.fc.weight, norm.weight" in message
    assert "1 unexpected: blocks.9.extra" in message
    assert "2 of another shape: blocks.2.attn.v_null is [8, 4], not [4, 8]" in message
    assert "proj.weight is [256, 32], not [257, 32]" in message


def test_one_renamed_key(tmp_path, weights):
    weights["head.bias"] = weights.pop("proj.bias")
    message = refusal(write_folder(tmp_path, weights)).message
    assert "1 missing: proj.bias; 1 unexpected: head.bias" in message


def test_a_long_listing_is_cut(tmp_path, weights):
    error = refusal(write_folder(tmp_path, {"a": torch.zeros(1)}))
    assert f"{len(weights)} missing: " in error.message
    assert f"and {len(weights) - MAX_LISTED_KEYS} more" in error.message


def test_a_config_that_asks_for_other_weights(tmp_path, weights):
    for change in ({"mem_enabled": False}, {"attn_type": "nope"}, {"num_hidden_layers": 5}, {"vocab_size": 300}):
        error = refusal(write_folder(tmp_path, weights, {**TINY, **change}))
        assert "does not fit its config.json" in error.message
        assert "check attn_type, mem_enabled" in error.hint


def test_integer_weights_are_refused(tmp_path, weights):
    weights["norm.weight"] = weights["norm.weight"].to(torch.int8)
    assert "1 not of floating point: norm.weight is torch.int8" in refusal(write_folder(tmp_path, weights)).message


def test_the_same_key_with_and_without_prefix(tmp_path, weights):
    weights["_orig_mod.norm.weight"] = torch.zeros(32)
    assert "twice" in refusal(write_folder(tmp_path, weights, ours=False)).message


@pytest.mark.parametrize("values", [[1, 2], {"model": [1]}, {"a": 5}, torch.zeros(3), {"model": {"a": "b"}}], ids=str)
def test_a_file_without_a_state_dict(tmp_path, values):
    assert "no state dict" in refusal(write_folder(tmp_path, values, ours=False)).message


# -- damaged and hostile files ----------------------------------------------------------------------------


@pytest.mark.parametrize("ours", [True, False])
def test_truncated_weights(tmp_path, weights, ours):
    folder = write_folder(tmp_path, weights, ours=ours)
    path = folder / ("weights.safetensors" if ours else "weights.pt")
    data = path.read_bytes()
    for size in (0, 1, 7, 8, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert f"{path} cannot be read" in refusal(folder).message
    path.write_bytes(b"\x00" * 5000)
    assert f"{path} cannot be read" in refusal(folder).message


@pytest.mark.parametrize("ours", [True, False])
def test_damaged_weights_never_give_a_traceback(tmp_path, weights, ours):
    """Bytes of the directories and headers overwritten: it loads, or it is refused."""
    folder = write_folder(tmp_path, weights, ours=ours)
    path = folder / ("weights.safetensors" if ours else "weights.pt")
    data = path.read_bytes()
    rng = np.random.default_rng(0)
    messages = []
    for _ in range(40):
        spoilt = bytearray(data)
        for place in rng.choice([*range(4000), *range(len(data) - 4000, len(data))], 8):
            spoilt[place] = rng.integers(256)
        path.write_bytes(spoilt)
        try:
            open_model(folder)
        except UserError as error:
            messages.append(error.message)
    assert len(messages) > 5
    assert not any("\n" in message for message in messages)


class Payload:
    """Unpickling it runs a command."""

    def __init__(self, target: Path):
        self.target = target

    def __reduce__(self):
        return os.system, (f"touch {self.target}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_does_not_run(tmp_path, weights, zipped):
    target = tmp_path / "ran"
    folder = write_folder(tmp_path, {}, ours=False)
    values = {"model": weights, "extra": Payload(target)}
    if zipped:
        torch.save(values, folder / "weights.pt")
    else:
        (folder / "weights.pt").write_bytes(pickle.dumps(values))
    assert "cannot be read with the weights-only loader" in refusal(folder).message
    assert not target.exists()
    pickle.loads(pickle.dumps(Payload(target)))
    assert target.exists()  # else this test shows nothing


# -- other families ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "folder"])
def test_raven_config_is_named(tmp_path, weights, name):
    config = {"arch_type": "atma_raven_titans", "hidden_size": 1024}
    folder = write_folder(tmp_path, weights, config)
    error = refusal(folder if name == "folder" else f"random:{folder / 'config.json'}")
    assert "Raven" in error.message
    assert "atma_raven_titans" in error.message


def test_raven_weights_are_named(tmp_path, weights):
    weights["blocks.2.attn.A_log"] = torch.zeros(4)
    assert "Raven" in refusal(write_folder(tmp_path, weights)).hint


def foveal(weights):
    """Such a file also holds loader and generator state, which the weights-only reader refuses."""
    moved = {k.replace("blocks.2.attn.", "blocks.2.attn.base."): v for k, v in weights.items()}
    return {"model": moved, "optimizers": [{"state": {}}], "step": 100, "loader": Path("shard")}


def test_foveal_restart_files_are_named(tmp_path, weights):
    restart = tmp_path / "restart"
    restart.mkdir()
    torch.save(foveal(weights), restart / "stage-step-000100.pt")
    with_config = write_folder(tmp_path / "with_config", {}, ours=False)
    (with_config / "weights.pt").rename(with_config / "stage-step-000100.pt")
    renamed_file = write_folder(tmp_path / "renamed", foveal(weights), ours=False)
    bare = write_folder(tmp_path / "bare", foveal(weights)["model"], ours=False)
    exported = write_folder(tmp_path / "exported", foveal(weights)["model"])
    for name in (restart / "stage-step-000100.pt", restart, with_config, renamed_file, bare, exported):
        error = refusal(name)
        assert "Foveal" in error.hint, name
        assert str(name) in error.message


def test_a_file_is_no_checkpoint(tmp_path, weights):
    folder = write_folder(tmp_path, weights)
    error = refusal(folder / "weights.safetensors")
    assert "is a file" in error.message
    assert "folder" in error.hint


# -- configs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", "attn_window mem_enabled mem_gamma_bias mem_beta_bias attn_type conv_kernel_size vocab_size".split()
)
def test_a_field_that_changes_results_is_never_filled_in(tmp_path, weights, field):
    error = refusal(write_folder(tmp_path, weights, {k: v for k, v in TINY.items() if k != field}))
    assert f"lacks {field}" in error.message
    assert "never filled in" in error.hint


def test_all_missing_fields_at_once(tmp_path, weights):
    error = refusal(write_folder(tmp_path, weights, {"mem_enabled": True}))
    for field in ("attn_window", "mem_gamma_bias", "hidden_size"):
        assert field in error.message


def test_without_memory_its_constants_may_lack(tmp_path):
    config = {k: v for k, v in TINY.items() if not k.startswith("mem_")} | {"mem_enabled": False}
    open_model(write_folder(tmp_path, tiny_model(mem_enabled=False).state_dict(), config))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"attn_type": "wall"}, "attn_type 'wall'"),
        ({"attn_type": "Polar"}, "attn_type 'Polar'"),
        ({"attn_type": 5}, "attn_type 5"),
        ({"attn_type": ["polar"]}, "attn_type"),
        ({"attn_type": None}, "attn_type None"),
        ({"hidden_size": 24}, "3 heads"),
        ({"hidden_size": 48}, "6 heads"),
        ({"hidden_size": 33}, "4 heads"),
        ({"head_dim": 64}, "0 heads"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": "32"}, "hidden_size is '32'"),
        ({"hidden_size": 32.0}, "hidden_size is 32.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"attn_window": 0}, "attn_window is 0"),
        ({"attn_window": "full"}, "attn_window is 'full'"),
        ({"mem_enabled": 1}, "mem_enabled is 1"),
        ({"mem_enabled": None}, "mem_enabled is None"),
        ({"mem_gamma_bias": "3.9"}, "mem_gamma_bias is '3.9'"),
        ({"mem_gamma_bias": None}, "mem_gamma_bias is None"),
        ({"mem_beta_bias": float("nan")}, "mem_beta_bias is nan"),
        ({"mem_chunk": -1}, "mem_chunk is -1"),
        ({"training_length": "2k"}, "training_length is '2k'"),
        ({"tokenizer": 5}, "tokenizer is 5"),
        ({"attn_typ": "polar"}, "attn_typ"),
        ({"attn_type": "none", "mem_enabled": False}, "nothing global"),
        ({"attn_type": "rope", "head_dim": 1, "hidden_size": 4}, "head_dim is 1"),
    ],
)
def test_bad_config_values_are_named(tmp_path, change, named):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({**TINY, **change}))
    error = refusal(f"random:{path}")
    assert named in error.message
    assert str(path) in error.message
    assert error.hint


def test_an_unknown_field_gets_a_suggestion(tmp_path, weights):
    assert "did you mean attn_window" in refusal(write_folder(tmp_path, weights, {**TINY, "attn_windw": 5})).hint


def test_what_the_authors_write_beside_is_accepted(tmp_path, weights):
    inert = {"dtype": "bfloat16", "attn_kernel": "triton", "num_random_keys": 16, "wall_gate_bias": None}
    open_model(write_folder(tmp_path, weights, {**TINY, **inert}))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"5", b"\xff\xfe", b"null"])
def test_a_config_that_is_no_object(tmp_path, weights, content):
    folder = write_folder(tmp_path, weights)
    (folder / "config.json").write_bytes(content)
    assert str(folder / "config.json") in refusal(folder).message


# -- names ------------------------------------------------------------------------------------------------


def test_names_that_lead_nowhere(tmp_path, weights, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    only_config = write_folder(tmp_path / "only_config", weights)
    (only_config / "weights.safetensors").unlink()
    for name, message in {
        "nosuch": "unknown model 'nosuch'",
        "": "unknown model ''",
        "x" * 300: "cannot look at",
        "~nobody-here/model": "unknown model",
        "random:": "no configuration ''",
        "random:nosuch.json": "no configuration 'nosuch.json'",
        "random:empty": "no configuration 'empty'",
        "hf:owner/name@revision": "hf:owner/name@revision",
        "empty": "has no config.json",
        "only_config": "has no weights",
    }.items():
        error = refusal(name)
        assert message in error.message, name
    assert "random:CONFIG.json" in refusal("nosuch").hint
    assert "folder" in refusal("hf:owner/name").hint


def test_did_you_mean(monkeypatch, tmp_path):
    monkeypatch.setattr("atma_eval.checkpoint.bundled_models", lambda: {"softmax": tmp_path})
    assert "did you mean softmax" in refusal("sofmtax").hint


@pytest.mark.parametrize("alias", MODEL_ALIASES)
def test_an_alias_is_another_name_of_a_model(alias):
    """The label is the model's own, so that rows of both names pair."""
    name = MODEL_ALIASES[alias]
    if name not in bundled_models():
        pytest.skip(f"models/{name} is not in this checkout")
    one, other = find_model(ModelSpec(name=alias)), find_model(ModelSpec(name=name))
    assert (one.label, one.path) == (other.label, other.path)
    assert one.label == name


def test_devices(tiny_name):
    for device in ("gpu", "mps", "cuda:x", ""):
        assert repr(device) in refusal(tiny_name, device=device).message
    if not torch.cuda.is_available():
        for device in ("cuda", "cuda:7"):
            error = refusal(tiny_name, device=device)
            assert device in error.message
            assert error.hint == "use --device cpu"


# -- random weights ---------------------------------------------------------------------------------------


def named_config(folder: Path, **changes) -> str:
    path = folder / "tiny.json"
    path.write_text(json.dumps({**TINY, **changes}))
    return f"random:{path}"


def test_random_weights_are_the_same_every_time(tmp_path):
    torch.manual_seed(1)
    first = open_model(named_config(tmp_path))
    torch.manual_seed(2)
    again = open_model(named_config(tmp_path))
    assert first.label == "random:tiny"
    assert first.details["fingerprint"] == again.details["fingerprint"]
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
        assert value.isfinite().all(), name
    fingerprints = {first.details["fingerprint"]}
    for change in ({"attn_type": "nope"}, {"mem_gamma_bias": 3.8}, {"attn_window": 64}, {"mem_enabled": False}):
        fingerprints.add(open_model(named_config(tmp_path, **change)).details["fingerprint"])
    assert len(fingerprints) == 5
    assert open_model(named_config(tmp_path), 64).details["fingerprint"] == first.details["fingerprint"]


def test_weights_replaced_before_they_are_loaded_are_refused(tmp_path, weights):
    """As those of a training run that is under way, while other models are evaluated first."""
    source = find_model(ModelSpec(name=str(write_folder(tmp_path, weights))))
    details = source.describe("train")
    weights["norm.weight"][0] += 1e-6
    write_folder(tmp_path, weights)
    with pytest.raises(UserError, match="was replaced"):
        load_model(source, "train", details)
    load_model(source, "train")


def test_too_little_memory_to_place_a_model(tmp_path, weights, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.\nA long story.")

    monkeypatch.setattr(Atma, "cast", full)
    with pytest.raises(UserError, match="CUDA out of memory") as caught:
        open_model(write_folder(tmp_path, weights))
    assert "\n" not in caught.value.message


def test_a_model_too_large_for_the_machine(tmp_path):
    error = refusal(named_config(tmp_path, hidden_size=2**22, head_dim=2**20))
    assert "cannot build" in error.message
    assert "\n" not in error.message


# -- windows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
def test_window_is_really_applied(tmp_path, core):
    """A token beyond the reach of every layer leaves the last logits bit-equal; without a window it does not."""
    window, length = 10, 120
    name = named_config(tmp_path, attn_type=core, attn_window=window, mem_enabled=False)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 257, (1, length)))
    other = ids.clone()
    other[0, 20] = (other[0, 20] + 1) % 257
    for asked, applied in (("train", window), (window, window), (5, 5), ("full", None), (200, 200)):
        loaded = open_model(name, asked)
        assert loaded.details["window"] == loaded.model.config.attn_window == applied
        assert loaded.details["trained_window"] == window
        before, after = logits_of(loaded.model, ids)[0], logits_of(loaded.model, other)[0]
        last_equal = torch.equal(before[-1], after[-1])
        # one global block, and convolutions: 3 local blocks of 3 taps, 4 taps on queries, keys and values
        assert last_equal is (applied is not None and applied < length), asked
        if applied == window:
            reach = 20 + window - 1 + 3 * 2 + 3
            assert torch.equal(before[reach + 1 :], after[reach + 1 :])
            assert not torch.equal(before[20 + window - 1], after[20 + window - 1])


def test_a_window_that_covers_everything_is_none(tmp_path):
    name = named_config(tmp_path)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 257, (1, 100)))
    torch.testing.assert_close(
        logits_of(open_model(name, 100).model, ids), logits_of(open_model(name, "full").model, ids), atol=1e-5, rtol=0
    )


# -- tokenizers -------------------------------------------------------------------------------------------


def test_tokenizer_of_a_model(tmp_path, weights):
    folder = write_folder(tmp_path / "byte", weights)
    assert find_model(ModelSpec(name=str(folder))).tokenizer.name == "byte"
    bare = {k: v for k, v in TINY.items() if k != "tokenizer"}
    assert find_model(ModelSpec(name=named_config(tmp_path, tokenizer=None))).tokenizer.name == "byte"
    small = find_model(ModelSpec(name=str(write_folder(tmp_path / "bare", weights, bare))))
    with pytest.raises(UserError, match="50257 tokens, the model 257") as caught:
        _ = small.tokenizer
    assert "--tokenizer" in caught.value.hint
    large = ModelSpec(name=named_config(tmp_path, vocab_size=50304), tokenizer="gpt2")
    assert find_model(large).tokenizer.vocab_size == 50257


def test_architecture_in_words():
    for changes, words in {
        (): "polar + memory",
        (("mem_enabled", False),): "polar",
        (("attn_type", "rope"),): "rope + memory",
        (("attn_type", "none"),): "memory only",
        (("attn_window", 50),): "polar + memory, window 50",
    }.items():
        assert AtmaConfig.from_dict({**TINY, **dict(changes)}).architecture == words
