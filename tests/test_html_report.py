"""The report page: whole, honest about what is missing, and self-contained in a real browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import typer
from rows import row, write_run
from test_plots import depth_grid, losses, manifest, models_of, retrieval, with_tokenizer
from typer.testing import CliRunner

from atma_eval.commands.report import report
from atma_eval.errors import UserError
from atma_eval.html_report import html_report
from atma_eval.html_report.parts import el, join, table
from atma_eval.runs import read_models

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
EVIL = "<script>alert('x')</script>\" onload=\"alert(1)"
VOID = ("img", "meta", "br")


class Page(HTMLParser):
    """The elements of a page with their attributes, its text, and whether every element is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open, self._words = [], [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open[-1:] != ["style"]:
            self._words.append(data)

    @property
    def text(self):
        return " ".join("".join(self._words).split())

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(tmp_path, rows, **options):
    return Page(html_report(models_of(tmp_path / "run", rows), **options))


def test_elements_escape_what_they_are_given():
    assert el("p", EVIL, class_=EVIL).count("<") == 2 and '" onload' not in el("p", class_=EVIL)
    assert join("<", el("b", "&"), ["a", None]) == "&lt;<b>&amp;</b>a"
    assert "<td>&lt;td&gt;</td>" in table(("a",), [["x", "<td>"]])  # a text that looks like a cell is no cell


def test_the_page_is_whole_and_asks_for_nothing(tmp_path):
    first = write_run(tmp_path / "a", retrieval(["m", "n"]), manifest("m", "n"))
    page = Page(html_report(read_models([first, losses(tmp_path / "b", ["m", "n"])])))
    assert page.all("script") == [] and page.all("link") == []
    pictures = page.all("img")
    assert len(pictures) == 4 + 4  # heatmap, exact, nll, forest; heatmap, nll, position, forest
    assert all(image["src"].startswith("data:image/svg+xml;base64,") and "n = " in image["alt"] for image in pictures)
    assert page.text.count("It supports:") == page.text.count("It does not show:") == len(pictures)
    anchors = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {link["href"].removeprefix("#") for link in page.all("a")} <= anchors
    for words in (
        "paired differences from m, ",
        "difference from m",
        "Benjamini-Hochberg",
        "effective length",
        "exact: absent",
        "nll (nats): format",
        "Guessing digits would score: exact 1e-05",
        "a falling prefix loss",
        "greedy generation",
    ):
        assert words in page.text, words


def test_names_of_users_are_text(tmp_path):
    rows = [row(model=EVIL, text_id=EVIL), row(model=EVIL, trial=1, status="error", error=EVIL), row(model="n")]
    call = {"command": EVIL, "version": EVIL, "git_commit": None, "packages": {EVIL: EVIL}}
    text = {"source": EVIL, "documents": [{"text_id": EVIL, "num_bytes": 1, "sha256": EVIL}]}
    asked = {EVIL: {EVIL: {"protocol": {"cue": EVIL}, "window": None, "text": text, "lengths": [2048], "trials": 2}}}
    whole = {**manifest(EVIL, "n"), "tasks": asked, "invocations": [call]}
    path = write_run(tmp_path / f"a{EVIL.replace('/', '')}", rows, whole)
    page = Page(html_report(read_models([path])))
    assert page.all("script") == []
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count("<script>alert('x')</script>") >= 8


def test_what_is_known_of_the_run_is_told(tmp_path):
    call = {"command": "atma-eval niah -m m", "version": "9.8.7", "git_commit": "c0ffee", "python": "3.12.1"}
    whole = {**manifest("m"), "invocations": [call]}
    whole["models"]["m"] |= {"dtype": "bfloat16", "device": "cuda", "device_name": "H200", "fingerprint": "f1ngerpr1nt"}
    asked = {"trials": 2, "lengths": [2048], "protocol": {"protocol": "induction-v1", "seed": 7}}
    whole["tasks"] = {"m": {"induction": {**asked, "text": {"documents": [{"text_id": "t", "sha256": "5ha"}]}}}}
    page = Page(html_report(read_models([write_run(tmp_path / "a", [row()], whole)])))
    for words in ("atma-eval niah -m m", "9.8.7", "c0ffee", "bfloat16", "cuda", "H200", "f1ngerpr1nt", "5ha"):
        assert words in page.text
    assert "is unfinished: 1 of 2 trials of induction for m" in page.text
    bare = Page(html_report(read_models([write_run(tmp_path / "b", [row()])])))
    assert "there is no manifest" in bare.text and "has no manifest" in bare.text


def test_failures_are_listed_and_left_out(tmp_path):
    page = page_of(tmp_path, [row(), row(trial=1, status="oom", error="out of it"), row(length=4096, status="nan")])
    assert "Failures" in page.text and "out of it" in page.text and "1 nan" in page.text
    assert "Failures" not in page_of(tmp_path / "b", [row()]).text


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row(trial=t, right=False) for t in range(3)],
        [row(trial=t, status="oom") for t in range(3)],
        [row(control="absent")],
        [row(model="m"), row(model="n", control="absent")],
        [row("perplexity", 3000, 0, nll=900.0)],
        depth_grid(["m"], trials=2),
    ],
    ids=["one trial", "all wrong", "all failed", "a control only", "another's control", "overflow", "depths"],
)
def test_poor_runs_make_a_page(tmp_path, rows):
    assert page_of(tmp_path, rows).all("h2")


