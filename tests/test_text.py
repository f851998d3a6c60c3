"""Documents: exact bytes, in a fixed order, long enough or refused with their length."""

from __future__ import annotations

import hashlib
import json
import platform

import numpy as np
import pytest

from atma_eval import text as module
from atma_eval.errors import UserError
from atma_eval.spec import build_task, load_preset
from atma_eval.tasks.documents import select_documents
from atma_eval.text import STDLIB_HELD_OUT, Document, TextSource, open_text, stdlib_held_out, stdlib_training
from atma_eval.tokenizer import ByteTokenizer


def refusal(function, *args, **kwargs) -> UserError:
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return caught.value


# -- stdlib -----------------------------------------------------------------------------------------------


def test_stdlib_has_enough_long_documents():
    """At least 14 take a gap of 64K bytes and what the absent control needs beside it."""
    source = open_text("stdlib")
    assert sum(len(d.data) >= 66_000 for d in source.documents) >= 14
    assert len(source.documents) == len(STDLIB_HELD_OUT)
    needle = build_task(load_preset("induction")).select(source, ByteTokenizer())
    assert len(needle.documents) >= 14


def test_stdlib_halves_share_nothing():
    held_out, training = stdlib_held_out(), stdlib_training()
    assert len(training) > 300
    assert not {d.text_id for d in held_out} & {d.text_id for d in training}
    assert not {d.sha256 for d in held_out} & {d.sha256 for d in training}
    assert not any(part in d.text_id for d in training for part in ("/test/", "/tests/", "site-packages"))
    assert training == stdlib_training()


def test_stdlib_manifest_records_hashes_and_python():
    source = open_text("stdlib")
    manifest = source.manifest([source.documents[2]])
    document = source.documents[2]
    assert manifest == {
        "source": "stdlib",
        "python": platform.python_version(),
        "documents": [
            {
                "text_id": document.text_id,
                "num_bytes": len(document.data),
                "sha256": hashlib.sha256(document.data).hexdigest(),
            }
        ],
    }


def test_python_without_its_library(monkeypatch, tmp_path):
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    error = refusal(open_text, "stdlib")
    assert str(tmp_path) in error.message
    assert "--text FILE" in error.hint


# -- files and folders ------------------------------------------------------------------------------------


def test_file_is_read_byte_for_byte(tmp_path):
    data = "\ufeffa\r\nb\rc\n\n 字\U0001f600".encode()
    path = tmp_path / "book.txt"
    path.write_bytes(data)
    (document,) = open_text(str(path)).documents
    assert document.data == data
    assert document.text.encode() == data
    assert document.text_id == "book.txt"
    assert document.sha256 == hashlib.sha256(data).hexdigest()


