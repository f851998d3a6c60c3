"""Compile every Triton kernel ahead of time, without a GPU: does it build, fit and stay in registers?

``python -m atma_eval.kernels.aot`` compiles all configurations of all ``*_triton.py`` modules for each target and
rewrites the table in `README.md` beside this file; ``--check`` compares instead. A configuration is one kernel as its
launcher calls it: each module lists its own from the same function that its launcher takes tile sizes from.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from atma_eval.errors import UserError

SHARED_BYTES = {80: 166_912, 89: 101_376, 90: 232_448}
"""Shared memory that one program may have, by compute capability. Too much of it compiles and fails at launch."""
TARGETS = (80, 90)
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- compile table: python -m atma_eval.kernels.aot -->", "<!-- end of the compile table -->"
HEADER = f"| target | kernel | warps | stages | registers | spilled bytes | shared bytes |\n|{'---|' * 7}"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One kernel as it is launched for one shape and type.

    Attributes:
        name: row of the table, such as ``polar prefill bf16 d128``.
        kernel: the ``@triton.jit`` function.
        signature: type of each argument that is no constant: ``*bf16``, ``i32``, ``i64``, ``fp32``.
        constants: the ``tl.constexpr`` arguments.
        divisible: arguments that the launcher finds divisible by 16 and the compiler may rely upon.
        num_warps, num_stages: warps of a program, depth of the software pipeline.
        spill_free: whether a spilled register is a failure.
        targets: compute capabilities (times ten) it is launched on.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    spill_free: bool
    targets: tuple[int, ...] = TARGETS


class Report(NamedTuple):
    """What one program takes: registers per thread, bytes per thread that did not fit in them, shared memory."""

    registers: int
    spill_bytes: int
    shared_bytes: int


def compile_for(configuration: Configuration, capability: int) -> Report:
    """Compile afresh for a compute capability (``80``, ``90``); raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    c = configuration
    if not isinstance(c.kernel, triton.JITFunction):
        raise UserError("Triton interprets in this process, so it cannot compile", "unset TRITON_INTERPRET")
    names = c.kernel.arg_names
    known = {*c.signature, *c.constants}
    if known != set(names) or not known.issuperset(c.divisible):
        raise ValueError(f"{c.name}: {sorted(known ^ set(names))} are in the list or the kernel, but not in both")
    signature = {name: c.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in c.divisible}
    source = ASTSource(c.kernel, signature, c.constants, attributes)
    options = {"num_warps": c.num_warps, "num_stages": c.num_stages}
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder  # empty: nothing comes from an earlier compilation
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(compiled.asm["cubin"])
        registers, spill_bytes = _resources(cubin)
    return Report(registers, spill_bytes, compiled.metadata.shared)


def _resources(cubin: Path) -> tuple[int, int]:
    """Registers and stack bytes per thread, as the tool of the Triton wheel reads them from the machine code."""
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"{tool} says nothing of registers: {text!r}")
    return int(found[1]), int(found[2])


def modules() -> list[str]:
    """The modules with Triton kernels."""
    import atma_eval.kernels as package

    names = (module.name for module in pkgutil.iter_modules(package.__path__))
    return [f"{package.__name__}.{name}" for name in sorted(names) if name.endswith("_triton")]


@functools.cache
def _configurations(module: str) -> list[Configuration]:
    return importlib.import_module(module).configurations()


def _compile_listed(place: tuple[str, int, int]) -> Report:
    """One configuration by its place in its module's list: kernels themselves do not travel between processes."""
    module, index, capability = place
    return compile_for(_configurations(module)[index], capability)


def compile_all(
    only: Iterable[str] | None = None, num_workers: int | None = None
) -> Iterator[tuple[int, Configuration, Report]]:
    """All configurations of all modules (or of those named), for each of their targets, in the order of the table."""
    places = [
        (module, index, capability)
        for module in (modules() if only is None else only)
        for capability in sorted(SHARED_BYTES)
        for index, configuration in enumerate(_configurations(module))
        if capability in configuration.targets
    ]
    context = multiprocessing.get_context("spawn")  # a fork would inherit the compiler's threads and their locks
    with ProcessPoolExecutor(num_workers or os.cpu_count(), mp_context=context) as pool:
        for (module, index, capability), report in zip(places, pool.map(_compile_listed, places), strict=True):
            yield capability, _configurations(module)[index], report


def fault(capability: int, configuration: Configuration, report: Report) -> str | None:
    """What is wrong with a compiled kernel, in words, or ``None``."""
    who = f"{configuration.name} for sm_{capability}"
    if report.shared_bytes > SHARED_BYTES[capability]:
        return f"{who} takes {report.shared_bytes} bytes of shared memory of {SHARED_BYTES[capability]}"
    if configuration.spill_free and report.spill_bytes:
        return f"{who} spills {report.spill_bytes} bytes of registers per thread"
    return None


def row(capability: int, configuration: Configuration, report: Report) -> str:
    """A line of the table."""
    cells = (f"sm_{capability}", configuration.name, configuration.num_warps, configuration.num_stages, *report)
    return f"| {' | '.join(str(cell) for cell in cells)} |"


def compiler() -> str:
    """The version that the figures belong to: another compiler allots other registers."""
    import triton

    return f"Triton {triton.__version__}"


def recorded() -> tuple[str, list[str]]:
    """The compiler and the rows that the table in the README states."""
    lines = _split()[1].strip().splitlines()
    return (lines[0].rstrip(":") if lines else ""), [line for line in lines if line.startswith("| sm_")]


def _split() -> tuple[str, str, str]:
    text = README.read_text(encoding="utf-8")
    try:
        before, rest = text.split(BEGIN)
        table, after = rest.split(END)
    except ValueError:
        raise UserError(f"{README} must hold {BEGIN!r} and {END!r} once each") from None
    return before, table, after


def main(
    check: Annotated[bool, typer.Option("--check", help="Compare with the table instead of rewriting it.")] = False,
) -> None:
    """Compile all Triton kernels for sm_80 and sm_90, some for sm_89; write registers, spills and shared memory."""
    rows, faults = [], []
    for result in compile_all():
        rows.append(row(*result))
        typer.echo(rows[-1])
        wrong = fault(*result)
        if wrong is not None:
            faults.append(wrong)
    if check:
        if recorded() != (compiler(), rows):
            faults.append("the table in the README differs: run python -m atma_eval.kernels.aot")
    else:
        before, _, after = _split()
        table = "\n".join(rows)
        README.write_text(f"{before}{BEGIN}\n{compiler()}:\n\n{HEADER}\n{table}\n{END}{after}", encoding="utf-8")
    for line in faults:
        typer.echo(line, err=True)
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    typer.run(main)
