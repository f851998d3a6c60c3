"""The training loop on a toy, and what the bundled demonstration checkpoint can do."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from safetensors.torch import load_file

from atma_eval.errors import UserError
from atma_eval.kernels.polar import PolarParameters, polar_reference, polar_training
from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.text import Document, stdlib_held_out, stdlib_training
from atma_eval.tokenizer import ByteTokenizer
from atma_eval.training.card import LOSS_BYTES, Measured, Recall, measure_loss, measure_recall, model_card
from atma_eval.training.data import draw_batch
from atma_eval.training.loop import Trainer
from atma_eval.training.recipe import read_recipe, recipe_from_dict, recipe_of
from atma_eval.training.sources import Corpus
from atma_eval.training.synthetic import RECORD_BYTES, VALUE_DIGITS
from atma_eval.training.trigram import ByteTrigram

DEMO = ROOT / "models" / "atma"
DOCUMENT_START = ByteTokenizer.start_id
HAS_DEMO = (DEMO / "weights.safetensors").is_file()
needs_demo = pytest.mark.skipif(not HAS_DEMO, reason="models/atma is not in this checkout")

TINY = """
model: {vocab_size: 257, num_hidden_layers: 3, hidden_size: 16, head_dim: 4, attn_type: polar, attn_window: null,
        attn_kernel_size: 4, conv_kernel_size: 3, mem_enabled: true, mem_gamma_bias: 3.9, mem_beta_bias: 0.0}
seed: 3
learning_rate: 0.01
final_learning_rate: 0.001
warmup_steps: 3
decay_steps: 10
weight_decay: 0.01
clip_norm: 1.0
value_weight: 4.0
checkpoint_every: 5
stages:
  - {length: 64, tokens_per_step: 256, steps: 20, mixture: {records: 1.0}}
  - {length: 96, tokens_per_step: 192, steps: 10, mixture: {plain: 0.3, single: 0.3, several: 0.4}}
