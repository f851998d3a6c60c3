"""Train a checkpoint: ``python -m atma_eval.training RECIPE.yaml --out FOLDER [--work FOLDER]``.

The same command resumes an interrupted run. A finished run only measures and writes its folder again.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

import torch
from safetensors.torch import save

from atma_eval.errors import UserError
from atma_eval.text import stdlib_held_out, stdlib_training
from atma_eval.training.card import measure, model_card
from atma_eval.training.data import Corpus
from atma_eval.training.loop import Trainer, read_recipe

GAPS = (64, 512, 2048, 4096, 8192, 16384, 32768, 65536)
FEWER_TRIALS_ABOVE = 4096  # a pass costs the square of its length


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m atma_eval.training", description="Train a checkpoint on the CPU.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--work", type=Path, help="resumable state (default: runs/<name of the recipe>)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; another number may change the last bits")
    parser.add_argument("--trials", type=int, default=100, help="recall trials of the model card, up to gaps of 4,096")
    parser.add_argument("--long-trials", type=int, default=20, help="recall trials at longer gaps")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    torch.set_num_threads(arguments.threads)

    recipe = read_recipe(arguments.recipe)
    training, held_out = stdlib_training(), stdlib_held_out()
    trainer = Trainer(recipe, Corpus(training), arguments.work or Path("runs") / arguments.recipe.stem)
    if trainer.resume():
        logging.info("resumed at step %d of %d", trainer.step, recipe.num_steps)
    trainer.run()

    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(recipe.model.to_dict(), indent=2) + "\n")
    weights = {name: tensor.contiguous() for name, tensor in trainer.model.state_dict().items()}
    (out / "weights.safetensors").write_bytes(save(weights))  # save_file leaves a file that only its owner can read
    logging.info("measuring %s", out)
    trials = {gap: arguments.trials if gap <= FEWER_TRIALS_ABOVE else arguments.long_trials for gap in GAPS}
    measured = measure(trainer.model, training, held_out, {g: n for g, n in trials.items() if n}, recipe.seed)
    card = model_card(
        name=out.name,
        recipe=recipe,
        recipe_text=arguments.recipe.read_text(),
        command=f"python -m atma_eval.training {arguments.recipe} --out {out}",
        model=trainer.model,
        training=training,
        num_held_out=len(held_out),
        measured=measured,
        final=trainer.final,
        seconds=trainer.seconds,
    )
    (out / "README.md").write_text(card)
    for r in measured.recall:
        logging.info("gap %d: exact %d of %d, digits right %.3f", r.gap, r.num_exact, r.num_trials, r.digit_accuracy)
    logging.info("loss %.4f nats per byte, trigram %.4f", measured.loss, measured.trigram_loss)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
