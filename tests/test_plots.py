"""Pictures: what they show, that nothing is cut off, and that equal charts are equal files."""

from __future__ import annotations

import hashlib
import io
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import typer
from rows import row, write_run
from typer.testing import CliRunner

from atma_eval.commands.plot import plot
from atma_eval.compare import CompareSpec, compare
from atma_eval.console import plain_console
from atma_eval.errors import UserError
from atma_eval.plots import files
from atma_eval.plots.builders import build_charts
from atma_eval.plots.charts import Gap, length_text
from atma_eval.plots.files import render, save
from atma_eval.plots.page import short_names
from atma_eval.plots.sketch import Sketch, bar, sparkline, whisker
from atma_eval.runs import read_models
from atma_eval.stats import wilson
from atma_eval.tasks.perplexity import position_buckets

KINDS = ("heatmap", "accuracy", "nll")
LENGTHS = (2048, 4096, 3000 * 4, 65536)


def manifest(*names, training_length=2048):
    details = {"config": {"training_length": training_length}}
    return {"models": {name: {**details, "fingerprint": name} for name in names}, "tasks": {}}


def retrieval(names, lengths=LENGTHS, trials=8):
    """Models that get worse by name and length; each trial with its controls."""
    return [
        row(length=n, trial=t, model=name, control=control, right=control == "none" and t > i + j, nll=0.1 + t)
        for i, name in enumerate(names)
        for j, n in enumerate(lengths)
        for t in range(trials)
        for control in ("none", "absent", "format")
    ]


def depth_grid(names, depths=(0.0, 0.5, 1.0), lengths=(2048, 4096), trials=4):
    return [
        row(length=n, trial=t, model=name, depth=d, gap=int(n * (1 - d)), right=t > k, key=f"{name}/{n}/{d}/{t}")
        for name in names
        for n in lengths
        for k, d in enumerate(depths)
        for t in range(trials)
    ]


def losses(folder, names, lengths=(1000, 2000), documents=3):
    """A run with curves: every document's loss falls with position."""
    rows, keys, sums, counts = [], [], [], []
    for i, name in enumerate(names):
        for n in lengths:
            for d in range(documents):
                nll = 3.0 + i + d - np.log2(np.arange(1, n + 1)) / 10
                rows.append(row("perplexity", n, d, model=name, nll_sum=float(nll.sum())))
                total, count = position_buckets(nll)
                keys.append(rows[-1]["key"]), sums.append(total), counts.append(count)
    write_run(folder, rows, manifest(*names))
    np.savez(folder / "curves.npz", keys=np.array(keys), nll_sums=np.stack(sums), num_targets=np.stack(counts))
    return folder


def models_of(folder, rows, **options):
    names = dict.fromkeys(r["model"] for r in rows)
    return read_models([write_run(folder, rows, manifest(*names, **options))])


def refusal(*arguments, **options):
    with pytest.raises(UserError) as caught:
        build_charts(*arguments, **options)
    return caught.value


# -- what they show ---------------------------------------------------------------------------------------


def test_lines_are_the_estimates_of_the_rows(tmp_path):
    rows = [row(trial=t, right=t < 3) for t in range(4)] + [row(length=4096, trial=t, status="oom") for t in range(2)]
    (chart,) = build_charts(models_of(tmp_path / "a", rows), kinds=("accuracy",))
    (line,) = chart.lines
    assert [(p.at, p.estimate, p.failed) for p in line.points] == [
        (2048, wilson(3, 4), {}),
        (4096, (None, None, None, 0), {"oom": 2}),
    ]
    assert chart.chance == pytest.approx(1e-5) and chart.trained == (2048,) and chart.x_label == "gap, tokens"
    assert "n = 4 trials per point, 4 documents" in chart.caption and "2 oom" in chart.caption
    assert "Wilson" in chart.caption


