"""The configuration of an ATMA-family model, read strictly and without torch.

Field names are those of the authors' ``config.json`` (spec: architecture, section 1). Fields that they write but
nothing reads are accepted and ignored; fields whose default would change results must be present.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from atma_eval.errors import UserError, did_you_mean

CORES = ("polar", "nope", "rope", "none")
GLOBAL_EVERY, GLOBAL_AT = 4, 2  # block i attends globally iff i mod 4 == 2
KV_GROUP = 4  # query heads per key/value head

# Written by the authors' tools; choose how their code computes, or are dead (architecture, section 1).
INERT = frozenset(
    """max_position_embeddings rms_norm_eps dtype tie_word_embeddings num_random_keys attn_online attn_k_block
    attn_kernel wall_gate_bias mem_kernel""".split()
)


@dataclass(frozen=True, kw_only=True)
class AtmaConfig:
    """Shape and behaviour of a model. ``training_length`` and ``tokenizer`` are ours and may be unknown."""

    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    head_dim: int
    attn_type: str
    attn_window: int | None
    mem_enabled: bool
    attn_kernel_size: int = 4
    conv_kernel_size: int = 3
    mem_chunk: int = 64
    mem_gamma_bias: float = 3.9
    mem_beta_bias: float = 0.0
    training_length: int | None = None
    tokenizer: str | None = None

    @property
    def architecture(self) -> str:
        """In a few words: core, memory, window."""
        core = "memory only" if self.attn_type == "none" else self.attn_type + " + memory" * self.mem_enabled
        return core + (f", window {self.attn_window}" if self.attn_window else "")

    @property
    def num_heads(self) -> int:
        return self.hidden_size // self.head_dim

    @property
    def num_kv_heads(self) -> int:
        return self.num_heads // KV_GROUP

    def is_global(self, block: int) -> bool:
        return block % GLOBAL_EVERY == GLOBAL_AT

    @property
    def num_global_blocks(self) -> int:
        return sum(self.is_global(i) for i in range(self.num_hidden_layers))

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "config.json") -> AtmaConfig:
        """Check and read a config; `UserError` with all fields that are unknown, or all that lack, or a wrong value."""
        if "arch_type" in values:
            raise UserError(
                f"{source} describes a Raven checkpoint (arch_type {values['arch_type']!r}), a separate model family",
                "supported: ATMA-family checkpoints whose attn_type is " + ", ".join(CORES),
            )
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known) - INERT)
        if unknown:
            raise UserError(
                f"{source} has fields that this version does not know: {', '.join(unknown)}",
                did_you_mean(unknown[0], known),
            )
        required = {n for n, f in known.items() if f.default is dataclasses.MISSING}
        required |= {"attn_kernel_size", "conv_kernel_size"}
        if values.get("mem_enabled"):
            required |= {"mem_gamma_bias", "mem_beta_bias"}
        missing = sorted(required - set(values))
        if missing:
            raise UserError(
                f"{source} lacks {', '.join(missing)}",
                "these change results, so they are never filled in; write null for a field that is meant to be off",
            )
        config = cls(**{name: value for name, value in values.items() if name in known})
        config._check(source)
        return config

    def _check(self, source: str) -> None:
        if self.attn_type not in CORES:
            raise UserError(
                f"{source}: attn_type {self.attn_type!r} is not supported", did_you_mean(str(self.attn_type), CORES)
            )
        counts = ("vocab_size", "num_hidden_layers", "hidden_size", "head_dim", "attn_kernel_size", "conv_kernel_size")
        for name in (*counts, "mem_chunk", "attn_window", "training_length"):
            value = getattr(self, name)
            optional = name in ("attn_window", "training_length")
            if (value is None and optional) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                continue
            raise UserError(
                f"{source}: {name} is {value!r}", f"allowed: a whole number of at least 1{' or null' * optional}"
            )
        for name in ("mem_gamma_bias", "mem_beta_bias"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise UserError(f"{source}: {name} is {value!r}", "allowed: a finite number")
        if not isinstance(self.tokenizer, str | None):
            raise UserError(f"{source}: tokenizer is {self.tokenizer!r}", "allowed: byte, gpt2, a path, or null")
        if not isinstance(self.mem_enabled, bool):
            raise UserError(f"{source}: mem_enabled is {self.mem_enabled!r}", "allowed: true or false")
        if self.num_heads * self.head_dim != self.hidden_size or self.num_heads % KV_GROUP:
            raise UserError(
                f"{source}: hidden_size {self.hidden_size} and head_dim {self.head_dim} give {self.num_heads} heads",
                f"heads must fill hidden_size and come in groups of {KV_GROUP}",
            )
        if self.attn_type == "rope" and self.head_dim % 2:
            raise UserError(f"{source}: head_dim is {self.head_dim}", "allowed for rope: even numbers")
        if self.attn_type == "none" and not self.mem_enabled:
            raise UserError(f"{source}: attn_type none without memory has nothing global", "set mem_enabled to true")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
