"""Shared pieces of the tests. One thread: with a busy neighbour two can be slower than one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
GOLDEN = SHARED / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden vectors are not beside this checkout")

NOT_WEIGHTS = ("input_ids", "targets", "logits", "loss_sum", "hidden", "final_norm64")


def golden_case(name: str):
    """Config, case notes, weights widened to fp32, and the other tensors of one golden model case."""
    notes = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    others = {k: t for k, t in tensors.items() if k.startswith(NOT_WEIGHTS)}
    weights = {k: t.float() for k, t in tensors.items() if k not in others}
    return notes["config"], notes["case"], weights, others
