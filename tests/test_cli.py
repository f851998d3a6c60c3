"""The command line: quick help, short errors before any work, scores of one sequence, and who may import whom."""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, TINY, tiny_model
from safetensors.torch import save_file

from atma_eval import __version__, cli, runner
from atma_eval.commands import evaluate
from atma_eval.progress import RunProgress
from atma_eval.session import DEFAULT_CHUNK, Session

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "100"}


class Outcome:
    """Exit code and output of one command, run in this process."""

    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    def lines(self, start: str) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith(start)]


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Run a command as the console script does, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["atma-eval", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return Outcome(int(caught.value.code or 0), *capsys.readouterr())

    return run


def refused(outcome: Outcome, *parts: str, hint: str | None = None) -> None:
    """One short error with the value, exit code 2, and a hint where one is promised."""
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    (error,) = outcome.lines("error: ")
    for part in parts:
        assert part in error
    if hint is not None:
        (line,) = outcome.lines("hint: ")
        assert hint in line


# -- help and version -------------------------------------------------------------------------------------


def seconds_of(command: list[str]) -> float:
    """Processor time of a command: what it would take on an idle machine, whoever else is busy."""
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_quick(option):
    assert min(seconds_of([sys.executable, "-m", "atma_eval", option]) for _ in range(3)) < 0.5


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from atma_eval.cli import app; app(['--help'], standalone_mode=False); "
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "atma_eval" in loaded
    assert not loaded & set("torch numpy triton yaml datasets matplotlib pandas safetensors tokenizers".split())


def test_help(call):
    for option in ("--help", "-h"):
        outcome = call(option)
        assert outcome.code == 0
        for command in ("niah", "ppl", "run", "score", "list"):
            assert command in outcome.out
    for command in ("niah", "ppl"):
        outcome = call(command, "--help")
        assert outcome.code == 0
        options = "--model --lengths --docs --text --preset --seed --window --dtype --device --out --dry-run --json"
        for option in options.split():
            assert option in outcome.out, (command, option)
    assert "--trials" in call("niah", "--help").out


def test_version(call):
    assert call("--version").out == f"atma-eval {__version__}\n"


def test_list(call):
    outcome = call("list", "--json")
    assert outcome.code == 0
    listed = json.loads(outcome.out)
    assert {"induction", "atma-stage1", "perplexity"} <= {preset["name"] for preset in listed["presets"]}
    assert {p["name"]: p["command"] for p in listed["presets"]}["perplexity"] == "ppl"
    assert set(listed) == {"models", "presets", "suites", "recipes"}
    table = call("list")
    assert table.code == 0
    for name in [preset["name"] for preset in listed["presets"]] + [model["name"] for model in listed["models"]]:
        assert name in table.out


# -- bad input --------------------------------------------------------------------------------------------

M = "--model random:tiny.json"
BAD_INPUT = [  # command, part of the error, part of the hint (None: no hint promised)
    ("niah --model atma-dmo", "unknown model 'atma-dmo'", "random:CONFIG.json"),
    ("niah --model nosuch/folder", "unknown model 'nosuch/folder'", "folder"),
    (f"niah --model {'x' * 300}", "too long", None),
    ("niah --model ~nobody-here/x", "unknown model", "folder"),
    ("niah --model hf:owner/name", "hf:owner/name", "folder"),
    ("niah --model hf:owner/name@v2", "hf:owner/name@v2", "folder"),
    ("niah --model hf:name", "bad model 'hf:name'", "hf:owner/name"),
    ("niah --model encoder", "encoder is a BertForMaskedLM", "ForCausalLM"),
    ("niah --model quantised", "quantised is quantised", "full weights"),
    ("niah --model causal", "causal has no tokenizer.json", "--tokenizer"),
    ("niah --model causal --tokenizer gpt2", "50257 tokens, the model 257", "--tokenizer"),
    ("niah --model causal --impl triton", "--impl triton", "leave"),
    ("niah --model causal --q2-floor 1e-6", "--q2-floor", "leave"),
    ("ppl --model own-code", "(auto_map) and is never run", "newer version"),
    ("ppl --model no-weights", "no-weights has no model.safetensors", "save_pretrained"),
    ("ppl --model model.gguf", "GGUF", "save_pretrained"),
    ("niah --model random:nosuch.json", "nosuch.json", None),
    ("niah --model random:notes.txt", "notes.txt is not JSON", None),
    ("niah --model only_config", "only_config has no weights", "weights.safetensors"),
    ("niah --model raven", "Raven", "polar"),
    ("niah --model restart", "stage-step-000100.pt", "Foveal"),
    ("niah --model restart/stage-step-000100.pt", "stage-step-000100.pt", "Foveal"),
    ("niah --model wall.json", "wall.json is a file", "folder"),
    ("niah --model random:wall.json", "attn_type 'wall'", "polar"),
    ("niah --model random:heads.json", "6 heads", "groups of 4"),
    ("niah --model random:nowindow.json", "lacks attn_window", "never filled in"),
    ("niah --model random:nomem.json", "lacks mem_enabled", "never filled in"),
    (f"niah {M} {M}", "two models are called random:tiny", "rename"),
    (f"niah {M} --task nosuch", "unknown preset 'nosuch'", "induction"),
    (f"niah {M} --preset inductoin", "unknown preset 'inductoin'", "did you mean induction"),
    (f"niah {M} --preset perplexity", "'perplexity' belongs to the family perplexity", "induction"),
    (f"ppl {M} --preset induction", "'induction' belongs to the family induction", "perplexity"),
    (f"niah {M} --preset nosuch.yaml", "nosuch.yaml", None),
    (f"niah {M} --preset typo.yaml", "unknown key 'trails'", "did you mean trials"),
    (f"niah {M} --lengths 64k..2k", "'64k..2k'", "write 2k..64k"),
    (f"niah {M} --lengths 0", "'0'", "2k..64k"),
    (f"niah {M} --lengths 2kk", "'2kk'", "2k..64k"),
    (f"niah {M} --lengths 2_", "'2_'", "2k..64k"),
    (f"niah {M} --lengths=-5", "'-5'", "2k..64k"),
    (f"niah {M} --lengths=", "bad length ''", "2k..64k"),
    (f"niah {M} --lengths 2k..", "bad length range '2k..': it has one end", "2k..64k"),
    (f"ppl {M} --lengths 1e3", "'1e3'", "2k..64k"),
    (f"niah {M} --lengths 5", "a gap of 5 tokens", "is 11"),
    (f"niah {M} --lengths 10,2k", "a gap of 10 tokens", "is 11"),
    (f"niah {M} --preset access-code --lengths 16", "as 10 tokens", "one token"),
    (f"niah {M} --trials 0", "--trials is 0", "at least 1"),
    (f"niah {M} --trials=-3", "--trials is -3", "at least 1"),
    (f"niah {M} --docs 0", "--docs is 0", "at least 1"),
    (f"niah {M} --docs 100", "100 documents", "--docs"),
    (f"ppl {M} --docs 100", "100 documents", "--docs"),
    (f"niah {M} --text nosuch.txt", "'nosuch.txt'", "stdlib"),
    (f"niah {M} --text=", "no text at ''", "stdlib"),
    (f"niah {M} --text empty.txt", "empty.txt is empty", None),
    (f"niah {M} --text short.txt", "the longest in short.txt has 300", "--repeat"),
    (f"ppl {M} --text short.txt --lengths 1k", "needs a document of 1,024 tokens", "--repeat"),
    (f"ppl {M} --text latin.txt", "latin.txt is not UTF-8", None),
    (f"ppl {M} --text bad.jsonl", "bad.jsonl, line 2", None),
    (f"niah {M} --window wide", "bad window 'wide'", "train, full"),
    (f"niah {M} --window 0", "bad window '0'", "train, full"),
    (f"niah {M} --dtype fp8", "unknown dtype 'fp8'", "fp16"),
    (f"niah {M} --device gpu", "unknown device 'gpu'", "cuda:N"),
    (f"niah {M} --tokenizer nosuch", "no tokenizer at 'nosuch'", "gpt2"),
    (f"niah {M} -o short.txt", "cannot write to short.txt", "-o"),
    (f"niah {M} -o short.txt/run", "cannot write to short.txt/run", "-o"),
    (f"niah {M} -o /proc/x", "cannot write to /proc/x", "-o"),
    (f"ppl {M} -o foreign --lengths 64", "foreign/records.jsonl, line 1", "line"),
    ("run nosuch", "no suite 'nosuch'", ".yaml"),
    ("run typo.yaml", "unknown key", "allowed"),
    (f"score {M} --out x.npz", "--text or --tokens", None),
    (f"score {M} --out x.npz --text short.txt --tokens t.npy", "--text or --tokens", None),
    (f"score {M} --out x.npy --text short.txt", "x.npy", ".npz"),
    (f"score {M} --out x.npz --text short.txt --chunk 0", "--chunk is 0", "at least 1"),
    (f"score {M} --out x.npz --text nosuch.txt", "nosuch.txt", None),
    (f"score {M} --out x.npz --text empty.txt", "1 tokens; at least 2", None),
    (f"score {M} --out short.txt/x.npz --text short.txt", "cannot write short.txt/x.npz", None),
    (f"score {M} --out folder.npz --text short.txt", "cannot write folder.npz", None),
    ("score --model nosuch --out x.npz --text short.txt", "unknown model 'nosuch'", "folder"),
    (f"score {M} --out x.npz --text short.txt --window none", "bad window 'none'", "train, full"),
]  # fmt: skip

DRIVER = """
import contextlib, io, json, sys, time
from atma_eval.cli import main
results = []
for arguments in json.load(sys.stdin):
    sys.argv, code, out, err, start = ["atma-eval", *arguments], None, io.StringIO(), io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        except BaseException as failure:
            code = repr(failure)
    results.append([code, out.getvalue(), err.getvalue(), time.process_time() - start, "torch" in sys.modules])
json.dump(results, sys.stdout)
"""


def prepare_folder(folder: Path) -> None:
    """What the commands of `BAD_INPUT` find in their working folder."""
    configs = {
        "tiny": TINY,
        "wall": {**TINY, "attn_type": "wall"},
        "heads": {**TINY, "hidden_size": 48},
        "nowindow": {k: v for k, v in TINY.items() if k != "attn_window"},
        "nomem": {k: v for k, v in TINY.items() if k != "mem_enabled"},
    }
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    for name, config in {"only_config": TINY, "raven": {"arch_type": "raven_native", "hidden_size": 1024}}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 257}
    for name, config in {
        "causal": llama,
        "no-weights": llama,
        "encoder": {**llama, "model_type": "bert", "architectures": ["BertForMaskedLM"]},
        "quantised": {**llama, "quantization_config": {"quant_method": "gptq"}},
        "own-code": {**llama, "architectures": ["MineForCausalLM"], "auto_map": {"AutoModelForCausalLM": "mine.Mine"}},
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    (folder / "causal/model.safetensors").touch()
    (folder / "model.gguf").touch()
    (folder / "restart").mkdir()
    (folder / "restart/stage-step-000100.pt").touch()
    (folder / "folder.npz").mkdir()
    (folder / "notes.txt").write_text("notes")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("x" * 299 + "\n")
    (folder / "latin.txt").write_bytes(b"\xe9" * 9)
    (folder / "bad.jsonl").write_text('{"text": "fine"}\n{"txt": 1}\n')
    (folder / "typo.yaml").write_text('family: induction\ncue: "#{key}="\nlengths: 1k\ntrails: 3\n')
    (folder / "foreign").mkdir()
    (folder / "foreign/records.jsonl").write_text('{"some": "one else\'s"}\n')
    np.save(folder / "t.npy", np.arange(9))


@pytest.fixture(scope="module")
def bad_outcomes(tmp_path_factory):
    """All of `BAD_INPUT` in one fresh process: exit code, output, seconds, and whether torch was loaded by then."""
    folder = tmp_path_factory.mktemp("bad")
    prepare_folder(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps([command.split() for command, _, _ in BAD_INPUT]),
        capture_output=True, text=True, check=True, cwd=folder, env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    for path, content in before.items():
        assert path.read_bytes() == content, f"{path} was changed"
    assert not list(folder.rglob("*.partial"))
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(BAD_INPUT)), ids=[command[:60] for command, _, _ in BAD_INPUT])
def test_bad_input(bad_outcomes, index):
    _, part, hint = BAD_INPUT[index]
    code, out, err, seconds, torch_loaded = bad_outcomes[index]
    refused(Outcome(code, out, err), part, hint=hint)
    assert len(err) < 1200
    assert seconds < 1
    assert not torch_loaded


