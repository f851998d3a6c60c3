"""Causal language models of the *transformers* library behind the `session.LanguageModel` interface.

The library is used as it is: its own classes, its own caches. What is taken for granted of them is looked at when a
model is loaded (`check_model`), since every family there continues a stream in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atma_eval.errors import UserError
from atma_eval.state import State

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")  # what families call what they carry on
POSITION_TABLE = re.compile(r"wpe|pos")
CHECK_PIECES, CHECK_WINDOW = (7, 1, 5), 4
# `check_model` measures differences of logits as a share of their spread. Token by token every cache can be continued,
# and what that differs from the whole is rounding: at the worst position 6e-6, 0.01 and 0.1 for SmolLM2-135M in these
# types; more than this is no rounding. Pieces may differ by so many times as much, or by so many steps of the type.
LIMIT = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
MARGIN, MARGIN_STEPS = 3, 8


@dataclass
class _Shared:
    """A model's own cache, and how many states hold it."""

    cache: Any
    num_holders: int = 1


class CacheState:
    """State of a stream: the cache that the model itself makes, copied when one of several holders advances.

    The kinds of cache are many, and some are written in place, so a copy is a whole one. It is never cut back.
    """

    def __init__(self) -> None:
        self.length = 0
        self._shared = _Shared(None)

    def fork(self) -> CacheState:
        twin = CacheState()
        twin.length, twin._shared = self.length, self._shared
        self._shared.num_holders += 1
        return twin

    def own(self) -> Any:
        """The cache, copied first if another state holds it too; ``None`` at the start."""
        if self._shared.num_holders > 1:
            own = _Shared(deepcopy(self._shared.cache))
            self._shared.num_holders -= 1
            self._shared = own
        return self._shared.cache

    def advance(self, cache: Any, num_tokens: int) -> None:
        """Keep what the model returned for the cache that `own` gave it."""
        self._shared.cache = cache
        self.length += num_tokens

    def release(self) -> None:
        """Let go of the cache. The state must not be used afterwards."""
        self._shared.num_holders -= 1
        self._shared = _Shared(None)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the cache keeps, shared ones counted in full."""
        storages = (tensor.untyped_storage() for tensor in _tensors(self._shared.cache, set()))
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor in a cache, whatever it is made of."""
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen or isinstance(value, type):
        return
    seen.add(id(value))  # of parts of the cache only, which live on: the number of a passing object is used again
    parts = value.values() if isinstance(value, dict) else vars(value).values() if hasattr(value, "__dict__") else ()
    for part in value if isinstance(value, list | tuple) else parts:
        yield from _tensors(part, seen)


