"""Which implementation runs: what is asked for and cannot be is refused; what `auto` leaves out is said."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from triton_case import needs_triton

from atma_eval.errors import UserError
from atma_eval.kernels.choice import PYTORCH, Choice, choose

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def asked(impl, dtype=torch.bfloat16, head_dim=128, device=CUDA, num_taps=(3, 4)):
    return choose(impl, dtype=dtype, head_dim=head_dim, device=device, num_taps=num_taps)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a given capability, as far as anybody asks torch."""

    def of(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
        triton = pytest.importorskip("triton")
        monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=SimpleNamespace(utils=None)))

    return of


def test_torch_is_torch_everywhere():
    assert asked("torch", device=CPU) == asked("torch") == PYTORCH
    assert PYTORCH.because is None


def test_auto_on_a_cpu_is_torch_and_says_why():
    assert asked("auto", device=CPU) == Choice(because="the Triton kernels need a GPU, and the device is cpu")


@needs_triton
def test_auto_on_a_gpu_is_triton(gpu):
    gpu((9, 0))
    assert asked("auto") == asked("triton") == Choice(impl="triton")
    assert asked("auto", torch.float32, 64).impl == "triton"


@needs_triton
@pytest.mark.parametrize(
    ("capability", "fields", "reason"),
    [
        ((7, 5), {}, "need compute capability 8.0, which Tesla T4 has not"),
        ((9, 0), {"head_dim": 320}, "do not serve heads of width 320"),
        ((9, 0), {"dtype": torch.float64}, "do not compute in torch.float64"),
        ((9, 0), {"num_taps": (3, 6)}, "takes 2 to 5 taps, not 6"),
    ],
)
def test_what_the_kernels_do_not_serve(gpu, capability, fields, reason):
    """An explicit choice is an error, with what would work; `auto` falls back and keeps the reason."""
    gpu(capability)
    with pytest.raises(UserError) as caught:
        asked("triton", **fields)
    assert reason in caught.value.message
    assert "torch" in caught.value.hint
    chosen = asked("auto", **fields)
    assert chosen.impl == "torch"
    assert reason in chosen.because


@needs_triton
def test_without_a_compiler_for_the_driver(gpu, monkeypatch):
    import triton

    class Active:
        @property
        def utils(self):
            raise RuntimeError("Failed to find C compiler.")

    gpu((9, 0))
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=Active()))
    with pytest.raises(UserError, match="cannot reach the driver: Failed to find C compiler"):
        asked("triton")
    assert "C compiler" in asked("auto").because


def test_without_triton(gpu, monkeypatch):
    gpu((9, 0))
    for name in [name for name in sys.modules if name.endswith("_triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match="Triton cannot be imported"):
        asked("triton")
    assert "Triton cannot be imported" in asked("auto").because


def test_words_for_the_manifest():
    assert Choice().describe("delta") == Choice().describe("polar") == "torch"
    assert Choice(impl="triton").describe("polar") == "triton"
    assert Choice(impl="triton").describe("delta") == "triton (steps), torch (prefill)"
    assert "1e-6 in the root" in Choice(impl="triton", memory_prefill="fla").describe("delta")


def command(*arguments, cwd):
    code = "import sys; from atma_eval.cli import main; sys.argv[0] = 'atma-eval'; main()"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_on_the_command_line(tiny_name, tmp_path):
    niah = ("niah", "-m", tiny_name, "--lengths", "64", "--trials", "1", "--docs", "1", "-q", "-o", "out")
    done = command(*niah, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    (model,) = manifest["models"].values()
    assert set(model["implementations"].values()) == {"torch"}
    assert model["not_triton_because"] == "the Triton kernels need a GPU, and the device is cpu"
    refused = command(*niah, "--impl", "triton", cwd=tmp_path)
    assert refused.returncode == 2
    assert "need a CUDA device, not cpu" in refused.stderr or "Triton cannot be imported" in refused.stderr
    assert "hint:" in refused.stderr
    unknown = command(*niah, "--impl", "trition", cwd=tmp_path)
    assert unknown.returncode == 2
    assert "did you mean triton" in unknown.stderr
    assert (tmp_path / "out" / "records.jsonl").read_text().count("\n") == 3  # earlier rows stay
