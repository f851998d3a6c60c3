"""Where training text comes from, and what is refused before a step is taken."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from test_training import TINY
from test_training_options import write_shard

from atma_eval.errors import UserError
from atma_eval.text import stdlib_training
from atma_eval.training.loop import Trainer
from atma_eval.training.recipe import recipe_from_dict
from atma_eval.training.sources import Corpus, Shards, Stream, open_source

PLAIN = [{"length": 16, "tokens_per_step": 64, "steps": 4, "mixture": {"plain": 1.0}}]
RNG = np.random.default_rng(0)


def recipe(*, model=None, **changes):
    values = {**yaml.safe_load(TINY), "stages": PLAIN, **changes}
    return recipe_from_dict({**values, "model": {**values["model"], **(model or {})}}, "tiny.yaml")


def test_text_of_the_users_own(tmp_path):
    (tmp_path / "a.txt").write_text("spam and eggs " * 9)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "more spam " * 9}) + "\n")
    for name in ("a.txt", "rows.jsonl", ""):
        source = open_source(recipe(data=str(tmp_path / name)))
        assert bytes(source.window(RNG, 5, 0)[1:].tolist()) in b"spam and eggs spam more spam more s"
        assert source.window(RNG, 5, 0)[0] == 256
        assert "sha256" in source.describe()


def test_the_default_is_the_training_half_of_the_standard_library():
    source = open_source(recipe())
    assert isinstance(source, Corpus)
    assert source.documents == stdlib_training()
    assert "training half of `stdlib`" in source.describe()


@pytest.mark.parametrize("width", [2, 4])
def test_shards_are_read_in_order_as_one_run(tmp_path, width):
    tokens = np.arange(50) * (1 if width == 2 else 3)
    for i, part in enumerate(np.split(tokens, [20, 33])):
        write_shard(tmp_path / f"s_{i}.bin", part, width)
    shards = Shards(sorted(tmp_path.glob("*.bin")))
    assert len(shards) == 50
    assert shards.window(RNG, 30, 10).tolist() == tokens[10:40].tolist()
    assert shards.window(RNG, 30, 90).tolist() == np.resize(tokens, 150)[90:120].tolist()
    assert (shards.largest(10**9), shards.largest(25)) == (tokens[-1], tokens[24])


def test_a_step_takes_shards_where_the_last_one_stopped(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(200))
    made = recipe(data=str(tmp_path / "*.bin"))
    trainer = Trainer(made, open_source(made), tmp_path / "work")
    batches = []
    for trainer.step in range(4):
        batches.append(trainer._draw().inputs)
    assert np.array_equal(np.concatenate(batches).reshape(-1), np.arange(256) % 200)


@pytest.fixture
def hub(monkeypatch):
    """`datasets.load_dataset` gives three rows, and counts what was asked; the hub knows the commit."""
    import datasets
    import huggingface_hub

    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        rows = datasets.Dataset.from_dict({"body": ["spam " * 5, "eggs " * 30, "ham " * 9]})
        return rows.to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    of = lambda self, name, revision: SimpleNamespace(sha=revision or "c0ffee")  # noqa: E731
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", of)
    return asked


STREAM = {"dataset": "owner/set", "name": "sample", "split": "train", "column": "body"}


def test_a_streamed_set_goes_on_where_it_was(hub, tmp_path):
    made = recipe(data=STREAM, model={"tokenizer": "byte"})
    source = open_source(made)
    options = {"split": "train", "revision": "c0ffee", "streaming": True}
    assert hub == [(("owner/set", "sample"), options)]
    everything = np.concatenate([[256, *text.encode()] for text in ("spam " * 5, "eggs " * 30, "ham " * 9)] * 9)
    assert source.window(RNG, 40, 10).tolist() == everything[10:50].tolist()
    assert source.window(RNG, 40, 300).tolist() == everything[300:340].tolist()  # past the end: from the front again
    again = Stream(STREAM, source.tokenizer)
    again.load_state_dict(source.state_dict())
    for position in (320, 700):
        assert again.window(RNG, 50, position).tolist() == source.window(RNG, 50, position).tolist()
    with pytest.raises(ValueError, match="forwards"):
        source.window(RNG, 4, 0)

    whole = Trainer(made, open_source(made), tmp_path / "whole")
    whole.run()
    Trainer(made, open_source(made), tmp_path / "cut").run(2)
    rest = Trainer(made, open_source(made), tmp_path / "cut")
    assert rest.resume()
    rest.run()
    assert all((w == rest.model.state_dict()[name]).all() for name, w in whole.model.state_dict().items())


def test_a_stream_stays_at_the_commit_it_began_with(hub, tmp_path, monkeypatch):
    made = recipe(data=STREAM, model={"tokenizer": "byte"})
    trainer = Trainer(made, open_source(made), tmp_path)
    assert "`owner/set sample` at revision `c0ffee`" in trainer.source.describe()
    trainer.run(2)
    newer = lambda self, name, revision: SimpleNamespace(sha=revision or "beef")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", newer)
    rest = Trainer(made, open_source(made), tmp_path)
    assert "`beef`" in rest.source.describe()
    assert rest.resume()
    rest.run()
    assert hub[-1][1]["revision"] == "c0ffee"
    assert "`c0ffee`" in rest.source.describe()


def test_a_hub_out_of_reach_is_said_to_be(monkeypatch):
    import datasets

    def load(*_, **__):
        raise ConnectionError("Couldn't reach 'owner/set' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("atma_eval.training.sources._commit_of", lambda name, revision: revision)
    with pytest.raises(UserError, match="hub cannot be reached for the data set owner/set sample") as caught:
        open_source(recipe(data=STREAM, model={"tokenizer": "byte"}))
    assert "token shards" in caught.value.hint


def test_another_column(hub):
    with pytest.raises(UserError, match="no text column 'text'") as caught:
        open_source(recipe(data={"dataset": "owner/set"}, model={"tokenizer": "byte"}))
    assert caught.value.hint == "columns: body"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": "short.txt"}, ["short.txt has 6 tokens, too short for sequences of 16"]),
        ({"data": "short.bin"}, ["short.bin has 9 tokens, too short"]),
        ({"data": "large.bin"}, ["vocabulary mismatch", "holds the id 257", "vocab_size is 257"]),
        ({"data": "cut.bin"}, ["cut.bin is cut short"]),
        ({"data": "short.txt.bin"}, ["no token shards at"]),
        ({"data": "other.bin"}, ["other.bin is no token shard"]),
        ({"data": "nowhere"}, ["no text at 'nowhere'"]),
        ({"model": {"vocab_size": 256}}, ["vocabulary mismatch", "byte has 257 ids", "vocab_size is 256"]),
        ({"model": {"tokenizer": "gpt2"}}, ["vocabulary mismatch", "gpt2 has 50,257 ids"]),
    ],
)
def test_data_that_does_not_serve(tmp_path, monkeypatch, changes, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "other.bin").write_bytes(b"other" * 500)
    write_shard(tmp_path / "short.bin", np.arange(9))
    write_shard(tmp_path / "large.bin", [0] * 250 + [257])
    write_shard(tmp_path / "cut.bin", np.arange(90))
    (tmp_path / "cut.bin").write_bytes((tmp_path / "cut.bin").read_bytes()[:-1])
    with pytest.raises(UserError) as caught:
        open_source(recipe(**changes))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": "muon", "learning_rate": 0}, ["learning_rate is 0", "Muon"]),
        ({"optimizer": "muon2"}, ["optimizer is 'muon2'", "did you mean muon"]),
        ({"microbatch_tokens": 15}, ["microbatch_tokens is 15", "sequence of 16"]),
        ({"num_random_keys": 4}, ["num_random_keys is 4 and distractor_weight 0.0"]),
        ({"num_random_keys": 4, "distractor_weight": 1, "model": {"attn_type": "none"}}, ["needs attention"]),
        ({"data": {"dataset": "a/b", "colum": "c"}}, ["unknown key 'colum'", "did you mean column"]),
        ({"data": {"name": "b"}}, ["lacks dataset"]),
        ({"data": {"dataset": "a/b"}}, ["needs a tokenizer"]),
        ({"data": 7}, ["data is 7"]),
        (
            {"data": "x.bin", "stages": [{**PLAIN[0], "length": 64, "mixture": {"single": 1}}]},
            ["single", "not text read as bytes"],
        ),
    ],
)
def test_recipes_that_contradict_themselves(changes, words):
    with pytest.raises(UserError) as caught:
        recipe(**changes)
    for word in words:
        assert word in str(caught.value)