def test_controls_stand_beside_the_task(tmp_path):
    rows = [row(nll=0.5), row(nll=4.0, control="absent"), row(nll=2.5, control="format")]
    accuracy, nll = build_charts(models_of(tmp_path / "a", rows))
    assert [(c.control, c.points[0].estimate.mean) for c in nll.controls] == [("absent", 4.0), ("format", 2.5)]
    assert nll.chance == pytest.approx(math.log(10)) and accuracy.metric.name == "exact"
    (uplift,) = build_charts(models_of(tmp_path / "b", rows), metric="uplift")
    assert uplift.lines[0].points[0].estimate.mean == 2.0 and uplift.controls == ()


def test_depths_make_a_panel_for_each_model(tmp_path):
    charts = build_charts(models_of(tmp_path / "a", depth_grid(["m", "n"])))
    assert [chart.kind for chart in charts] == ["heatmap", "accuracy", "nll"]
    grid = charts[0]
    assert [panel.title for panel in grid.panels] == ["m", "n"] and grid.panels[0].rows == ("0", "0.5", "1")
    assert [[p.estimate.mean for p in cells] for cells in grid.panels[0].cells] == [[0.75] * 2, [0.5] * 2, [0.25] * 2]
    assert charts[1].x_label == "length, tokens"  # not the gap: it differs from the length


def test_one_depth_makes_models_by_length(tmp_path):
    rows = [row(model="m"), row(model="n", length=4096)]
    (chart,) = build_charts(models_of(tmp_path / "a", rows), kinds=("heatmap",))
    (panel,) = chart.panels
    assert panel.rows == ("m", "n") and chart.lengths == (2048, 4096)
    assert [[p and p.estimate.mean for p in cells] for cells in panel.cells] == [[1.0, None], [None, 1.0]]
    assert "Empty: not asked." in chart.caption


def test_loss_by_position(tmp_path):
    """At the longest length, in buckets of powers of two; the mean of a bucket is over its targets."""
    charts = build_charts(read_models([losses(tmp_path / "a", ["m"])]))
    assert [chart.kind for chart in charts] == ["nll", "position"]
    (line,) = charts[1].lines
    assert [point.at for point in line.points][:3] == [1.0, pytest.approx(math.sqrt(6)), pytest.approx(math.sqrt(28))]
    assert line.points[-1].at == pytest.approx(math.sqrt(1024 * 2000))
    expected = np.mean([3.0 + d - np.log2(np.arange(4, 8)) / 10 for d in range(3)])
    assert line.points[2].estimate.mean == pytest.approx(expected) and line.points[2].estimate.n == 3
    assert "n = 3 documents of 2,000 tokens" in charts[1].caption


def test_a_last_bucket_of_few_positions_is_left_out(tmp_path):
    (line,) = build_charts(read_models([losses(tmp_path / "a", ["m"], lengths=(1024,))]))[1].lines
    assert line.points[-1].at == pytest.approx(math.sqrt(512 * 1023))  # position 1,024 alone is no bucket


def test_a_forest_is_what_compare_finds(tmp_path):
    models = models_of(tmp_path / "a", retrieval(["m", "n", "o"]))
    (chart,) = build_charts(models, baseline="n")
    (table,) = compare(models, CompareSpec(baseline="n")).tables
    assert chart.baseline == "n" and list(chart.differences) == ["m", "o"] and chart.null == 0
    for name, gaps in chart.differences.items():
        for gap in gaps:
            (found,) = [c for (who, at), c in table.contrasts.items() if who == name and at.length == gap.length]
            assert gap[1:] == (*found.difference[:3], found.difference.n, found.resolved)
    assert "over 8 differences" in chart.caption
    (ratio,) = build_charts(read_models([losses(tmp_path / "p", ["m", "n"])]), kinds=("forest",), metric="perplexity")
    assert ratio.null == 1.0 and ratio.differences["n"][0].mean == pytest.approx(math.e)