class HuggingFaceModel:
    """A `LanguageModel` around a ``...ForCausalLM``.

    Args:
        causal: the model, in evaluation mode. It is used by one thread at a time.
    """

    def __init__(self, causal: Any):
        self._causal = causal
        self._decoder: nn.Module = causal.get_decoder()
        self._output_type: type | None = None  # of the decoder, known after its first call
        self._cache_name: str | None = None

    @property
    def training_length(self) -> int | None:
        return getattr(self._causal.config, "max_position_embeddings", None)

    @property
    def max_length(self) -> int | None:
        """Entries of its table of positions, where it has one; ``None``: positions are computed, and know no end."""
        length = self.training_length
        for name, tensor in (*self._decoder.named_parameters(), *self._decoder.named_buffers()):
            # OPT and its kin leave the first two rows of the table unused.
            if length and POSITION_TABLE.search(name) and tensor.dim() == 2 and tensor.shape[0] in (length, length + 2):
                return length
        return None

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._causal.parameters()

    def init_state(self, batch_size: int = 1, capacity: int = 0) -> CacheState:
        """An empty state. The model makes the cache at its first tokens, as many streams as these are."""
        return CacheState()

    def state_bytes(self, num_tokens: int) -> int:
        """Bytes of one stream's state after ``num_tokens`` in one piece, found by shapes alone."""
        with torch.device("meta"):
            causal = type(self._causal)(self._causal.config).to(self._causal.dtype)
            outline = HuggingFaceModel(causal.eval())
            state = outline.init_state()
            outline(torch.zeros(1, num_tokens, dtype=torch.int64), state)
        return state.num_bytes

    @torch.no_grad()
    def __call__(self, tokens: Tensor, state: State | None = None, last: int | None = None) -> Tensor:
        """Advance ``state`` over ``tokens`` ``[B, T]``; the decoder's output at the last positions, ``[B, last, C]``.

        ``None`` for the state computes the tokens as a whole sequence, without a cache.
        """
        if state is None:
            output = self._decoder(input_ids=tokens, use_cache=False)
        else:
            assert isinstance(state, CacheState)
            cache = state.own()
            given = {} if cache is None else {str(self._cache_name): cache}
            output = self._decoder(input_ids=tokens, use_cache=True, **given)
            if self._cache_name is None:
                self._cache_name = next((n for n in CACHE_NAMES if getattr(output, n, None) is not None), None)
            if self._cache_name is None:
                raise RuntimeError("it keeps nothing from one call to the next")
            state.advance(output[self._cache_name], tokens.shape[1])
        self._output_type = type(output)
        hidden = output.last_hidden_state
        return hidden if last is None else hidden[:, -last:]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final logits in fp32 ``[..., N]`` by the model's own forward, whose decoder answers with ``hidden``.

        So whatever a family does around its head (a soft cap, a scale, a projection) is done here too.
        """
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        placeholder = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
        with self._answering(flat):
            logits = self._causal(input_ids=placeholder, use_cache=False).logits
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(*hidden.shape[:-1], -1)

    @contextmanager
    def _answering(self, hidden: Tensor) -> Iterator[None]:
        """While it lasts, the decoder computes nothing and returns ``hidden``."""
        assert self._output_type is not None, "hidden states come from a call of this model"
        answer = self._output_type(last_hidden_state=hidden)
        self._decoder.forward = lambda *args, **kwargs: answer  # hides the method of the class
        try:
            yield
        finally:
            del self._decoder.forward


@torch.inference_mode()
def check_model(model: HuggingFaceModel, name: str) -> float:
    """Compare this adapter with the model's own forward on a few random tokens; `UserError` where they disagree.

    Hidden states and logits apart, single tokens, pieces, and two forks that go on must all give the logits of the
    plain forward over the whole; where there is a sliding window, also with one that is short enough to slide here.
    Returns the largest difference of pieces and forks, as a share of the logits' spread.
    """
    causal = model._causal
    embeddings = causal.get_input_embeddings().weight  # not all weights need have the type that was asked for
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(embeddings), (1, sum(CHECK_PIECES)), generator=generator).to(embeddings.device)
    try:
        whole = causal(input_ids=tokens, use_cache=False).logits.float()
        largest = _check_pieces(model, name, tokens, whole, embeddings.dtype)
        with _short_window(causal.config):
            windowed = causal(input_ids=tokens, use_cache=False).logits.float()
            if not torch.equal(windowed, whole):  # else there is none, or it is not the config's at this point
                largest = max(largest, _check_pieces(model, name, tokens, windowed, embeddings.dtype))
    except UserError:
        raise
    except Exception as error:  # whatever a family's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise UserError(
            f"{name} cannot be evaluated: its {type(causal).__name__} cannot be run in pieces ({reason})"
        ) from None
    return largest


@contextmanager
def _short_window(config: Any) -> Iterator[None]:
    """While it lasts, a config with a sliding window has one of a few tokens; masks and caches are made by it."""
    window = getattr(config, "sliding_window", None)
    if window is not None:
        config.sliding_window = min(window, CHECK_WINDOW)
    try:
        yield
    finally:
        if window is not None:
            config.sliding_window = window


def _check_pieces(model: HuggingFaceModel, name: str, tokens: Tensor, whole: Tensor, dtype: torch.dtype) -> float:
    """The comparisons of `check_model` for ``tokens`` ``[1, T]`` whose logits are to be ``whole``."""
    architecture = type(model._causal).__name__
    apart = _differences(model.logits(model(tokens)), whole)
    state = model.init_state()
    steps = _differences(model.logits(torch.cat([model(token, state) for token in tokens.split(1, 1)], 1)), whole)
    state = model.init_state()
    first, second, rest = tokens.split(CHECK_PIECES, 1)
    begun = [model(first, state), model(second, state)]
    ends = [model(rest, branch) for branch in (state, state.fork())]
    pieces = [_differences(model.logits(torch.cat([*begun, end], 1)), whole) for end in ends]
    if not _within(apart, torch.zeros_like(apart), dtype):  # the same operations: nothing is rounded in another way
        raise UserError(
            f"{name} cannot be evaluated: head and decoder of its {architecture} apart do not give the logits of the "
            f"whole (they differ by {apart.max():.2g} of their spread)",
            "its forward does something between the two that this version does not know",
        )
    if not (steps.max() <= LIMIT[dtype] and all(_within(branch, steps, dtype) for branch in pieces)):
        raise UserError(
            f"{name} cannot be evaluated: the cache of its {architecture} cannot be continued in pieces of "
            f"{', '.join(map(str, CHECK_PIECES))} tokens (logits differ by {torch.stack(pieces).max():.2g} of their "
            f"spread, single tokens by {steps.max():.2g})",
            "some recurrent models in transformers continue by single tokens only; their scores would be wrong",
        )
    return torch.stack(pieces).max().item()


def _differences(logits: Tensor, whole: Tensor) -> Tensor:
    """Root mean square difference at each position, as a share of the spread of its logits: ``[T]``."""
    spread = whole.std(dim=-1).clamp_min(torch.finfo(whole.dtype).tiny)
    return ((logits - whole).square().mean(dim=-1).sqrt() / spread)[0]


def _within(differences: Tensor, rounding: Tensor, dtype: torch.dtype) -> bool:
    """Whether differences are rounding, at the worst position and at the typical one of the last piece.

    The worst alone would not do: in 16 bits an expert chosen otherwise makes one position as different as a lost state
    makes all. False for NaN.
    """
    least = MARGIN_STEPS * torch.finfo(dtype).eps
    (worst, typical), (usual_worst, usual) = (
        (part.max().item(), part[-CHECK_PIECES[-1] :].median().item()) for part in (differences, rounding)
    )
    return worst <= max(MARGIN * usual_worst, least) and typical <= max(MARGIN * usual, least)