@pytest.mark.parametrize("command", ["niah --trials 0", "niah --docs 0", "ppl --docs 0"])
def test_nothing_to_do_is_refused_for_the_demonstration_too(call, monkeypatch, command):
    """Its defaults fill in what was not given, not a zero."""
    monkeypatch.setattr(evaluate, "_execute", lambda *_: pytest.fail("it ran"))
    refused(call(*command.split()), " is 0", hint="at least 1")


@pytest.mark.parametrize(
    "command", [f"niah {M} --text short.txt", "niah --model nosuch", f"score {M} --out x.npz --text empty.txt"]
)
def test_bad_input_is_quick_from_the_shell(tmp_path, command):
    """Start of the interpreter included."""
    prepare_folder(tmp_path)
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "atma_eval", *command.split()],
        capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=False,
    )  # fmt: skip
    after = os.times()
    refused(Outcome(done.returncode, done.stdout, done.stderr))
    assert after.children_user + after.children_system - before.children_user - before.children_system < 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["niah", "--modle", "x"], ("--modle", "--model")),
        (["nia"], ("nia", "niah")),
        (["niah", "--trials", "many"], ("--trials", "integer")),
        (["niah", "extra"], ("extra",)),
        (["score", "--model", "x"], ("--out",)),
        (["run"], ("suite",)),
    ],
)
def test_usage_errors(call, arguments, named):
    outcome = call(*arguments)
    assert outcome.code == 2
    assert outcome.out == ""
    for part in named:
        assert part in outcome.err


