"""Tests of Triton kernels on a machine without a GPU: by Triton's interpreter, in a process of its own.

A process either interprets or compiles. So a test file of kernels is collected twice: by `./check`, where it holds one
test that runs pytest on the same file with ``TRITON_INTERPRET=1``, and in that process, where it holds the rest::

    if not INTERPRETING:
        test_in_the_interpreter = rerun(__file__)
    else:
        ...

One case by hand: ``TRITON_INTERPRET=1 pytest tests/test_triton_polar.py -k window``. The interpreter computes bf16
wrongly without a word: only fp32 and fp16 are tested there.
"""

from __future__ import annotations

import importlib.util
import inspect
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def rerun(file: str) -> Callable[[], None]:
    """A test that runs this test file in the interpreter and shows what failed there."""

    @needs_triton
    def test_in_the_interpreter() -> None:
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
        command = [sys.executable, "-m", "pytest", "-x", "--tb=short", "-p", "no:cacheprovider", file]
        result = subprocess.run(command, env=environment, cwd=Path(file).parent.parent, capture_output=True, text=True)
        print(result.stdout[-20_000:], result.stderr[-5_000:])
        assert result.returncode == 0
        assert " passed" in result.stdout

    return test_in_the_interpreter


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that an operation allocates and does not write holds NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # with it torch fills whatever is allocated without a value
    yield
    torch.use_deterministic_algorithms(before)


def surrounded(x: Tensor, dim: int) -> Tensor:
    """The same values with three slices of NaN before and after along ``dim``: a read beside them is felt."""
    shape = list(x.shape)
    shape[dim] += 6
    around = x.new_full(shape, torch.nan)
    inside = around.narrow(dim, 3, x.shape[dim])
    inside.copy_(x)
    return inside


def in_pages(
    keys: Tensor, values: Tensor, page_size: int, first: int = 0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values ``[B, S, G, K]`` as a pool ``[P, page, G, K]`` each and tables, int32 ``[B, max_pages]``.

    Pages lie in random order between pages of NaN, as what is not filled of a page; those wholly before position
    ``first`` are dropped (-1), and so is what a table has beyond its last page.
    """
    batch, length = keys.shape[:2]
    num_pages = -(-length // page_size)
    order = torch.randperm(2 * batch * num_pages + 2, generator=torch.Generator().manual_seed(seed)).tolist()
    pools = [x.new_full((len(order), page_size, *x.shape[2:]), torch.nan) for x in (keys, values)]
    tables = torch.full((batch, num_pages + 1), -1, dtype=torch.int32)
    for b in range(batch):
        for index in range(first // page_size, num_pages):
            page = order.pop()
            tables[b, index] = page
            span = slice(index * page_size, min((index + 1) * page_size, length))
            for pool, x in zip(pools, (keys, values), strict=True):
                pool[page, : span.stop - span.start] = x[b, span]
    return pools[0], pools[1], tables


def far_apart(x: Tensor) -> Tensor:
    """The same 16-bit values with ``x[1]`` more than 2^31 elements behind ``x[0]``.

    The memory between is never touched, hence never there.
    """
    assert x.shape[0] == 2 and x.element_size() == 2
    stride = 2**31 + 4096
    memory = mmap.mmap(-1, 2 * (stride + x[0].numel()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    base = torch.frombuffer(memory, dtype=x.dtype)
    out = base.as_strided(x.shape, (stride, *x[0].contiguous().stride()))
    return out.copy_(x)


def error(got: Tensor, truth: Tensor) -> float:
    """The largest error, relative to values above one, absolute below."""
    assert got.shape == truth.shape
    return ((got.double() - truth) / truth.abs().clamp(min=1)).abs().max().item()


def record_launches(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, kernel_name: str
) -> list[tuple[dict[str, Any], dict[str, int]]]:
    """Put a recorder in the place of a kernel: the list fills with its arguments by name, and its options."""
    kernel = getattr(module, kernel_name)
    launches: list[tuple[dict[str, Any], dict[str, int]]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            assert all(0 < size < 2**31 for size in grid)
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages")}
            launches.append((inspect.signature(kernel.fn).bind(*args, **kwargs).arguments, options))

    monkeypatch.setattr(module, kernel_name, Recorder())
    return launches


def launched_as_listed(configuration: Any, arguments: dict[str, Any], options: dict[str, int]) -> None:
    """Assert that Triton would compile for these arguments the very kernel that `aot` compiled."""
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    assert options == {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    for parameter in configuration.kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            assert configuration.constants[name] == value, name
            continue
        kind, attribute = native_specialize_impl(BaseBackend, value, False, not parameter.do_not_specialize, True)
        assert configuration.signature[name] == (parameter.annotation_type or kind), name
        assert (name in configuration.divisible) == (attribute == "D"), name