def test_runs_that_asked_different_things_are_not_paired(tmp_path):
    """Both stand there; the page says why there is no difference."""
    a = write_run(tmp_path / "a", [row(trial=t) for t in range(3)], manifest("m"))
    b = write_run(
        tmp_path / "b", [row(trial=t, model="n", seed=9, sample_hash=f"x{t}") for t in range(3)], manifest("n")
    )
    c = losses(tmp_path / "c", ["m", "n"])
    page = Page(html_report(read_models([a, b, c])))
    assert "samples of induction differ between m and n" in page.text
    assert page.text.count("induction · exact · induction-v1") == 2  # a table for each
    assert page.text.count("difference from m") == 1  # the losses still pair


def test_models_of_a_run_pair_though_another_run_does_not(tmp_path):
    """Seed 9 in a second run takes no differences away from the models of the first."""
    a = write_run(tmp_path / "a", [row(trial=t, model=m) for t in range(3) for m in "mn"], manifest("m", "n"))
    rows = [row(trial=t, model=m, seed=9, sample_hash=f"x{t}") for t in range(3) for m in "mo"]
    b = write_run(tmp_path / "b", rows, manifest("m", "o"))
    page = Page(html_report(read_models([a, b])))
    assert page.text.count("induction · exact · induction-v1") == 2
    assert "Among m (a) and n: 1 paired difference from m (a), 0 resolved." in page.text
    assert "Among m (b) and o: 1 paired difference from m (b), 0 resolved." in page.text
    assert page.text.count("samples of induction differ between m (a) and m (b)") == 1
    other = Page(html_report(read_models([a, b]), baseline="o"))
    assert "from m (a), 0 resolved" in other.text and "from o, 0 resolved" in other.text


@pytest.mark.parametrize(
    ("right", "words"),
    [
        ({"m": 4, "n": 4, "o": 3}, "The best mean at 2K, 1.000, is shared by m and n."),
        ({"m": 4, "n": 4, "o": 4}, "The best mean at 2K, 1.000, is shared by m, n and o."),
        ({"m": 4, "n": 4, "o": 4, "p": 4, "q": 1}, "The best mean at 2K, 1.000, is shared by 4 models."),
        ({"m": 4, "n": 3}, "The best mean at 2K is that of m, but not ahead of the second by more than chance."),
    ],
)
def test_nobody_is_crowned_for_a_shared_mean(tmp_path, right, words):
    rows = [row(model=m, trial=t, right=t < num) for m, num in right.items() for t in range(4)]
    assert words in page_of(tmp_path, rows).text


def test_the_summary_tells_how_far_each_seed_holds(tmp_path):
    """Each seed alone: one that fails does not take the other's length from it."""
    rows = [row(model=m, trial=t, right=m == "m") for m in ("m", "m-s2") for t in range(22)]
    rows += [row(model="n", trial=t) for t in range(3)]
    summary, task = page_of(tmp_path, rows).text.split("Mean with its 95 % interval")
    assert summary.count("≥ 2K") == 1 and "n = 22, at 2Knone" in summary and "too few trials" in summary
    assert "m≥ 2,0482,048" in task and "m-s2none" in task and "m (2 seeds)none" not in task