def test_an_unfinished_run_says_so_in_every_picture(tmp_path):
    asked = {"m": {"induction": {"trials": 9, "lengths": [2048]}}}
    path = write_run(tmp_path / "a", [row()], {**manifest("m"), "tasks": asked})
    assert all("unfinished" in c.caption for c in build_charts(read_models([path]), kinds=KINDS))


def test_imported_means_are_drawn_as_what_they_are(tmp_path):
    """A mean of trials nobody kept apart: no exact, so token accuracy is drawn, and the caption says what it is."""
    rows = [row(length=n, exact=None, first_token_correct=None, sample_hash=None, num_targets=80) for n in (2048, 4096)]
    path = write_run(tmp_path / "a", rows, {**manifest("m"), "source": "imported"})
    charts = build_charts(read_models([path]))
    assert [chart.metric.name for chart in charts] == ["token_accuracy", "nll"]
    assert all("Imported means" in chart.caption and "document" not in chart.caption for chart in charts)
    assert charts[0].caption.startswith("Bands: 95 % Wilson intervals over trials; n =")
    both = build_charts(read_models([path, write_run(tmp_path / "b", [row(model="n")])]), kinds=("accuracy",))
    assert both[0].metric.name == "exact" and "No exact is known of m." in both[0].caption


def with_tokenizer(folder, fingerprint):
    """The same run, its one model of that tokenizer."""
    details = json.loads((folder / "manifest.json").read_text())
    for model in details["models"].values():
        model |= {"tokenizer_fingerprint": fingerprint, "tokenizer": fingerprint.split("-")[0]}
    (folder / "manifest.json").write_text(json.dumps(details))
    return folder


def test_losses_of_other_tokenizers_are_drawn_in_bits_per_byte(tmp_path):
    runs = [with_tokenizer(losses(tmp_path / name, [name]), f"{name}-v1") for name in ("m", "n")]
    loss, position = build_charts(read_models(runs))
    assert loss.metric.name == "bits_per_byte" and "bits per byte compare, but of the text each read" in loss.caption
    assert "different tokenizers (m, n)" in loss.caption
    assert position.metric.name == "nll" and "nll (nats) is per token and does not compare" in position.caption
    (named,) = build_charts(read_models(runs), metric="nll")
    assert named.metric.name == "nll" and "does not compare; bits_per_byte does" in named.caption
    alike = [with_tokenizer(losses(tmp_path / f"x{name}", [name]), "byte-v1") for name in ("m", "n")]
    assert all(c.metric.name == "nll" and c.notes == () for c in build_charts(read_models(alike)))
    heat, _ = build_charts(read_models(runs), kinds=("heatmap", "position"))
    assert heat.metric.name == "bits_per_byte" and "different tokenizers" in heat.caption


def test_samples_that_differ_are_drawn_with_what_differs(tmp_path):
    a = write_run(tmp_path / "a", [row(trial=t) for t in range(3)], manifest("m"))
    b = write_run(tmp_path / "b", [row(trial=t, seed=9, sample_hash=f"x{t}") for t in range(3)], manifest("m"))
    charts = build_charts(read_models([a, b]))
    words = "amples of induction differ between m (a) and m (b), so they cannot be paired: seed (1234 and 9)"
    assert charts and all(f" S{words}." in chart.caption for chart in charts)
    assert run(a, b).stderr.count(f"note: s{words}") == 1
    assert all(chart.notes == () for chart in build_charts(read_models([a])))


def test_windows_are_named_in_every_picture(tmp_path):
    def under(name, window):
        asked = {"m": {"induction": {"trials": 1, "lengths": [2048], "window": window}}}
        return write_run(tmp_path / name, [row()], {**manifest("m"), "tasks": asked})

    charts = build_charts(read_models([under("full", None), under("train", 256)]))
    assert all("m (full) with full attention; m (train) with a window of 256 tokens" in c.caption for c in charts)


