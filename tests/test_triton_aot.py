"""Every Triton kernel compiled for GPUs that are not there, and what is launched held against what is listed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from triton_case import INTERPRETING, launched_as_listed, needs_triton, record_launches

from atma_eval.errors import UserError
from atma_eval.kernels import aot
from atma_eval.kernels.polar import PolarParameters

pytestmark = [needs_triton, pytest.mark.skipif(INTERPRETING, reason="a process interprets or compiles, never both")]


def test_every_kernel_compiles_and_fits_and_the_table_is_true():
    results = list(aot.compile_all())
    compiler, recorded = aot.recorded()
    rows = [aot.row(*result) for result in results]
    if compiler != aot.compiler():  # other figures, and a few spills, are no fault then; another list is
        results = [(target, dataclasses.replace(c, spill_free=False), report) for target, c, report in results]
        recorded, rows = ([line.split("|")[:5] for line in lines] for lines in (recorded, rows))
    faults = [fault for fault in (aot.fault(*result) for result in results) if fault]
    assert not faults, "\n".join(faults)
    assert rows == recorded, "python -m atma_eval.kernels.aot rewrites the table"


def test_what_counts_as_a_fault():
    from atma_eval.kernels import polar_triton

    strict = next(c for c in polar_triton.configurations() if c.spill_free)
    loose = dataclasses.replace(strict, spill_free=False)
    for target, limit in aot.SHARED_BYTES.items():
        assert aot.fault(target, strict, aot.Report(255, 0, limit)) is None
        assert "shared memory" in aot.fault(target, loose, aot.Report(255, 0, limit + 1))
        assert "spills 8 bytes" in aot.fault(target, strict, aot.Report(255, 8, limit))
        assert aot.fault(target, loose, aot.Report(255, 8, limit)) is None


def test_the_most_rows_of_a_decode_fit_a_consumers_card():
    """Sixteen new tokens of eight heads that share their keys, in fp32, where shared memory is scarcest."""
    from atma_eval.kernels import decode_triton

    configuration = decode_triton._split_configuration(torch.float32, 16, 128, True, False, 89)
    assert aot.fault(89, configuration, aot.compile_for(configuration, 89)) is None


def test_a_list_that_misses_an_argument_is_refused():
    from atma_eval.kernels import polar_triton

    whole = polar_triton.configurations()[0]
    signature = {name: kind for name, kind in whole.signature.items() if name != "window"}
    with pytest.raises(ValueError, match="window"):
        aot.compile_for(dataclasses.replace(whole, signature=signature), 90)


def test_readme_without_its_markers_is_refused(monkeypatch, tmp_path):
    (tmp_path / "README.md").write_text("no table")
    monkeypatch.setattr(aot, "README", tmp_path / "README.md")
    with pytest.raises(UserError, match="compile table"):
        aot.recorded()


@pytest.mark.parametrize("capability", aot.TARGETS)
@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.bfloat16, 128), (torch.float32, 16), (torch.float16, 128)], ids=str
)
def test_the_prefill_kernel_is_launched_as_listed(dtype, width, past, capability, monkeypatch):
    """One token, sixteen tokens, one head, one stream: no length may make a kernel that was not compiled here."""
    from atma_eval.kernels import polar_triton

    monkeypatch.setattr(polar_triton, "require_supported", lambda *_: None)
    monkeypatch.setattr(polar_triton, "shared_bytes", lambda _: aot.SHARED_BYTES[capability])
    listed = {c.name: c for c in polar_triton.configurations() if capability in c.targets}
    launches = record_launches(monkeypatch, polar_triton, "_prefill")
    name = f"prefill {polar_triton.TYPES[dtype]} d{width}"
    for batch, num_kv_heads, group, num_tokens in ((1, 1, 1, 1), (1, 2, 4, 16), (3, 1, 3, 33)):
        q = torch.zeros(batch, num_tokens, num_kv_heads * group, width, dtype=dtype).transpose(1, 2)
        k = torch.zeros(batch, num_tokens, num_kv_heads, width, dtype=dtype)
        heads = torch.zeros(num_kv_heads * group)
        parameters = PolarParameters(torch.zeros(num_kv_heads * group, width), heads, heads, heads, heads)
        placing = {}
        if past:
            pool = torch.zeros(2, 256, num_kv_heads, width, dtype=dtype)
            tables = torch.zeros(batch, 1, dtype=torch.int32)
            placing = {"past": polar_triton.PagedPast(pool, pool, tables, 100)}
        for details in (False, True):
            polar_triton.polar_prefill(q, k, k, parameters, details=details, **placing)
            launched_as_listed(listed[f"polar {name}"], *launches.pop())
        polar_triton.softmax_prefill(q, k, k, scale=0.5, window=5, **placing)
        launched_as_listed(listed[f"softmax {name}"], *launches.pop())