"""


def tiny(**changes):
    return recipe_from_dict({**yaml.safe_load(TINY), **changes}, "tiny.yaml")


@pytest.fixture(scope="module")
def corpus():
    text = b"def spam(eggs):\n    return eggs + 1\n"
    return Corpus([Document("a", text * 8), Document("b", b"x"), Document("c", text[::-1] * 8)])


def test_a_tiny_recipe_learns(tmp_path, corpus):
    trainer = Trainer(tiny(), corpus, tmp_path)
    first = trainer.train_step()[0]
    lines = []
    trainer.run(on_log=lambda logged: lines.append(logged.line()))
    assert trainer.final["loss"] < first - 1
    assert lines[-1].startswith("step 30/30  length 96  loss ")
    assert lines[-1].endswith(" tokens/s  0:00:00 left")
    assert [row[0] for row in trainer.history] == [20, 30]


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(tmp_path, corpus):
    whole = Trainer(tiny(), corpus, tmp_path / "whole")
    whole.run()
    Trainer(tiny(), corpus, tmp_path / "cut").run(until=13)
    rest = Trainer(tiny(), corpus, tmp_path / "cut")
    assert rest.resume()
    assert rest.step == 13
    rest.run()
    assert rest.step == whole.step == 30
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name]), name
    assert not list(tmp_path.glob("*/*.partial"))


def test_another_recipe_does_not_resume(tmp_path, corpus):
    Trainer(tiny(), corpus, tmp_path).run(until=1)
    with pytest.raises(UserError, match="differs in learning_rate"):
        Trainer(tiny(learning_rate=0.02), corpus, tmp_path).resume()


def test_other_text_or_a_damaged_file_does_not_resume(tmp_path, corpus):
    Trainer(tiny(), corpus, tmp_path).run(until=1)
    with pytest.raises(UserError, match="was trained on other text"):
        Trainer(tiny(), Corpus([Document("d", b"ham" * 99)]), tmp_path).resume()
    (tmp_path / "last.pt").write_bytes((tmp_path / "last.pt").read_bytes()[:999])
    with pytest.raises(UserError, match=r"cannot read .*last\.pt"):
        Trainer(tiny(), corpus, tmp_path).resume()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(tmp_path, corpus):
    trainer = Trainer(tiny(), corpus, tmp_path)
    trainer.run(until=5)
    with torch.no_grad():
        trainer.model.norm.weight[0] = torch.nan
    with pytest.raises(UserError, match="loss is nan at step 5"):
        trainer.run()
    kept = Trainer(tiny(), corpus, tmp_path)
    assert kept.resume()
    assert kept.step == 5
    assert all(weight.isfinite().all() for weight in kept.model.state_dict().values())


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path, corpus):
    trainer = Trainer(tiny(), corpus, tmp_path)
    trainer.run(until=5)
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(UserError, match=r"gradient norm is (inf|nan) at step 5"):
        trainer.run()
    assert all(weight.isfinite().all() for weight in trainer.model.state_dict().values())


def test_the_learning_rate_warms_up_and_decays():
    recipe = tiny()
    rates = [recipe.learning_rate_at(step) for step in range(recipe.num_steps)]
    assert rates[0] == pytest.approx(0.01 / 3)
    assert rates[2:21] == [0.01] * 19
    assert rates[-1] == pytest.approx(0.001 + 0.009 / 10)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert recipe.stage_at(19).length == 64
    assert recipe.stage_at(20).length == 96
    assert recipe.num_tokens == 20 * 256 + 10 * 192


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rte": 0.1}, ["learning_rte", "did you mean learning_rate"]),
        ({"seed": 1.5}, ["seed is 1.5", "whole number"]),
        ({"learning_rate": "1e-3"}, ["learning_rate is '1e-3'", "write 3.0e-3"]),
        ({"model": {"vocab_size": 257, "heads": 4}}, ["heads"]),
        ({"stages": []}, ["stages"]),
        ({"model": {**yaml.safe_load(TINY)["model"], "training_length": 128}}, ["training_length is 128", "length 96"]),
        ({"stages": [{"length": 64, "tokens_per_step": 100, "steps": 1, "mixture": {"plain": 1}}]}, ["not a multiple"]),
        (
            {"stages": [{"length": 64, "tokens_per_step": 64, "steps": 1, "mixture": {"recods": 1}}]},
            ["stage 1", "recods", "did you mean records"],
        ),
    ],
)
def test_recipes_are_read_strictly(changes, words):
    with pytest.raises(UserError) as error:
        tiny(**changes)
    assert all(word in str(error.value) for word in words)


def test_a_missing_field_is_named():
    values = yaml.safe_load(TINY)
    del values["clip_norm"]
    with pytest.raises(UserError, match="lacks clip_norm"):
        recipe_from_dict(values, "tiny.yaml")


@pytest.mark.parametrize("kind", ["records", "plain", "single", "several"])
def test_weights_sit_on_the_value_digits_of_queries_alone(kind, corpus):
    length = 200
    for step in range(20):
        batch = draw_batch(corpus, {kind: 1.0}, num_sequences=3, length=length, seed=1, step=step)
        assert batch.inputs.shape == batch.targets.shape == (3, length)
        assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
        weights = batch.weights(7.0)
        assert torch.equal(weights == 7.0, batch.values)
        assert set(weights.unique().tolist()) <= {1.0, 7.0}
        for inputs, targets, values in zip(batch.inputs, batch.targets, batch.values, strict=True):
            tokens = [*inputs.tolist(), targets[-1].item()]
            assert tokens[0] == DOCUMENT_START
            written = bytes(t if t != DOCUMENT_START else 0 for t in tokens)
            seen: set[bytes] = set()
            expected, asked = np.zeros(length, dtype=bool), 0
            for at in range(len(written)):
                segment = written[at : at + RECORD_BYTES]
                if segment[:1] == b"#" and segment[5:6] == b"=" and segment[6:11].isdigit() and len(segment) >= 11:
                    if segment[:11] in seen:
                        expected[at + 5 : at + 5 + VALUE_DIGITS] = True  # target t is token t + 1
                        asked += 1
                    seen.add(segment[:11])
            assert np.array_equal(values.numpy(), expected)
            assert len({s[:5] for s in seen}) == len(seen)
            assert {"plain": asked == 0, "single": asked == 1 == len(seen), "several": asked == len(seen) >= 2}.get(
                kind, asked >= len(seen) >= 1
            )


def test_batches_depend_on_seed_and_step_alone(corpus):
    def draw(seed, step):
        return draw_batch(corpus, {"several": 0.5, "plain": 0.5}, num_sequences=2, length=128, seed=seed, step=step)

    assert all(torch.equal(a, b) for a, b in zip(draw(1, 2), draw(1, 2), strict=True))
    assert not torch.equal(draw(1, 2).inputs, draw(1, 3).inputs)
    assert not torch.equal(draw(1, 2).inputs, draw(2, 2).inputs)


@pytest.mark.parametrize("window", [None, 3])
def test_the_training_path_of_polar_attention(window):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v = random(2, 8, 5, 4), random(2, 9, 2, 4), random(2, 9, 2, 4)
    parameters = random(8, 4), *(random(8) for _ in range(4))
    with torch.no_grad():
        truth = polar_reference(q, k, v, PolarParameters(*parameters), window=window)
    ours = polar_training(q, k, v, PolarParameters(*parameters), window=window)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, atol=1e-13, rtol=1e-13)

    def outputs(q, k, v, *parameters):
        return polar_training(q, k, v, PolarParameters(*parameters), window=window)

    assert torch.autograd.gradcheck(outputs, (q, k, v, *parameters))


def test_the_trigram_is_a_distribution_and_knows_its_text():
    text = b"the cat sat on the mat; the rat sat on the cat. " * 30
    trigram = ByteTrigram([Document(str(i), text) for i in range(25)])
    total = sum(np.exp(-trigram.nll(b"th" + bytes([c])))[0] for c in range(256))
    assert total == pytest.approx(1.0, abs=1e-9)
    assert trigram.nll(text).mean() < 0.5 < 4 < trigram.nll(bytes(range(128, 200))).mean()


def test_the_card_says_what_was_measured(tmp_path):
    recipe = tiny()
    recall = Recall(gap=4096, num_trials=100, num_exact=97, digit_accuracy=0.99)
    card = model_card(
        name="tiny",
        recipe=recipe,
        command="atma-eval train tiny.yaml --out tiny",
        model=Atma(recipe.model),
        data="`spam`",
        num_held_out=20,
        measured=Measured(recall=(recall,), loss=1.5, trigram_loss=2.0, loss_bytes=1000),
        final={"loss": 1.0, "other": 1.2, "values": 0.9, "steps": 10.0},
        seconds=61.0,
        machine="an abacus",
        commit="0123abc",
    )
    assert card.startswith("# tiny\n")
    assert "| 4,096 | 42.6667 | 100 | 0.970 | 0.915 to 0.990 | 0.990 |" in card
    assert "**1.5000 nats per byte** (2.1640 bits), below the 2.0000" in card
    assert "atma-eval train tiny.yaml --out tiny" in card
    assert "1 minutes on an abacus" in card
    assert "commit 0123abc" in card
    (tmp_path / "README.md").write_text(card)
    assert recipe_of(tmp_path) == recipe


@pytest.fixture(scope="module")
def demo():
    config = AtmaConfig.from_dict(json.loads((DEMO / "config.json").read_text()))
    model = Atma(config)
    model.load_state_dict(load_file(DEMO / "weights.safetensors"))
    return model


@needs_demo
def test_the_bundled_checkpoint_is_what_its_recipe_says(demo):
    recipe = read_recipe(ROOT / "configs" / "train" / "atma.yaml")
    assert dataclasses.asdict(demo.config) == dataclasses.asdict(recipe.model)
    assert demo.config.training_length == 2048
    assert demo.config.attn_type == "polar"
    assert demo.config.mem_enabled
    assert sum(f.stat().st_size for f in DEMO.iterdir()) <= 4 * 2**20
    inert = [n for n, w in demo.named_parameters() if n.endswith(("in_proj.weight", "out_proj.weight")) and not w.any()]
    assert not inert


@needs_demo
def test_the_bundled_checkpoint_recalls_over_its_training_length(demo):
    (recall,) = measure_recall(demo, stdlib_held_out(), {2048: 100}, seed=1234)
    assert recall.num_trials == 100
    assert recall.exact >= 0.97


@needs_demo
def test_the_bundled_checkpoint_beats_a_byte_trigram(demo):
    documents = stdlib_held_out()[:6]
    trigram = ByteTrigram(stdlib_training())
    theirs = np.concatenate([trigram.nll(d.data[:LOSS_BYTES]) for d in documents]).mean()
    assert measure_loss(demo, documents) < theirs


def test_a_recipe_may_change_another(tmp_path):
    (tmp_path / "base.yaml").write_text(TINY)
    (tmp_path / "own.yaml").write_text("base: base.yaml\nseed: 7\nmodel: {attn_type: nope, mem_enabled: false}\n")
    base, own = read_recipe(tmp_path / "base.yaml"), read_recipe(tmp_path / "own.yaml")
    assert (own.seed, own.model.attn_type, own.model.mem_enabled) == (7, "nope", False)
    assert dataclasses.replace(own, seed=base.seed, model=base.model) == base
    (tmp_path / "own2.yaml").write_text("base: own.yaml\nmodel: {attn_window: 8}\n")
    again = read_recipe(tmp_path / "own2.yaml")
    assert again == dataclasses.replace(own, model=dataclasses.replace(own.model, attn_window=8))
    (tmp_path / "own.yaml").write_text("base: own2.yaml\n")
    with pytest.raises(UserError, match="comes back to itself"):
        read_recipe(tmp_path / "own.yaml")
    (tmp_path / "own.yaml").write_text("base: absent.yaml\n")
    with pytest.raises(UserError, match=r"absent\.yaml"):
        read_recipe(tmp_path / "own.yaml")
