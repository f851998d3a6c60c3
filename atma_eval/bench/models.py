"""Whole models on the GPU against the same weights in fp32 on the processor: the golden cases, and a random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from atma_eval.bench.parts import NAMES, Bench
from atma_eval.bench.report import Line
from atma_eval.errors import UserError
from atma_eval.kernels.choice import PYTORCH, Choice, choose
from atma_eval.kernels.tiles import use_workers
from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig

NOT_WEIGHTS = ("input_ids", "targets", "logits", "loss_sum", "hidden", "final_norm64")
GOLDEN_TOLERANCE = 1e-4  # absolute below one, relative above
GOLDEN_STEPS = 8  # tokens that come one by one, so that the decode kernels run too
TIMES_PYTORCH = 1.5  # mean difference of the logits, against the same model in PyTorch on the same device
MEAN_TOLERANCE = 1e-5


def golden_folder() -> Path | None:
    """The authors' vectors beside the checkout or in it; they are not part of the package."""
    root = Path(__file__).resolve().parents[2]
    places = (root.parent / "shared" / "golden", root / "shared" / "golden", Path("../shared/golden"))
    return next((place for place in places if place.is_dir()), None)


@torch.no_grad()
def logits_in_pieces(model: Atma, tokens: Tensor, chunk: int, num_steps: int) -> Tensor:
    """Logits ``[B, T, N]``: prefill in chunks, then five tokens together, then the last ``num_steps`` one by one."""
    state = model.init_state(tokens.shape[0], tokens.shape[1])
    singles = max(0, tokens.shape[1] - num_steps)
    few = max(0, singles - 5)
    cuts = sorted({*range(0, few, chunk), few, *range(singles, tokens.shape[1] + 1)})
    hidden = [model(tokens[:, a:z], state) for a, z in pairwise(cuts)]
    return model.logits(torch.cat(hidden, dim=1)).float()


def models(bench: Bench) -> Iterator[Line]:
    """The lines of this part."""
    for dtype in bench.sizes.parity_types:
        bench.check_time()
        yield from _random_model(bench, dtype)
    folder = golden_folder()
    if folder is None:
        yield Line(what="golden cases", case="all", note="the golden vectors are not beside this checkout")
        return
    names = sorted(path.stem for path in folder.glob("*.safetensors") if not path.stem.startswith("op_"))
    for name in bench.while_time(names[: bench.sizes.max_golden]):
        yield _golden(bench, folder, name)


def _golden(bench: Bench, folder: Path, name: str) -> Line:
    config = AtmaConfig.from_dict(json.loads((folder / f"{name}.json").read_text())["config"])
    try:
        choice = choose("triton", dtype=torch.float32, head_dim=config.head_dim, device=bench.device)
    except UserError as refusal:
        return Line(what="golden model", case=name, note=refusal.message)
    tensors = load_file(folder / f"{name}.safetensors")
    model = Atma(config, choice=choice)
    model.load_state_dict({key: t.float() for key, t in tensors.items() if not key.startswith(NOT_WEIGHTS)})
    model = model.eval().to(bench.device)
    got = logits_in_pieces(model, tensors["input_ids"].to(bench.device), 64, GOLDEN_STEPS).cpu()
    truth = tensors["logits"].float()
    return Line(
        what="golden model fp32",
        case=name,
        figures={
            "difference": ((got - truth).abs() / (1 + truth.abs())).max().item(),
            "same argmax %": 100 * (got.argmax(-1) == truth.argmax(-1)).float().mean().item(),
        },
        judged="difference",
        target=GOLDEN_TOLERANCE,
        at_least=False,
    )


def _random_model(bench: Bench, dtype: torch.dtype) -> Iterator[Line]:
    """The reference has the rounded weights in fp32, so that only the arithmetic differs."""
    sizes, config = bench.sizes, AtmaConfig.from_dict(bench.sizes.model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (1, sizes.model_tokens), generator=generator)
    use_workers(torch.get_num_threads())

    with torch.device("meta"):
        fresh = Atma(config)
    weights = fresh.to_empty(device="cpu").init_weights(0).cast(dtype).state_dict()

    def logits(choice: Choice, kept: torch.dtype, device: torch.device) -> Tensor:
        with torch.device("meta"):
            model = Atma(config, choice=choice)
        model.load_state_dict(weights, assign=True)
        model.cast(kept).eval().to(device)
        return logits_in_pieces(model, tokens.to(device), sizes.model_chunk, sizes.model_steps).cpu()

    triton = choose("triton", dtype=dtype, head_dim=config.head_dim, device=bench.device)
    truth = logits(PYTORCH, torch.float32, torch.device("cpu"))
    mean = {}
    for impl, choice in (("torch", PYTORCH), ("triton", triton)):
        bench.check_time()
        got = logits(choice, dtype, bench.device)
        difference = (got - truth).abs()
        mean[impl] = difference.mean().item()
        yield Line(
            what=f"{config.num_hidden_layers} layers {NAMES[dtype]}, {impl}",
            case=f"{config.num_heads}/{config.num_kv_heads} heads of {config.head_dim}, {sizes.model_tokens:,} tokens",
            figures={
                "mean": mean[impl],
                "largest": difference.max().item(),
                "same argmax %": 100 * (got.argmax(-1) == truth.argmax(-1)).float().mean().item(),
            },
            judged="mean",
            target=None if impl == "torch" else TIMES_PYTORCH * mean["torch"] + MEAN_TOLERANCE,
            at_least=False,
        )
