"""A comparison in the format asked for: terminal, Markdown, LaTeX, CSV, JSON. Needs no torch."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text as RichText

from atma_eval.compare.data import as_csv, as_json
from atma_eval.compare.effective import effective_sheet
from atma_eval.compare.published import published_sheet
from atma_eval.compare.sheets import Line, Section, Sheet, Text, main_sheet
from atma_eval.compare.tables import Comparison
from atma_eval.console import WIDTH, plain_console, wide_console
from atma_eval.errors import UserError

SUFFIXES = {".md": "md", ".tex": "latex", ".csv": "csv", ".json": "json"}
LATEX_COLUMNS, LATEX_LINES = 6, 54  # of a page of usual margins, in small type
NOTE_LETTERS = 120  # in a line of notes
LABEL_WIDTH, MOST_LABEL_WIDTH = 16, 32  # names may fold: their figures take two lines anyway


def sheets(comparison: Comparison, *, against_paper: bool = False) -> list[Sheet]:
    """All tables in order: estimates and differences, effective lengths, published figures."""
    found = []
    for table in comparison.tables:
        found.append(main_sheet(table, comparison))
        if table.effective_lengths:
            found.append(effective_sheet(table))
        if against_paper and table.by == "length":
            found.append(published_sheet(table))
    return found


def render(comparison: Comparison, form: str, *, against_paper: bool = False) -> str:
    """The whole output as text that ends with a newline."""
    if form == "csv":
        return as_csv(comparison, against_paper=against_paper)
    if form == "json":
        return as_json(comparison, against_paper=against_paper)
    if form == "terminal":
        text = io.StringIO()
        plain_console(file=text, width=WIDTH).print(TerminalTables(comparison, against_paper=against_paper))
        return text.getvalue()
    write = {"md": _markdown, "latex": _latex}[form]
    return "\n".join(write(sheet) for sheet in sheets(comparison, against_paper=against_paper))


def write(comparison: Comparison, form: str | None, out: Path | None, *, against_paper: bool = False) -> None:
    """Print it, or write a file, by default in the format of its suffix; `UserError` where that cannot be written."""
    form = form or (SUFFIXES.get(out.suffix.lower()) if out else None) or "terminal"
    if out is None and form == "terminal":
        wide_console().print(TerminalTables(comparison, against_paper=against_paper))
        return
    text = render(comparison, form, against_paper=against_paper)
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}", "give another file with -o") from None


# -- terminal -----------------------------------------------------------------------------------------------


class TerminalTables:
    """Sheets for a console; where columns do not fit side by side, in as many even parts as it takes."""

    def __init__(self, comparison: Comparison, *, against_paper: bool = False):
        self._sheets = sheets(comparison, against_paper=against_paper)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, sheet in enumerate(self._sheets):
            if i:
                yield RichText("")
            yield RichText(sheet.title, style="bold")
            label_width, parts = _layout(sheet, options.max_width)
            for part in parts:
                yield _rich_table(sheet, part, label_width)
            yield RichText("\n".join(sheet.footnotes), style="dim")


def _layout(sheet: Sheet, width: int) -> tuple[int, list[slice]]:
    """Width of the names, and which columns stand side by side: names fold where that saves a table."""
    lines = [line for section in sheet.sections for line in section]
    texts = [part for line in lines for text in line.cells for part in _both(text)]
    column = max(map(len, [*sheet.heads, *texts]), default=0) + 2
    labels = [sheet.stub, *(line.label for line in lines if not line.heading)]
    narrow = min(max(map(len, labels)), LABEL_WIDTH)
    wide = min(max(map(len, labels)), MOST_LABEL_WIDTH)

    def num_tables(label_width: int) -> int:
        return -(-len(sheet.heads) // max(1, (width - label_width - 1) // column))

    label_width = wide if num_tables(wide) == num_tables(narrow) else narrow
    size = -(-len(sheet.heads) // max(1, num_tables(label_width)))
    return label_width, [slice(start, start + size) for start in range(0, len(sheet.heads), size or 1)]


def _both(text: Text) -> tuple[str, str]:
    return text.main + ("†" if text.best else ""), text.under


def _rich_table(sheet: Sheet, part: slice, label_width: int) -> RichTable:
    table = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(sheet.stub, width=label_width, overflow="fold")
    for head in sheet.heads[part]:
        table.add_column(head, justify="right", no_wrap=True)
    for section in sheet.sections:
        for i, line in enumerate(section):
            cells = [_rich_cell(text) for text in line.cells[part]]
            style = "dim" if line.faint else "italic" if line.heading else ""
            table.add_row(RichText(line.label), *cells, style=style, end_section=i + 1 == len(section))
    return table


def _rich_cell(text: Text) -> RichText:
    main, under = _both(text)
    cell = RichText(main, style="red" if text.failed else "bold" if text.best else "")
    if under:
        cell.append(f"\n{under}", style="dim")
    return cell


# -- Markdown -----------------------------------------------------------------------------------------------


def _markdown(sheet: Sheet) -> str:
    lines = [f"### {_md(sheet.title)}", ""]
    if sheet.heads:
        lines.append(_md_row([sheet.stub, *sheet.heads]))
        lines.append(_md_row(["---", *["---:"] * len(sheet.heads)]))
    for section in sheet.sections:
        for line in section:
            label = f"*{_md(line.label)}*" if line.heading else _md(line.label)
            cells = [_md_cell(text) for text in line.cells] or [""] * len(sheet.heads)
            lines.append("| " + " | ".join([label, *cells]) + " |")
    for note in sheet.footnotes:
        lines += ["", _md(note)]
    return "\n".join(lines) + "\n"


def _md_row(cells: list[str]) -> str:
    return "| " + " | ".join(map(_md, cells)) + " |"


def _md_cell(text: Text) -> str:
    main = f"**{_md(text.main)}**†" if text.best else _md(text.main)
    return f"{main}<br>{_md(text.under)}" if text.under else main


def _md(text: str) -> str:
    if set(text) <= set("-:"):
        return text
    return re.sub(r"([\\`*_<>|\[\]#~])", r"\\\1", text).replace("\n", " ")


# -- LaTeX --------------------------------------------------------------------------------------------------

_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': "''",
    "–": "--",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≥": r"$\geq$",
    "†": r"$^\dagger$",
    "·": r"$\cdot$",
    **{character: "\\" + character for character in "&%$#_{}"},
}


def _tex(text: str) -> str:
    """Escaped for pdflatex; a letter it has no font for stands as its code point."""
    return "".join(_LATEX.get(c, c if ord(c) < 0x180 and c.isprintable() else f"(U+{ord(c):04X})") for c in text)


def _latex(sheet: Sheet) -> str:
    """Complete ``table`` environments; intervals stand under their figures in small type.

    What does not fit a page comes in several tables, the notes below the last.
    """
    tables = list(_pages(sheet))
    lines = ["% needs \\usepackage{booktabs}; names with other letters than English: \\usepackage[T1]{fontenc}"]
    for number, (part, sections) in enumerate(tables, start=1):
        counted = f" ({number} of {len(tables)})" if len(tables) > 1 else ""
        label = re.sub("[^a-z0-9]+", "-", (sheet.title + counted).lower()).strip("-")
        lines += ["\\begin{table}[tbp]", "\\centering\\footnotesize", "\\setlength{\\tabcolsep}{3pt}"]
        lines += [f"\\caption{{{_tex(sheet.title + counted)}}}", f"\\label{{tab:{label}}}"]
        if sections:
            lines += [*_tabular(sheet, part, sections), r"\par\smallskip"]
        if number == len(tables):
            lines.append(
                "\\parbox{\\linewidth}{\\raggedright\\scriptsize " + " ".join(map(_tex, sheet.footnotes)) + "}"
            )
        lines.append("\\end{table}")
    return "\n".join(lines) + "\n"


def _pages(sheet: Sheet) -> Iterator[tuple[slice, tuple[Section, ...]]]:
    """Columns and sections that fit a page together; none at last where the notes need one of their own."""
    num_parts = -(-len(sheet.heads) // LATEX_COLUMNS)
    size = -(-len(sheet.heads) // max(1, num_parts))
    pages: list[list[Section]] = []
    used = LATEX_LINES
    for section in sheet.sections:
        height = sum(2 if any(text.under for text in line.cells) else 1 for line in section)
        if used + height > LATEX_LINES:
            pages, used = [*pages, []], 0
        pages[-1].append(section)
        used += height
    for sections in pages:
        for number in range(num_parts):
            yield slice(number * size, (number + 1) * size), tuple(sections)
    if used + sum(map(len, sheet.footnotes)) // NOTE_LETTERS > LATEX_LINES or not pages:
        yield slice(0), ()


def _tabular(sheet: Sheet, part: slice, sections: tuple[Section, ...]) -> Iterator[str]:
    heads = sheet.heads[part]
    longest = max(len(line.label) for section in sheet.sections for line in section if not line.heading)
    free = LATEX_COLUMNS - len(heads)
    stub = "l" if longest <= 22 + 5 * free else f"p{{{3 + free}cm}}"
    yield f"\\begin{{tabular}}{{@{{}}{stub}{'r' * len(heads)}@{{}}}}"
    yield "\\toprule"
    yield " & ".join(map(_tex, [sheet.stub, *heads])) + r" \\"
    for section in sections:
        yield "\\midrule"
        for line in section:
            yield from _latex_line(line, part, len(heads))
    yield "\\bottomrule"
    yield "\\end{tabular}"


def _latex_line(line: Line, part: slice, num_columns: int) -> Iterator[str]:
    if line.heading:
        yield f"\\multicolumn{{{num_columns + 1}}}{{@{{}}l}}{{\\emph{{{_tex(line.label)}}}}} \\\\"
        return
    cells = line.cells[part]
    mains = [f"\\textbf{{{_tex(text.main)}}}$^\\dagger$" if text.best else _tex(text.main) for text in cells]
    yield " & ".join([_tex(line.label), *mains]) + r" \\"
    if any(text.under for text in cells):
        yield (
            " & ".join(["", *(f"{{\\scriptsize {_tex(text.under)}}}" if text.under else "" for text in cells)]) + r" \\"
        )