def test_losses_of_other_tokenizers_are_told_apart(tmp_path):
    runs = [with_tokenizer(losses(tmp_path / name, [name]), f"{name}-v1") for name in ("m", "n")]
    page = Page(html_report(read_models(runs)))
    assert "perplexity: bits per byte" in page.text and "--metric" not in page.text
    assert "different tokenizers (m, n)" in page.text
    drawn = [image["alt"] for image in page.all("img")]
    assert len(drawn) == 3 and all("different tokenizers (m, n)" in alt for alt in drawn)
    assert [("nll (nats)" in alt, "bits per byte" in alt) for alt in drawn].count((False, True)) == 2


def test_one_row_is_one(tmp_path):
    assert "1 row of run" in page_of(tmp_path, [row()]).text


def test_a_falling_loss_is_not_sold_as_use_of_context(tmp_path):
    prefix = page_of(tmp_path, [row("perplexity", 2048), row("perplexity", 4096)])
    assert "a falling prefix loss comes as well from text that becomes easier" in prefix.text
    fixed = page_of(tmp_path / "b", [row("longdoc", 2048, protocol="fixed-target-v1")])
    assert "what context is worth" in fixed.text and "prefix loss" not in fixed.text


def test_a_baseline_that_is_not_there_is_refused(tmp_path):
    models = models_of(tmp_path / "a", [row(model="model-a"), row(model="model-b")])
    with pytest.raises(UserError) as caught:
        html_report(models, baseline="model-c")
    assert "no model is called 'model-c'" in caught.value.message and "model-a" in caught.value.hint
    assert "difference from model-b" in Page(html_report(models, baseline="model-b")).text


def test_the_same_runs_make_the_same_page(tmp_path):
    models = models_of(tmp_path / "a", retrieval(["m", "n"], lengths=(2048,)))
    assert html_report(models) == html_report(models)


def test_the_command_writes_a_page(tmp_path):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(report)

    def run(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    folder = write_run(tmp_path / "a", [row()], manifest("m"))
    assert run(folder, "-o", tmp_path / "new" / "x.html").exit_code == 0
    assert (tmp_path / "new" / "x.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert isinstance(run(folder, "-o", tmp_path / "x.pdf").exception, UserError)
    (tmp_path / "file").write_text("")
    assert isinstance(run(folder, "-o", tmp_path / "file" / "x.html").exception, UserError)


# -- in a browser -----------------------------------------------------------------------------------------


def browse(page, tmp_path):
    """The DOM that Chromium makes of a page, lines of its console, and URLs that the page itself asked for."""
    log = tmp_path / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--log-net-log={log}"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom"]
    done = subprocess.run([CHROMIUM, *options, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    asked = [
        event["params"]["url"]
        for event in json.loads(log.read_text())["events"]
        if "url" in event.get("params", {}) and "file://" in event["params"].get("network_isolation_key", "")
    ]
    return done.stdout, console, asked


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_in_a_browser_the_page_asks_for_nothing_and_complains_of_nothing(tmp_path):
    canary = tmp_path / "canary.html"
    canary.write_text('<img src="http://127.0.0.1:9/x.png"><script>console.error("heard")</script>')
    _, console, asked = browse(canary, tmp_path)
    assert "heard" in console[0] and "http://127.0.0.1:9/x.png" in asked  # such things would be seen

    first = write_run(tmp_path / "a", retrieval(["m", EVIL]), manifest("m", EVIL))
    written = html_report(read_models([first, losses(tmp_path / "b", ["m"])]))
    path = tmp_path / "report.html"
    path.write_text(written, encoding="utf-8")
    dom, console, asked = browse(path, tmp_path)
    assert console == [] and asked == []
    seen = Page(dom)
    assert seen.all("script") == [] and "How it was made" in seen.text and "<script>alert('x')</script>" in seen.text
    assert len(seen.all("img")) == len(Page(written).all("img")) == 4 + 2
