"""Optimisers, microbatches, ranks, types and the distractor loss in the training loop; the canonical recipe."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from conftest import ROOT
from test_training import TINY, tiny

from atma_eval.errors import UserError
from atma_eval.models.atma import Atma
from atma_eval.text import Document
from atma_eval.training.flops import flops_per_token, mfu, mfu_formula, peak_flops
from atma_eval.training.loop import Trainer
from atma_eval.training.optim import make_optimizers
from atma_eval.training.recipe import find_recipe, read_recipe, recipe_from_dict
from atma_eval.training.sources import Corpus, open_source

TEXT = b"def spam(eggs):\n    return eggs + 1\n" * 16
DISTRACTOR = {"num_random_keys": 24, "distractor_weight": 0.5}


def corpus():
    return Corpus([Document("a", TEXT), Document("b", TEXT[::-1])])


def trained(work, steps, *, dtype=torch.float32, **changes):
    trainer = Trainer(tiny(**changes), corpus(), work, dtype=dtype)
    trainer.resume()
    trainer.run(steps)
    return trainer


def largest_difference(a, b):
    theirs = b.model.state_dict()
    return max((weight - theirs[name]).abs().max().item() for name, weight in a.model.state_dict().items())


# -- Muon ----------------------------------------------------------------------------------------------------------


def test_muon_takes_the_hidden_matrices_and_nothing_else():
    model = Atma(tiny().model)
    names = {id(p): name for name, p in model.named_parameters()}
    adamw, muon = make_optimizers(model, tiny(optimizer="muon"))
    hidden = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert not hidden & rest
    assert hidden | rest == set(names.values())
    assert {"blocks.0.attn.in_proj.weight", "blocks.2.attn.q.weight", "blocks.2.attn.mem.proj.weight"} <= hidden
    assert {"embed.weight", "proj.weight", "norm.weight", "blocks.2.attn.v_null", "blocks.0.attn.conv.weight"} <= rest
    assert all(dict(model.named_parameters())[name].dim() == 2 for name in hidden)
    decayed = {names[id(p)] for p in adamw.param_groups[0]["params"]}
    assert all(dict(model.named_parameters())[name].dim() > 1 for name in decayed)


def test_the_first_step_of_muon_is_orthogonal(tmp_path):
    rate = 0.02
    trainer = Trainer(tiny(optimizer="muon", warmup_steps=0, weight_decay=0.0), corpus(), tmp_path)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train_step()
    for name in ("blocks.0.attn.in_proj.weight", "blocks.2.attn.q.weight", "blocks.1.mlp.proj.weight"):
        after = trainer.model.get_parameter(name).detach()
        rows, columns = after.shape
        update = (before[name] - after) / (rate * max(1, rows / columns) ** 0.5)
        singular = torch.linalg.svdvals(update)
        assert singular.max() < 1.3, name
        assert singular.median() > 0.6, name  # five steps leave the values between about 0.7 and 1.2


def test_a_tiny_model_learns_with_muon_and_its_convolutions_live(tmp_path):
    start = Atma(tiny().model).init_weights(tiny().seed).state_dict()
    trainer = trained(tmp_path, 20, optimizer="muon", log_every=5)
    losses = [mean.loss for _, mean in trainer.history]
    assert losses[-1] < losses[0] - 1
    for name in ("blocks.0.attn.in_proj.weight", "blocks.0.attn.out_proj.weight", "blocks.0.attn.conv.weight"):
        assert start[name].abs().sum() > 0
        assert not torch.equal(trainer.model.state_dict()[name], start[name])


@pytest.mark.parametrize("changes", [{"optimizer": "muon", "microbatch_tokens": 100}, DISTRACTOR])
def test_a_resumed_run_is_bit_equal_with_every_option(tmp_path, changes):
    whole = trained(tmp_path / "whole", 9, **changes)
    trained(tmp_path / "cut", 4, **changes)
    assert largest_difference(trained(tmp_path / "cut", 9, **changes), whole) == 0


# -- microbatches, types, the distractor loss ----------------------------------------------------------------------


def test_microbatches_give_the_mean_of_the_whole_step(tmp_path):
    changes = {**DISTRACTOR, "dtype": torch.float64}
    whole = trained(tmp_path / "whole", 25, **changes)
    cut = trained(tmp_path / "cut", 25, microbatch_tokens=128, **changes)
    assert largest_difference(whole, cut) < 1e-10
    assert cut.history[-1][1] == pytest.approx(whole.history[-1][1], rel=1e-10)


def test_bf16_arithmetic_keeps_fp32_weights(tmp_path):
    wide, narrow = trained(tmp_path / "a", 20), trained(tmp_path / "b", 20, dtype=torch.bfloat16)
    assert {p.dtype for p in narrow.model.parameters()} == {torch.float32}
    (_, theirs), (_, ours) = wide.history[-1], narrow.history[-1]
    assert ours.loss == pytest.approx(theirs.loss, abs=0.1)
    assert ours.loss != theirs.loss


@pytest.mark.parametrize("core", ["polar", "nope", "rope"])
def test_the_distractor_loss_falls(tmp_path, core):
    model = {**yaml.safe_load(TINY)["model"], "attn_type": core}
    recipe = {"model": model, "num_random_keys": 24, "distractor_weight": 20.0, "log_every": 5}
    trainer = trained(tmp_path, 20, **recipe)
    losses = [mean.distractor for _, mean in trainer.history]
    assert losses[-1] < 0.9 * losses[0]
    plain = trained(tmp_path / "plain", 1, model=model, log_every=1)
    assert np.isnan(plain.history[-1][1].distractor)


# -- speed ---------------------------------------------------------------------------------------------------------


def test_flops_utilisation():
    assert flops_per_token(378_220_864, 16, 1024, 2048) == 6 * 378_220_864 + 12 * 16 * 1024 * 2048
    names = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA L40S": 362e12, "NVIDIA L4": 121e12, "Tesla T4": 65e12}
    names |= {"NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H200": 989e12, "NVIDIA A1000": None, "cpu": None}
    names |= {"NVIDIA H100 PCIe": None, "NVIDIA A100-PCIE-40GB": 312e12}
    names |= {"NVIDIA H100 NVL": None, "NVIDIA H200 NVL": None}
    assert {name: peak_flops(name) for name in names} == names
    assert mfu(1000.0, 10**12, 1e16, 2) == 0.05
    assert mfu(1000.0, 10**12, None) is None
    assert mfu_formula(989e12, 8).endswith("(8 x 989 TFLOP/s, dense 16-bit)")


# -- ranks ---------------------------------------------------------------------------------------------------------

IN_DOUBLE = "import sys; from atma_eval import spec; spec.DTYPES['fp64'] = 'float64'\n" + (
    "from atma_eval.training.__main__ import main; main(); import pathlib\n"
    "names = [(task / 'comm').read_text().strip() for task in pathlib.Path('/proc/self/task').glob('*')]\n"
    "left = [name for name in names if 'gloo' in name]\n"
    "import os; os.write(2, f'left: {left}\\n'.encode())\n"  # in one piece: two processes share the pipe
)


def test_two_processes_equal_one(tmp_path):
    """Through torchrun and gloo, in fp64 so that the tolerance can be tight: 1e-10 after 10 steps."""
    changes = {**DISTRACTOR, "microbatch_tokens": 96, "stages": tiny().to_dict()["stages"], "data": "text.txt"}
    changes["stages"][0]["steps"], changes["stages"][1]["steps"] = 6, 6
    (tmp_path / "text.txt").write_bytes(TEXT)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**yaml.safe_load(TINY), **changes}))
    (tmp_path / "in_double.py").write_text(IN_DOUBLE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "in_double.py"]
    command += ["tiny.yaml", "--device", "cpu", "--dtype", "fp64", "--stop-after", "10"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("stopped at step 10") == 1  # one rank speaks
    assert done.stderr.count("left: []") == 2  # a thread of the group that outlives it may kill the process at its end
    recipe = recipe_from_dict({**yaml.safe_load(TINY), **changes}, "tiny")
    one = Trainer(recipe, Corpus([Document("text.txt", TEXT)], name="text.txt"), tmp_path / "one", dtype=torch.float64)
    one.run(10)
    two = Trainer(recipe, one.source, tmp_path / "runs" / "tiny", dtype=torch.float64)
    assert two.resume()
    assert two.step == 10
    assert largest_difference(one, two) < 1e-10
    assert len(two.recent) == len(one.recent) == 10
    for theirs, ours in zip(two.recent, one.recent, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-10)


def test_several_processes_that_torchrun_did_not_start(tmp_path):
    environment = {**os.environ, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "atma_eval.training", "atma"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "WORLD_SIZE is 2, but RANK" in done.stderr
    assert "hint: start several processes by torchrun" in done.stderr


def test_ranks_must_share_out_the_sequences(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    with pytest.raises(UserError, match="4 sequences in a step do not share out among 3"):
        Trainer(tiny(), corpus(), tmp_path)


# -- the canonical recipe ------------------------------------------------------------------------------------------


def test_the_canonical_recipe_has_the_published_size():
    recipe = read_recipe(find_recipe("atma-378m-1b"))
    with torch.device("meta"):
        model = Atma(recipe.model)
    assert sum(p.numel() for p in model.parameters()) == 378_220_864
    (stage,) = recipe.stages
    assert (stage.tokens_per_step, stage.length, recipe.optimizer) == (524_288, 2048, "muon")
    assert abs(recipe.num_tokens - 1e9) < 0.01e9
    assert recipe.data["dataset"] == "HuggingFaceFW/fineweb-edu"


def write_shard(path, tokens, width=2):
    header = np.zeros(256, dtype="<i4")
    header[:4] = 20240520, 1, len(tokens), 0 if width == 2 else width
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype=f"<u{width}").tobytes())


def test_a_step_of_the_canonical_recipe_shrunk(tmp_path):
    values = read_recipe(find_recipe("atma-378m-1b")).to_dict()
    values["model"].update(num_hidden_layers=3, hidden_size=32, head_dim=8, training_length=64)
    values["stages"][0].update(length=64, tokens_per_step=256)
    values.update(microbatch_tokens=128, data=str(tmp_path / "fineweb_*.bin"))
    rng = np.random.default_rng(0)
    for i in range(2):
        write_shard(tmp_path / f"fineweb_{i}.bin", rng.integers(50257, size=400))
    recipe = recipe_from_dict(values, "shrunk")
    trainer = Trainer(recipe, open_source(recipe), tmp_path, dtype=torch.bfloat16)
    before = {name: w.clone() for name, w in trainer.model.state_dict().items()}
    step = trainer.train_step()
    assert step.loss == pytest.approx(np.log(50304), abs=1.5)
    assert np.isnan(step.recall)
    changed = [name for name, w in trainer.model.state_dict().items() if not torch.equal(w, before[name])]
    assert len(changed) == len(before)
