"""One stream of tokens through a model: extend it, fork it, score what comes next."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from atma_eval.state import State

DEFAULT_CHUNK = 2048
HEAD_ELEMENTS = 2**25  # logits formed at once: positions x vocabulary


class LanguageModel(Protocol):
    """What a model offers. Hidden states and logits are apart, so that full logits never need to exist."""

    @property
    def training_length(self) -> int | None: ...

    @property
    def max_length(self) -> int | None:
        """Longest sequence the architecture can take; ``None`` where nothing limits it."""
        ...

    def init_state(self, batch_size: int = 1, capacity: int = 0) -> State: ...

    def state_bytes(self, num_tokens: int) -> int: ...

    def __call__(self, tokens: Tensor, state: State | None = None, last: int | None = None) -> Tensor:
        """Hidden states ``[B, last, C]`` of the last positions of ``tokens`` ``[B, T]``; advances ``state``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final logits in fp32 ``[..., N]``, soft cap and scale included."""
        ...

    def parameters(self) -> Any: ...


class TokenScores(NamedTuple):
    """For each scored token: its loss in nats, and the token the model would have chosen, both ``[n]``."""

    nll: np.ndarray
    argmax: np.ndarray


class Session:
    """A stream with its state. The numbers do not depend on how the tokens are handed over, to rounding.

    Computation breaks at multiples of ``chunk`` tokens and where a call ends; equal breaks give equal bits.
    """

    def __init__(self, model: LanguageModel, *, chunk: int = DEFAULT_CHUNK, capacity: int = 0):
        self._model = model
        self._chunk = chunk
        self._state = model.init_state(1, capacity)
        self._last_hidden: Tensor | None = None
        self._device = next(iter(model.parameters())).device

    @property
    def length(self) -> int:
        """Tokens seen so far."""
        return self._state.length

    def extend(self, tokens: np.ndarray) -> None:
        """Advance over known tokens ``[T]`` without scoring them."""
        self.score(tokens, np.zeros(len(tokens), dtype=bool))

    @torch.inference_mode()
    def score(self, tokens: np.ndarray, wanted: np.ndarray | None = None) -> TokenScores:
        """Advance over ``tokens`` ``[T]`` and score those that are ``wanted`` (boolean ``[T]``; default: all).

        The first token of a stream has nothing before it and cannot be scored.
        """
        if wanted is None:
            wanted = np.ones(len(tokens), dtype=bool)
        if len(tokens) and wanted[0] and self._last_hidden is None:
            raise ValueError("the first token of a stream cannot be scored: nothing precedes it")
        ids = torch.as_tensor(np.asarray(tokens, dtype=np.int64), device=self._device)
        nll, argmax = [], []
        start = 0
        while start < len(ids):
            stop = min(len(ids), start + self._chunk - self.length % self._chunk)
            piece, mask = ids[start:stop], wanted[start:stop]
            targets = np.flatnonzero(mask)
            first = targets[targets > 0].min(initial=len(mask))  # its prediction comes from the position before
            before = self._last_hidden
            hidden = self._model(piece[None], self._state, last=len(mask) - int(first) + 1)[0]
            if len(targets):
                # Predictions for tokens first..end come from hidden[:-1]; for the piece's own first token, from before.
                rows = hidden[targets[targets > 0] - int(first)]
                if mask[0]:
                    rows = torch.cat([before, rows])  # type: ignore[list-item]
                scores = self._head(rows, piece[torch.as_tensor(targets, device=self._device)])
                nll.append(scores.nll)
                argmax.append(scores.argmax)
            self._last_hidden = hidden[-1:].clone()
            start = stop
        if not nll:
            return TokenScores(np.empty(0, dtype=np.float32), np.empty(0, dtype=np.int64))
        return TokenScores(np.concatenate(nll), np.concatenate(argmax))

    def _head(self, hidden: Tensor, targets: Tensor) -> TokenScores:
        """Losses and argmax of ``targets`` ``[n]`` from ``hidden`` ``[n, C]``, a slice of positions at a time."""
        nll, argmax = [], []
        start = 0
        step = 64  # until the vocabulary is known from the first logits
        while start < len(targets):
            logits = self._model.logits(hidden[start : start + step])
            chosen = logits.gather(-1, targets[start : start + step, None])[:, 0]
            nll.append(torch.logsumexp(logits, dim=-1) - chosen)
            argmax.append(logits.argmax(-1))
            start += step
            step = max(1, HEAD_ELEMENTS // logits.shape[-1])
        return TokenScores(torch.cat(nll).float().cpu().numpy(), torch.cat(argmax).cpu().numpy())

    @torch.inference_mode()
    def generate(self, num_tokens: int) -> np.ndarray:
        """Append ``num_tokens`` greedily and return them ``[num_tokens]``."""
        if self._last_hidden is None:
            raise ValueError("nothing to continue: extend the stream first")
        tokens = []
        for _ in range(num_tokens):
            token = int(self._model.logits(self._last_hidden).argmax(-1)[0])
            tokens.append(token)
            self.extend(np.array([token]))
        return np.array(tokens, dtype=np.int64)

    def fork(self) -> Session:
        """An independent continuation that shares the past."""
        twin = object.__new__(Session)
        twin.__dict__.update(self.__dict__)
        twin._state = self._state.fork()
        return twin

    def close(self) -> None:
        """Give shared pages back; the session must not be used afterwards."""
        self._state.release()