def test_bad_weights_are_refused_soon_after_the_load_begins(call, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "weights.safetensors").write_bytes(b"\x10" * 100)
    for command in (("niah", "--lengths", 64), ("ppl", "--lengths", 64)):
        refused(call(*command, "--model", folder, "-o", "run"), "weights.safetensors", "truncated or corrupt")
    weights = tiny_model().state_dict()
    save_file({k: v for k, v in weights.items() if k != "norm.weight"}, folder / "weights.safetensors")
    refused(call("niah", "--lengths", 64, "--model", folder, "-o", "run"), "1 missing: norm.weight", hint="config.json")


def test_a_gpu_that_is_not_there(call, tiny_name):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    outcome = call("niah", "--model", tiny_name, "--lengths", 64, "--device", "cuda", "-o", "run")
    refused(outcome, "cuda", hint="--device cpu")


def test_a_full_disk_behind_the_output_is_an_error():
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "atma_eval", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "error: the output cannot be written: the disk is full"
    assert "Traceback" not in done.stderr


def test_the_home_folder_behind_an_equals_sign(call, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    refused(call("niah", "--dry-run", "--text=~/none.txt"), f"no text at '{tmp_path}/none.txt'")
    refused(call("niah", "--dry-run", "--text=a~/none.txt"), "no text at 'a~/none.txt'")


def test_names_are_printed_as_they_are(call, tmp_path):
    """Square brackets and colons in a name are neither markup nor emoji."""
    (tmp_path / "t.txt").write_text("hello")
    for name in ("a[/b]", "[red]x", "x:smile:y"):
        refused(call("ppl", "--model", name), f"unknown model '{name}'")
        folder = tmp_path / "models" / name.replace("/", "")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(TINY))
        save_file(tiny_model().state_dict(), folder / "weights.safetensors")
        outcome = call("ppl", "--model", folder, "--lengths", 64, "--docs", 1, "-o", name)
        assert outcome.code == 0
        assert f"1 row in {name}/records.jsonl" in outcome.err
        assert f"perplexity · {folder.name}" in outcome.out
        scored = call("score", "--model", folder, "--text", "t.txt", "--out", f"{name}/x.npz")
        assert scored.code == 0
        assert f"in {name}/x.npz" in scored.err


