"""Models of the transformers library: the same numbers as their own forward, whole folders of them refused by name."""

from __future__ import annotations

import copy
import json
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from conftest import assert_forks_are_isolated
from huggingface_hub import errors
from safetensors.torch import load_file, save_file

from atma_eval import checkpoint_huggingface, cli, hub, runner
from atma_eval.checkpoint import find_model, load_model
from atma_eval.errors import UserError
from atma_eval.models import huggingface
from atma_eval.models.huggingface import HuggingFaceModel, check_model
from atma_eval.records import MODEL_IDENTITY, VOLATILE_FIELDS
from atma_eval.runner import walk
from atma_eval.session import Session
from atma_eval.spec import ModelSpec
from atma_eval.tasks.base import Sample

transformers.logging.set_verbosity_error()

VOCAB = 300
# Weights of this size make attention and recurrence count: at the library's 0.02 a lost past would hardly show.
SIZE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
HEADS = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
HEADS |= {"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
LINEAR = {f"linear_{name}": 4 if "num" in name else 8 for name in "num_key_heads num_value_heads key_head_dim".split()}
LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}

FAMILIES = {  # class, fields
    "grouped heads": ("LlamaForCausalLM", HEADS),
    "sliding window": ("MistralForCausalLM", {**HEADS, "sliding_window": 9}),
    "soft caps, window every second layer": (
        "Gemma2ForCausalLM",
        {**HEADS, "sliding_window": 9, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    ),
    "learned positions": ("GPT2LMHeadModel", GPT2),
    "scaled logits": ("GraniteForCausalLM", {**HEADS, "logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "gated delta memory, experts": ("Qwen3NextForCausalLM", {**HEADS, **MOE, **LINEAR}),
    "state space": ("Mamba2ForCausalLM", {**SIZE, "state_size": 4, "num_heads": 4, "head_dim": 16, "n_groups": 1}),
    "convolutions": ("Lfm2ForCausalLM", {**HEADS, "layer_types": ["conv", "full_attention"]}),
    "decoder inside the base, positions from 2": (
        "OPTForCausalLM",
        {
            **{k: v for k, v in SIZE.items() if k != "initializer_range"},
            **{"init_std": 0.3, "num_attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 128},
            "word_embed_proj_dim": 16,
        },
    ),
}
JAMBA = {**SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "mamba_d_state": 4}
JAMBA |= {"attn_layer_period": 2, "attn_layer_offset": 1}


def build(family: str, fields: dict):
    """A random model as `load` has it, attention included."""
    causal = getattr(transformers, family)
    config = causal.config_class(**fields)
    config._attn_implementation = checkpoint_huggingface._attention(causal)
    torch.manual_seed(0)
    return causal(config).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return build(*FAMILIES[request.param])


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


@torch.no_grad()
def full_logits(causal, ids: np.ndarray) -> torch.Tensor:
    """By the library alone."""
    return causal(input_ids=torch.as_tensor(ids)[None], use_cache=False).logits[0].float()


# -- a stream's numbers, as in test_session.py ------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_score_equals_full_logits(family, chunk):
    ids = tokens(90)
    session = Session(HuggingFaceModel(family), chunk=chunk)
    session.extend(ids[:1])
    scores = session.score(ids[1:])
    logits = full_logits(family, ids)[:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.as_tensor(ids[1:]), reduction="none").numpy()
    np.testing.assert_allclose(scores.nll, expected, atol=2e-4)
    assert (scores.argmax == logits.argmax(-1).numpy()).mean() > 0.98
    assert session.length == 90


def test_any_partition_and_selection(family):
    ids = tokens(110, seed=1)
    expected = torch.nn.functional.cross_entropy(
        full_logits(family, ids)[:-1], torch.as_tensor(ids[1:]), reduction="none"
    )
    rng = np.random.default_rng(2)
    wanted = rng.random(110) < 0.2
    wanted[0] = False
    session, at, nll = Session(HuggingFaceModel(family), chunk=16), 0, []
    while at < 110:
        stop = min(110, at + int(rng.integers(1, 30)))
        nll.append(session.score(ids[at:stop], wanted[at:stop]).nll)
        at = stop
    np.testing.assert_allclose(np.concatenate(nll), expected.numpy()[wanted[1:]], atol=2e-4)


def test_forks_are_isolated(family):
    branches = [tokens(30, seed=seed) for seed in range(3)]
    assert_forks_are_isolated(HuggingFaceModel(family), tokens(90, seed=4), 50, branches)


def test_generate_is_greedy(family):
    ids = tokens(40, seed=5)
    session = Session(HuggingFaceModel(family))
    session.extend(ids)
    sequence = list(ids)
    for token in session.generate(5):
        assert token == int(full_logits(family, np.array(sequence))[-1].argmax())
        sequence.append(token)


def test_state_is_measured_and_foretold(family):
    model = HuggingFaceModel(family)
    state = model.init_state()
    assert (state.length, state.num_bytes) == (0, 0)
    model(torch.zeros(1, 40, dtype=torch.int64), state)
    assert state.length == 40
    if "Qwen3Next" not in type(family).__name__:  # PyTorch has no shape rule in fp32 for its experts
        assert state.num_bytes == model.state_bytes(40) > 0
    if type(family).__name__ == "LlamaForCausalLM":
        assert state.num_bytes == 40 * 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, width, bytes


def test_the_state_of_a_model_in_16_bits_is_foretold_too():
    model = HuggingFaceModel(build(*FAMILIES["grouped heads"]).bfloat16())
    state = model.init_state()
    model(torch.zeros(1, 40, dtype=torch.int64), state)
    assert state.num_bytes == model.state_bytes(40) == 40 * 2 * 2 * 2 * 8 * 2


def test_a_fork_costs_nothing_until_one_side_advances(monkeypatch):
    copies = []
    monkeypatch.setattr(huggingface, "deepcopy", lambda cache: copies.append(1) or copy.deepcopy(cache))
    model = HuggingFaceModel(build(*FAMILIES["sliding window"]))
    state, ids = model.init_state(), torch.zeros(1, 5, dtype=torch.int64)
    model(ids, state)
    forks = [state.fork() for _ in range(3)]
    assert not copies
    for fork in forks[:2]:
        model(ids, fork)
        fork.release()
    assert len(copies) == 2
    forks[2].release()
    model(ids, state)  # nobody else holds it now
    assert len(copies) == 2
    assert state.length == 10


def test_walk_and_sequences_beyond_the_table_of_positions():
    model = HuggingFaceModel(build(*FAMILIES["learned positions"]))
    assert model.max_length == model.training_length == 128
    ids = tokens(140)
    samples = [
        Sample(key=str(n), tokens=ids[:n].astype(np.int32), span=(n - 5, n), length=n, trial=0, text_id="t")
        for n in (30, 128, 129, 140)
    ]
    found = {sample.key: (status, scored) for sample, scored, status, _ in walk(model, samples)}
    assert {key: status for key, (status, _) in found.items()} == {
        "30": "ok", "128": "ok", "129": "too_long", "140": "too_long",
    }  # fmt: skip
    logits = full_logits(model._causal, ids[:128])[122:127]
    expected = torch.nn.functional.cross_entropy(logits, torch.as_tensor(ids[123:128]), reduction="none")
    np.testing.assert_allclose(found["128"][1].nll, expected, atol=2e-4)


def test_only_tables_limit_the_length():
    limits = {name: HuggingFaceModel(build(*FAMILIES[name])).max_length for name in FAMILIES}
    assert {name for name, limit in limits.items() if limit == 128} == {
        "learned positions", "decoder inside the base, positions from 2",
    }  # fmt: skip
    assert set(limits.values()) == {128, None}


# -- what is checked when a model is loaded ---------------------------------------------------------------


def test_check_passes_in_every_type(family):
    for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 0.2), (torch.float16, 0.04)):
        assert check_model(HuggingFaceModel(copy.deepcopy(family).to(dtype)), "it") < bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["MambaForCausalLM", "JambaForCausalLM"])
def test_a_cache_that_cannot_be_continued_is_refused(name, dtype):
    """Rounding must not hide it, nor the choice of experts that rounding changes."""
    causal = build(name, {**SIZE, "state_size": 4} if name == "MambaForCausalLM" else JAMBA).to(dtype)
    with pytest.raises(UserError, match=f"the cache of its {name} cannot be continued in pieces of 7, 1, 5") as caught:
        check_model(HuggingFaceModel(causal), "it")
    assert "single tokens" in caught.value.hint


def test_a_model_without_a_cache_is_refused():
    fields = {**SIZE, "num_attention_heads": 4, "intermediate_size": 48, "is_decoder": False}
    with pytest.raises(UserError, match=r"it cannot be evaluated.*BertLMHeadModel.*keeps nothing from one call"):
        check_model(HuggingFaceModel(build("BertLMHeadModel", fields)), "it")


def test_what_a_forward_does_that_logits_would_miss_is_refused(monkeypatch):
    """Hidden states changed between decoder and head by something other than the decoder's output."""
    causal = build(*FAMILIES["grouped heads"])
    forward = causal.forward

    def other(input_ids, **kwargs):
        output = forward(input_ids=input_ids, **kwargs)
        output.logits = output.logits + input_ids[..., None].float()
        output.logits[..., ::2] *= 2
        return output

    monkeypatch.setattr(causal, "forward", other)
    with pytest.raises(UserError, match="head and decoder of its LlamaForCausalLM apart"):
        check_model(HuggingFaceModel(causal), "it")


def test_a_shallow_copy_of_the_cache_would_be_noticed(monkeypatch):
    monkeypatch.setattr(huggingface, "deepcopy", lambda cache: cache)
    for name in ("grouped heads", "gated delta memory, experts"):
        with pytest.raises(UserError, match="cannot be continued"):
            check_model(HuggingFaceModel(build(*FAMILIES[name])), "it")


def test_a_window_that_slides_wrongly_is_noticed(monkeypatch):
    """Though the model's own is far longer than the check."""
    model = HuggingFaceModel(build("MistralForCausalLM", {**HEADS, "sliding_window": 256}))
    check_model(model, "it")
    assert model._causal.config.sliding_window == 256
    sizes = transformers.cache_utils.DynamicSlidingWindowLayer.get_mask_sizes

    def one_less(self, query_length):
        length, offset = sizes(self, query_length)
        return length, offset - (offset > 0)

    monkeypatch.setattr(transformers.cache_utils.DynamicSlidingWindowLayer, "get_mask_sizes", one_less)
    with pytest.raises(UserError, match="cannot be continued"):
        check_model(model, "it")
    assert model._causal.config.sliding_window == 256


def test_a_loss_that_is_no_number_is_refused():
    causal = build(*FAMILIES["grouped heads"])
    causal.lm_head.weight[:] = float("nan")
    with pytest.raises(UserError, match="cannot be evaluated"):
        check_model(HuggingFaceModel(causal), "it")


# -- folders ----------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, **config: object) -> None:
    """A byte-level tokenizer of a few merges, trained here, whose id 0 starts a document."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB - 10,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()[:4000]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<eos>", **config}))


def write_folder(folder: Path, name: str = "grouped heads", **save: object) -> Path:
    build(*FAMILIES[name]).save_pretrained(folder, **save)
    write_tokenizer(folder)
    return folder


def change_config(folder: Path, **changes: object) -> None:
    """Fields of config.json replaced, or with ``...`` taken out."""
    values = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def find(name: str | Path, **options: object):
    return find_model(ModelSpec(name=str(name), **options))


def refusal(name: str | Path, window: str | int = "train", **options: object) -> UserError:
    with pytest.raises(UserError) as caught:
        load_model(find(name, **options), window)
    return caught.value


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "tiny-llama")


def test_a_folder_loads_as_it_was_saved(folder):
    source = find(folder)
    loaded = load_model(source, "train")
    model, details = build(*FAMILIES["grouped heads"]), loaded.details
    np.testing.assert_allclose(full_logits(loaded.model._causal, tokens(20)), full_logits(model, tokens(20)), atol=1e-6)
    assert source.label == loaded.label == "tiny-llama"
    assert source.training_length == loaded.model.training_length == details["training_length"] == 512
    assert source.tokenizer.name == "tiny-llama"
    assert source.tokenizer.start_id == 0  # no bos_token: the eos_token
    assert details["architecture"] == "LlamaForCausalLM"
    assert details["config"] == json.loads((folder / "config.json").read_text())
    assert details["num_parameters"] == sum(p.numel() for p in model.parameters())
    assert details["implementations"] == {"model": "transformers", "attention": "sdpa"}
    assert (details["dtype"], details["window"], details["revision"]) == ("float32", None, None)
    assert set(MODEL_IDENTITY) - {"tokenizer_fingerprint"} <= details.keys()
    assert not loaded.model._causal.training
    assert not any(p.requires_grad for p in loaded.model.parameters())


def test_types_and_attention(tmp_path):
    gemma = write_folder(tmp_path / "gemma", "soft caps, window every second layer")
    loaded = load_model(find(gemma, dtype="bfloat16"), "train")
    assert {p.dtype for p in loaded.model.parameters()} == {torch.bfloat16}
    assert loaded.model.logits(loaded.model(torch.zeros(1, 3, dtype=torch.int64))).dtype == torch.float32
    assert loaded.details["dtype"] == "bfloat16"
    assert loaded.details["implementations"]["attention"] == "eager"  # the fused one has no soft cap
    assert loaded.details["trained_window"] == loaded.details["window"] == 9


def test_fingerprint(folder, tmp_path):
    first = find(folder).describe("train")["fingerprint"]
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert find(tmp_path / "elsewhere").describe("train")["fingerprint"] == first
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-6
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert find(folder).describe("train")["fingerprint"] != first


def test_shards(tmp_path):
    folder = write_folder(tmp_path / "sharded", max_shard_size="20KB")
    names = hub.weight_files(folder)
    assert len(names) > 2
    loaded = load_model(find(folder), "train")
    first = loaded.details["fingerprint"]
    torch.testing.assert_close(
        full_logits(loaded.model._causal, tokens(9)), full_logits(build(*FAMILIES["grouped heads"]), tokens(9))
    )
    index = json.loads((folder / hub.INDEX).read_text())
    swapped = {names[0]: names[1], names[1]: names[0]}  # the same files under each other's names
    index["weight_map"] = {key: swapped.get(file, file) for key, file in index["weight_map"].items()}
    (folder / hub.INDEX).write_text(json.dumps(index))
    (folder / names[0]).rename(folder / "other")
    (folder / names[1]).rename(folder / names[0])
    (folder / "other").rename(folder / names[1])
    assert load_model(find(folder), "train").details["fingerprint"] == first
    (folder / names[0]).unlink()
    assert names[0] in refusal(folder).message
    index["weight_map"]["lm_head.weight"] = "../model.safetensors"
    (folder / hub.INDEX).write_text(json.dumps(index))
    assert "'../model.safetensors'" in refusal(folder).message


def test_one_file_goes_before_an_index_of_shards(tmp_path):
    """As in the library, so that the fingerprint is that of what is loaded."""
    folder = write_folder(tmp_path / "both", max_shard_size="20KB")
    sharded = find(folder).describe("train")["fingerprint"]
    weights = build(*FAMILIES["grouped heads"]).state_dict()
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    loaded = load_model(find(folder), "train")
    assert torch.equal(loaded.model._causal.model.norm.weight, weights["model.norm.weight"])
    assert loaded.details["fingerprint"] != sharded
    for name in folder.glob("model-0*"):  # what saving the model in one file leaves
        name.unlink()
    assert find(folder).describe("train")["fingerprint"] == loaded.details["fingerprint"]


def test_numbers_that_are_not_json(folder):
    change_config(folder, time_step_limit=[0.0, float("inf")])
    details = find(folder).describe("train")
    assert details["config"]["time_step_limit"] == [0.0, "Infinity"]
    json.dumps(details, allow_nan=False)


def test_keys_of_old_gpt2_files(tmp_path):
    """The hub's GPT-2 has no prefix, and buffers that are weights no more."""
    folder = write_folder(tmp_path / "gpt2", "learned positions")
    weights = {k.removeprefix("transformer."): v for k, v in load_file(folder / "model.safetensors").items()}
    weights["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    source = find(folder)
    assert source.training_length == 128
    logits = full_logits(load_model(source, "train").model._causal, tokens(9))
    torch.testing.assert_close(logits, full_logits(build(*FAMILIES["learned positions"]), tokens(9)))


# -- what is refused --------------------------------------------------------------------------------------

WRONG_CONFIGS = {  # changes, part of the error, part of the hint
    "encoder": ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM (model_type", "text"),
    "seq2seq": ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "T5ForCondit", "text models"),
    "seq2seq half": ({"is_encoder_decoder": True}, "not a causal language model", "ForCausalLM"),
    "vision": ({"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava"}, "Llava", "text models"),
    "base model": ({"architectures": ["LlamaModel"]}, "LlamaModel", "ForCausalLM"),
    "no class": ({"architectures": ...}, "architectures is None", "LlamaForCausalLM"),
    "two classes": ({"architectures": ["A", "B"]}, "architectures is ['A', 'B']", "LlamaForCausalLM"),
    "own code": (
        {"architectures": ["MineForCausalLM"], "model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.M"}},
        "its code lies beside it (auto_map) and is never run",
        "newer version",
    ),
    "unknown": ({"architectures": ["MineForCausalLM"]}, "MineForCausalLM, which transformers", "newer version"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "is quantised", "full weights"),
    "no vocabulary": ({"vocab_size": ...}, "vocab_size is None", "whole number"),
    "another type": ({"model_type": "qwen3"}, "model_type is 'qwen3', but a LlamaForCausalLM is of 'llama'", None),
    "wrong value": ({"hidden_size": "wide"}, "cannot build the model", None),
    "wrong shape": ({"hidden_size": 64}, "tiny-llama", None),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CONFIGS)
def test_configs_of_other_models(folder, name):
    changes, message, hint = WRONG_CONFIGS[name]
    change_config(folder, **changes)
    (folder / "mine.py").write_text("raise AssertionError('it ran')")
    error = refusal(folder)
    assert message in error.message
    assert "\n" not in error.message
    if hint is not None:
        assert hint in error.hint


def test_weights_that_do_not_fit(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file({**weights, "model.extra": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    message = refusal(folder).message
    assert "1 missing: model.layers.0.mlp.up_proj.weight" in message
    assert "1 unexpected: model.extra" in message


def test_weights_of_other_formats(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for size in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:size])
        assert f"{path} cannot be read: it is truncated or corrupt" in refusal(folder).message
    path.unlink()
    assert "has no model.safetensors" in refusal(folder).message
    torch.save({}, folder / "pytorch_model.bin")
    error = refusal(folder)
    assert ".bin files are pickles" in error.message
    assert "save_pretrained" in error.hint
    (folder / "adapter_config.json").write_text("{}")
    assert "adapter" in refusal(folder).message
    only = folder / "quantised"
    only.mkdir()
    (only / "model.Q4.gguf").touch()
    for name in (only, only / "model.Q4.gguf"):
        assert "GGUF" in refusal(name).message
        assert "safetensors" in refusal(name).hint


def test_options_that_make_no_sense(folder):
    for options, part in (
        ({"q2_floor": 1e-6}, "--q2-floor 1e-06"),
        ({"impl": "triton"}, "--impl triton"),
        ({"window": 128}, "window 128"),
        ({"window": "full"}, "window full"),
    ):
        error = refusal(folder, **options)
        assert part in error.message
        assert "tiny-llama" in error.message
        assert error.hint
    load_model(find(folder, impl="torch"), "train")


def test_tokenizers_of_a_folder(folder):
    write_tokenizer(folder, bos_token="<bos>")
    assert find(folder).tokenizer.start_id == 1
    assert find(folder, tokenizer="byte").tokenizer.name == "byte"
    with pytest.raises(UserError, match="50257 tokens, the model 300"):
        _ = find(folder, tokenizer="gpt2").tokenizer
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tiny-llama has no tokenizer.json"):
        _ = find(folder).tokenizer


def test_without_the_library(folder, monkeypatch):
    monkeypatch.setattr(checkpoint_huggingface.importlib.util, "find_spec", lambda name: None)
    assert refusal(folder).hint == "pip install 'atma-eval[hf]'"


# -- the hub ----------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """The two calls that go to the hub, answered from a folder into a cache of the library's own layout."""

    def __init__(self, origin: Path, cache: Path):
        self.origin, self.cache = origin, cache / "models--owner--name"
        self.failure: Exception | None = None
        self.asked: list[str] = []

    def model_info(self, _api: object, repository: str, *, revision: str, timeout: float) -> SimpleNamespace:
        assert repository == "owner/name"
        assert timeout <= 5
        self.asked.append(f"info {revision}")
        if self.failure is not None:
            raise self.failure
        names = [SimpleNamespace(rfilename=path.name) for path in self.origin.iterdir()]
        return SimpleNamespace(siblings=names, sha=COMMIT)

    def download(self, repository: str, file: str, *, revision: str) -> str:
        self.asked.append(file)
        if revision != COMMIT:
            (self.cache / "refs").mkdir(parents=True, exist_ok=True)
            (self.cache / "refs" / revision).write_text(COMMIT)
        path = self.cache / "snapshots" / COMMIT / file
        if not (self.origin / file).is_file():
            (self.cache / ".no_exist" / COMMIT).mkdir(parents=True, exist_ok=True)
            (self.cache / ".no_exist" / COMMIT / file).touch()
            raise errors.RemoteEntryNotFoundError("404", response=response(404))
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.origin / file, path)
        return str(path)


def response(status: int) -> SimpleNamespace:
    """As much of the client's response as the library's errors look at."""
    return SimpleNamespace(status_code=status, headers={}, request=None)


@pytest.fixture
def fake(folder, tmp_path, monkeypatch):
    hub_ = FakeHub(folder, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: hub_.model_info(*args, **kwargs))
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hub_.download)
    return hub_


@pytest.mark.parametrize("revision", ["", "@main", "@v1.0", f"@{COMMIT}"])
def test_a_repository_is_fetched_once(fake, revision):
    (fake.origin / "pytorch_model.bin").touch()
    source = find(f"hf:owner/name{revision}")
    _ = source.tokenizer
    name = revision.removeprefix("@") or "main"
    assert fake.asked == [f"info {name}", "config.json", "tokenizer.json", "tokenizer_config.json"]
    loaded = load_model(source, "train")
    assert fake.asked[4:] == [f"info {COMMIT}", "model.safetensors"]
    assert loaded.label == f"hf:owner/name{revision}"
    assert loaded.details["revision"] == COMMIT
    assert loaded.details["fingerprint"] == find(fake.origin).describe("train")["fingerprint"]
    fake.failure = AssertionError("the cache has everything")
    again = find(f"hf:owner/name{revision}")
    assert again.describe("train") == loaded.details
    assert len(fake.asked) == 6


def test_files_that_a_repository_lacks(fake):
    (fake.origin / "tokenizer_config.json").unlink()
    find("hf:owner/name")
    fake.failure = AssertionError("it is known that there is none")
    find("hf:owner/name")
    (fake.cache / "snapshots" / COMMIT / "tokenizer.json").unlink()
    find("hf:owner/name", tokenizer="byte")  # needs none
    with pytest.raises(UserError, match="a request to the hub failed"):
        find("hf:owner/name")


def test_shards_of_a_repository(fake):
    shutil.rmtree(fake.origin)
    write_folder(fake.origin, max_shard_size="20KB")
    (fake.origin / "consolidated.safetensors").touch()
    load_model(find("hf:owner/name"), "train")
    names = hub.weight_files(fake.origin)
    assert fake.asked[-len(names) - 1 :] == [hub.INDEX, *names]
    assert "consolidated.safetensors" not in fake.asked


def test_of_shards_and_one_file_the_one_is_fetched(fake):
    write_folder(fake.origin, max_shard_size="20KB")
    write_folder(fake.origin)  # leaves the index
    assert (fake.origin / hub.INDEX).is_file()
    load_model(find("hf:owner/name"), "train")
    assert fake.asked[-1] == "model.safetensors"
    assert hub.INDEX not in fake.asked


def test_repositories_of_other_formats(fake):
    (fake.origin / "model.safetensors").rename(fake.origin / "pytorch_model.bin")
    error = refusal("hf:owner/name")
    assert "has no model.safetensors; it has .bin" in error.message
    assert "save_pretrained" in error.hint
    (fake.origin / "config.json").unlink()
    (fake.origin / "pytorch_model.bin").rename(fake.origin / "model.gguf")
    assert "has no config.json; it has .gguf" in refusal("hf:owner/name").message
    assert fake.asked == ["info main", "info main"]  # and nothing was fetched


@pytest.mark.parametrize(
    ("failure", "message", "hint"),
    [
        (errors.RepositoryNotFoundError("404", response=response(404)), "no such model, or it is private", "name"),
        (errors.GatedRepoError("403", response=response(403)), "grant access", "hf auth login"),
        (errors.RevisionNotFoundError("404", response=response(404)), "no revision 'v2'", "branch"),
        (errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE is set", "unset it"),
        (ConnectionError("no route\nto host"), "ConnectionError: no route to host", "folder"),
        (OSError(28, "No space left on device"), "No space left", "folder"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_hub_that_gives_nothing(fake, failure, message, hint):
    fake.failure = failure
    error = refusal("hf:owner/name@v2")
    assert message in error.message
    assert "hf:owner/name@v2" in error.message
    assert "\n" not in error.message
    assert hint in error.hint


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    """The library's own calls, to a port where nobody listens."""
    for name, value in {
        "HF_HUB_CACHE": str(tmp_path),
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    start = time.monotonic()
    error = refusal("hf:owner/name")
    assert time.monotonic() - start < 5
    assert "a request to the hub failed (Connect" in error.message


@pytest.mark.parametrize("name", ["hf:", "hf:gpt2", "hf:a/b/c", "hf:a/b@", "hf:a b/c", "hf:owner/na..me", "hf:/x"])
def test_names_that_are_no_repository(name):
    error = refusal(name)
    assert repr(name) in error.message
    assert "hf:owner/name" in error.hint


# -- the command line -------------------------------------------------------------------------------------


@pytest.fixture
def call(monkeypatch, capsys, folder):
    """Run a command beside the folder of a model."""
    monkeypatch.chdir(folder.parent)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["atma-eval", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return int(caught.value.code or 0), *capsys.readouterr()

    return run


def rows_of(folder: str) -> list[dict]:
    return [json.loads(line) for line in (Path(folder) / "records.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("command", ["niah --trials 2 --docs 2", "ppl --docs 2"])
def test_evaluations_and_their_repetition(call, command, monkeypatch):
    arguments = [*command.split(), "--model", "tiny-llama", "--lengths", "64,128", "-o", "run"]
    code, _, error = call(*arguments[:-2], "--dry-run", "--window", "128")
    assert (code, "window 128 was asked for" in error) == (2, True)
    plan = json.loads(call(*arguments[:-2], "--dry-run", "--json")[1])
    (cell,) = plan["cells"]
    assert (cell["tokenizer"], cell["training_length"]) == ("tiny-llama", 512)
    code, out, _ = call(*arguments, "--json")
    assert code == 0
    rows = rows_of("run")
    assert len(rows) == json.loads(out)["num_rows"] == cell["num_samples"]
    assert {row["status"] for row in rows} == {"ok"}
    manifest = json.loads(Path("run/manifest.json").read_text())
    assert manifest["models"]["tiny-llama"]["architecture"] == "LlamaForCausalLM"
    assert manifest["invocations"][0]["packages"]["transformers"] == transformers.__version__
    with monkeypatch.context() as patch:  # nothing is computed or loaded anew
        patch.setattr(runner, "load_model", lambda *_: pytest.fail("it was loaded"))
        assert call(*arguments, "--json")[:2] == (0, out)
    assert rows_of("run") == rows
    kept = Path("run/records.jsonl").read_text().splitlines(keepends=True)
    Path("run/records.jsonl").write_text("".join(kept[:1]) + kept[1][:40])
    assert call(*arguments, "--json")[:2] == (0, out)
    strip = [{k: v for k, v in row.items() if k not in VOLATILE_FIELDS} for row in rows]
    again = [{k: v for k, v in row.items() if k not in VOLATILE_FIELDS} for row in rows_of("run")]
    assert sorted(again, key=lambda row: row["key"]) == sorted(strip, key=lambda row: row["key"])


def test_another_commit_does_not_fit_a_run(fake, call, monkeypatch):
    arguments = ["ppl", "--docs", "2", "--lengths", "64", "--model", "hf:owner/name", "-o", "run"]
    assert call(*arguments)[0] == 0
    assert {row["model"] for row in rows_of("run")} == {"hf:owner/name"}
    monkeypatch.setattr(f"{__name__}.COMMIT", COMMIT[::-1])
    shutil.rmtree(fake.cache)
    code, _, error = call(*arguments)
    assert code == 2
    assert "revision of model hf:owner/name" in error


def test_scores_of_a_file(call, folder):
    Path("text.txt").write_text("def spam(eggs):\n    return eggs\n" * 3)
    assert call("score", "--model", "tiny-llama", "--text", "text.txt", "--out", "x.npz", "--chunk", "5")[0] == 0
    result = np.load("x.npz")
    logits = full_logits(build(*FAMILIES["grouped heads"]), result["tokens"])[:-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.as_tensor(result["tokens"][1:]), reduction="none")
    np.testing.assert_allclose(result["nll"], expected, atol=2e-4)
    assert (result["argmax"] == logits.argmax(-1).numpy()).mean() > 0.97
    write_folder(folder.parent / "gpt2", "learned positions")
    Path("text.txt").write_text("x = 1\n" * 200)
    code, _, error = call("score", "--model", "gpt2", "--text", "text.txt", "--out", "x.npz")
    assert code == 2
    assert "gpt2 takes at most 128" in error
