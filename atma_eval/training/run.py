"""From a recipe to a checkpoint folder: check, train, measure, write. Importing it imports no torch."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atma_eval.errors import UserError
from atma_eval.spec import check_device, parse_dtype
from atma_eval.training.recipe import Recipe, check_out, find_recipe, read_recipe
from atma_eval.training.sources import Corpus, Source, open_source

if TYPE_CHECKING:
    import torch

    from atma_eval.training.loop import Trainer
    from atma_eval.training.progress import TrainingProgress

GAPS = (64, 512, 2048, 4096, 8192, 16384, 32768, 65536)
FEWER_TRIALS_ABOVE = 4096  # a pass costs the square of its length


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """What ``atma-eval train`` was asked for.

    Attributes:
        recipe: bundled name or path.
        out: checkpoint folder; default ``models/<recipe name>``.
        work: folder of the resumable state; default ``runs/<recipe name>``.
        stop_after: stop after so many steps of the recipe, and write no checkpoint folder; the same command
            without it goes on.
        threads: CPU threads; another number may change the last bits.
        save_dtype: type of the weights in the folder, fp32 or bf16; the card measures what is written.
        trials, long_trials: recall trials of the model card up to gaps of 4,096, and above.
    """

    recipe: str
    out: Path | None = None
    work: Path | None = None
    stop_after: int | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 1
    save_dtype: str = "fp32"
    trials: int = 100
    long_trials: int = 20
    quiet: bool = False


def train(spec: TrainSpec) -> Path | None:
    """Train, or continue, and write the checkpoint folder, whose path is returned; ``None`` if stopped before.

    Whatever is wrong with the request is a `UserError` before the first step.
    """
    path = find_recipe(spec.recipe)
    recipe = read_recipe(path)
    out, work = spec.out or Path("models") / path.stem, spec.work or Path("runs") / path.stem
    if spec.stop_after is not None and spec.stop_after < 1:
        raise UserError(f"--stop-after is {spec.stop_after}", "allowed: a number of steps, at least 1")
    if spec.threads < 1:
        raise UserError(f"--threads is {spec.threads}", "allowed: at least 1")
    check_device(spec.device)
    dtype_name = parse_dtype(spec.dtype)
    if parse_dtype(spec.save_dtype) not in ("float32", "bfloat16"):
        raise UserError(f"--save-dtype is {spec.save_dtype}", "allowed: fp32, bf16")
    if dtype_name == "float16":
        raise UserError(f"training in {spec.dtype}: its gradients underflow", "allowed: auto, fp32, bf16")
    check_out(out, recipe)
    source = open_source(recipe)

    import torch

    torch.set_num_threads(spec.threads)
    with _ranks(spec.device) as (device, rank, world):
        if dtype_name == "auto":
            dtype_name = "bfloat16" if device.startswith("cuda") else "float32"
        finished = _train(spec, recipe, source, out, work, (device, rank, world), getattr(torch, dtype_name))
    return out if finished else None


def _train(
    spec: TrainSpec,
    recipe: Recipe,
    source: Source,
    out: Path,
    work: Path,
    ranks: tuple[str, int, int],
    dtype: torch.dtype,
) -> bool:
    """One rank's part; whether the recipe's last step is done. Nothing of the trainer outlives the call."""
    from atma_eval.training.loop import Trainer
    from atma_eval.training.progress import TrainingProgress

    device, rank, world = ranks
    trainer = Trainer(recipe, source, work, device=device, dtype=dtype)
    resumed = trainer.resume()
    done = recipe.tokens_before(trainer.step)
    with TrainingProgress(recipe.num_tokens, done, quiet=spec.quiet or rank > 0) as progress:
        if resumed:
            progress.message(f"resumed at step {trainer.step:,} of {recipe.num_steps:,}, from {trainer.checkpoint}")
        trainer.run(spec.stop_after, on_log=progress.report, on_step=progress.tokens)
        if trainer.step < recipe.num_steps:
            progress.message(f"stopped at step {trainer.step:,}; the same command without --stop-after goes on")
            return False
        if rank == 0:
            machine = f"{world} x {_device_name(device)}" if world > 1 else _device_name(device)
            _write(spec, trainer, source, out, machine, progress)
    return True


@contextmanager
def _ranks(device: str) -> Iterator[tuple[str, int, int]]:
    """Device, rank and number of processes; under ``torchrun`` with a process group around the block."""
    import torch
    import torch.distributed as dist

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device} is not there", "this torch sees no GPU; use --device cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device, 0, 1
        return
    if device.startswith("cuda"):
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    import torch.distributed.nn  # its functions keep the group that exists at import as a default, for ever

    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield device, dist.get_rank(), dist.get_world_size()
    finally:
        # The group's threads end with its last reference. One that is alive at the interpreter's end and asks for
        # its lock then kills the process, now and then ("terminate called without an active exception").
        gc.collect()
        dist.destroy_process_group()


def _device_name(device: str) -> str:
    import torch

    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} thread(s) of a shared CPU"


def _write(
    spec: TrainSpec, trainer: Trainer, source: Source, out: Path, machine: str, progress: TrainingProgress
) -> None:
    """Measure what was trained and write ``config.json``, the weights, the loss curve and the card."""
    import torch
    from safetensors.torch import save

    from atma_eval.records import git_commit
    from atma_eval.text import stdlib_held_out
    from atma_eval.training.card import loss_curve, measure, model_card

    recipe, model = trainer.recipe, trainer.model.cpu()
    command = f"atma-eval train {spec.recipe} --out {out}"
    if parse_dtype(spec.save_dtype) == "bfloat16":
        model.cast(torch.bfloat16)
        command += " --save-dtype bf16"
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    held_out = stdlib_held_out()
    measured = None
    if recipe.is_bytes and isinstance(source, Corpus):
        progress.message(f"measuring recall and loss on {len(held_out)} held-out documents")
        trials = {gap: spec.trials if gap <= FEWER_TRIALS_ABOVE else spec.long_trials for gap in GAPS}
        trials = {gap: number for gap, number in trials.items() if number}
        measured = measure(model, source.documents, held_out, trials, recipe.seed)
        for r in measured.recall:
            exact = f"exact {r.num_exact} of {r.num_trials}"
            progress.message(f"gap {r.gap}: {exact}, digits right {r.digit_accuracy:.3f}")
        progress.message(f"loss {measured.loss:.4f} nats per byte, trigram {measured.trigram_loss:.4f}")
    card = model_card(
        name=out.name,
        recipe=recipe,
        command=command,
        model=model,
        data=source.describe(),
        num_held_out=len(held_out),
        measured=measured,
        final=trainer.final,
        seconds=trainer.seconds,
        machine=machine,
        commit=git_commit(),
        has_curve=bool(trainer.history),
    )
    files = {
        "config.json": (json.dumps(recipe.model.to_dict(), indent=2) + "\n").encode(),
        "weights.safetensors": save(weights),  # save_file leaves a file that only its owner can read
        "README.md": card.encode(),
    }
    if trainer.history:
        files["loss.png"] = loss_curve(trainer.history)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "the trained state is kept; try again") from None
    progress.message(f"wrote {out}")