def test_folder(tmp_path):
    for name, content in {"b.txt": "b", "a.md": "a", "sub/c.py": "c", "empty.txt": "", "image.png": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    documents = open_text(str(tmp_path)).documents
    assert [(d.text_id, d.text) for d in documents] == [("a.md", "a"), ("b.txt", "b"), ("sub/c.py", "c")]


def test_folder_with_nothing_to_read(tmp_path):
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    error = refusal(open_text, str(tmp_path))
    assert str(tmp_path) in error.message
    assert ".txt" in error.hint
    (tmp_path / "a.txt").touch()
    assert "is empty" in refusal(open_text, str(tmp_path)).message


def test_empty_file(tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).touch()
        assert refusal(open_text, str(tmp_path / name)).message == f"{tmp_path / name} is empty"


@pytest.mark.parametrize("name", ["nosuch.txt", "", "stdlb", "~nobody-here/a.txt", "x" * 300, "/dev/null"])
def test_missing_text(name, tmp_path, monkeypatch):
    """Among them the empty name, which is not the current folder."""
    (tmp_path / "here.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    assert name[:20] in refusal(open_text, name).message


@pytest.mark.parametrize("in_folder", [False, True])
def test_text_that_is_not_utf8(tmp_path, in_folder):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    error = refusal(open_text, str(tmp_path if in_folder else path))
    assert error.message == f"{path} is not UTF-8 text (byte 3 is 0xe9)"


# -- JSONL ------------------------------------------------------------------------------------------------


def write_lines(path, *rows: object) -> str:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def test_jsonl(tmp_path):
    rows = [{"text": "one\u2028two\x85three", "id": "x"}, "", {"text": "ñ", "n": 1}, {"text": "c", "id": None}]
    documents = open_text(write_lines(tmp_path / "a.jsonl", *rows)).documents
    assert [(d.text_id, d.text) for d in documents] == [("x", "one\u2028two\x85three"), ("a/3", "ñ"), ("a/4", "c")]


def test_jsonl_with_windows_line_ends(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\r\n{"text": "b"}\r\n')
    assert [d.text for d in open_text(str(tmp_path / "a.jsonl")).documents] == ["a", "b"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON"),
        ("plain words", "not JSON"),
        ({"txt": "a"}, "no text"),
        ({"text": 5}, "no text"),
        (["a"], "no text"),
        ('{"text": "\\ud800"}', "surrogate"),
        ({"text": "b", "id": "a"}, "the id 'a'"),
    ],
)
def test_bad_jsonl_line_is_named(tmp_path, row, message):
    error = refusal(open_text, write_lines(tmp_path / "a.jsonl", {"text": "fine", "id": "a"}, "", row))
    assert f"{tmp_path / 'a.jsonl'}, line 3: " in error.message
    assert message in error.message


# -- choosing documents -----------------------------------------------------------------------------------


def source_of(*texts: str) -> TextSource:
    return TextSource("test", tuple(Document(f"d{i}", t.encode()) for i, t in enumerate(texts)), {})


def choose(source: TextSource, required: int, *, wanted: int | None = None, repeat: bool = False, **options):
    options = {"tokenizer": ByteTokenizer(), "docs_at_most": False, "shuffle": None, **options}
    return select_documents(source, required=required, docs=wanted, repeat=repeat, what="task", **options)


def test_fewer_documents_will_do_where_they_may():
    source = TextSource("t", tuple(Document(f"d{i}", b"x" * size) for i, size in enumerate([5, 50, 60])), {})
    chosen = choose(source, 10, wanted=3, docs_at_most=True)
    assert [d.text_id for d in chosen.documents] == ["d1", "d2"]
    assert chosen.num_too_short == 1


def test_order_by_seed_survives_leaving_documents_out():
    source = TextSource("t", tuple(Document(f"d{i}", bytes([65 + i]) * (10 + 10 * i)) for i in range(12)), {})
    orders = {seed: [d.text_id for d in choose(source, 1, shuffle=seed).documents] for seed in ("1", "2")}
    assert sorted(orders["1"]) == sorted(orders["2"])
    assert orders["1"] != orders["2"]
    longer = [d.text_id for d in choose(source, 70, shuffle="1").documents]
    assert longer == [name for name in orders["1"] if name in longer]


class Halves(ByteTokenizer):
    """Every two bytes are one token: ids of ASCII pairs."""

    name = "halves"

    def encode(self, text: str) -> np.ndarray:
        return super().encode(text)[::2]

    def encode_with_bytes(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        return ids, np.full(len(ids), 2, dtype=np.int32)


def test_long_enough_documents_in_order():
    chosen = choose(source_of("a" * 9, "b" * 10, "c" * 12, "d" * 11), 10)
    assert [d.text_id for d in chosen.documents] == ["d1", "d2", "d3"]
    assert [len(ids) for ids in chosen.ids] == [10, 10, 10]
    assert [n.sum() for n in chosen.num_bytes] == [10, 10, 10]
    assert not chosen.repeated
    assert [d.text_id for d in choose(source_of("a" * 9, "b" * 10, "c" * 12), 10, wanted=1).documents] == ["d1"]


@pytest.mark.parametrize("texts", [("a" * 80,), ("a" * 80, "b" * 60), ("a" * 80, "b" * 120)])
def test_too_short_says_how_long_it_is(texts):
    """In the tokenizer's own tokens, also where a document is ruled out by its bytes alone."""
    for tokenizer, per_token in ((ByteTokenizer(), 1), (Halves(), 2)):
        error = refusal(choose, source_of(*texts), 1000, tokenizer=tokenizer)
        longest = max(map(len, texts)) // per_token
        assert error.message == f"task needs a document of 1,000 tokens; the longest in test has {longest}"
        assert "--repeat" in error.hint


def test_too_few_documents_says_how_many():
    error = refusal(choose, source_of("a" * 20, "b" * 20, "c" * 5), 10, wanted=3)
    assert "3 documents of at least 10 tokens were asked for; test has 2" in error.message
    assert "--docs 2" in error.hint


def test_repetition_only_when_asked():
    source = source_of("abc", "defgh")
    refusal(choose, source, 7)
    chosen = choose(source, 7, repeat=True)
    assert chosen.repeated
    assert [bytes(ids.astype(np.uint8)) for ids in chosen.ids] == [b"abcabca", b"defghde"]
    assert [n.tolist() for n in chosen.num_bytes] == [[1] * 7] * 2
    assert not choose(source, 3, repeat=True).repeated


def test_repetition_of_a_text_without_tokens():
    class Silent(ByteTokenizer):
        def encode(self, text: str) -> np.ndarray:
            return np.empty(0, dtype=np.int32)

    assert "has 0" in refusal(choose, source_of("   "), 5, repeat=True, tokenizer=Silent()).message


@pytest.mark.parametrize("preset", ["induction", "perplexity"])
def test_rows_say_that_text_is_repeated(preset):
    extra = {"trials": 2} if preset == "induction" else {"docs": 1}
    for repeat, text in ((True, "too short, so it comes again. "), (False, "long enough as it is. " * 30)):
        task = build_task(load_preset(preset), lengths=(100, 300), repeat=repeat, **extra)
        chosen = task.select(source_of(text), ByteTokenizer())
        samples = [sample for group in task.groups(ByteTokenizer(), chosen) for sample in group]
        assert {sample.text_id for sample in samples} == {"d0 (repeated)" if repeat else "d0"}
        assert chosen.repeated is repeat
        assert task.protocol()["repeat"] is repeat


@pytest.mark.parametrize("inner_start", [False, True])
def test_a_control_that_alone_repeats_its_text_says_so(inner_start):
    """Text in the needle's place takes more of the document than the gap does."""
    own = 100 - inner_start  # a start token in the gap is none of the document's
    task = build_task(load_preset("induction"), lengths=(100,), trials=1, repeat=True, inner_start=inner_start)
    chosen = task.select(source_of(("abcdefg" * 20)[:own]), ByteTokenizer())
    samples = [sample for group in task.groups(ByteTokenizer(), chosen) for sample in group]
    assert {s.control: s.text_id for s in samples} == {"none": "d0", "format": "d0", "absent": "d0 (repeated)"}


def test_long_documents_of_a_repeating_run_are_not_marked():
    """Repetition is a property of a document, not of the run."""
    task = build_task(load_preset("perplexity"), lengths=(100,), repeat=True, docs=2)
    chosen = task.select(source_of("long enough " * 20, "short "), ByteTokenizer())
    samples = [sample for group in task.groups(ByteTokenizer(), chosen) for sample in group]
    assert [sample.text_id for sample in samples] == ["d0", "d1 (repeated)"]


def test_bytes_of_a_row_are_those_of_its_targets(tmp_path):
    """Emoji and CJK: the bytes of any prefix are the bytes of the text it covers."""
    from test_tokenizer import byte_level, saved

    text = "数学 \U0001f600 a\U0001f680é " * 200
    for tokenizer in (ByteTokenizer(), saved(byte_level(), tmp_path)):
        total = len(tokenizer.encode(text))
        task = build_task(load_preset("perplexity"), lengths=(1, 5, 64, total), docs=1)
        chosen = task.select(source_of(text), tokenizer)
        ids, num_bytes = tokenizer.encode_with_bytes(text)
        (samples,) = task.groups(tokenizer, chosen)
        for sample in samples:
            assert sample.num_bytes == num_bytes[: sample.length].sum()
            assert sample.tokens[1:].tolist() == ids[: sample.length].tolist()
        assert samples[-1].num_bytes == len(text.encode())
