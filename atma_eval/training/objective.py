"""The training objective of one microbatch, and its arithmetic in another type than the weights'."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atma_eval.models.atma import FP32_PARAMETERS, Atma, GlobalMixer
from atma_eval.training.data import Batch


class Sums(NamedTuple):
    """Sums over the targets of a microbatch; ``distractor`` is a sum over sequences of the mean over blocks."""

    weighted: Tensor  # nats, each times its weight
    text: Tensor  # nats of all targets but value digits
    num_right: Tensor  # value digits predicted
    distractor: Tensor


def random_inputs(model: Atma, num_keys: int, seed: int, step: int, sequences: range, device: torch.device) -> Tensor:
    """Normal inputs ``[blocks, B, R, C]`` for random keys: those of a sequence depend on its number in the step
    alone, so they are the same however a step is cut and shared out (on one kind of device)."""
    generator = torch.Generator(device)
    shape = (num_keys, model.config.hidden_size)
    drawn = []
    for block in range(model.config.num_global_blocks):
        for sequence in sequences:
            state = np.random.SeedSequence([seed, step, sequence, block]).generate_state(1, np.uint64)
            generator.manual_seed(int(state[0]) >> 1)
            drawn.append(torch.randn(shape, generator=generator, device=device))
    return torch.stack(drawn).unflatten(0, (-1, len(sequences)))


class Objective(nn.Module):
    """``forward`` is what a data-parallel wrapper must see: all parameters in, sums out."""

    def __init__(self, model: Atma, value_weight: float):
        super().__init__()
        self.model, self.value_weight = model, value_weight

    def forward(self, inputs: Tensor, targets: Tensor, is_value: Tensor, random: Tensor | None) -> Sums:
        """``[B, T]`` each; ``random`` ``[blocks, B, R, C]`` for the distractor loss, ``None`` without it."""
        mixers = [m for m in self.model.modules() if isinstance(m, GlobalMixer)]
        for i, mixer in enumerate(mixers):
            mixer.random_inputs = None if random is None else random[i]
        logits = self.model.logits(self.model(inputs))
        nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        weights = Batch(inputs, targets, is_value).weights(self.value_weight)
        right = (logits.detach().argmax(-1) == targets) & is_value
        distractor = nll.new_zeros(())
        if random is not None:
            losses = [m.distractor_loss for m in mixers if m.distractor_loss is not None]
            distractor = len(inputs) * torch.stack(losses).mean()
            for mixer in mixers:
                mixer.random_inputs = mixer.distractor_loss = None
        return Sums((nll * weights).sum(), (nll.detach() * ~is_value).sum(), right.sum(), distractor)


class CastAtUse(nn.Module):
    """The objective with weights cast to ``dtype`` as they are used; weights, gradients and optimiser stay fp32."""

    def __init__(self, objective: Objective, dtype: torch.dtype):
        super().__init__()
        self.objective, self.dtype = objective, dtype

    def forward(self, *arguments: Tensor | None) -> Sums:
        cast = {
            name: parameter if name.rsplit(".", 1)[-1] in FP32_PARAMETERS else parameter.to(self.dtype)
            for name, parameter in self.objective.named_parameters()
        }
        return torch.func.functional_call(self.objective, cast, arguments)
