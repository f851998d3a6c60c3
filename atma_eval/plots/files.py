"""Charts as files: PNG, SVG or PDF, equal byte for byte whenever the charts are.

Lines differ in colour, dash and marker, and heatmaps are drawn in cividis with the values in their cells, so that
pictures read in grey print and for the colour-blind. Names are drawn as they are: no mathematics in a user's text.
"""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from atma_eval.errors import UserError
from atma_eval.plots.charts import Chart, ForestChart, HeatChart, LineChart
from atma_eval.plots.grids import draw_forest, draw_heatmap, forest_height, heatmap_height
from atma_eval.plots.lines import draw_lines, lines_height
from atma_eval.plots.page import WIDTH, Area

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 200
CAPTION_LETTERS = 122  # in a line
TITLE, CAPTION_LINE, PAD = 0.32, 0.145, 0.16  # inches
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "atma-eval",
    "text.parse_math": False,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "pdf.fonttype": 42,
    "hatch.linewidth": 0.6,
}


@contextmanager
def _settings() -> Iterator[None]:
    """Our settings while a figure is made and written; a name in letters the font lacks is no cause for a warning."""
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **_SETTINGS}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def suffix_of(path: Path) -> str:
    """The suffix of a picture's file, in lower case; `UserError` for a format there is none of."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UserError(
            f"{path}: the suffix {path.suffix!r} names no format of pictures",
            f"give a file name that ends in {', '.join(SUFFIXES)}",
        )
    return suffix


def render(charts: Sequence[Chart], suffix: str) -> bytes:
    """All charts, one below the other, as the bytes of a ``.png``, ``.svg`` or ``.pdf`` file."""
    undated = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}[suffix]
    image = io.BytesIO()
    with _settings():
        _figure(charts).savefig(image, format=suffix[1:], dpi=DPI, metadata=undated)
    return image.getvalue()


def save(charts: Sequence[Chart], path: Path) -> None:
    """Write a picture; its folder is made where there is none."""
    image = render(charts, suffix_of(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", "give another file with -o") from None


def _figure(charts: Sequence[Chart]) -> Figure:
    captions = [textwrap.fill(chart.caption, CAPTION_LETTERS) for chart in charts]
    bodies = [_body_height(chart) for chart in charts]
    words = [CAPTION_LINE * (1 + caption.count("\n")) for caption in captions]
    total = sum(bodies) + sum(words) + (TITLE + 2 * PAD) * len(charts)
    figure = Figure(figsize=(WIDTH, total))
    FigureCanvasAgg(figure)
    top = total
    for chart, caption, body, below in zip(charts, captions, bodies, words, strict=True):
        figure.text(0.12 / WIDTH, (top - PAD) / total, chart.title, fontsize=10, fontweight="bold", va="top")
        top -= PAD + TITLE + body
        area = Area(figure, top, body)
        if isinstance(chart, LineChart):
            draw_lines(area, chart)
        elif isinstance(chart, HeatChart):
            draw_heatmap(area, chart)
        elif isinstance(chart, ForestChart):
            draw_forest(area, chart)
        figure.text(0.12 / WIDTH, top / total, caption, fontsize=7.5, color="0.25", va="top", linespacing=1.25)
        top -= below + PAD
    return figure


def _body_height(chart: Chart) -> float:
    """Inches of the picture itself, without title and caption."""
    if isinstance(chart, LineChart):
        return lines_height(chart)
    if isinstance(chart, HeatChart):
        return heatmap_height(chart)
    assert isinstance(chart, ForestChart)
    return forest_height(chart)
