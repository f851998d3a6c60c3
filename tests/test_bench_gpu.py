"""The whole script for the GPU, every part of it, in Triton's interpreter: tiny sizes, wall clock (`triton_case`)."""

from __future__ import annotations

import contextlib
import io
import json
import math

import pytest
import torch
from conftest import GOLDEN, TINY
from triton_case import INTERPRETING, rerun

from atma_eval.bench import gpu, models, parity
from atma_eval.bench.parts import Sizes

SMALL = {**TINY, "hidden_size": 64, "head_dim": 16}

if not INTERPRETING:
    test_in_the_interpreter = rerun(__file__)
else:

    def tiny(tmp_path) -> Sizes:
        config = tmp_path / "small.json"
        config.write_text(json.dumps(SMALL))
        return Sizes(
            heads=(4, 1, 16),
            channels=32,
            page=128,
            dtype=torch.float32,
            parity_types=(torch.float32, torch.float16),
            parity_length=200,
            parity_rows=4,
            window=64,
            memory_tokens=24,
            model=SMALL,
            model_tokens=40,
            model_chunk=24,
            model_steps=2,
            max_golden=1,
            prefill_lengths=(64, 100),
            decode_lengths=(64, 200),
            decode_batches=(1, 2, 2**24),  # the last cannot fit
            step_batches=(1, 3),
            conv_batches=(1, 3),
            large_batch=2,
            copy_bytes=2**16,
            end_to_end_model=f"random:{config}",
            end_to_end_lengths="32,48",
            warm_up_length="16",
            num_trials=1,
            num_documents=1,
            max_rounds=1,
        )

    @pytest.fixture(scope="module")
    def ran(tmp_path_factory):
        """What the script wrote, and what it printed."""
        folder = tmp_path_factory.mktemp("bench")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            met = gpu.measure(sizes=tiny(folder), device=torch.device("cpu"), out=folder / "out", budget_s=1e6)
        (path,) = (folder / "out").glob("*.json")
        return met, json.loads(path.read_text()), printed.getvalue()

    def lines_of(written, name):
        return next(part["lines"] for part in written["parts"] if part["name"] == name)

    def test_every_part_is_done(ran):
        met, written, printed = ran
        print(printed)
        assert [(part["name"], part["status"], part["error"]) for part in written["parts"]] == [
            (part.name, "done", None) for part in gpu.PARTS
        ]
        assert written["missing_parts"] == []
        assert met is (not written["missed_targets"])
        assert {"torch", "triton", "cuda", "python", "atma-eval", "fla-core"} == set(written["versions"])
        assert written["sizes"]["parity_types"] == ["torch.float32", "torch.float16"]

    def test_tables_fit(ran):
        printed = ran[2]
        assert max(map(len, printed.splitlines()[:-1])) <= 100
        assert "…" not in printed
        for part in gpu.PARTS:
            assert part.title in printed

    def test_kernels_are_right_at_their_full_length(ran):
        """In miniature, so these targets must be met; speed in the interpreter means nothing."""
        for name in ("parity", "models"):
            judged = [line for line in lines_of(ran[1], name) if line["ok"] is not None]
            assert judged and all(line["ok"] for line in judged)
        names = {line["what"].rpartition(" ")[0] for line in lines_of(ran[1], "parity")}
        assert names == {
            *(f"{core} {form}" for core in ("polar", "softmax") for form in ("prefill", "decode")),
            *("memory step", "memory prefill", "short convolution", "canon convolution"),
        }

    def test_every_case_has_its_line(ran):
        written = ran[1]
        assert [line["what"] for line in lines_of(written, "prefill")] == ["polar prefill", "softmax prefill"] * 2
        decode = lines_of(written, "decode")
        assert decode[0]["what"] == "polar decode, split" and decode[0]["target"] == 8
        assert sum(line["note"] is not None for line in decode) == 4  # what does not fit, of both cores
        with_target = [line["case"] for line in decode[1:] if line["target"] is not None]
        assert with_target == ["2 x 64 fp32", "2 x 200 fp32"] * 2  # the largest that fits
        states = lines_of(written, "states")
        assert [line["target"] for line in states] == [None, 0.8, None, 0.8, 1.0, 1.0]
        tasks = lines_of(written, "end-to-end")
        assert [line["what"] for line in tasks] == [
            *("niah, triton", "ppl, triton", "niah, torch", "ppl, torch", "niah", "ppl")
        ]
        assert [line["figures"].get("rows not ok") for line in tasks] == [0, 0, 0, 0, None, None]
        assert all(line["figures"]["tokens/s"] > 0 for line in tasks[:4])
        faster = tasks[0]["figures"]["tokens/s"] / tasks[2]["figures"]["tokens/s"]
        assert tasks[4]["figures"]["times faster"] == pytest.approx(faster)

    def test_timings_lie_behind_the_figures(ran):
        for name in ("prefill", "decode", "states"):
            for line in lines_of(ran[1], name):
                assert line["note"] or line["timings"]
                for one in line["timings"].values():
                    assert 0 < one["best_s"] <= one["median_s"] and one["num_rounds"] == 1 and one["first_s"] > 0

    def test_bytes_of_decode_and_of_a_step(ran):
        decode = {line["case"]: line for line in lines_of(ran[1], "decode") if line["what"] == "polar decode"}
        assert decode["2 x 200 fp32"]["figures"]["MB"] == pytest.approx(2 * 200 * 2 * 16 * 4 / 1e6)
        step = lines_of(ran[1], "states")[1]
        assert step["figures"]["MB"] == pytest.approx(2 * 3 * 4 * 16 * 16 * 4 / 1e6)

    @pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden vectors are not beside this checkout")
    def test_golden_cases_are_found(ran):
        (line,) = [line for line in lines_of(ran[1], "models") if line["what"].startswith("golden model")]
        assert line["ok"] or "width" in line["note"]  # compared, or refused with the reason
        assert models.golden_folder() == GOLDEN

    def test_errors_are_felt():
        x = torch.randn(1, 2, 5, 16, dtype=torch.float64)
        assert parity.row_error(x, x) == 0
        assert parity.row_error(1.01 * x, x) == pytest.approx(0.01)
        wrong = x.clone()
        wrong[0, 1, 3, 2] = math.nan
        assert math.isnan(parity.row_error(wrong, x))
        assert math.isnan(parity.error([x, wrong], [x, x]))
        assert parity.error([x, x + 0.5], [x, x]) == pytest.approx((0.5 / x.abs().clamp(min=1)).max().item())
        with parity.poisoned():
            assert torch.empty(3).isnan().all()