def test_long_names_that_differ_in_the_middle_stay_apart():
    one, other = (f"_polar+memory, {size} (imported)" for size in ("378m, 1900 steps", "378m, 4000 steps"))
    whole = [f" {name[:20]}\n{name[21:]}" for name in (one, other)]
    assert short_names([one, other, "softmax+memory with a long name"]) == [*whole, "softmax+mem…a long name"]
    assert short_names([one, "softmax"]) == [" " + f"{one[:11]}…{one[-11:]}", "softmax"]


def test_controls_that_were_not_measured_are_not_named(tmp_path):
    rows = [row(), row(control="absent", token_accuracy=0.0, exact=False)]
    (chart,) = build_charts(models_of(tmp_path, rows), kinds=("accuracy",))
    assert "Thin lines are controls: needle absent. " in chart.caption and "format" not in chart.caption


def test_a_forest_names_its_intervals(tmp_path):
    """Shares of one seed or several have Newcombe's, losses t intervals."""
    names = ["base", "m", "m-s2", "n"]
    rows = [row(trial=t, model=m, right=t > i or m == "base") for i, m in enumerate(names) for t in range(8)]
    (chart,) = build_charts(models_of(tmp_path / "a", rows), kinds=("forest",))
    words = "Bars: 95 % score intervals of paired shares (Newcombe). Filled"
    assert words in chart.caption and "without a bar" not in chart.caption
    (loss,) = build_charts(read_models([losses(tmp_path / "p", ["m", "n"], documents=1)]), kinds=("forest",))
    assert "Bars: 95 % t intervals over documents. Filled" in loss.caption
    assert "A point without a bar is of one pair" in loss.caption and "n = 1 pair of 1 document." in loss.caption


def test_without_intervals_none_are_promised(tmp_path):
    charts = build_charts(read_models([losses(tmp_path / "a", ["m"], documents=1)]))
    assert all("No intervals: each point is one value" in c.caption and "Bands" not in c.caption for c in charts)
    assert text_of(charts).count("No intervals: each") == 2


def test_what_cannot_be_drawn_is_refused(tmp_path):
    models = models_of(tmp_path / "a", [row()])
    assert "did you mean accuracy?" in refusal(models, kinds=("acuracy",)).hint
    assert "did you mean exact?" in refusal(models, metric="exat").hint
    assert "did you mean induction?" in refusal(models, task="inducton").hint
    assert "no model is called 'x'" in refusal(models, baseline="x").message
    assert "the kind accuracy does not draw nll" in refusal(models, kinds=("accuracy",), metric="nll").message
    assert "nothing to draw" in refusal(models, metric="perplexity").message
    assert "nothing to draw" in refusal(models, kinds=("position",)).message
    assert "nothing to draw" in refusal(models, kinds=("forest",)).message  # one model has no differences
    assert "--baseline is for the kind forest" in refusal(models, kinds=("nll",), baseline="m").message


# -- files ------------------------------------------------------------------------------------------------


def texts_outside(charts):
    """Texts that stick out of the page."""
    with files._settings():
        figure = files._figure(charts)
        figure.draw_without_rendering()
        page = figure.bbox
        shown = [t for t in figure.findobj(lambda o: hasattr(o, "get_text")) if t.get_text() and t.get_visible()]
        boxes = {t.get_text(): t.get_window_extent() for t in shown if t.axes is None or t.axes.get_visible()}
    assert len(boxes) > 5
    return [
        text
        for text, box in boxes.items()
        if box.x0 < -1 or box.y0 < -1 or box.x1 > page.x1 + 1 or box.y1 > page.y1 + 1
    ]


@pytest.mark.parametrize("num_models", [1, 2, 4, 7, 12])
def test_nothing_is_cut_off(tmp_path, num_models):
    names = [f"a-model-with-a-rather-long-name-and-seed-{i}" for i in range(num_models)]
    models = models_of(tmp_path / "a", retrieval(names))
    charts = build_charts(models, kinds=(*KINDS, "forest") if num_models > 1 else KINDS)
    charts += build_charts(read_models([losses(tmp_path / "p", names)]))
    charts += build_charts(models_of(tmp_path / "d", depth_grid(names[:5])), kinds=("heatmap",))
    assert texts_outside(charts) == []