# -- runs -------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


def test_a_refused_request_leaves_earlier_results(call, tiny_name, tmp_path):
    base = ("niah", "--model", tiny_name, "-o", "run", "-q")
    assert call(*base, "--lengths", "64", "--trials", 2, "--docs", 2).code == 0
    files = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    assert len(rows_of(tmp_path / "run")) == 6
    for more in (
        ("--lengths", "5", "--docs", 2),
        ("--lengths", "64", "--seed", 9, "--docs", 2),
        ("--lengths", "64", "--window", 32, "--docs", 2),
        ("--lengths", "64", "--dtype", "bf16", "--docs", 2),
        ("--lengths", "64", "--docs", 3),
        ("--lengths", "64", "--text", "nosuch.txt"),
    ):
        refused(call(*base, *more))
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == files, more


@pytest.mark.parametrize("num_rows", [0, 1])
def test_interrupted(call, tiny_name, tmp_path, monkeypatch, num_rows):
    def stop(*_):
        raise KeyboardInterrupt

    if num_rows:
        monkeypatch.setattr(RunProgress, "row", stop)
    else:
        monkeypatch.setattr(runner, "load_model", stop)
    outcome = call("niah", "--model", tiny_name, "--lengths", 64, "--trials", 1, "-o", "run")
    assert outcome.code == 130
    assert len(rows_of(tmp_path / "run")) == num_rows
    said = "finished rows are in run, and the same command continues" if num_rows else "before the first row"
    assert outcome.lines("interrupted")[0].endswith(said)


