"""Why the memory's keys have unit length: ``python -m atma_eval.training.stability --out FIGURE.png``.

One step of the delta rule multiplies the state by ``g (I - b k k^T)``, whose eigenvalue along ``k`` is
``g (1 - b |k|^2)``. A key of unit length keeps it within ``[0, 1]`` for any write strength ``b`` in ``[0, 1]``. An
RMS-normed key has ``|k|^2`` equal to its width ``K``: once ``b`` exceeds ``2 / K`` the state swings and grows for ever.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

LENGTHS = tuple(2**i for i in range(15))  # 1 to 16,384
HEADS, WIDTH = 4, 16  # of the demonstration models
GAMMA_LOGIT = 3.9  # the constant of the authors' configs: a half-life of 34 tokens
FP32_MAX = float(np.finfo(np.float32).max)


def random_tokens(num_tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Keys ``[T, H, K]`` without a norm, values ``[T, H, K]`` and gate logits ``[T, H]``, all random."""
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, num_tokens, HEADS, WIDTH))
    gamma_logit, beta_logit = rng.normal(size=(2, num_tokens, HEADS))
    return keys, values, GAMMA_LOGIT + gamma_logit, beta_logit


def unit_keys(keys: np.ndarray) -> np.ndarray:
    return keys / np.linalg.norm(keys, axis=-1, keepdims=True)


def rms_keys(keys: np.ndarray) -> np.ndarray:
    return unit_keys(keys) * np.sqrt(keys.shape[-1])


def state_norms(
    keys: np.ndarray, values: np.ndarray, gamma: np.ndarray, beta: np.ndarray, lengths: Sequence[int] = LENGTHS
) -> np.ndarray:
    """Frobenius norm of the state, mean over heads, after each of ``lengths`` tokens; ``inf`` from the overflow on.

    The rule as written (`kernels.delta`), in fp64, with keys as they are given and gates ``[T, H]`` in 0..1.
    """
    state = np.zeros((keys.shape[1], keys.shape[2], values.shape[2]))
    norms = dict.fromkeys(lengths, np.inf)
    for t in range(max(lengths)):
        state *= gamma[t, :, None, None]
        k = keys[t, :, :, None]
        written = beta[t, :, None, None] * (values[t, :, None, :] - k.transpose(0, 2, 1) @ state)
        state += k * written
        if t + 1 in norms:
            norms[t + 1] = np.linalg.norm(state, axis=(1, 2)).mean()
        if np.abs(state).max() > 1e150:  # its square still fits
            break
    return np.array([norms[length] for length in lengths])


def curves(lengths: Sequence[int] = LENGTHS) -> dict[str, np.ndarray]:
    """State norms by kind of key: unit length, unit length and never forgetting, and RMS-normed."""
    keys, values, gamma_logit, beta_logit = random_tokens(max(lengths))
    gamma, beta = 1 / (1 + np.exp(-gamma_logit)), 1 / (1 + np.exp(-beta_logit))
    return {
        "RMS-normed keys": state_norms(rms_keys(keys), values, gamma, beta, lengths),
        "L2-normed keys, no forgetting": state_norms(unit_keys(keys), values, np.ones_like(gamma), beta, lengths),
        "L2-normed keys": state_norms(unit_keys(keys), values, gamma, beta, lengths),
    }


def draw(path: Path) -> None:
    """The curves as a small PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for (name, norms), color in zip(curves().items(), ("tab:red", "tab:green", "tab:blue"), strict=True):
        shown = np.isfinite(norms)
        axis.plot(np.array(LENGTHS)[shown], norms[shown], marker=".", label=name, color=color)
    axis.axhline(FP32_MAX, color="gray", linewidth=0.8, linestyle=":")
    axis.annotate("fp32 overflows", (LENGTHS[-1], FP32_MAX), ha="right", va="bottom", color="gray", fontsize=8)
    axis.set(yscale="log", ylim=(1e-1, 1e45), xlabel="tokens", ylabel="norm of the memory state")
    axis.set_xscale("log", base=2)
    axis.legend(frameon=False, fontsize=8, loc="center right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m atma_eval.training.stability", description="Draw the state norms.")
    parser.add_argument("--out", type=Path, required=True, help="a .png to write")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
