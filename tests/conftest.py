"""Shared pieces of the tests. One thread: with a busy neighbour two can be slower than one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from atma_eval.models.atma import Atma
from atma_eval.models.config import AtmaConfig
from atma_eval.session import Session

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


TINY = {
    "vocab_size": 257,
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "head_dim": 8,
    "attn_type": "polar",
    "attn_window": None,
    "mem_enabled": True,
    "attn_kernel_size": 4,
    "conv_kernel_size": 3,
    "mem_gamma_bias": 3.9,
    "mem_beta_bias": 0.0,
    "training_length": 128,
    "tokenizer": "byte",
}


def tiny_model(**changes):
    """A random byte model of 4 layers, with fields of its config changed."""
    return Atma(AtmaConfig.from_dict({**TINY, **changes})).init_weights(0).eval()


@pytest.fixture
def tiny_name(tmp_path):
    """The ``--model`` value of such a model."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return f"random:{path}"


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """What a test draws without a generator of its own is the same every time."""
    torch.manual_seed(0)


def assert_forks_are_isolated(model, ids, cut, branches):
    """Whatever forks of a stream read, and that they are closed, the stream and a twin go on as one without forks."""
    trunk = Session(model)
    trunk.extend(ids[:cut])
    for branch_ids in branches:
        branch = trunk.fork()
        branch.score(branch_ids)
        branch.close()
    twin = trunk.fork()
    first, second = trunk.score(ids[cut:]), twin.score(ids[cut:])
    np.testing.assert_array_equal(first.nll, second.nll)
    alone = Session(model)
    alone.extend(ids[:cut])
    np.testing.assert_array_equal(first.nll, alone.score(ids[cut:]).nll)
