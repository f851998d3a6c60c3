"""What the README and the pages beside it say of runs and models, held to the runs and models themselves."""

from __future__ import annotations

import pytest
from conftest import ROOT
from typer.testing import CliRunner

from atma_eval.bundled import bundled_models
from atma_eval.cli import app
from atma_eval.compare import CompareSpec, compare
from atma_eval.compare.data import as_data
from atma_eval.runs import read_models
from atma_eval.words import signed

REFERENCE = ROOT / "results" / "reference"
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason="results/reference is not in this checkout")


def table(first_cell: str) -> list[list[str]]:
    """The README's Markdown table whose header begins with this cell, without the line of dashes."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_cell}"))
    end = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]
    return [rows[0], *rows[2:]]


def test_recall_of_the_bundled_models_is_that_of_their_cards():
    """At 2,048, of 100; the second seed after a comma."""
    names, figures = table("atma |")
    written = {}
    for name, cell in zip(names, figures, strict=True):
        for label, figure in zip((name, f"{name}-s1"), cell.split(", "), strict=False):
            written[label] = int(figure)
    measured = {}
    for name, folder in bundled_models().items():
        line = next(x for x in (folder / "README.md").read_text().splitlines() if x.startswith("| 2,048 |"))
        trials, exact = line.split("|")[3:5]
        assert int(trials) == 100
        measured[name] = round(100 * float(exact))
    assert written == measured


@needs_reference
def test_the_full_tables_are_those_of_the_reference_run(tmp_path):
    out = tmp_path / "reference.md"
    done = CliRunner().invoke(app, ["compare", str(REFERENCE), "--baseline", "softmax", "-o", str(out)])
    assert done.exit_code == 0
    assert out.read_text(encoding="utf-8") == (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


@needs_reference
def test_the_leading_table_is_that_of_the_reference_run():
    data = as_data(compare(read_models([REFERENCE]), CompareSpec(baseline="softmax")))
    recall, loss = ({(c["model"], c["length"]): c for c in t["cells"]} for t in data["tables"])

    def estimate(cell):
        return f"{cell['mean']:.3f} ({cell['low']:.3f}–{cell['high']:.3f})"

    expected = []
    for model in sorted({model for model, _ in loss}, key=lambda model: loss[model, 65536]["mean"]):
        cell = loss[model, 65536]
        half = 0 if model == "softmax" else (cell["diff_high"] - cell["diff_low"]) / 2
        difference = f"{signed(cell['diff'])} ± {half:.3f}" if half else ""
        expected.append(
            [model, *(estimate(recall[model, n]) for n in (2048, 16384, 65536)), estimate(cell), difference]
        )
    assert table("|")[1:] == expected
