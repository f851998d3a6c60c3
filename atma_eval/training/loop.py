"""The training loop: steps, microbatches, ranks, and checkpoints that resume bit for bit on the CPU."""

from __future__ import annotations

import contextlib
import json
import logging
import math
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

from atma_eval.errors import ComputationError, UserError
from atma_eval.files import replacing
from atma_eval.models.atma import Atma
from atma_eval.training import flops
from atma_eval.training.data import Batch, draw_batch
from atma_eval.training.objective import CastAtUse, Objective, random_inputs
from atma_eval.training.optim import make_optimizers
from atma_eval.training.recipe import HOUSEKEEPING, Recipe, recipe_from_dict
from atma_eval.training.sources import Source
from atma_eval.weights import first_line

log = logging.getLogger(__name__)

CHECKPOINT = "last.pt"
HELD = {"recipe", "model", "optimizer_states", "data", "source", "dtype", "step", "seconds", "recent", "history"}
OTHER_WORK = "give another --work folder, or delete this one"


class Step(NamedTuple):
    """Of one step; NaN where there was nothing to measure."""

    loss: float  # what was minimised
    text: float  # plain nats of all targets but the value digits of queries
    recall: float  # share of those digits that were right
    distractor: float


@dataclass(frozen=True, kw_only=True)
class Logged:
    """Means over the steps since the last report, and speed."""

    step: int
    num_steps: int
    length: int
    mean: Step
    tokens_per_s: float
    mfu: float | None  # None where the device is not in the table
    left_s: float

    def figures(self) -> str:
        """Loss, recall accuracy, speed: what a person watches."""
        parts = [f"loss {self.mean.loss:.4f}", f"text {self.mean.text:.4f}"]
        if not math.isnan(self.mean.recall):
            parts.append(f"recall {self.mean.recall:.3f}")
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
        dtype: type of the arithmetic, fp32 or bf16; weights, gradients and optimiser state are fp32 whatever it is.
            fp64 casts all of them, for tests.
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
        self.dtype = str(dtype).removeprefix("torch.")
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
        if dtype == torch.bfloat16:
            objective = CastAtUse(objective, dtype)  # type: ignore[arg-type]
        if self.world > 1:
            objective = DistributedDataParallel(objective, [self.device] if self.device.type == "cuda" else None)
        self.objective = objective
        self.optimizers = make_optimizers(self.model, recipe)
        self._heights = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        self.data = source.describe()  # once: it hashes the text
        self.step = 0
        self.seconds = 0.0
        self.commits: list[str] = []  # of the code that took the steps
        self.saved_step: int | None = None  # of the checkpoint on disk
        self.recent: list[Step] = []  # since the last report
        self.history: list[tuple[int, Step]] = []  # step and means of each report

    @property
    def checkpoint(self) -> Path:
        return self.work / CHECKPOINT

    def save(self) -> None:
        if self.rank:
            return
        held = {
            "recipe": self.recipe.to_dict(),
            "model": self.model.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in self.optimizers],
            "data": self.data,
            "source": self.source.state_dict(),
            "dtype": self.dtype,
            "step": self.step,
            "seconds": self.seconds,
            "commits": self.commits,
            "recent": [tuple(step) for step in self.recent],
            "history": [(step, *mean) for step, mean in self.history],
        }
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            config = json.dumps(self.recipe.model.to_dict(), indent=2)
            with replacing(self.work / "config.json") as partial:  # with it, the folder is one that --model takes
                partial.write_text(config + "\n")
            with replacing(self.checkpoint) as partial:
                torch.save(held, partial)
            self.saved_step = self.step
        except (OSError, RuntimeError) as error:  # torch's writer raises the latter on a full disk
            why = getattr(error, "strerror", None) or first_line(error)
            raise UserError(f"cannot write {self.checkpoint}: {why}", self.kept()) from None

    def resume(self) -> bool:
        """Continue from the checkpoint in ``work``, where there is one."""
        if not self.checkpoint.is_file():
            return False
        try:
            held = torch.load(self.checkpoint, weights_only=True, map_location=self.device)
        except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
            raise UserError(f"cannot read {self.checkpoint}: {first_line(error)}", OTHER_WORK) from None
        if not isinstance(held, dict) or not held.keys() >= HELD:
            raise UserError(f"{self.checkpoint} is no checkpoint of this version's training", OTHER_WORK)
        theirs = {**held["recipe"], "stages": list(held["recipe"]["stages"])}
        changed = self.recipe.differs_from(recipe_from_dict(theirs, str(self.checkpoint)))
        if changed:
            raise UserError(
                f"{self.checkpoint} was made by another recipe (it differs in {', '.join(changed)})",
                f"{OTHER_WORK}; of a run that is under way only {', '.join(HOUSEKEEPING)} may change",
            )
        if held["dtype"] != self.dtype:
            raise UserError(
                f"{self.checkpoint} was trained in {held['dtype']}, and this run is in {self.dtype}",
                f"give --dtype {held['dtype']}, or another --work folder",
            )
        self.source.load_state_dict(held["source"])
        self.data = self.source.describe()  # a stream goes on at the commit it began with
        if held["data"] != self.data:
            raise UserError(
                f"{self.checkpoint} was trained on other text: {held['data']}",
                f"now it is {self.data}; use another --work folder to train on that",
            )
        self.model.load_state_dict(held["model"])
        for optimizer, state in zip(self.optimizers, held["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.seconds = held["step"], held["seconds"]
        self.commits = held.get("commits", [])  # checkpoints of earlier versions have none
        self.saved_step = self.step
        self.recent = [Step(*step) for step in held["recent"]]
        self.history = [(step, Step(*mean)) for step, *mean in held["history"]]
        return True

    def kept(self) -> str:
        """What an ending that was not wished for leaves behind."""
        if self.saved_step is None:
            return "no checkpoint was written yet"
        return f"{self.checkpoint} keeps step {self.saved_step:,}, and the same command goes on from it"

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
        loss_value, _, text, num_right, distractor = sums.tolist()
        if not math.isfinite(loss_value):
            raise self._diverged("loss", loss_value)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip_norm or math.inf).item()
        if not math.isfinite(norm):
            raise self._diverged("gradient norm", norm)
        share = recipe.learning_rate_at(self.step) / recipe.learning_rate
        for optimizer, heights in zip(self.optimizers, self._heights, strict=True):
            for group, height in zip(optimizer.param_groups, heights, strict=True):
                group["lr"] = height * share
            optimizer.step()
        self.step += 1
        num_digits = int(whole.is_value.sum())
        return Step(
            loss_value,
            text / max(1, whole.is_value.numel() - num_digits),
            num_right / num_digits if num_digits else math.nan,
            distractor / num_sequences if recipe.num_random_keys else math.nan,
        )

    def _diverged(self, what: str, value: float) -> ComputationError:
        kept = (
            f"{self.checkpoint} keeps step {self.saved_step}"
            if self.saved_step is not None
            else "nothing was saved yet"
        )
        return ComputationError(
            f"the {what} is {value} at step {self.step}; {kept}",
            "the same command would meet it again: lower learning_rate in the recipe and give another --work folder",
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
        tokens = 0
        since = began = time.perf_counter()
        while self.step < end:
            stage = recipe.stage_at(self.step)
            tokens += stage.tokens_per_step
            self.recent.append(self._step_or_say())
            on_step(stage.tokens_per_step)
            if self.step % recipe.log_every == 0 or self.step == recipe.num_steps:
                mean, speed = _mean(self.recent), tokens / (time.perf_counter() - since)
                self.history.append((self.step, mean))
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
                self.recent, tokens, since = [], 0, time.perf_counter()
            if self.step % recipe.checkpoint_every == 0 or self.step == end:
                now = time.perf_counter()
                self.seconds += now - began
                self.save()
                began = time.perf_counter()
                since += began - now  # the speed that is reported is that of training

    def _step_or_say(self) -> Step:
        try:
            return self.train_step()
        except torch.OutOfMemoryError as error:
            raise ComputationError(
                f"out of memory on {self.device} at step {self.step}: {first_line(error)}",
                f"lower microbatch_tokens in the recipe (now {self.recipe.microbatch_tokens}; 0 is the whole step), "
                "which may change in the middle of a run",
            ) from None