@pytest.mark.parametrize(
    "rows",
    [
        [row()],
        [row(trial=t) for t in range(5)],
        [row(trial=t, right=False) for t in range(5)],
        [row(trial=t, length=n, status="oom") for t in range(3) for n in (2048, 4096)],
        [row(length=3000), row(length=5000, status="nan"), row(length=100_000)],
        [row("perplexity", 3000, 0, nll=900.0)],  # its perplexity is no number
        [row(model="m"), row(model="n", status="too_long"), row(model="n", length=4096)],
        [row(model="m", text_id="one"), row(model="m", trial=1, text_id="one", nll=0.7)],
    ],
    ids=["one trial", "all right", "all wrong", "all failed", "odd lengths", "overflow", "lengths missing", "one text"],
)
def test_poor_runs_are_drawn(tmp_path, rows):
    models = models_of(tmp_path / "a", rows)
    charts = build_charts(models) + build_charts(models, kinds=("heatmap",))
    if rows[0]["task"] == "perplexity":
        charts += build_charts(models, metric="perplexity")
    assert texts_outside(charts) == []
    assert render(charts, ".svg")
    assert max(map(len, text_of(charts).splitlines())) <= 100


def test_files_are_equal_whenever_charts_are(tmp_path):
    models = models_of(tmp_path / "a", retrieval(["m", "n"]))
    charts = build_charts(models, kinds=(*KINDS, "forest"))
    program = (
        "import hashlib; from atma_eval.runs import read_models; from atma_eval.plots.builders import build_charts\n"
        "from atma_eval.plots.files import render\n"
        f"charts = build_charts(read_models([{str(tmp_path / 'a')!r}]), kinds={(*KINDS, 'forest')!r})\n"
        "print(*(hashlib.sha256(render(charts, suffix)).hexdigest() for suffix in ('.png', '.svg', '.pdf')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    starts = (b"\x89PNG", b"<?xml", b"%PDF")
    for suffix, start, elsewhere in zip(files.SUFFIXES, starts, done.stdout.split(), strict=True):
        first = render(charts, suffix)
        assert first.startswith(start) and hashlib.sha256(first).hexdigest() == elsewhere
        assert b"CreationDate" not in first and b"<dc:date>" not in first


def test_names_are_drawn_as_they_are(tmp_path):
    names = ["_under", "$x^2$ \\alpha", "日本", "<b>&"]
    charts = build_charts(models_of(tmp_path / "a", retrieval(names)), kinds=("accuracy",))
    with files._settings():
        figure = files._figure(charts)
    assert [text.get_text().strip() for text in figure.legends[0].get_texts()][:4] == names
    assert not figure.legends[0].get_texts()[1].get_parse_math()
    assert render(charts, ".png")


def test_the_settings_of_others_are_left_alone(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    render(build_charts(models_of(tmp_path / "a", [row()])), ".svg")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_a_picture_is_saved_or_the_reason_is_told(tmp_path):
    charts = build_charts(models_of(tmp_path / "a", [row()]), kinds=("accuracy",))
    save(charts, tmp_path / "new" / "x.SVG")
    assert (tmp_path / "new" / "x.SVG").read_bytes().startswith(b"<?xml")
    with pytest.raises(UserError, match="the suffix"):
        save(charts, tmp_path / "x.gif")
    with pytest.raises(UserError, match="the suffix"):
        save(charts, tmp_path / "x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        save(charts, tmp_path / "file" / "x.png")


# -- terminal ---------------------------------------------------------------------------------------------


def text_of(charts, width=100):
    console = plain_console(file=io.StringIO(), width=width)
    console.print(Sketch(charts))
    return console.file.getvalue()


def test_parts_of_a_sketch():
    assert bar(0.0, 4) == "    " and bar(1.0, 4) == "████" and bar(0.5, 3) == "█▌ " and bar(2.0, 1) == "█"
    assert sparkline([0.0, None, 1.0, 2.0], 0.0, 2.0) == "▁ ▅█" and sparkline([1.0], 1.0, 1.0) == "▁"
    drawn = whisker(Gap(1, 0.0, -0.5, 0.5, 8, False), -1.0, 1.0, 0.0)
    assert drawn.index("├") == 10 and drawn.index("●") == 20 and drawn.index("┤") == 30
    assert whisker(Gap(1, 1.0, None, None, 8, False), -1.0, 1.0, 0.0).index("│") == 20
    assert [length_text(n) for n in (512, 2048, 3000, 65536, 2**20, 100_000)] == [
        "512",
        "2K",
        "3,000",
        "64K",
        "1M",
        "100,000",
    ]


@pytest.mark.parametrize("width", [60, 100])
def test_a_sketch_fits_and_holds_every_figure(tmp_path, width):
    names = [f"model-{i}" for i in range(4)]
    lengths = tuple(2048 * 2**i for i in range(6))
    models = models_of(tmp_path / "a", retrieval(names, lengths))
    charts = build_charts(models, kinds=(*KINDS, "forest"))
    charts += build_charts(read_models([losses(tmp_path / "p", names)]))
    text = text_of(charts, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text and all(name in text for name in names)
    assert all(length_text(length) in text for length in lengths)
    if width == 100:
        assert text.count("gap, tokens") == len(KINDS)  # six lengths stand side by side


def test_a_sketch_folds_long_names_and_claims_no_interval_it_does_not_draw(tmp_path):
    names = [f"polar+memory, of 378m parameters, {steps} steps" for steps in (1900, 4000)]
    text = text_of(build_charts(models_of(tmp_path / "a", retrieval(names)), kinds=("accuracy",)))
    assert "…" not in text and "1900" in text and "4000" in text
    position = text_of(build_charts(read_models([losses(tmp_path / "p", names)]), kinds=("position",)))
    assert "interval" not in position and "\nn = " in position


# -- command ----------------------------------------------------------------------------------------------


def run(*arguments):
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(plot)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_sketches_or_writes(tmp_path):
    asked = {"m": {"induction": {"trials": 2, "lengths": [2048]}}}
    folder = write_run(tmp_path / "a", [row()], {**manifest("m"), "tasks": asked})
    sketched = run(folder)
    assert sketched.exit_code == 0 and "█████  1.00" in sketched.stdout and "is unfinished" in sketched.stderr
    written = run(folder, "--kind", "heatmap", "-o", tmp_path / "x.pdf")
    assert written.exit_code == 0 and written.stdout == "" and (tmp_path / "x.pdf").is_file()
    assert isinstance(run(folder, "-o", "x.bmp").exception, UserError)
    assert isinstance(run(tmp_path / "nothing").exception, UserError)


def test_pictures_need_no_torch_and_commands_import_nothing_heavy(tmp_path):
    folder = write_run(tmp_path / "a", [row()], manifest("m"))
    program = (
        "import sys, json\n"
        "import atma_eval.commands.plot, atma_eval.commands.report\n"
        "light = [m for m in ('numpy', 'matplotlib', 'torch') if m in sys.modules]\n"
        "from atma_eval.runs import read_models\n"
        "from atma_eval.plots.builders import build_charts\n"
        f"charts = build_charts(read_models([{str(folder)!r}]))\n"
        "from atma_eval.plots.sketch import Sketch\n"
        "sketch = [m for m in ('matplotlib', 'torch') if m in sys.modules]\n"
        "from atma_eval.html_report import html_report\n"
        f"html_report(read_models([{str(folder)!r}]))\n"
        "print(json.dumps([light, sketch, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], [], False]
