"""Model FLOPs utilisation: useful arithmetic over what the device could do."""

from __future__ import annotations

import re

# Dense 16-bit FLOP/s from the makers' tables (protocols, section 10; the H200 computes like the H100).
PEAK_FLOPS = {"T4": 65e12, "L4": 121e12, "A100": 312e12, "L40S": 362e12, "H100": 989e12, "H200": 989e12}
SLOWER = {"H100 PCIe", "H100 NVL", "H200 NVL"}  # cards that the table's figure does not hold for


def peak_flops(device_name: str) -> float | None:
    """Of the named GPU; ``None`` for one that is not in the table, and for a CPU."""
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    name = next((name for name in PEAK_FLOPS if name in words), None)
    return None if name is None or any(f"{name} {word}" in SLOWER for word in words) else PEAK_FLOPS[name]


def flops_per_token(num_parameters: int, num_layers: int, hidden_size: int, length: int) -> int:
    """``6 N + 12 layers hidden length``: forward and backward, with the authors' count of attention.

    ``N`` is all parameters, embeddings included, and every block counts as if it attended, as in the published
    figures. A model that attends in a quarter of its blocks does less, so its true utilisation is lower.
    """
    return 6 * num_parameters + 12 * num_layers * hidden_size * length


def mfu(tokens_per_s: float, flops: int, peak: float | None, num_devices: int = 1) -> float | None:
    """``tokens/s x FLOPs per token / (peak x devices)``; the time of a step includes data and optimiser."""
    return None if peak is None else tokens_per_s * flops / (peak * num_devices)


def mfu_formula(peak: float, num_devices: int) -> str:
    """What the figure on the screen is."""
    return (
        "MFU = tokens/s x (6 parameters + 12 blocks x width x length) / "
        f"({num_devices} x {peak / 1e12:.0f} TFLOP/s, dense 16-bit)"
    )
