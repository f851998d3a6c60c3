"""Optimisers: AdamW for all, or Muon for the hidden matrices as the authors do, with AdamW for the rest."""

from __future__ import annotations

import torch
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

from atma_eval.errors import UserError
from atma_eval.models.atma import FP32_PARAMETERS, Atma
from atma_eval.training.recipe import Recipe

BETAS = (0.9, 0.95)


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Weights of the linear layers inside blocks; not embeddings, head, filters, or per-head vectors."""
    return name.startswith("blocks.") and parameter.dim() == 2 and name.rsplit(".", 1)[-1] not in FP32_PARAMETERS


def make_optimizers(model: Atma, recipe: Recipe) -> list[Optimizer]:
    """Optimisers whose groups hold the learning rate where the schedule stands at its height.

    Muon is torch's: five Newton-Schulz steps on Nesterov momentum 0.95, the step scaled by
    ``sqrt(max(1, rows / columns))``. Output projections keep their small random start: at zero, those of the
    convolution blocks would never learn (architecture, trap 1).
    """
    named = list(model.named_parameters())
    muon = recipe.optimizer == "muon"
    hidden = [p for name, p in named if muon and is_hidden_matrix(name, p)]
    rest = [p for name, p in named if not (muon and is_hidden_matrix(name, p))]
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = [AdamW(groups, lr=recipe.learning_rate, betas=BETAS)]
    if muon:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"optimizer muon needs torch 2.9 or later; this is {torch.__version__}")
        optimizers.append(
            torch.optim.Muon(
                hidden,
                lr=recipe.muon_learning_rate,
                weight_decay=recipe.weight_decay,
                momentum=0.95,
                adjust_lr_fn="original",
            )
        )
    return optimizers
