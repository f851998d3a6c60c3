"""The training loop on a toy, and what the bundled demonstration checkpoint can do."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from safetensors.torch import load_file

from atma_eval.bundled import bundled_models
from atma_eval.errors import ComputationError, UserError
from atma_eval.kernels.polar import (
    TRAINING_ROWS,
    TRAINING_ROWS_GPU,
    PolarParameters,
    _RowSums,
    polar_reference,
    polar_training,
)
from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.text import Document, stdlib_held_out, stdlib_training
from atma_eval.tokenizer import ByteTokenizer
from atma_eval.training.card import (
    LOSS_BYTES,
    Measured,
    Recall,
    loss_table,
    measure_loss,
    measure_recall,
    model_card,
)
from atma_eval.training.curves import read_recall
from atma_eval.training.data import draw_batch
from atma_eval.training.loop import Step, Trainer
from atma_eval.training.recipe import (
    OPTIMIZERS,
    STREAM_KEYS,
    Recipe,
    Stage,
    find_recipe,
    read_recipe,
    recipe_from_dict,
    recipe_of,
)
from atma_eval.training.sources import Corpus
from atma_eval.training.synthetic import KINDS, RECORD_BYTES, VALUE_DIGITS
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
    assert trainer.history[-1][1].loss < first - 1
    assert lines[-1].startswith("step 30/30  length 96  loss ")
    assert lines[-1].endswith(" tokens/s  0:00:00 left")
    assert [row[0] for row in trainer.history] == [20, 30]


@pytest.mark.parametrize("clip_norm", [0.0, 1e-9])
def test_a_clip_of_zero_clips_nothing(tmp_path, corpus, clip_norm):
    trainer = Trainer(tiny(clip_norm=clip_norm, optimizer="muon"), corpus, tmp_path)
    trainer.train_step()
    norms = torch.stack([p.grad.norm() for p in trainer.model.parameters()])
    assert (norms.norm() > 1e-3) == (clip_norm == 0)


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(tmp_path, corpus):
    whole = Trainer(tiny(), corpus, tmp_path / "whole")
    whole.run()
    Trainer(tiny(), corpus, tmp_path / "cut").run(until=13)
    rest = Trainer(tiny(), corpus, tmp_path / "cut")
    assert rest.resume()
    assert rest.step == 13
    rest.run()
    assert rest.step == whole.step == 30
    assert rest.history == whole.history
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, rest.model.state_dict()[name]), name
    assert not list(tmp_path.glob("*/*.partial"))


def test_another_recipe_or_arithmetic_does_not_resume(tmp_path, corpus):
    Trainer(tiny(), corpus, tmp_path).run(until=1)
    with pytest.raises(UserError, match="differs in learning_rate"):
        Trainer(tiny(learning_rate=0.02), corpus, tmp_path).resume()
    with pytest.raises(UserError, match=r"trained in float32, and this run is in bfloat16(.|\n)*--dtype float32"):
        Trainer(tiny(), corpus, tmp_path, dtype=torch.bfloat16).resume()


def test_what_bears_on_no_weight_may_change_in_the_middle_of_a_run(tmp_path, corpus):
    Trainer(tiny(), corpus, tmp_path).run(until=1)
    trainer = Trainer(tiny(microbatch_tokens=128, checkpoint_every=7, log_every=3), corpus, tmp_path)
    assert trainer.resume()
    trainer.run(until=4)
    assert [step for step, _ in trainer.history] == [3]


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
    with pytest.raises(ComputationError, match=r"loss is nan at step 5; .*last\.pt keeps step 5"):
        trainer.run()
    kept = Trainer(tiny(), corpus, tmp_path)
    assert kept.resume()
    assert kept.step == 5
    assert all(weight.isfinite().all() for weight in kept.model.state_dict().values())


def test_a_loss_that_is_not_finite_before_anything_was_saved(tmp_path, corpus):
    trainer = Trainer(tiny(), corpus, tmp_path)
    trainer.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ComputationError, match="loss is nan at step 0; nothing was saved yet"):
        trainer.run()


def test_memory_that_runs_out_is_an_error_with_a_hint(tmp_path, corpus, monkeypatch):
    trainer = Trainer(tiny(), corpus, tmp_path)

    def full():
        raise torch.OutOfMemoryError("tried to allocate 1 GiB\nand more")

    monkeypatch.setattr(trainer, "train_step", full)
    with pytest.raises(ComputationError, match=r"out of memory on cpu at step 0: tried(.|\n)*lower microbatch_tokens"):
        trainer.run()


def test_a_full_disk_is_an_error_and_leaves_the_checkpoint_before(tmp_path, corpus, monkeypatch):
    trainer = Trainer(tiny(), corpus, tmp_path)
    trainer.run(until=1)
    save = torch.save

    def cut_short(held, path):
        save(held, path)
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr(torch, "save", cut_short)
    with pytest.raises(UserError, match=r"cannot write .*last\.pt: PytorchStreamWriter(.|\n)*keeps step 1, and"):
        trainer.run(until=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "last.pt"]
    rest = Trainer(tiny(), corpus, tmp_path)
    assert rest.resume()
    assert rest.step == 1


def test_the_config_beside_the_checkpoint_is_never_cut_short(tmp_path, corpus, monkeypatch):
    trainer = Trainer(tiny(), corpus, tmp_path)
    trainer.run(until=1)
    whole = (tmp_path / "config.json").read_bytes()

    def cut_short(path, text):
        path.write_bytes(text[:9].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(UserError, match="No space left"):
        trainer.run(until=2)
    assert (tmp_path / "config.json").read_bytes() == whole


def test_a_file_of_somebody_elses_does_not_resume(tmp_path, corpus):
    torch.save({"model": {}}, tmp_path / "last.pt")
    with pytest.raises(UserError, match="no checkpoint of this version's training"):
        Trainer(tiny(), corpus, tmp_path).resume()


def test_a_gradient_that_is_not_finite_does_not_reach_the_weights(tmp_path, corpus):
    trainer = Trainer(tiny(), corpus, tmp_path)
    trainer.run(until=5)
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(UserError, match=r"gradient norm is (inf|nan) at step 5"):
        trainer.run()
    assert all(weight.isfinite().all() for weight in trainer.model.state_dict().values())


def test_the_learning_rate_warms_up_and_decays():
    recipe = tiny()
    recipe_of_three = tiny(stages=[{"length": 64, "tokens_per_step": 64, "steps": 3, "mixture": {"plain": 1}}])
    rates = [recipe.learning_rate_at(step) for step in range(recipe.num_steps)]
    assert rates[0] == pytest.approx(0.01 / 3)
    assert rates[2:21] == [0.01] * 19
    assert rates[-1] == pytest.approx(0.001 + 0.009 / 10)
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert max(recipe_of_three.learning_rate_at(s) for s in range(3)) < 0.01
    stages = [{**stage, "learning_rate_factor": 0.5} for stage in recipe.to_dict()["stages"][:1]]
    halved = tiny(stages=[*stages, *recipe.to_dict()["stages"][1:]])
    factors = [halved.learning_rate_at(step) / rate for step, rate in enumerate(rates)]
    assert factors == pytest.approx([0.5] * 20 + [1.0] * 10)
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
        ({"stages": [{"length": 64, "tokens_per_step": 64, "steps": 0, "mixture": {"plain": 1}}]}, ["steps is 0"]),
        (
            {"stages": [{"length": 64, "tokens_per_step": 64, "steps": 1, "mixture": {"plain": math.inf}}]},
            ["the share of plain is inf"],
        ),
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
        assert torch.equal(weights == 7.0, batch.is_value)
        assert set(weights.unique().tolist()) <= {1.0, 7.0}
        for inputs, targets, is_value in zip(*batch, strict=True):
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
            assert np.array_equal(is_value.numpy(), expected)
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


@pytest.mark.parametrize("device", ["cpu", "meta"])  # on any but the CPU the blocks are those of a GPU
@pytest.mark.parametrize("group", [1, 4])
def test_training_holds_no_square_of_weights(device, group):
    length = 2048
    q, k = torch.empty(1, length, group, 16, device=device), torch.empty(1, length, 16, device=device)
    sizes = [scores.numel() for *_, scores in _RowSums._blocks(q, k, None)]
    assert max(sizes) <= length * (TRAINING_ROWS if device == "cpu" else TRAINING_ROWS_GPU) < length * length * group


def test_the_trigram_is_a_distribution_and_knows_its_text():
    text = b"the cat sat on the mat; the rat sat on the cat. " * 30
    trigram = ByteTrigram([Document(str(i), text) for i in range(25)])
    alone = ByteTrigram([Document("0", text * 25)])
    for model in (trigram, alone):
        for context in (b"th", b"xh", b"tx", b"xy"):  # seen; of letters that were and were not
            total = sum(np.exp(-model.nll(context + bytes([c])))[0] for c in range(256))
            assert total == pytest.approx(1.0, abs=1e-9)
    assert alone.nll(text).mean() == pytest.approx(trigram.nll(text).mean(), abs=0.05)
    assert trigram.nll(text).mean() < 0.5 < 4 < trigram.nll(bytes(range(128, 200))).mean()


HISTORY = [(20, Step(1.5, 1.6, 0.5, math.nan)), (30, Step(1.0, 1.2, 0.9, math.nan))]


def a_card(recipe, **changes):
    measured = {"recall": (), "loss": 1.5, "trigram_loss": 2.0, "loss_bytes": 1000, "num_documents": 20}
    return model_card(
        name="tiny",
        recipe=recipe,
        command="atma-eval train tiny.yaml --out tiny",
        num_parameters=12345,
        data="`spam`",
        measured=Measured(**{**measured, **changes}),
        history=HISTORY,
        seconds=61.0,
        machine="an abacus",
        dtype="float32",
        commits=["0123abc", "4567def"],
    )


def test_the_card_says_what_was_measured(tmp_path):
    recipe = tiny()
    recall = Recall(gap=4096, num_trials=100, num_exact=97, digit_accuracy=0.99)
    card = a_card(recipe, recall=(recall,))
    assert card.startswith("# tiny\n")
    for words in (
        "12,345 parameters",
        "| 4,096 | 42.6667 | 100 | 0.970 | 0.915 to 0.990 | 0.990 |",
        "**1.5000 nats per byte** (2.1640 bits), below the 2.0000",
        "atma-eval train tiny.yaml --out tiny",
        "1 minutes on an abacus, in float32",
        "commit 0123abc, then 4567def.",
        "weighted loss 1.0000, other tokens 1.2000, digits right 0.9000",
        "Records are planted",
        "a toy",
    ):
        assert words in card
    (tmp_path / "README.md").write_text(card)
    assert recipe_of(tmp_path) == recipe


def test_the_card_of_a_model_that_saw_no_records_does_not_speak_of_them():
    plain = [{"length": 64, "tokens_per_step": 64, "steps": 1, "mixture": {"plain": 1}}]
    card = a_card(tiny(stages=plain, data="book.txt"))
    assert not [w for w in ("ecord", "ecall", "digits", "toy", "narrow") if w in card]
    assert "1,000 bytes of `stdlib`, none of its own text" in card
    assert "\n\n\n" not in card


def test_the_loss_by_step_is_a_table():
    lines = loss_table([*HISTORY, (40, Step(0.5, 0.6, math.nan, 1e-9))]).splitlines()
    assert lines[0] == "step,loss,text,recall,distractor"
    assert lines[1] == "20,1.5,1.6,0.5,"
    assert lines[3] == "40,0.5,0.6,,1e-09"


@pytest.fixture(scope="module")
def demo():
    config = AtmaConfig.from_dict(json.loads((DEMO / "config.json").read_text()))
    model = Atma(config)
    model.load_state_dict(load_file(DEMO / "weights.safetensors"))
    return model


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_checkpoint_is_what_its_recipe_says(name):
    folder = bundled_models()[name]
    recipe = read_recipe(find_recipe(name))
    assert recipe.differs_from(recipe_of(folder)) == []
    config = AtmaConfig.from_dict(json.loads((folder / "config.json").read_text()))
    assert dataclasses.asdict(config) == dataclasses.asdict(recipe.model)
    assert sum(f.stat().st_size for f in folder.iterdir()) < 2 * 10**6
    steps, recall = read_recall(folder)
    assert steps[-1] == recipe.num_steps
    assert len(recall) == recipe.num_steps // recipe.log_every
    weights = load_file(folder / "weights.safetensors")
    inert = [n for n, w in weights.items() if n.endswith(("in_proj.weight", "out_proj.weight")) and not w.any()]
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
    (tmp_path / "own.yaml").write_text("base: sofmax\n")
    with pytest.raises(UserError, match=r"own\.yaml: no base 'sofmax'(.|\n)*did you mean softmax"):
        read_recipe(tmp_path / "own.yaml")
    (tmp_path / "base.yaml").write_text(TINY + "sed: 4\n")
    (tmp_path / "own.yaml").write_text("base: base.yaml\nseed: 7\n")
    with pytest.raises(UserError, match=r"base\.yaml: unknown field 'sed'"):
        read_recipe(tmp_path / "own.yaml")


@pytest.mark.parametrize("base", ["swa", "swa.yaml"])
def test_a_bundled_recipe_may_be_the_base(tmp_path, base):
    stages = "stages: [{length: 64, tokens_per_step: 64, steps: 1, mixture: {plain: 1}}]"
    (tmp_path / "own.yaml").write_text(f"base: {base}\n{stages}\n")
    own, theirs = read_recipe(tmp_path / "own.yaml"), read_recipe(ROOT / "configs" / "train" / "swa.yaml")
    assert (own.training_length, theirs.training_length) == (64, 2048)
    assert own.model == dataclasses.replace(theirs.model, training_length=64)
    (tmp_path / "swa.yaml").write_text(TINY)
    (tmp_path / "own.yaml").write_text("base: swa.yaml\n")
    assert read_recipe(tmp_path / "own.yaml").model.attn_type == "polar"  # the one beside it comes first


def test_every_field_of_a_recipe_is_explained():
    words = (ROOT / "configs" / "train" / "README.md").read_text()
    rows = {line.split("`")[1] for line in words.splitlines() if line.startswith("| `")}
    assert rows == {f.name for f in dataclasses.fields(Recipe)} | {"mixture"}
    stage = {f.name for f in dataclasses.fields(Stage)}
    assert all(f"`{name}`" in words for name in (*stage, *KINDS, *STREAM_KEYS, *OPTIMIZERS))


def test_what_a_recipe_leaves_open_is_filled_in():
    made = tiny()
    assert (made.model.training_length, made.model.tokenizer) == (96, "byte")
    assert recipe_from_dict(made.to_dict(), "again") == made
