"""From a recipe to a checkpoint folder: check, train, measure, write. Importing it imports no torch."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atma_eval.errors import UserError
from atma_eval.files import replacing
from atma_eval.source import find_device, find_dtype
from atma_eval.spec import check_device, parse_dtype
from atma_eval.training.recipe import Recipe, check_out, check_writable, find_recipe, read_recipe
from atma_eval.training.sources import Corpus, Source, open_source

if TYPE_CHECKING:
    import torch

    from atma_eval.training.card import Measured
    from atma_eval.training.loop import Trainer
    from atma_eval.training.progress import TrainingProgress

GAPS = (64, 512, 2048, 4096, 8192, 16384, 32768, 65536)
FEWER_TRIALS_ABOVE = 4096  # a pass costs the square of its length
TORCHRUN = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what it sets for each process
LARGEST_FACTOR = 32  # gaps of the card, in training lengths


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
        dtype: auto (fp32 on a CPU, bf16 on a GPU), fp32 or bf16.
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
    for name, trials in (("--trials", spec.trials), ("--long-trials", spec.long_trials)):
        if trials < 0:
            raise UserError(f"{name} is {trials}", "allowed: a whole number, 0 or more")
    check_device(spec.device)
    dtype_name = parse_dtype(spec.dtype)
    if parse_dtype(spec.save_dtype) not in ("float32", "bfloat16"):
        raise UserError(f"--save-dtype is {spec.save_dtype}", "allowed: fp32, bf16")
    if dtype_name == "float16":
        raise UserError(f"training in {spec.dtype}: its gradients underflow", "allowed: auto, fp32, bf16")
    check_out(out, recipe)
    check_writable(out, "--out")
    check_writable(work, "--work")
    source = open_source(recipe)

    import torch

    torch.set_num_threads(spec.threads)
    with _ranks(spec.device) as (device, rank, world), _only_writer(work, rank):
        dtype = getattr(torch, find_dtype(dtype_name, torch.device(device)))
        finished = _train(spec, recipe, source, out, work, (device, rank, world), dtype)
    return out if finished else None


@contextmanager
def _only_writer(work: Path, rank: int) -> Iterator[None]:
    """Holds the folder of the resumable state against a second run."""
    if rank:
        yield
        return
    created = [folder for folder in (work, *work.parents) if not folder.exists()]
    work.mkdir(parents=True, exist_ok=True)
    folder = os.open(work, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another training run is writing to {work}", "give another --work folder") from None
        yield
    finally:
        os.close(folder)
        with suppress(OSError):  # not empty: something was saved
            for made in created:
                made.rmdir()


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
    from atma_eval.records import git_commit
    from atma_eval.training.flops import mfu_formula, peak_flops
    from atma_eval.training.loop import Trainer
    from atma_eval.training.progress import TrainingProgress

    device, rank, world = ranks
    trainer = Trainer(recipe, source, work, device=device, dtype=dtype)
    resumed = trainer.resume()
    done = recipe.tokens_before(trainer.step)
    commit = git_commit()  # now: the checkout may move on while this process trains
    if trainer.step < recipe.num_steps and commit and commit not in trainer.commits:
        trainer.commits.append(commit)
    with TrainingProgress(recipe.num_tokens, done, quiet=spec.quiet or rank > 0) as progress:
        if resumed:
            progress.message(f"resumed at step {trainer.step:,} of {recipe.num_steps:,}, from {trainer.checkpoint}")
        if device.startswith("cuda") and (peak := peak_flops(_device_name(device))):
            progress.message(mfu_formula(peak, world))
        try:
            trainer.run(spec.stop_after, on_log=progress.report, on_step=progress.tokens)
        except KeyboardInterrupt:
            progress.message(f"interrupted at step {trainer.step:,}; {trainer.kept()}")
            raise
        if trainer.step < recipe.num_steps:
            progress.message(f"stopped at step {trainer.step:,}; the same command without --stop-after goes on")
            return False
        if rank == 0:
            _write(spec, trainer, source, out, (device, world), progress)
    return True


@contextmanager
def _ranks(device: str) -> Iterator[tuple[str, int, int]]:
    """Device, rank and number of processes; under ``torchrun`` with a process group around the block."""
    import torch
    import torch.distributed as dist

    device = str(find_device(device))
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield device, 0, 1
        return
    absent = [name for name in TORCHRUN if name not in os.environ]
    if absent:
        raise UserError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(absent)} is not set",
            "start several processes by torchrun --nproc-per-node N -m atma_eval.training RECIPE",
        )
    if device.startswith("cuda"):
        device = str(find_device(f"cuda:{os.environ['LOCAL_RANK']}"))
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

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "CPU"


def _command(spec: TrainSpec, out: Path, world: int) -> str:
    """What makes this folder again; of the options, those that bear on the weights."""
    start = f"torchrun --nproc-per-node {world} -m atma_eval.training" if world > 1 else "atma-eval train"
    command = f"{start} {shlex.quote(spec.recipe)} --out {shlex.quote(str(out))}"
    if spec.device != "auto":
        command += f" --device {spec.device}"
    if spec.dtype != "auto":
        command += f" --dtype {spec.dtype}"
    if spec.threads != 1:
        command += f" --threads {spec.threads}"
    if parse_dtype(spec.save_dtype) == "bfloat16":
        command += " --save-dtype bf16"
    return command


def _measure(spec: TrainSpec, trainer: Trainer, source: Corpus, progress: TrainingProgress) -> Measured:
    """Recall and loss of the model as it is written, on held-out text."""
    from atma_eval.text import stdlib_held_out
    from atma_eval.training.card import measure

    recipe, held_out = trainer.recipe, stdlib_held_out()
    progress.message(f"measuring on {len(held_out)} held-out documents")
    trials = {gap: spec.trials if gap <= FEWER_TRIALS_ABOVE else spec.long_trials for gap in GAPS}
    longest = LARGEST_FACTOR * recipe.training_length
    trials = {gap: number for gap, number in trials.items() if number and recipe.plants and gap <= longest}
    measured = measure(trainer.model, source.documents, held_out, trials, recipe.seed)
    for r in measured.recall:
        progress.message(f"gap {r.gap}: exact {r.num_exact} of {r.num_trials}, digits right {r.digit_accuracy:.3f}")
    progress.message(f"loss {measured.loss:.4f} nats per byte, trigram {measured.trigram_loss:.4f}")
    return measured


def _write(
    spec: TrainSpec,
    trainer: Trainer,
    source: Source,
    out: Path,
    ranks: tuple[str, int],
    progress: TrainingProgress,
) -> None:
    """Measure what was trained and write the card, ``config.json``, the weights and the loss by step.

    The card comes first: by the recipe in it a folder that was cut short while it was written is known again.
    """
    import torch
    from safetensors.torch import save

    from atma_eval.training.card import loss_curve, loss_table, model_card

    device, world = ranks
    recipe, model = trainer.recipe, trainer.model
    if parse_dtype(spec.save_dtype) == "bfloat16":
        model.cast(torch.bfloat16)
    weights = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.promote_types(parameter.dtype, torch.float32))
    measured = None
    if recipe.is_bytes and isinstance(source, Corpus):
        measured = _measure(spec, trainer, source, progress)
    name = f"{torch.get_num_threads()} thread(s) of a CPU" if device == "cpu" else _device_name(device)
    card = model_card(
        name=out.name,
        recipe=recipe,
        command=_command(spec, out, world),
        num_parameters=sum(p.numel() for p in model.parameters()),
        data=trainer.data,
        measured=measured,
        history=trainer.history,
        seconds=trainer.seconds,
        machine=f"{world} x {name}" if world > 1 else name,
        dtype=trainer.dtype,
        commits=trainer.commits,
    )
    files = {
        "README.md": card.encode(),
        "config.json": (json.dumps(recipe.model.to_dict(), indent=2) + "\n").encode(),
        "loss.csv": loss_table(trainer.history).encode(),
        "loss.png": loss_curve(trainer.history),
        "weights.safetensors": save(weights),  # save_file leaves a file that only its owner can read
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            with replacing(out / name) as partial:
                partial.write_bytes(content)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "the trained state is kept; try again") from None
    progress.message(f"wrote {out}")
