"""``atma-eval list``: what is bundled. Importing this module imports nothing heavy."""

from __future__ import annotations

import json

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from atma_eval.commands.options import AsJson
from atma_eval.console import wide_console


def list_all(as_json: AsJson = False) -> None:
    """Bundled models, task presets, suites and training recipes."""
    from atma_eval.bundled import bundled_models, bundled_presets, bundled_suites
    from atma_eval.models.config import AtmaConfig
    from atma_eval.spec import COMMAND_FAMILIES, load_preset, read_yaml
    from atma_eval.training.recipe import bundled_recipes, read_recipe

    models = []
    for name, path in bundled_models().items():
        config = AtmaConfig.from_dict(json.loads((path / "config.json").read_text()), str(path / "config.json"))
        size = sum(p.stat().st_size for p in path.glob("weights.*"))
        models.append(
            {
                "name": name,
                "architecture": config.architecture,
                "training_length": config.training_length,
                "num_bytes": size,
            }
        )
    presets = [
        {
            "name": preset.name,
            "command": next(name for name, families in COMMAND_FAMILIES.items() if preset.family in families),
            "description": preset.description,
        }
        for preset in map(load_preset, bundled_presets())
    ]
    suites = [
        {"name": name, "description": str(read_yaml(path).get("description", ""))}
        for name, path in bundled_suites().items()
    ]
    recipes = [
        {"name": name, "architecture": recipe.model.architecture, "num_tokens": recipe.num_tokens}
        for name, recipe in ((name, read_recipe(path)) for name, path in bundled_recipes().items())
    ]
    if as_json:
        typer.echo(json.dumps({"models": models, "presets": presets, "suites": suites, "recipes": recipes}, indent=1))
        return
    console = wide_console()
    for title, entries in (("models", models), ("presets", presets), ("suites", suites), ("recipes", recipes)):
        table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
        for column in entries[0] if entries else ["name"]:
            table.add_column(
                column.replace("_", " "),
                justify="right" if column in ("num_bytes", "num_tokens", "training_length") else "left",
                overflow="fold",  # a name is there to be typed
                no_wrap=column == "name",
            )
        for entry in entries:
            table.add_row(
                *(f"{v:,}" if isinstance(v, int) else str(v) if v is not None else "unknown" for v in entry.values())
            )
        console.print(table)
