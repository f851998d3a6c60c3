"""``atma-eval train`` from the outside: folders, resumption, what is refused, and what a person sees."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from safetensors.torch import load_file
from test_training import TINY
from test_training_options import write_shard
from typer.testing import CliRunner

from atma_eval import cli
from atma_eval.checkpoint import find_model, load_model
from atma_eval.errors import UserError
from atma_eval.models.atma import FP32_PARAMETERS, Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.spec import ModelSpec
from atma_eval.training import curves
from atma_eval.training.loop import Logged, Step, Trainer
from atma_eval.training.recipe import bundled_recipes, find_recipe, read_recipe, recipe_of
from atma_eval.training.run import TrainSpec, train


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("atma_eval.training.card.LOSS_BYTES", 300)
    (tmp_path / "text.txt").write_text("spam and eggs and ham\n" * 60)
    small = {**yaml.safe_load(TINY), "data": "text.txt", "log_every": 5}
    small["stages"] = [{"length": 64, "tokens_per_step": 128, "steps": 10, "mixture": {"records": 1, "single": 1}}]
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small))
    (tmp_path / "other.yaml").write_text("base: small.yaml\nseed: 4\n")
    return tmp_path


def call(*arguments):
    return CliRunner().invoke(cli.app, ["train", *arguments])


def quick(recipe="small.yaml", **options):
    return train(TrainSpec(recipe=recipe, trials=2, long_trials=0, quiet=True, **options))


def test_a_recipe_becomes_a_checkpoint_folder(folder):
    assert str(quick()) == "models/small"
    out = folder / "models/small"
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "loss.csv",
        "loss.png",
        "weights.safetensors",
    ]
    model = Atma(AtmaConfig.from_dict(json.loads((out / "config.json").read_text())))
    model.load_state_dict(load_file(out / "weights.safetensors"))
    kept = torch.load(folder / "runs/small/last.pt")
    assert all(torch.equal(w, kept["model"][name]) for name, w in model.state_dict().items())
    card = (out / "README.md").read_text()
    for words in (
        "atma-eval train small.yaml",
        "![loss by step](loss.png)",
        "seed 3",
        "`text.txt`, 1 documents, 1,320",
    ):
        assert words in card
    assert recipe_of(out) == read_recipe(folder / "small.yaml")
    before = (out / "weights.safetensors").read_bytes()
    quick()  # finished: measures and writes again
    assert (out / "weights.safetensors").read_bytes() == before


def test_the_command_on_the_card_can_be_typed(folder):
    (folder / "of two words.yaml").write_text("base: small.yaml\n")
    options = {"device": "cpu", "dtype": "fp32", "threads": 2}
    card = (quick("of two words.yaml", out=folder / "a b", **options) / "README.md").read_text()
    command = f"atma-eval train 'of two words.yaml' --out '{folder}/a b' --device cpu --dtype fp32 --threads 2"
    assert f"    {command}\n" in card


def test_recall_by_step_of_several_trainings(folder, monkeypatch, capsys):
    out = quick()
    steps, recall = curves.read_recall(out)
    assert steps == [5, 10]
    assert all(0 <= share <= 1 for share in recall)
    (folder / "small-long").mkdir()
    (folder / "small-long" / "loss.csv").write_text(
        "step,loss,text,recall,distractor\n5,1,1,0.5,\n10,1,1,,\n15,1,1,0.75,\n"
    )
    assert curves.read_recall(folder / "small-long") == ([5, 15], [0.5, 0.75])
    for suffix in (".png", ".svg"):
        monkeypatch.setattr(sys, "argv", ["curves", str(out), "small-long", "--out", f"pictures/recall{suffix}"])
        curves.main()
    assert (folder / "pictures/recall.png").read_bytes().startswith(b"\x89PNG")
    assert "small-long" in (folder / "pictures/recall.svg").read_text()  # in a comment beside the drawn letters


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (None, "cannot read empty/loss.csv"),
        ("step,loss\n1,2\n", "no table of losses by step"),
        ("step,recall\n1,half\n", "no table of losses by step"),
        ("step,recall\n1,\n", "has no recall in it"),
    ],
)
def test_a_folder_without_recall_by_step(folder, table, words):
    (folder / "empty").mkdir()
    if table is not None:
        (folder / "empty" / "loss.csv").write_text(table)
    with pytest.raises(UserError, match=words):
        curves.read_recall(Path("empty"))


def test_the_card_holds_the_whole_recipe_of_one_that_changes_another(folder):
    out = folder / quick("other.yaml")
    text = (out / "README.md").read_text()
    assert "base:" not in text
    assert "hidden_size: 16" in text
    assert recipe_of(out) == read_recipe(folder / "other.yaml")


def test_weights_may_be_written_in_half_the_bytes(folder):
    wide, narrow = quick(out=folder / "wide"), quick(out=folder / "narrow", save_dtype="bf16")
    wide_weights, weights = (load_file(d / "weights.safetensors") for d in (wide, narrow))
    for name, weight in weights.items():
        island = name.rsplit(".", 1)[-1] in FP32_PARAMETERS
        assert weight.dtype == (torch.float32 if island else torch.bfloat16), name
        assert torch.equal(weight, wide_weights[name].to(weight.dtype))
    assert "--save-dtype bf16" in (narrow / "README.md").read_text()
    assert load_model(find_model(ModelSpec(name=str(narrow))), "train").model.config.hidden_size == 16


def test_tokens_that_are_no_bytes(folder):
    """Nothing is asked of such a model at the end, and its card says less."""
    write_shard(folder / "s_0.bin", np.arange(900) % 200)
    own = {"base": "small.yaml", "data": "s_*.bin", "model": {"vocab_size": 300, "tokenizer": "gpt2"}}
    own["stages"] = [{"length": 32, "tokens_per_step": 64, "steps": 10, "mixture": {"plain": 1}}]
    (folder / "shards.yaml").write_text(yaml.safe_dump(own))
    card = (quick("shards.yaml") / "README.md").read_text()
    assert "1 token shards, `s_0.bin` to `s_0.bin`, 900 tokens; sha256" in card
    assert "Tokens: gpt2, vocabulary 300." in card
    assert "recall" not in card
    assert "\n\n\n" not in card
    assert recipe_of(folder / "models/shards") == read_recipe(folder / "shards.yaml")


def test_a_run_cut_in_two_is_the_same_run(folder):
    result = call("small.yaml", "--stop-after", "6")
    assert result.exit_code == 0, result.output
    assert "step 5/10" in result.output
    assert "stopped at step 6" in result.output
    assert not (folder / "models").exists()
    quick()
    quick(work=folder / "whole", out=folder / "whole-out")
    pieces, whole = (load_file(d / "weights.safetensors") for d in (folder / "models/small", folder / "whole-out"))
    assert all(torch.equal(w, pieces[name]) for name, w in whole.items())


def test_the_card_names_the_code_that_took_the_steps(folder, monkeypatch):
    """Not the one that the checkout has moved on to when the card is written, or written again."""
    commits = iter(["aaa", "bbb-dirty", "ccc"])
    monkeypatch.setattr("atma_eval.records.git_commit", lambda: next(commits))
    quick(stop_after=6)
    card = (quick() / "README.md").read_text()
    assert "* Code: commit aaa, then bbb-dirty.\n" in card
    assert "trials share 2 documents" in card
    assert (quick() / "README.md").read_text() == card


def test_control_c_keeps_the_checkpoint(folder, monkeypatch):
    step = Trainer.train_step

    def interrupted(self):
        if self.step == 7:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    result = call("small.yaml")
    assert result.exit_code == 130
    assert "interrupted at step 7; runs/small/last.pt keeps step 5, and the same command goes on" in result.output
    assert torch.load(folder / "runs/small/last.pt")["step"] == 5
    model = load_model(find_model(ModelSpec(name="runs/small")), "train").model  # a run that is under way
    assert model.config.hidden_size == 16


def test_control_c_before_a_checkpoint_says_so(folder, monkeypatch):
    monkeypatch.setattr(Trainer, "train_step", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    result = call("small.yaml")
    assert result.exit_code == 130
    assert "interrupted at step 0; no checkpoint was written yet" in result.output
    assert not (folder / "runs").exists()


def test_a_second_run_in_the_same_work_folder_is_refused(folder, monkeypatch):
    inside = []

    def nested(self, *arguments, **options):
        with pytest.raises(UserError, match="another training run is writing to runs/small"):
            quick()
        inside.append(self.step)

    monkeypatch.setattr(Trainer, "run", nested)
    assert quick(stop_after=3) is None
    assert inside == [0]


def test_a_folder_that_was_cut_short_is_written_again(folder, monkeypatch):
    write = Path.write_bytes

    def full(self, content):
        if self.name.startswith("weights"):
            raise OSError(28, "No space left on device")
        return write(self, content)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device"):
        quick()
    assert not (folder / "models/small/weights.safetensors").exists()
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr("atma_eval.training.card.LOSS_BYTES", 300)
    quick()
    assert (folder / "models/small/weights.safetensors").exists()


@pytest.mark.parametrize(
    "start", [["-c", "from atma_eval.cli import main; main()", "train"], ["-m", "atma_eval.training"]]
)
def test_a_loss_that_is_not_finite_ends_with_one_whatever_started_it(folder, start):
    (folder / "wild.yaml").write_text("base: small.yaml\nlearning_rate: 1.0e+30\nwarmup_steps: 0\n")
    done = subprocess.run(
        [sys.executable, *start, "wild.yaml"],
        cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "error: the loss is nan at step 1; nothing was saved yet" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_recipes_folder_is_refused_before_training(folder):
    quick()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for out, words in (("models/small", "another recipe's checkpoint"), (".", "other files"), ("text.txt", "a file")):
        with pytest.raises(UserError, match=words):
            quick("other.yaml", out=folder / out)
    with pytest.raises(UserError, match="made by another recipe"):
        quick("other.yaml", work=folder / "runs/small")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["swaa"], ["no recipe 'swaa'", "did you mean swa"]),
        (["small.yaml", "--stop-after", "0"], ["--stop-after is 0"]),
        (["small.yaml", "--threads", "0"], ["--threads is 0"]),
        (["small.yaml", "--trials", "-1"], ["--trials is -1"]),
        (["small.yaml", "--out", "text.txt/x"], ["text.txt/x cannot be a folder", "text.txt is a file"]),
        (["small.yaml", "--work", "text.txt"], ["text.txt cannot be a folder"]),
        (["small.yaml", "--device", "gpu"], ["unknown device 'gpu'"]),
        (["small.yaml", "--dtype", "bf8"], ["unknown dtype 'bf8'"]),
        (["small.yaml", "--save-dtype", "fp16"], ["--save-dtype is fp16", "allowed: fp32, bf16"]),
        (["small.yaml", "--dtype", "fp16"], ["fp16: its gradients underflow"]),
        (["typo.yaml"], ["typo.yaml: unknown field 'sed'", "did you mean seed"]),
        (["short.yaml"], ["short.txt has 4 tokens, too short"]),
    ],
)
def test_bad_requests_load_no_torch(folder, arguments, words):
    (folder / "typo.yaml").write_text("base: small.yaml\nsed: 4\n")
    (folder / "short.yaml").write_text("base: small.yaml\ndata: short.txt\n")
    (folder / "short.txt").write_text("ham")
    code = "import sys; from atma_eval.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *arguments],
        cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == "False\n"
    for word in words:
        assert word in " ".join(done.stderr.split())


def test_every_bundled_recipe_reads():
    assert {"atma", "atma-378m-1b"} <= set(bundled_recipes())
    for name in bundled_recipes():
        recipe = read_recipe(find_recipe(name))
        assert recipe.model.training_length == recipe.training_length


def test_a_terminal_gets_a_bar(folder, monkeypatch):
    from rich.console import Console

    from atma_eval.training import progress

    consoles = []

    def terminal(**options):
        consoles.append(Console(force_terminal=True, width=120, record=True, **{**options, "quiet": False}))
        return consoles[-1]

    monkeypatch.setattr(progress, "plain_console", terminal)
    train(TrainSpec(recipe="small.yaml", stop_after=5))
    assert "stopped at step 5" in consoles[-1].export_text()
    with progress.TrainingProgress(1000, 100) as shown:
        shown.tokens(300)
        mean = Step(loss=1.5, text=1.25, recall=0.75, distractor=float("nan"))
        speed = {"tokens_per_s": 1234.0, "mfu": 0.425, "left_s": 3700.0}
        shown.report(Logged(step=4, num_steps=9, length=64, mean=mean, **speed))
        shown._bar.refresh()
        text = consoles[-1].export_text()
    assert " 40 %" in text
    figures = "loss 1.5000  text 1.2500  recall 0.750  1,234 tokens/s  MFU 42.5 %  1:01:40 left"
    assert f"step 4/9  length 64  {figures}" in text


def test_every_bundled_recipe_of_the_study_differs_in_its_model_alone():
    """Baselines are comparable because text, order, steps and optimiser are those of atma."""
    base = read_recipe(find_recipe("atma"))
    cells = "softmax softmax-rope swa delta softmax+memory swa+memory polar atma+window atma+distractor".split()
    cells += ["delta-long", "softmax-rope-long", "swa-long", "atma+window-long"]
    cells += ["atma-s1", "softmax+memory-s1", "polar-s1", "delta-s1"]
    for name in cells:
        recipe = read_recipe(find_recipe(name))
        own = {"model": recipe.model}
        if name == "atma+distractor":
            own |= {"num_random_keys": recipe.num_random_keys, "distractor_weight": recipe.distractor_weight}
        if name.endswith("-long"):
            short = read_recipe(find_recipe(name.removesuffix("-long")))
            stage = 0 if name == "delta-long" else 2
            assert recipe.model == short.model
            stages = list(base.stages)
            stages[stage] = dataclasses.replace(stages[stage], steps=3 * stages[stage].steps)
            own["stages"] = tuple(stages)
        if name.endswith("-s1"):
            assert recipe.model == read_recipe(find_recipe(name.removesuffix("-s1"))).model
            own["seed"] = 2
        assert recipe == dataclasses.replace(base, **own), name
        same = {"attn_type": base.model.attn_type, "mem_enabled": True, "attn_window": None}
        assert dataclasses.replace(recipe.model, **same) == base.model, name
