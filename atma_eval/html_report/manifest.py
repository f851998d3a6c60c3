"""How the rows came about, from the manifests: commands, versions, models, texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atma_eval.html_report.parts import Content, Html, el, folded, join, table
from atma_eval.runs import ModelRows, Run
from atma_eval.words import plural

MODEL_FIELDS = (
    "architecture num_parameters training_length trained_window dtype device device_name implementations tokenizer "
    "tokenizer_fingerprint q2_floor fingerprint path revision"
).split()


def manifest_section(models: Sequence[ModelRows]) -> Html:
    runs = list({id(model.run): model.run for model in models}.values())
    return el("section", el("h2", "How it was made", id_="manifest"), [_run(run) for run in runs])


def _run(run: Run) -> Html:
    num_rows = f"{plural(len(run.rows), 'row')} of run {run.rows[0]['run_id']}, in {run.path}"
    if not run.manifest:
        return join(el("h3", run.name), el("p", num_rows, "; there is no manifest, so nothing more is known."))
    return join(
        el("h3", run.name),
        el("p", num_rows + ("; imported from logs." if run.imported else ".")),
        folded("Commands and versions", _invocations(run)),
        folded("Models", [_details(label, run.model(label)) for label in dict.fromkeys(r["model"] for r in run.rows)]),
        folded("Tasks and texts", _tasks(run)),
    )


def _invocations(run: Run) -> Html:
    return join(
        [
            el(
                "div",
                el("p", el("code", _word(call.get("command")))),
                _pairs({key: value for key, value in call.items() if key != "command"}),
            )
            for call in _list(run.manifest.get("invocations"))
        ]
    )


def _details(label: str, details: Mapping[str, Any]) -> Html:
    known = {"training_length": _dict(details.get("config")).get("training_length"), **details}
    return join(
        el("h3", label), _pairs({name: known.get(name) for name in MODEL_FIELDS if known.get(name) is not None})
    )


def _tasks(run: Run) -> Html:
    """Each distinct request once, with the models it was put to."""
    asked: dict[str, tuple[str, dict[str, Any], list[str]]] = {}
    for label, tasks in _dict(run.manifest.get("tasks")).items():
        for task, request in _dict(tasks).items():
            asked.setdefault(repr((task, request)), (task, _dict(request), []))[2].append(label)
    parts: list[Html] = []
    for task, request, labels in asked.values():
        text = _dict(request.get("text"))
        figures = {"models": ", ".join(labels), **_dict(request.get("protocol"))}
        figures |= {name: request.get(name) for name in ("window", "lengths", "trials")}
        figures |= {f"text: {name}": value for name, value in text.items() if name != "documents"}
        rows: list[list[Content]] = [
            [_word(d.get("text_id")), _word(d.get("num_bytes")), el("td", el("code", _word(d.get("sha256"))))]
            for d in map(_dict, _list(text.get("documents")))
        ]
        parts.append(join(el("h3", task), _pairs(figures), table(("document", "bytes", "SHA-256"), rows)))
    return join(parts)


def _pairs(values: Mapping[str, Any]) -> Html:
    rows: list[list[Content]] = [
        [name, el("td", el("code", _word(value)), class_="text")] for name, value in values.items()
    ]
    return table(("", ""), rows)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(_word, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "none" if value is None else str(value)


def _dict(value: Any) -> dict[str, Any]:
    """A manifest may be of another version or edited: what is not a mapping is taken as empty."""
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