def test_repeated_text_is_said_in_rows_and_manifest(call, tiny_name, tmp_path):
    (tmp_path / "short.txt").write_text("only a few words\n")
    base = ("--model", tiny_name, "--text", "short.txt", "--lengths", "64,100", "-q")
    refused(call("ppl", *base, "--docs", 1, "-o", "a"), "the longest in short.txt has 17", hint="--repeat")
    for number, command in enumerate((("ppl", "--docs", 1), ("niah", "--trials", 1))):
        out = tmp_path / f"run{number}"
        assert call(*command, *base, "--repeat", "-o", out).code == 0
        assert {row["text_id"] for row in rows_of(out)} == {"short.txt (repeated)"}
        (tasks,) = json.loads((out / "manifest.json").read_text())["tasks"].values()
        (task,) = tasks.values()
        assert task["text"]["repeated"] is True
        assert task["protocol"]["repeat"] is True


def test_dry_run_counts_and_touches_nothing(call, tiny_name, tmp_path):
    request = ("niah", "--model", tiny_name, "--lengths", "2k..64k", "--trials", 4, "-o", "run")
    outcome = call(*request, "--dry-run", "--json")
    assert outcome.code == 0
    plan = json.loads(outcome.out)
    longest = plan["cells"][0]["longest_sequence"]
    assert longest == 1 + 6 + 5 + 1 + 65536 + 6 + 5
    assert plan["computed_tokens"] < plan["naive_tokens"]
    shown = call("ppl", "--model", tiny_name, "--lengths", "2k,3000", "--docs", 3, "--dry-run")
    assert shown.code == 0
    assert "3,000" in shown.out
    assert "9,003 tokens to compute" in " ".join(shown.out.split())
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "results").exists()


def test_any_length_gets_through_the_tables(call, tiny_name):
    outcome = call("ppl", "--model", tiny_name, "--lengths", "1,3,500,1000", "--docs", 1, "-o", "run")
    assert outcome.code == 0
    for length in ("1,000", "500"):
        assert length in outcome.out
    outcome = call("ppl", "--model", tiny_name, "--lengths", "1,3,500,1000", "--docs", 1, "-o", "run", "--json")
    data = json.loads(outcome.out, parse_constant=lambda token: pytest.fail(f"{token} in JSON"))
    assert [cell["length"] for cell in data["cells"]] == [1, 3, 500, 1000]


def test_output_in_a_file_has_no_control_codes(call, tiny_name):
    outcome = call("niah", "--model", tiny_name, "--lengths", 64, "--trials", 2, "-o", "run")
    assert outcome.code == 0
    for text in (outcome.out, outcome.err):
        assert "\x1b" not in text
        assert "\r" not in text


# -- score ------------------------------------------------------------------------------------------------


def scored(call, *arguments) -> dict[str, np.ndarray]:
    outcome = call("score", *arguments, "--out", "result.npz")
    assert outcome.code == 0, outcome.err
    with np.load("result.npz") as file:
        return dict(file)


TEXT = "Windows line\r\nand 数学 \U0001f600, twice\n" * 7


