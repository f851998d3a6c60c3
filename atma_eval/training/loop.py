"""The training loop: steps, microbatches, ranks, and checkpoints that resume bit for bit on the CPU."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from atma_eval.errors import UserError
from atma_eval.models.atma import Atma
from atma_eval.training import flops
from atma_eval.training.data import Batch, draw_batch
from atma_eval.training.objective import CastAtUse, Objective, random_inputs
from atma_eval.training.optim import make_optimizers
from atma_eval.training.recipe import Recipe, recipe_from_dict
from atma_eval.training.sources import Source

log = logging.getLogger(__name__)

CHECKPOINT = "last.pt"


class Step(NamedTuple):
    """Of one step: the loss that was minimised; plain nats of all targets but value digits; the share of value
    digits that were right; the distractor loss. NaN where there was nothing to measure."""

    loss: float
    other: float
    values: float
    distractor: float


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Means over the steps since the last report, and speed."""

    step: int
    num_steps: int
    length: int
    mean: Step
    tokens_per_s: float
    mfu: float | None  # null where the device is not in the table
    left_s: float

    def figures(self) -> str:
        """Loss, recall accuracy, speed: what a person watches."""
        parts = [f"loss {self.mean.loss:.4f}", f"other {self.mean.other:.4f}"]
        if not math.isnan(self.mean.values):
            parts.append(f"values right {self.mean.values:.3f}")
        if not math.isnan(self.mean.distractor):
            parts.append(f"distractor {self.mean.distractor:.4f}")
        parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:.1f} %")
        return "  ".join(parts)

    def line(self) -> str:
        minutes, seconds = divmod(round(self.left_s), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"
        return f"step {self.step}/{self.num_steps}  length {self.length}  {self.figures()}  {left}"


def _mean(steps: list[Step]) -> Step:
    columns = [[x for x in column if not math.isnan(x)] for column in zip(*steps, strict=True)]
    return Step(*(sum(c) / len(c) if c else math.nan for c in columns))


class Trainer:
    """Model, optimisers and step of one run, saved in and resumed from ``work``.

    Under an initialised `torch.distributed` each rank computes its share of a step's sequences; all hold the same
    weights, and rank 0 writes.

    Args:
        recipe: everything the run depends on.
        source: its text, opened by `sources.open_source`.
        work: folder of the resumable state.
        device: where the model is.
        dtype: type of the arithmetic; weights, gradients and optimiser state are fp32 whatever it is. fp64 casts
            all of them, for tests.
    """

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        work: Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        self.recipe, self.source, self.work, self.device = recipe, source, work, torch.device(device)
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for stage in recipe.stages:
            if stage.tokens_per_step // stage.length % self.world:
                raise UserError(
                    f"{stage.tokens_per_step // stage.length} sequences in a step do not share out among {self.world}",
                    "use a number of processes that divides tokens_per_step / length of every stage",
                )
        self.model = Atma(recipe.model).init_weights(recipe.seed).to(self.device)
        if dtype == torch.float64:
            self.model.double()
        objective: nn.Module = Objective(self.model, recipe.value_weight)
        if dtype in (torch.bfloat16, torch.float16):
            objective = CastAtUse(objective, dtype)  # type: ignore[arg-type]
        if self.world > 1:
            objective = DistributedDataParallel(objective, [self.device] if self.device.type == "cuda" else None)
        self.objective = objective
        self.optimizers = make_optimizers(self.model, recipe)
        self._heights = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self._data = source.describe()
        self.step = 0
        self.seconds = 0.0
        self.final: dict[str, float] = {}  # means over the last logged steps
        self.history: list[list[float]] = []  # step and means of each report

    @property
    def checkpoint(self) -> Path:
        return self.work / CHECKPOINT

    def save(self) -> None:
        if self.rank:
            return
        held = {
            "recipe": self.recipe.to_dict(),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self._data,
            "source": self.source.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "final": self.final,
            "history": self.history,
        }
        partial = self.checkpoint.with_suffix(".partial")
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            torch.save(held, partial)
            os.replace(partial, self.checkpoint)  # a kill while writing leaves the previous checkpoint
        except OSError as error:
            raise UserError(f"cannot write {self.checkpoint}: {error.strerror}") from None

    def resume(self) -> bool:
        """Continue from the checkpoint in ``work``, where there is one."""
        if not self.checkpoint.is_file():
            return False
        try:
            held = torch.load(self.checkpoint, weights_only=True, map_location=self.device)
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            first = str(error).partition("\n")[0]
            raise UserError(f"cannot read {self.checkpoint}: {first}", "use another --work folder") from None
        theirs = {**held["recipe"], "stages": list(held["recipe"]["stages"])}
        ours = self.recipe.to_dict()
        with contextlib.suppress(UserError):
            theirs = recipe_from_dict(theirs, str(self.checkpoint)).to_dict()  # fields it did not know yet: defaults
        if theirs != ours:
            changed = [name for name, value in ours.items() if theirs.get(name) != value]
            raise UserError(
                f"{self.checkpoint} was made by another recipe (it differs in {', '.join(changed) or 'its fields'})",
                "use another --work folder, or delete this one",
            )
        if held.get("data", self._data) != self._data:
            raise UserError(
                f"{self.checkpoint} was trained on other text: {held['data']}",
                f"now it is {self._data}; use another --work folder to train on that",
            )
        self.model.load_state_dict(held["model"])
        states = held.get("optimizers") or [held["optimizer"]]  # one, in checkpoints of version 0.1
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self.source.load_state_dict(held.get("source", {}))
        self.step, self.seconds, self.final = held["step"], held["seconds"], held["final"]
        self.history = held.get("history", [])
        return True

    def _draw(self) -> Batch:
        """All sequences of the step; every rank draws them all, for records are drawn in their order."""
        recipe, stage = self.recipe, self.recipe.stage_at(self.step)
        return draw_batch(
            self.source,
            stage.mixture,
            num_sequences=stage.tokens_per_step // stage.length,
            length=stage.length,
            seed=recipe.seed,
            step=self.step,
            position=recipe.tokens_before(self.step),
        )

    def _microbatches(self, num_sequences: int, length: int) -> list[range]:
        """This rank's share of the step, as the numbers of the sequences that go through the model at once."""
        own = range(self.rank, num_sequences, self.world)
        limit = self.recipe.microbatch_tokens
        size = min(len(own), limit // length) if limit else len(own)
        return [own[start : start + size] for start in range(0, len(own), size)]

    def train_step(self) -> Step:
        """One update. A loss or gradient that is not finite stops the run before it touches the weights."""
        recipe = self.recipe
        whole = self._draw()
        num_sequences, length = whole.inputs.shape
        parts = self._microbatches(num_sequences, length)
        total_weight = whole.weights(recipe.value_weight).sum().to(self.device)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        sums = torch.zeros(5, dtype=torch.float64, device=self.device)
        for i, numbers in enumerate(parts):
            part = whole.take(slice(numbers.start, numbers.stop, numbers.step)).to(self.device)
            random = None
            if recipe.num_random_keys:
                random = random_inputs(self.model, recipe.num_random_keys, recipe.seed, self.step, numbers, self.device)
            with self._synchronised(last=i == len(parts) - 1):
                out = self.objective(*part, random)
                loss = out.weighted / total_weight
                if random is not None:
                    loss = loss + recipe.distractor_weight * out.distractor / num_sequences
                (loss * self.world).backward()  # gradients are averaged over ranks
            sums += torch.stack([x.detach().double() for x in (loss, *out)])
        if self.world > 1:
            dist.all_reduce(sums)
        loss_value, _, other, num_right, distractor = sums.tolist()
        if not math.isfinite(loss_value):
            raise self._diverged("loss", loss_value)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm).item()
        if not math.isfinite(norm):
            raise self._diverged("gradient norm", norm)
        share = recipe.learning_rate_at(self.step) / recipe.learning_rate if recipe.learning_rate else 0.0
        for optimizer, heights in zip(self.optimizers, self._heights, strict=True):
            for group, height in zip(optimizer.param_groups, heights, strict=True):
                group["lr"] = height * share
            optimizer.step()
        self.step += 1
        num_values = int(whole.values.sum())
        return Step(
            loss_value,
            other / max(1, whole.values.numel() - num_values),
            num_right / num_values if num_values else math.nan,
            distractor / num_sequences if recipe.num_random_keys else math.nan,
        )

    def _diverged(self, what: str, value: float) -> UserError:
        return UserError(
            f"the {what} is {value} at step {self.step}; the weights of the last checkpoint are kept",
            f"lower learning_rate, or look at {self.checkpoint}",
        )

    def _synchronised(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        """Gradients travel between ranks once a step, with its last microbatch."""
        if isinstance(self.objective, DistributedDataParallel) and not last:
            return self.objective.no_sync()
        return contextlib.nullcontext()

    def run(
        self,
        until: int | None = None,
        on_log: Callable[[Logged], None] = lambda logged: log.info(logged.line()),
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Train up to step ``until`` (default: the recipe's end), saving as the recipe says and at the end.

        ``on_step`` is told the tokens of each step, ``on_log`` the means of every so many.
        """
        recipe = self.recipe
        end = recipe.num_steps if until is None else min(until, recipe.num_steps)
        config = recipe.model
        num_parameters = sum(p.numel() for p in self.model.parameters())
        peak = flops.peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        recent: list[Step] = []
        tokens, began = 0, time.perf_counter()
        since = began
        while self.step < end:
            stage = recipe.stage_at(self.step)
            tokens += stage.tokens_per_step
            recent.append(self.train_step())
            on_step(stage.tokens_per_step)
            if self.step % recipe.log_every == 0 or self.step == end:
                now = time.perf_counter()
                mean, speed = _mean(recent), tokens / (now - since)
                self.final = {k: v for k, v in mean._asdict().items() if k != "distractor" or recipe.num_random_keys}
                self.final["steps"] = float(len(recent))
                self.history.append([float(self.step), *mean])
                per_token = flops.flops_per_token(
                    num_parameters, config.num_hidden_layers, config.hidden_size, stage.length
                )
                logged = Logged(
                    step=self.step,
                    num_steps=recipe.num_steps,
                    length=stage.length,
                    mean=mean,
                    tokens_per_s=speed,
                    mfu=flops.mfu(speed, per_token, peak, self.world),
                    left_s=(recipe.tokens_before(end) - recipe.tokens_before(self.step)) / speed,
                )
                on_log(logged)
                recent, tokens, since = [], 0, now
            if self.step % recipe.checkpoint_every == 0 or self.step == end:
                self.seconds += time.perf_counter() - began
                began = time.perf_counter()
                self.save()
