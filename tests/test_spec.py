"""What was asked for is read strictly: lengths, windows, types, presets, suites."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from atma_eval.bundled import bundled_presets
from atma_eval.errors import UserError
from atma_eval.spec import (
    build_task,
    check_device,
    load_preset,
    load_suite,
    parse_dtype,
    parse_lengths,
    parse_window,
)


def write_yaml(path: Path, values: object) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def refusal(function, *args, **kwargs) -> UserError:
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return caught.value


# -- lengths, windows, types, devices ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("2k", (2048,)),
        ("1m", (1048576,)),
        ("3000", (3000,)),
        ("2k,3000,100000", (2048, 3000, 100000)),
        ("4k,2k,2048", (2048, 4096)),
        ("2k..64k", (2048, 4096, 8192, 16384, 32768, 65536)),
        ("2K..8K", (2048, 4096, 8192)),
        ("3k..10k", (3072, 6144, 10240)),
        ("2k..2k", (2048,)),
        (" 1k .. 2k , 100 ", (100, 1024, 2048)),
        ("1..5", (1, 2, 4, 5)),
        ([2048, "4k"], (2048, 4096)),
        (512, (512,)),
    ],
)
def test_lengths(text, lengths):
    assert parse_lengths(text) == lengths


BAD_LENGTHS = [
    "64k..2k", "0", "0k", "2kk", "", ",", "2k,", "-5", "2k..", "..2k", "1e3", "2.5k", "2_", "2k..4k..8k", "k", "2 k",
    "٣", "9" * 5000, [], [2048.0], [True], [None], {"a": 1}, None,
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_LENGTHS, ids=lambda t: str(t)[:20])
def test_bad_lengths(text):
    error = refusal(parse_lengths, text)
    assert error.hint
    assert "length" in error.message


def test_bad_length_names_the_part_and_what_would_do():
    assert "'2kk'" in refusal(parse_lengths, "1k,2kk").message
    backwards = refusal(parse_lengths, " 64k..2k")
    assert "'64k..2k'" in backwards.message
    assert backwards.hint == "write 2k..64k"


@pytest.mark.parametrize(
    ("value", "window"), [("train", "train"), ("FULL", "full"), ("1024", 1024), (1024, 1024), ("1k", 1024)]
)
def test_window(value, window):
    assert parse_window(value) == window


@pytest.mark.parametrize("value", ["0", "none", "", "-1", "2k..4k", 0, None, True])
def test_bad_window(value):
    error = refusal(parse_window, value)
    assert repr(value) in error.message
    assert "train, full" in error.hint


def test_dtypes():
    assert [parse_dtype(v) for v in ("auto", "fp32", "BF16", "float16")] == ["auto", "float32", "bfloat16", "float16"]
    error = refusal(parse_dtype, "bf61")
    assert "'bf61'" in error.message
    assert error.hint.startswith("did you mean bf16")


def test_devices():
    for name in ("auto", "cpu", "cuda", "cuda:3"):
        check_device(name)
    for name in ("gpu", "cuda:", "cuda:x", "", "mps", "meta", "CPU "):
        assert repr(name) in refusal(check_device, name).message


# -- presets ----------------------------------------------------------------------------------------------


def test_every_key_of_a_preset_is_explained():
    lines = (ROOT / "tasks" / "README.md").read_text().splitlines()
    rows = {line.split("`")[1] for line in lines if line.startswith("| `")}
    fields = {name for preset in ("induction", "perplexity") for name in load_preset(preset).fields}
    assert rows == fields | {"family", "description", "window"}


def test_bundled_presets_build():
    assert {"induction", "atma-stage1", "perplexity"} <= set(bundled_presets())
    for name in bundled_presets():
        preset = load_preset(name)
        task = build_task(preset)
        assert preset.description
        assert task.name == name
        assert task.seed == 1234
        assert task.lengths == (2048, 4096, 8192, 16384, 32768, 65536)
    assert build_task(load_preset("induction")).trials == 32
    assert load_preset("atma-stage1").window == "full"
    assert load_preset("induction").window == "train"


def test_overrides_replace_and_none_keeps():
    task = build_task(load_preset("induction"), lengths=(7, 9), trials=None, docs=3, seed=5)
    assert (task.lengths, task.trials, task.docs, task.seed) == ((7, 9), 32, 3, 5)


def test_unknown_preset():
    error = refusal(load_preset, "inductoin", ("induction",))
    assert "'inductoin'" in error.message
    assert "did you mean induction" in error.hint
    assert "perplexity" not in error.hint


def test_preset_of_another_command():
    error = refusal(load_preset, "perplexity", ("induction",))
    assert "'perplexity'" in error.message
    assert "induction" in error.hint


def test_user_preset_by_path(tmp_path):
    values = {"family": "induction", "cue": "k{key}:", "lengths": ["1k", 2048], "trials": 3, "window": 64, "docs": None}
    preset = load_preset(write_yaml(tmp_path / "mine.yaml", values))
    task = build_task(preset)
    assert (task.name, task.lengths, task.trials, preset.window) == ("mine", (1024, 2048), 3, 64)


INDUCTION = {"family": "induction", "cue": "#{key}=", "lengths": "1k", "trials": 3}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"trails": 3}, "'trails'"),
        ({"name": "x"}, "'name'"),
        ({1: 2}, "1"),
        ({"trials": "three"}, "trials is 'three'"),
        ({"trials": True}, "trials is True"),
        ({"trials": 1.5}, "trials is 1.5"),
        ({"trials": 0}, "trials is 0"),
        ({"trials": None}, "trials is None"),
        ({"docs": 0}, "docs is 0"),
        ({"num_digits": -1}, "num_digits is -1"),
        ({"key_digits": 0}, "key_digits is 0"),
        ({"seed": "x"}, "seed is 'x'"),
        ({"repeat": "yes please"}, "repeat is 'yes please'"),
        ({"draws": "random"}, "draws is 'random'"),
        ({"cue": 5}, "cue is 5"),
        ({"cue": ""}, "cue is ''"),
        ({"cue": "{kye}"}, "cue is '{kye}'"),
        ({"cue": "{key"}, "cue is '{key'"),
        ({"cue": "{}"}, "cue is '{}'"),
        ({"lengths": "2kk"}, "'2kk'"),
        ({"window": "wide"}, "'wide'"),
        ({"family": "inductoin"}, "'inductoin'"),
        ({"family": ["induction"]}, "induction"),
        ({"family": None}, "family is 'None'"),
    ],
)
def test_preset_faults_are_named(tmp_path, change, named):
    path = write_yaml(tmp_path / "mine.yaml", {**INDUCTION, **change})
    assert named in refusal(lambda: build_task(load_preset(path))).message


@pytest.mark.parametrize("name", ["lengths", "trials", "cue"])
def test_preset_that_lacks_a_field(tmp_path, name):
    path = write_yaml(tmp_path / "mine.yaml", {k: v for k, v in INDUCTION.items() if k != name})
    assert name in refusal(lambda: build_task(load_preset(path))).message


@pytest.mark.parametrize("content", [b"", b"- a\n", b"just text", b"a: [1", b"\xff\xfe", b"a: !!python/object:x {}"])
def test_preset_file_that_holds_no_mapping(tmp_path, content):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert str(path) in refusal(load_preset, str(path)).message


def test_preset_file_that_is_not_there(tmp_path):
    for name in (tmp_path / "no.yaml", "~nobody-here/no.yaml", "x" * 300 + ".yaml"):
        refusal(load_preset, str(name))


# -- suites -----------------------------------------------------------------------------------------------

SUITE = {"models": ["a", "b"], "tasks": ["induction", {"preset": "perplexity", "lengths": "1k", "docs": 2}]}


def test_suite(tmp_path):
    extra = {"dtype": "bf16", "device": "cpu", "tokenizer": "byte", "description": "x"}
    spec = load_suite(write_yaml(tmp_path / "grid.yaml", {**SUITE, **extra}))
    assert [m.name for m in spec.models] == ["a", "b"]
    assert {(m.dtype, m.device, m.tokenizer) for m in spec.models} == {("bfloat16", "cpu", "byte")}
    needle, loss = spec.tasks
    assert (needle.task.name, needle.task.trials, needle.text, needle.window) == ("induction", 32, "stdlib", "train")
    assert (loss.task.name, loss.task.lengths, loss.task.docs) == ("perplexity", (1024,), 2)
    assert spec.out == Path("results/grid")


def test_suite_defaults_and_overrides(tmp_path):
    tasks = [{"preset": "atma-stage1", "text": "book.txt", "trials": 2, "seed": 7, "repeat": True}]
    path = write_yaml(tmp_path / "grid.yaml", {**SUITE, "tasks": tasks, "out": "here"})
    spec = load_suite(path)
    (task,) = spec.tasks
    assert (task.text, task.window) == ("book.txt", "full")
    assert (task.task.trials, task.task.seed, task.task.repeat) == (2, 7, True)
    assert {(m.dtype, m.device, m.tokenizer) for m in spec.models} == {("auto", "auto", None)}
    assert spec.out == Path("here")
    assert load_suite(path, Path("there")).out == Path("there")
    tasks[0]["window"] = 512
    assert load_suite(write_yaml(tmp_path / "grid.yaml", {**SUITE, "tasks": tasks})).tasks[0].window == 512


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": ["a"]}, "'model'"),
        ({"models": []}, "list of models"),
        ({"models": "a"}, "list of models"),
        ({"tasks": []}, "list of tasks"),
        ({"tasks": None}, "list of tasks"),
        ({"tasks": [5]}, "5"),
        ({"tasks": [["induction"]]}, "induction"),
        ({"tasks": [{}]}, "unknown preset"),
        ({"tasks": ["inductoin"]}, "'inductoin'"),
        ({"tasks": [{"preset": "induction", "length": "2k"}]}, "'length'"),
        ({"tasks": [{"preset": "perplexity", "trials": 5}]}, "'trials'"),
        ({"tasks": [{"preset": "induction", "cue": "x"}]}, "'cue'"),
        ({"tasks": [{"preset": "induction", "trials": "5"}]}, "trials is '5'"),
        ({"tasks": [{"preset": "induction", "lengths": "0"}]}, "'0'"),
        ({"tasks": [{"preset": "induction", "window": 0}]}, "bad window 0"),
        ({"dtype": "fp8"}, "'fp8'"),
    ],
)
def test_suite_faults_are_named(tmp_path, change, named):
    path = write_yaml(tmp_path / "grid.yaml", {**SUITE, **change})
    assert named in refusal(load_suite, path).message


def test_suite_that_is_not_there(tmp_path):
    for name in ("nosuch", str(tmp_path), "~nobody-here/x.yaml", "x" * 300):
        assert "suite" in refusal(load_suite, name).message or "cannot look" in refusal(load_suite, name).message
