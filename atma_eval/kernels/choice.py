"""Which code computes each operation: plain PyTorch everywhere, the Triton kernels on a GPU that they serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from atma_eval.errors import UserError

if TYPE_CHECKING:
    import torch

Impl = Literal["torch", "triton"]
MAX_STEPS = 16  # tokens that the kernels with a state in place take at once: a block of one program


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What computes the operations of a model.

    Attributes:
        impl: attention, convolutions and the step of the memory.
        memory_prefill: the memory over many tokens: ours in PyTorch, or flash-linear-attention's kernel.
        because: why it is not Triton, where that was not asked for; ``None`` otherwise.
    """

    impl: Impl = "torch"
    memory_prefill: Literal["torch", "fla"] = "torch"
    because: str | None = None

    def describe(self, operation: str) -> str:
        """What computes ``conv``, ``polar``, ``softmax`` or ``delta``, in words for the manifest."""
        if operation != "delta" or self.impl == "torch":
            return self.impl
        prefill = "flash-linear-attention, norms with 1e-6 in the root" if self.memory_prefill == "fla" else "torch"
        return f"triton (steps), {prefill} (prefill)"


PYTORCH = Choice()


def choose(
    impl: str, *, dtype: torch.dtype, head_dim: int, device: torch.device, num_taps: tuple[int, ...] = ()
) -> Choice:
    """Resolve ``--impl``: ``auto`` takes Triton on a GPU where it can, ``triton`` insists.

    ``num_taps`` are the widths of the model's convolutions.

    Raises `UserError` with the reason where ``triton`` cannot run.
    """
    if impl == "torch":
        return PYTORCH
    if impl == "auto" and device.type != "cuda":
        return Choice(because=f"the Triton kernels need a GPU, and the device is {device}")
    try:
        from atma_eval.kernels.common_triton import require_supported
        from atma_eval.kernels.conv_triton import require_taps
        from atma_eval.kernels.delta_triton import fla_refusal
    except ImportError as error:
        if impl == "triton":
            raise UserError(f"--impl triton: Triton cannot be imported ({error})", "use --impl auto or torch") from None
        return Choice(because=f"Triton cannot be imported ({error})")
    try:
        require_supported(dtype, head_dim, device)
        for taps in num_taps:
            require_taps(taps)
    except UserError as error:
        if impl == "triton":
            raise
        return Choice(because=error.message)
    return Choice(impl="triton", memory_prefill="torch" if fla_refusal(dtype, head_dim, device) else "fla")
