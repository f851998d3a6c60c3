"""The measurements' own machinery: ratios on a CPU, and of the GPU's script what needs no kernel."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from atma_eval.bench import cpu, gpu, report, timing
from atma_eval.bench.__main__ import app
from atma_eval.bench.parts import Part, Sizes, in_pages, thousands
from atma_eval.bench.report import Line, PartReport
from atma_eval.errors import UserError

CPU = torch.device("cpu")


def test_cpu_reports_every_ratio(monkeypatch, tmp_path):
    """In miniature: fourteen lines, and the exit code says whether a target was missed."""
    for name, size in (("LENGTH", 512), ("LONG", 2048), ("CHUNK", 256), ("WINDOW", 64), ("ROUNDS", 1)):
        monkeypatch.setattr(cpu, name, size)
    path = tmp_path / "new" / "bench.json"
    result = CliRunner().invoke(app, ["cpu", "--json", str(path)])
    written = json.loads(path.read_text())
    assert len(written["lines"]) == 14
    assert written["threads"] == 1
    assert result.exit_code == (0 if all(line["ok"] for line in written["lines"]) else 1)
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_verdicts():
    assert cpu.Ratio("", "", "", (1.6, 1.0), 1.6).ok
    assert not cpu.Ratio("", "", "", (1.7, 1.0), 1.6).ok
    assert cpu.Ratio("", "", "", (4.0, 1.0), 4.0, at_least=True).ok
    assert not cpu.Ratio("", "", "", (3.9, 1.0), 4.0, at_least=True).ok

    def ok(value, target, at_least):
        return Line(what="", case="", figures={"x": value}, judged="x", target=target, at_least=at_least).ok

    assert ok(0.8, 0.8, True) is True and ok(0.79, 0.8, True) is False
    assert ok(0.8, 0.8, False) is True and ok(0.81, 0.8, False) is False
    assert ok(math.nan, 0.8, True) is False and ok(math.nan, 0.8, False) is False
    assert ok(1.0, None, True) is None
    assert Line(what="", case="", judged="x", target=1.0).ok is None  # skipped: nothing to judge


def test_without_a_gpu_it_says_what_works():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "atma_eval.bench", "gpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "error: there is no GPU" in done.stderr and "bench cpu" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(UserError, match="need a CUDA device") as refusal:  # a CPU computes only in the interpreter
        gpu.measure(sizes=Sizes(), device=CPU, out=None)
    assert "torch" in refusal.value.hint


def test_an_unknown_part_is_named():
    refusal = CliRunner().invoke(app, ["gpu", "--part", "decod"]).exception
    assert isinstance(refusal, UserError)
    assert refusal.hint.startswith("did you mean decode?")


@pytest.mark.parametrize("met", [True, False])
def test_the_command_passes_its_options_on(monkeypatch, tmp_path, met):
    asked = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu, "measure", lambda **options: asked.update(options) or met)
    options = ["--quick", "--part", "states", "--part", "decode", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, ["gpu", *options]).exit_code == (0 if met else 1)
    assert [part.name for part in asked["parts"]] == ["decode", "states"]
    assert asked["sizes"] == Sizes().quick() and asked["budget_s"] == gpu.QUICK_BUDGET_S
    assert asked["device"] == torch.device("cuda:0") and asked["out"] == tmp_path
    CliRunner().invoke(app, ["gpu"])
    assert asked["parts"] == gpu.PARTS and asked["sizes"] == Sizes() and asked["budget_s"] == gpu.BUDGET_S < 360
    shares = [part.until for part in gpu.PARTS]
    assert shares == sorted(shares) and shares[-1] == 1


# -- parts that fail, stop, or never begin ----------------------------------------------------------------


def good_line(value: float = 1.0) -> Line:
    return Line(what="thing", case="small", figures={"x": value}, judged="x", target=1.0)


def good(bench):
    yield good_line()


def failing(bench):
    yield good_line()
    raise RuntimeError("the kernel\nfell over")


def slow(bench):
    for _ in bench.while_time(range(1000)):
        time.sleep(0.02)
        yield good_line()


def missing(bench):
    yield good_line(0.5)
    yield Line(what="thing", case="large", figures={"x": math.nan}, judged="x", target=1.0)
    yield Line(what="thing", case="huge", note="skipped, it does not fit")


def measure(monkeypatch, tmp_path, budget_s, *parts):
    monkeypatch.setattr(gpu, "choose", lambda *args, **options: None)
    listed = tuple(Part(name=f.__name__, title=f.__name__, measure=f, until=until) for f, until in parts)
    out = tmp_path / "new" / "folder"
    met = gpu.measure(sizes=Sizes(), device=CPU, out=out, budget_s=budget_s, parts=listed)
    (path,) = out.glob("*.json")
    return met, json.loads(path.read_text())


def test_all_is_well(monkeypatch, tmp_path):
    met, written = measure(monkeypatch, tmp_path, 60, (good, 1.0))
    assert met is True
    assert written["missing_parts"] == written["missed_targets"] == []
    assert written["num_targets_met"] == 1


def test_one_failure_is_reported_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
    met, written = measure(monkeypatch, tmp_path, 60, (failing, 0.5), (good, 1.0))
    failed, done = written["parts"]
    assert met is False
    assert failed["status"] == "failed" and failed["error"] == "RuntimeError: the kernel fell over"
    assert "in failing" in failed["traceback"]
    assert len(failed["lines"]) == 1 and failed["lines"][0]["ok"] is True
    assert done["status"] == "done" and len(done["lines"]) == 1
    assert written["missing_parts"] == ["failing"]
    assert "failing: failed: RuntimeError: the kernel fell over; 1 of 1 targets met" in capsys.readouterr().out


def test_time_that_runs_out(monkeypatch, tmp_path, capsys):
    met, written = measure(monkeypatch, tmp_path, 2, (slow, 0.5), (slow, 1.0), (good, 0.9))
    first, second, last = written["parts"]
    assert met is False
    assert first["status"] == second["status"] == "stopped" and last["status"] == "skipped"
    assert 0 < len(first["lines"]) < 1000 and first["elapsed_s"] < 2 and last["lines"] == []
    assert written["missing_parts"] == ["slow", "slow", "good"]
    out = capsys.readouterr().out
    assert "slow: stopped, its time was over; " in out and "good: skipped, no time was left" in out


def test_missed_targets(monkeypatch, tmp_path, capsys):
    met, written = measure(monkeypatch, tmp_path, 60, (missing, 1.0))
    assert met is False
    assert written["missing_parts"] == []
    assert written["missed_targets"] == ["thing, small", "thing, large"]
    assert [line["figures"].get("x", "none") for line in written["parts"][0]["lines"]] == [0.5, None, "none"]
    out = capsys.readouterr().out
    assert "thing, huge: skipped, it does not fit" in out
    assert "missed: thing, small" in out


def test_the_file_is_written_after_every_part(monkeypatch, tmp_path):
    (tmp_path / "new" / "folder").mkdir(parents=True)
    seen = []

    def looking(bench):
        seen.extend(json.loads(next((tmp_path / "new" / "folder").glob("*.json")).read_text())["parts"])
        yield good_line()

    measure(monkeypatch, tmp_path, 60, (good, 0.5), (looking, 1.0))
    assert [part["name"] for part in seen] == ["good"]


# -- pieces -----------------------------------------------------------------------------------------------


def test_an_earlier_run_of_the_day_is_kept(tmp_path):
    day = datetime.date(2026, 11, 29)
    first = gpu.result_path(tmp_path, "NVIDIA H200", day)
    assert first.name == "nvidia-h200-2026-11-29.json"
    first.touch()
    assert gpu.result_path(tmp_path, "NVIDIA H200", day).name == "nvidia-h200-2026-11-29-2.json"


def test_numbers_keep_three_digits():
    shown = [report.number(x) for x in (0, 3, 12_345, 1234.5, 12.345, 0.75, 0.00123, 1.1e-6, math.nan, math.inf)]
    assert shown == ["0", "3", "12,345", "1,234", "12.3", "0.75", "0.0012", "1.1e-06", "nan", "inf"]
    assert [thousands(n) for n in (65_536, 1000, 1024, 0)] == ["64K", "1,000", "1K", "0"]


def test_a_summary_counts_first_calls():
    first = timing.Timing(median_s=0.1, best_s=0.1, first_s=2.5, num_rounds=3)
    line = Line(what="", case="", timings={"a": first, "b": dataclasses.replace(first)})
    again = Line(what="", case="", timings={"b": line.timings["b"]})  # compared with two kernels, as flash attention is
    summary = PartReport(name="p", title="", status="done", lines=[line, again]).summary()
    assert summary == "p: done; 0 of 0 targets met, 0 s, 5 s of it first calls"


def test_pages_hold_the_keys_and_nothing_else():
    k, v = torch.randn(2, 2, 10, 3, 5)
    pages = in_pages(k, v, 4)
    for b in range(2):
        for pool, x in ((pages.keys, k), (pages.values, v)):
            rows = pool[pages.tables[b].long()].flatten(0, 1)
            assert torch.equal(rows[:10], x[b]) and rows[10:].isnan().all()
    assert pages.tables.dtype == torch.int32
    assert sorted(pages.tables.flatten().tolist()) == list(range(6))


class Recorder:
    """A stopwatch that says what it was asked, in a time that the test decides."""

    def __init__(self, monkeypatch):
        self.calls, self.now = [], 0.0
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now)

    def warm_up(self, run):
        run()
        return timing.WarmUp(9.0, 0.25)

    def seconds(self, run, queue_s):
        assert queue_s == 0.25
        self.calls.append(run())
        self.now += 0.1
        return float(len(self.calls))


@pytest.mark.parametrize(
    ("at_most_s", "max_rounds", "num_rounds"), [(100, 5, 5), (1.01, 50, 5), (0.1, 50, 3), (9, 1, 1)]
)
def test_comparisons_are_in_turns(monkeypatch, at_most_s, max_rounds, num_rounds):
    stopwatch = Recorder(monkeypatch)
    runs = {"A": lambda: "A", "B": lambda: "B"}
    timings = timing.in_turns(stopwatch, runs, max_rounds=max_rounds, at_most_s=at_most_s)
    assert "".join(stopwatch.calls) == "AB" * num_rounds
    assert timings["A"].num_rounds == timings["B"].num_rounds == num_rounds
    assert timings["A"].best_s == 1 and timings["B"].best_s == 2 and timings["A"].first_s == 9
    assert timings["A"].median_s == num_rounds  # 1, 3, 5, ...


class FakeGpu:
    """Enough of `torch.cuda` for the stopwatch: events read a clock that each read of the buffer moves by 1 ms."""

    def __init__(self, monkeypatch):
        self.num_flushes, self.now_ms = 0, 0.0
        properties = SimpleNamespace(
            name="NVIDIA Fake 1", L2_cache_size=2**20, major=9, minor=0, total_memory=2**34, multi_processor_count=7
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(timing.torch, "zeros", lambda *shape, **options: self)

    def sum(self):
        self.num_flushes += 1
        self.now_ms += 1


class FakeEvent:
    def __init__(self, fake):
        self.fake = fake

    def record(self):
        self.at_ms = self.fake.now_ms

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


@pytest.mark.parametrize(("queue_s", "num_flushes"), [(0.0, 1), (0.0021, 4), (5.0, timing.MAX_FLUSHES)])
def test_the_gpu_is_kept_busy_while_calls_are_queued(monkeypatch, queue_s, num_flushes):
    fake = FakeGpu(monkeypatch)
    stopwatch = timing.GpuStopwatch(CPU)
    before = fake.num_flushes

    def run():
        fake.now_ms += 7

    assert stopwatch.seconds(run, queue_s) == pytest.approx(0.007)
    assert fake.num_flushes - before == num_flushes
    assert stopwatch.warm_up(run).first_s >= 0
    assert fake.now_ms > 14


def test_the_machine_is_described(monkeypatch):
    FakeGpu(monkeypatch)
    monkeypatch.setattr(gpu, "git_commit", lambda: "abc")
    monkeypatch.setattr(gpu.subprocess, "run", lambda *args, **options: SimpleNamespace(stdout="580.1\n580.1\n"))
    about = gpu.machine(torch.device("cuda:0"))
    assert about["device"]["name"] == "NVIDIA Fake 1"
    assert about["device"]["capability"] == "9.0" and about["device"]["driver"] == "580.1"
    assert about["versions"]["torch"] and about["versions"]["python"]

    def absent(*args, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(gpu.subprocess, "run", absent)
    assert gpu.machine(torch.device("cuda:0"))["device"]["driver"] is None
