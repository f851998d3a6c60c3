"""Readable names for the authors' run ids: ``polar__reg-strong__distr-0__mem-1__win-0`` is polar+memory, reg strong."""

from __future__ import annotations

import re
from typing import Any

RUN_ID = re.compile(
    r"(?P<before>.*?)(?P<attn_type>[a-z]+)__reg-(?P<reg_mode>\w+?)__distr-(?P<distractor>[01])"
    r"__mem-(?P<memory>[01])__win-(?P<window>[01])"
)
_OPEN = re.compile(r"open__(?P<owner>.+?)__(?P<name>.+)")


def axes_of(run_id: str, config: dict[str, Any]) -> dict[str, Any]:
    """The five axes of the study: from the config, else read off the run id; empty where neither says."""
    match = RUN_ID.fullmatch(run_id)
    read = (
        {name: int(value) if value.isdigit() else value for name, value in match.groupdict().items()} if match else {}
    )
    axes = {name: config.get(name, read.get(name)) for name in ("attn_type", "reg_mode", "distractor", "memory")}
    axes["memory"] = axes["memory"] if axes["memory"] is not None else config.get("mem_enabled")
    axes["window"] = config.get("window", config.get("attn_window", read.get("window")))
    return {name: value for name, value in axes.items() if isinstance(value, (str, int))}


def _on(value: Any) -> bool:
    return value not in (None, False, 0, "0", "", "none", "None", "false")


def architecture(run_id: str, config: dict[str, Any]) -> str | None:
    """As in our manifests: ``polar + memory``, ``rope, window``; ``None`` where unknown."""
    axes = axes_of(run_id, config)
    base = config.get("arch_type") or axes.get("attn_type")
    if not base or base == "open":
        return None
    return (
        str(base) + (" + memory" if _on(axes.get("memory")) else "") + (", window" if _on(axes.get("window")) else "")
    )


def readable(run_id: str, config: dict[str, Any]) -> str:
    """Short enough for a table: architecture, then what departs from the baseline."""
    model = _OPEN.fullmatch(run_id)
    if model:
        return model["name"]
    kind = architecture(run_id, config)
    if kind is None:
        return run_id
    axes = axes_of(run_id, config)
    name, *window = kind.replace(" + ", "+").split(", ")
    extras = [] if axes.get("reg_mode") in (None, "baseline") else [f"reg {axes['reg_mode']}"]
    extras += ["distractor"] if _on(axes.get("distractor")) else []
    return ", ".join([name, *extras, *window])


def repository_parts(repository: str) -> tuple[str, str]:
    """Of a Hugging Face repository: the run id at its end, and what stands before it (``atma-10b-L40S-mbs16``)."""
    name = repository.rsplit("/", 1)[-1]
    match = RUN_ID.fullmatch(name)
    if not match:
        return name, ""
    before = match["before"].rstrip("-_")
    return name[len(match["before"]) :], before
