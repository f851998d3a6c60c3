"""HTML built of elements: text is escaped unless it is an element already, so nobody's name becomes markup."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Sequence


class Html(str):
    """A piece of finished markup."""

    __slots__ = ()


Content = str | Iterable[str] | None
_VOID = ("img", "meta", "br")


def el(name: str, *content: Content, **attributes: str) -> Html:
    """``<name attribute="...">content</name>``; an attribute that is a word of Python ends in ``_``."""
    given = "".join(f' {key.rstrip("_")}="{html.escape(value)}"' for key, value in attributes.items())
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(*content)}</{name}>")


def join(*content: Content) -> Html:
    parts = []
    for item in content:
        if isinstance(item, Html):
            parts.append(str(item))
        elif isinstance(item, str):
            parts.append(html.escape(item))
        elif item is not None:
            parts.append(join(*item))
    return Html("".join(parts))


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], below: Content = None) -> Html:
    """A table whose first column names its rows, and words below it; wide ones scroll in a frame of their own.

    A cell may be an element of its own, ``td``, or ``th`` in the head.
    """
    body = [el("tr", el("th", cells[0], scope="row"), [_cell(cell) for cell in cells[1:]]) for cells in rows]
    heads = [
        cell if isinstance(cell, Html) and cell.startswith("<th") else el("th", cell, scope="col") for cell in head
    ]
    frame = el("div", el("table", el("thead", el("tr", heads)), el("tbody", body)), class_="wide")
    return join(frame, el("div", below, class_="below") if below else None)


def _cell(content: Content) -> Html:
    return content if isinstance(content, Html) and content.startswith("<td") else el("td", content)


def folded(summary: Content, *content: Content) -> Html:
    return el("details", el("summary", summary), *content)


def picture(svg: bytes, alt: str) -> Html:
    """An image that carries its own data: the page asks for nothing, and ids of two pictures never meet."""
    return el("img", src="data:image/svg+xml;base64," + base64.b64encode(svg).decode(), alt=alt)


def page(title: str, style: str, *content: Content) -> str:
    """A whole document; the policy forbids it to load or run anything."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        el("meta", **{"http-equiv": "Content-Security-Policy"}, content=_POLICY),
        el("meta", name_="color-scheme", content="light dark"),
        el("title", title),
        Html(f"<style>{style}</style>"),
    )
    return "<!doctype html>\n" + el("html", head, el("body", el("main", *content)), lang="en") + "\n"


_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