def test_score_entry_i_scores_token_i_plus_1(call, tiny_name, tmp_path):
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    result = scored(call, "--model", tiny_name, "--text", "t.txt")
    tokens = torch.from_numpy(result["tokens"])
    assert tokens.tolist() == [256, *TEXT.encode()]
    with torch.no_grad():
        model = tiny_model()
        logits = model.logits(model(tokens[None]))[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="none")
    assert result["nll"].shape == result["argmax"].shape == (len(tokens) - 1,)
    np.testing.assert_allclose(result["nll"], expected.numpy(), atol=2e-5)
    assert (result["argmax"] == logits[:-1].argmax(-1).numpy()).mean() > 0.99
    assert result["nll"].std() > 0.1  # else an entry more or less would not show


def test_score_of_text_and_tokens_and_chunks_agree(call, tiny_name, tmp_path, monkeypatch):
    chunks = []
    init = Session.__init__
    monkeypatch.setattr(Session, "__init__", lambda self, *a, **k: (chunks.append(k["chunk"]), init(self, *a, **k))[1])
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    base = scored(call, "--model", tiny_name, "--text", "t.txt")
    np.save(tmp_path / "t.npy", base["tokens"].astype(np.uint16))
    for chunk in (None, 1, 7, 64, 100_000):
        more = () if chunk is None else ("--chunk", chunk)
        result = scored(call, "--model", tiny_name, "--tokens", "t.npy", *more)
        assert result["tokens"].tolist() == base["tokens"].tolist()
        np.testing.assert_allclose(result["nll"], base["nll"], atol=1e-4)
        assert (result["argmax"] == base["argmax"]).mean() > 0.99
    assert chunks == [DEFAULT_CHUNK, DEFAULT_CHUNK, 1, 7, 64, 100_000]


def test_score_of_tokens_needs_no_tokenizer(call, tmp_path, monkeypatch):
    monkeypatch.setattr("atma_eval.tokenizer._find_gpt2", lambda: None)
    monkeypatch.setattr("atma_eval.tokenizer._download_gpt2", lambda: None)
    (tmp_path / "big.json").write_text(json.dumps({**TINY, "vocab_size": 50304, "tokenizer": "gpt2"}))
    (tmp_path / "t.txt").write_text("hello")
    np.save(tmp_path / "t.npy", np.array([50256, 31373, 995]))
    assert scored(call, "--model", "random:big.json", "--tokens", "t.npy")["nll"].shape == (2,)
    outcome = call("score", "--model", "random:big.json", "--text", "t.txt", "--out", "x.npz")
    refused(outcome, "GPT-2 tokenizer", hint="PATH")


@pytest.mark.parametrize("window", ["train", "full", "16"])
def test_score_takes_a_window(call, tmp_path, window):
    (tmp_path / "w.json").write_text(json.dumps({**TINY, "attn_window": 30, "mem_enabled": False}))
    (tmp_path / "t.txt").write_bytes(TEXT.encode())
    got = scored(call, "--model", "random:w.json", "--text", "t.txt", "--window", window)
    applied = {"train": 30, "full": None, "16": 16}[window]
    model, tokens = tiny_model(attn_window=applied, mem_enabled=False), torch.from_numpy(got["tokens"])
    with torch.no_grad():
        logits = model.logits(model(tokens[None]))[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="none")
    np.testing.assert_allclose(got["nll"], expected.numpy(), atol=2e-5)


BAD_TOKENS = {
    "two-dimensional": (np.zeros((2, 3), dtype=int), "one-dimensional"),
    "a number": (np.array(5), "one-dimensional"),
    "floats": (np.array([1.0, 2.0]), "whole numbers"),
    "booleans": (np.array([True, False]), "whole numbers"),
    "words": (np.array(["a", "b"]), "whole numbers"),
    "too high": (np.array([1, 257]), "ids from 1 to 257"),
    "negative": (np.array([-1, 5]), "ids from -1 to 5"),
    "enormous": (np.array([1, 2**64 - 1], dtype=np.uint64), "18446744073709551615"),
    "one": (np.array([5]), "1 tokens; at least 2"),
    "none": (np.array([], dtype=int), "0 tokens; at least 2"),
}


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_score_refuses_bad_tokens(call, tiny_name, tmp_path, name):
    values, message = BAD_TOKENS[name]
    np.save(tmp_path / "t.npy", values)
    refused(call("score", "--model", tiny_name, "--tokens", "t.npy", "--out", "x.npz"), "t.npy", message)
    assert not (tmp_path / "x.npz").exists()


