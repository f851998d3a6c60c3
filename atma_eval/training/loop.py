"""The training loop: a recipe read strictly from YAML, AdamW, and checkpoints that resume bit for bit on the CPU."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from atma_eval.errors import UserError, did_you_mean
from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.spec import read_yaml
from atma_eval.training.data import KINDS, SHORTEST_WITH_RECORDS, Batch, Corpus, draw_batch

log = logging.getLogger(__name__)

CHECKPOINT = "last.pt"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of steps on sequences of one length; ``mixture`` gives the share of each of `data.KINDS`."""

    length: int
    tokens_per_step: int
    steps: int
    mixture: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a training run depends on, but for the text."""

    model: AtmaConfig
    stages: tuple[Stage, ...]
    seed: int
    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    decay_steps: int
    weight_decay: float
    clip_norm: float
    value_weight: float
    checkpoint_every: int = 200
    log_every: int = 20

    @property
    def num_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        return sum(stage.steps * stage.tokens_per_step for stage in self.stages)

    def stage_at(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError(step)

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, constant, and over the last ``decay_steps`` down to ``final_learning_rate`` in a line."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        left = min(1.0, (self.num_steps - step) / max(1, self.decay_steps))
        return self.learning_rate * left + self.final_learning_rate * (1 - left)


def _fields(cls: type, values: Any, source: str) -> dict[str, Any]:
    """``values`` as keyword arguments of a dataclass of numbers; whole numbers and floats are told apart."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    if not isinstance(values, dict):
        raise UserError(f"{source} is {values!r}", f"it takes the fields {', '.join(known)}")
    for name in values:
        if name not in known:
            raise UserError(f"{source}: unknown field {name!r}", did_you_mean(str(name), known))
    missing = [n for n, f in known.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{source} lacks {', '.join(missing)}")
    read = dict(values)
    for name, value in values.items():
        kind = known[name].type  # a string: annotations are not evaluated
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "int" and not (number and isinstance(value, int) and value >= 0):
            raise UserError(f"{source}: {name} is {value!r}", "allowed: a whole number, 0 or more")
        if kind == "float":
            if not (number and math.isfinite(value) and value >= 0):
                hint = "allowed: a number, 0 or more (YAML reads 3e-3 as a word; write 3.0e-3 or 0.003)"
                raise UserError(f"{source}: {name} is {value!r}", hint)
            read[name] = float(value)
    return read


def _stage(values: Any, source: str) -> Stage:
    stage = Stage(**_fields(Stage, values, source))
    if stage.length < 1 or stage.tokens_per_step % stage.length or not stage.tokens_per_step:
        raise UserError(
            f"{source}: tokens_per_step {stage.tokens_per_step} is not a multiple of length {stage.length}",
            "a step takes whole sequences",
        )
    if not isinstance(stage.mixture, dict) or not stage.mixture:
        raise UserError(f"{source}: mixture is {stage.mixture!r}", f"it gives shares of {', '.join(KINDS)}")
    for kind, share in stage.mixture.items():
        if kind not in KINDS:
            raise UserError(f"{source}: unknown kind of sequence {kind!r}", did_you_mean(str(kind), KINDS))
        if not isinstance(share, int | float) or isinstance(share, bool) or not share > 0:
            raise UserError(f"{source}: the share of {kind} is {share!r}", "allowed: a number above 0")
        if kind != "plain" and stage.length < SHORTEST_WITH_RECORDS:
            raise UserError(
                f"{source}: length {stage.length} is too short for {kind}",
                f"records need at least {SHORTEST_WITH_RECORDS}",
            )
    return stage


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; an unknown or missing field, or one of the wrong type, is an error.

    ``base`` names another recipe beside it, of which it changes fields, and those of ``model`` one by one.
    """
    values = read_yaml(path)
    base = values.pop("base", None)
    if base is not None:
        below = read_yaml(path.parent / str(base))
        own_model = values.get("model", {})
        if isinstance(own_model, dict) and isinstance(below.get("model"), dict):
            values["model"] = {**below["model"], **own_model}
        values = {**below, **values}
    return recipe_from_dict(values, str(path))


def recipe_from_dict(values: Any, source: str) -> Recipe:
    read = _fields(Recipe, values, source)
    if not isinstance(read["model"], dict):
        raise UserError(f"{source}: model is {read['model']!r}", "it takes the fields of a model's config.json")
    if not isinstance(read["stages"], list) or not read["stages"]:
        raise UserError(f"{source}: stages is {read['stages']!r}", "it takes a list of at least one stage")
    model = AtmaConfig.from_dict(read["model"], f"{source}, model")
    stages = tuple(_stage(stage, f"{source}, stage {i}") for i, stage in enumerate(read["stages"], start=1))
    longest = max(stage.length for stage in stages)
    if model.training_length not in (None, longest):
        raise UserError(
            f"{source}: training_length is {model.training_length}, and the longest stage has length {longest}",
            "they must agree, since extrapolation is counted from training_length",
        )
    for name in ("checkpoint_every", "log_every"):
        if read.get(name) == 0:
            raise UserError(f"{source}: {name} is 0", "allowed: a whole number of at least 1")
    return Recipe(**{**read, "model": model, "stages": stages})


def batch_loss(model: Atma, batch: Batch, value_weight: float) -> tuple[torch.Tensor, float, float]:
    """The weighted loss; the plain loss of all other targets; the share of value digits that are right (or NaN)."""
    logits = model.logits(model(batch.inputs))
    nll = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none").view_as(batch.targets)
    weights = batch.weights(value_weight)
    loss = (nll * weights).sum() / weights.sum()
    right = (logits.detach().argmax(-1) == batch.targets)[batch.values]
    return loss, nll.detach()[~batch.values].mean().item(), right.float().mean().item()


class Trainer:
    """Model, optimiser and step of one run, saved in and resumed from ``work``."""

    def __init__(self, recipe: Recipe, corpus: Corpus, work: Path):
        self.recipe, self.corpus, self.work = recipe, corpus, work
        self.model = Atma(recipe.model).init_weights(recipe.seed)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.step = 0
        self.seconds = 0.0
        self.final: dict[str, float] = {}  # means over the last logged steps

    @property
    def checkpoint(self) -> Path:
        return self.work / CHECKPOINT

    def save(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        held = {
            "recipe": dataclasses.asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "final": self.final,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(held, partial)
        os.replace(partial, self.checkpoint)  # a kill while writing leaves the previous checkpoint

    def resume(self) -> bool:
        """Continue from the checkpoint in ``work``, where there is one."""
        if not self.checkpoint.is_file():
            return False
        held = torch.load(self.checkpoint, weights_only=True)
        if held["recipe"] != dataclasses.asdict(self.recipe):
            changed = [k for k, v in dataclasses.asdict(self.recipe).items() if held["recipe"].get(k) != v]
            raise UserError(
                f"{self.checkpoint} was made by another recipe (it differs in {', '.join(changed) or 'its fields'})",
                "use another --work folder, or delete this one",
            )
        self.model.load_state_dict(held["model"])
        self.optimizer.load_state_dict(held["optimizer"])
        self.step, self.seconds, self.final = held["step"], held["seconds"], held["final"]
        return True

    def train_step(self) -> tuple[float, float, float]:
        """One update. A loss that is not finite stops the run before it touches the weights."""
        recipe, stage = self.recipe, self.recipe.stage_at(self.step)
        batch = draw_batch(
            self.corpus,
            stage.mixture,
            num_sequences=stage.tokens_per_step // stage.length,
            length=stage.length,
            seed=recipe.seed,
            step=self.step,
        )
        loss, text_loss, accuracy = batch_loss(self.model, batch, recipe.value_weight)
        if not math.isfinite(loss.item()):
            raise UserError(
                f"the loss is {loss.item()} at step {self.step}; the weights of the last checkpoint are kept",
                f"lower learning_rate, or look at {self.checkpoint}",
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(self.step)
        self.optimizer.step()
        self.step += 1
        return loss.item(), text_loss, accuracy

    def run(self, until: int | None = None, on_log: Callable[[str], None] = log.info) -> None:
        """Train up to step ``until`` (default: the recipe's end), saving as the recipe says and at the end."""
        end = self.recipe.num_steps if until is None else min(until, self.recipe.num_steps)
        recent: list[tuple[float, float, float]] = []
        tokens, began = 0, time.perf_counter()
        since = began
        while self.step < end:
            tokens += self.recipe.stage_at(self.step).tokens_per_step
            recent.append(self.train_step())
            if self.step % self.recipe.log_every == 0 or self.step == end:
                now = time.perf_counter()
                columns = [[x for x in column if not math.isnan(x)] for column in zip(*recent, strict=True)]
                means = [sum(c) / len(c) if c else math.nan for c in columns]
                self.final = dict(zip(("loss", "other", "values"), means, strict=True)) | {"steps": float(len(recent))}
                on_log(
                    f"step {self.step}/{self.recipe.num_steps}  length {self.recipe.stage_at(self.step - 1).length}  "
                    f"loss {means[0]:.4f}  other {means[1]:.4f}  values right {means[2]:.3f}  "
                    f"{tokens / (now - since):.0f} tokens/s"
                )
                recent, tokens, since = [], 0, now
            if self.step % self.recipe.checkpoint_every == 0 or self.step == end:
                self.seconds += time.perf_counter() - began
                began = time.perf_counter()
                self.save()
