"""What the Triton kernels share: what they serve, and functions that keep the digits of small values."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
import triton
import triton.language as tl

from atma_eval.errors import UserError
from atma_eval.kernels.aot import SHARED_BYTES, Configuration
from atma_eval.kernels.polar import NORM_FLOOR

P = ParamSpec("P")
R = TypeVar("R")

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WIDTHS = range(4, 257, 4)  # those that are no multiple of sixteen, what a tensor core takes, cost as much as the next

LOG2_E = tl.constexpr(math.log2(math.e))
FLOOR = tl.constexpr(NORM_FLOOR)
MASKED = tl.constexpr(-1e38)  # finite: what every row starts from, so that a tile that hides all of it gives no NaN


def require_supported(dtype: torch.dtype, width: int, device: torch.device) -> None:
    """Raise a `UserError` with the reason if the kernel does not serve this type, head width and device."""
    instead = "the torch implementation serves every type, width and device"
    if device.type != "cuda" and isinstance(log1p, triton.JITFunction):
        raise UserError(f"the Triton kernels need a CUDA device, not {device}", instead)
    if device.type == "cuda" and isinstance(log1p, triton.JITFunction):
        try:
            triton.runtime.driver.active.utils  # noqa: B018  # built by the C compiler at its first use
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"Triton cannot reach the driver: {reason}", f"install a C compiler, or: {instead}"
            ) from None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"the Triton kernels need compute capability 8.0, which {name} has not", instead)
    if dtype not in TYPES:
        raise UserError(f"the Triton kernels do not compute in {dtype}", f"{', '.join(TYPES.values())}, or: {instead}")
    if width not in WIDTHS:
        allowed = f"multiples of {WIDTHS.step} from {WIDTHS[0]} to {WIDTHS[-1]}"
        raise UserError(f"the Triton kernels do not serve heads of width {width}", f"{allowed}; or: {instead}")


def on_its_device(launch: Callable[P, R]) -> Callable[P, R]:
    """Launch on the device of the first argument: Triton takes the current one, whatever the pointers say."""

    @functools.wraps(launch)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.cuda.device_of(args[0]):
            return launch(*args, **kwargs)

    return guarded


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have on this device."""
    if device.type != "cuda":
        return SHARED_BYTES[90]  # the interpreter
    return triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


@triton.jit
def log1p(x):
    """``ln(1 + x)`` for ``x >= 0``, also where ``1 + x`` keeps few digits of ``x``, or none."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus(x):
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def tanh(x):
    """For ``x >= 0``; the first terms of the series where ``1 - exp`` would cancel."""
    y = x * x
    small = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0))))
    e = tl.exp(-2.0 * x)
    return tl.where(x < 0.2, small, (1.0 - e) / (1.0 + e))


def configurations() -> list[Configuration]:
    """None: nothing here is launched by itself."""
    return []