class Payload:
    def __reduce__(self):
        return os.system, ("touch ran",)


def test_score_refuses_files_that_are_no_arrays(call, tiny_name, tmp_path):
    good = tmp_path / "good.npy"
    np.save(good, np.arange(200))
    contents = {
        "empty": b"",
        "text": b"1 2 3",
        "cut": good.read_bytes()[:-100],
        "head only": good.read_bytes()[:60],
        "zip": b"PK\x03\x04" + bytes(99),
        "enormous": good.read_bytes().replace(b"(200,)", b"(2000000000000,)"),
        "pickle": pickle.dumps(Payload()),
        "header": good.read_bytes().replace(b"'descr'", b"'dscr' "),
    }
    for name, content in contents.items():
        (tmp_path / "t.npy").write_bytes(content)
        refused(call("score", "--model", tiny_name, "--tokens", "t.npy", "--out", "x.npz"), "t.npy"), name
    assert not (tmp_path / "ran").exists()
    np.savez(tmp_path / "t.npz", a=np.arange(5))
    refused(call("score", "--model", tiny_name, "--tokens", "t.npz", "--out", "x.npz"), "t.npz")
    refused(call("score", "--model", tiny_name, "--tokens", "nosuch.npy", "--out", "x.npz"), "nosuch.npy")


def test_score_leaves_an_earlier_result_when_it_fails(call, tiny_name, tmp_path):
    (tmp_path / "t.txt").write_text("hello")
    scored(call, "--model", tiny_name, "--text", "t.txt")
    before = (tmp_path / "result.npz").read_bytes()
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "weights.safetensors").write_bytes(b"")
    refused(call("score", "--model", folder, "--text", "t.txt", "--out", "result.npz"), "weights.safetensors")
    assert (tmp_path / "result.npz").read_bytes() == before
    refused(call("score", "--model", folder, "--text", "t.txt", "--out", "new/other.npz"), "weights.safetensors")
    assert not list(tmp_path.glob("new/*"))
    assert not list(tmp_path.glob("*.partial"))


# -- layers -----------------------------------------------------------------------------------------------

PACKAGE = ROOT / "atma_eval"
NO_TORCH = "cli spec text tokenizer plan progress bundled errors files models/config".split()
NO_TORCH += "records runs metrics stats report compare plots export importing reference commands tasks".split()
WITHOUT_TORCH = [path for name in NO_TORCH for path in PACKAGE.glob(f"{name}.py")]
WITHOUT_TORCH += [path for name in NO_TORCH for path in PACKAGE.glob(f"{name}/*.py")]


def imports_of(path: Path) -> set[str]:
    """Every module a file imports, at any depth of its code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def within(modules: set[str], package: str) -> set[str]:
    return {name for name in modules if name == package or name.startswith(package + ".")}


def test_tasks_and_reports_import_no_torch():
    assert len(WITHOUT_TORCH) > 20
    for path in WITHOUT_TORCH:
        for package in ("torch", "triton", "transformers", "safetensors.torch"):
            assert not within(imports_of(path), package), path
    paths = (path.relative_to(ROOT).with_suffix("") for path in sorted(WITHOUT_TORCH))
    names = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    # resolving models and texts needs none either, so every refusal of a request comes without the wait for it
    names += ["atma_eval.checkpoint", "atma_eval.runner", "atma_eval.scoring"]
    code = f"import sys, {', '.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, env=ENVIRONMENT).returncode == 0


def test_models_and_tasks_never_import_each_other():
    for path in (PACKAGE / "models").glob("*.py"):
        assert not within(imports_of(path), "atma_eval.tasks"), path
    for path in (PACKAGE / "tasks").glob("*.py"):
        for package in ("models", "kernels", "session", "state", "checkpoint", "runner"):
            assert not within(imports_of(path), f"atma_eval.{package}"), path


def test_triton_is_imported_by_its_own_files_only():
    for path in PACKAGE.rglob("*.py"):
        if not path.name.endswith("_triton.py") and path.name != "aot.py":  # which compiles them
            assert not within(imports_of(path), "triton"), path
