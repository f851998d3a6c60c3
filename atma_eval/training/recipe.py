"""A training recipe: read strictly from YAML, before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atma_eval.bundled import bundled, given_path
from atma_eval.errors import UserError, did_you_mean
from atma_eval.files import PARTIAL
from atma_eval.models.config import AtmaConfig
from atma_eval.spec import read_yaml
from atma_eval.training.synthetic import KINDS, SHORTEST_WITH_RECORDS

OPTIMIZERS = ("adamw", "muon")
STREAM_KEYS = ("dataset", "name", "split", "column", "revision")
CARD_HEADING = "The recipe:\n\n```yaml\n"  # where a model card holds it
HOUSEKEEPING = ("microbatch_tokens", "checkpoint_every", "log_every")  # may change in the middle of a run


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stretch of steps on sequences of one length; ``mixture`` gives the share of each of `synthetic.KINDS`.

    ``learning_rate_factor`` multiplies the height of the schedule.
    """

    length: int
    tokens_per_step: int
    steps: int
    mixture: Mapping[str, float]
    learning_rate_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything a training run depends on, but for the text itself.

    Attributes:
        learning_rate: of AdamW. Under ``muon`` it holds for embeddings, head, norms, scalars and filters.
        muon_learning_rate: of the hidden matrices; both follow one schedule.
        value_weight: weight of the value digits of a query in the loss; 1 is the plain mean per token.
        clip_norm: largest norm of the whole gradient; 0 clips nothing.
        microbatch_tokens: sequences that go through the model at once hold at most so many tokens; 0 is no limit.
        num_random_keys, distractor_weight: of the distractor loss (`kernels.distractor`); 0 is off.
        data: ``stdlib``, a text file or folder or ``.jsonl``, a glob of ``.bin`` token shards, or the keys of a
            streamed `datasets` set (``dataset``, and maybe ``name``, ``split``, ``column``, ``revision``).
    """

    model: AtmaConfig
    stages: tuple[Stage, ...]
    seed: int
    learning_rate: float
    final_learning_rate: float
    warmup_steps: int
    decay_steps: int
    weight_decay: float
    clip_norm: float
    value_weight: float
    checkpoint_every: int = 200
    log_every: int = 20
    optimizer: str = "adamw"
    muon_learning_rate: float = 0.02
    microbatch_tokens: int = 0
    num_random_keys: int = 0
    distractor_weight: float = 0.0
    data: str | Mapping[str, str] = "stdlib"

    @property
    def num_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def num_tokens(self) -> int:
        return self.tokens_before(self.num_steps)

    @property
    def training_length(self) -> int:
        return max(stage.length for stage in self.stages)

    @property
    def is_bytes(self) -> bool:
        """Whether a token is a byte, so that records can be planted and asked for."""
        return self.model.tokenizer in (None, "byte") and isinstance(self.data, str) and not is_shards(self.data)

    @property
    def plants(self) -> bool:
        """Whether any sequence holds records, so that there is recall to measure."""
        return any(kind != "plain" for stage in self.stages for kind in stage.mixture)

    def differs_from(self, other: Recipe) -> list[str]:
        """Names of the fields that would lead to other weights (up to rounding)."""
        ours, theirs = self.to_dict(), other.to_dict()
        return [name for name, value in ours.items() if name not in HOUSEKEEPING and theirs[name] != value]

    def stage_at(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise IndexError(step)

    def tokens_before(self, step: int) -> int:
        """Tokens that the steps before ``step`` take."""
        tokens = 0
        for stage in self.stages:
            taken = min(step, stage.steps)
            tokens, step = tokens + taken * stage.tokens_per_step, step - taken
        return tokens

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, constant, and over the last ``decay_steps`` down to ``final_learning_rate`` in a line.

        Where a short run makes the two overlap, the lower one holds.
        """
        height = self.learning_rate * self.stage_at(step).learning_rate_factor
        rising = height * (step + 1) / self.warmup_steps if step < self.warmup_steps else math.inf
        left = min(1.0, (self.num_steps - step) / max(1, self.decay_steps))
        return min(rising, height * left + self.final_learning_rate * (1 - left))

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return {**values, "stages": list(values["stages"])}

    def to_yaml(self) -> str:
        """The whole recipe, whatever others it was made from."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None, width=100)


def is_shards(data: str) -> bool:
    return data.endswith(".bin")


def bundled_recipes() -> dict[str, Path]:
    """Bundled recipes for ``atma-eval train`` by name."""
    return {p.stem: p for p in sorted((bundled("configs") / "train").glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """A bundled recipe by its name, or a path."""
    path = bundled_recipes().get(name) or given_path(name)
    if not path.is_file():
        raise UserError(f"no recipe {name!r}", did_you_mean(name, bundled_recipes()) + "; or a path to a .yaml file")
    return path


def read_recipe(path: Path) -> Recipe:
    """Read a recipe; an unknown or missing field, or one of the wrong type, is an error.

    ``base`` names another recipe beside it, or a bundled one, of which it changes fields, and those of ``model`` one
    by one. With stages of its own it does not take over the training length.
    """
    return recipe_from_dict(_with_base(path, ()), str(path))


def _with_base(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """The fields of a recipe over those of its base, and of the base's base."""
    if path.resolve() in above:
        raise UserError(f"{path}: its base comes back to itself", "let the chain of base end in a whole recipe")
    values = read_yaml(path)
    base = values.pop("base", None)
    _check_names({f.name for f in dataclasses.fields(Recipe)}, values, str(path))
    if base is None:
        return values
    below = _with_base(_find_base(path, str(base)), (*above, path.resolve()))
    if isinstance(below.get("model"), dict):
        if "stages" in values:
            below["model"].pop("training_length", None)
        if isinstance(own_model := values.get("model", {}), dict):
            values["model"] = {**below["model"], **own_model}
    return {**below, **values}


def _find_base(path: Path, base: str) -> Path:
    """The recipe beside ``path`` of this name, else the bundled one."""
    beside, name = path.parent / os.path.expanduser(base), base.removesuffix(".yaml")
    if beside.is_file():
        return beside
    recipes = bundled_recipes()
    if name in recipes:
        return recipes[name]
    raise UserError(f"{path}: no base {base!r}", f"a recipe beside it, or a bundled one; {did_you_mean(name, recipes)}")


def recipe_from_dict(values: Any, source: str) -> Recipe:
    read = _fields(Recipe, values, source)
    if not isinstance(read["model"], dict):
        raise UserError(f"{source}: model is {read['model']!r}", "it takes the fields of a model's config.json")
    if not isinstance(read["stages"], list) or not read["stages"]:
        raise UserError(f"{source}: stages is {read['stages']!r}", "it takes a list of at least one stage")
    model = AtmaConfig.from_dict(read["model"], f"{source}, model")
    stages = tuple(_stage(stage, f"{source}, stage {i}") for i, stage in enumerate(read["stages"], start=1))
    recipe = Recipe(**{**read, "model": model, "stages": stages})
    _check(recipe, source)
    filled: dict[str, Any] = {"training_length": recipe.training_length}
    if model.tokenizer is None and recipe.is_bytes:
        filled["tokenizer"] = "byte"
    return dataclasses.replace(recipe, model=dataclasses.replace(model, **filled))


def _check_names(known: Collection[str], values: Any, source: str) -> None:
    if not isinstance(values, dict):
        raise UserError(f"{source} is {values!r}", f"it takes the fields {', '.join(known)}")
    for name in values:
        if name not in known:
            raise UserError(f"{source}: unknown field {name!r}", did_you_mean(str(name), known))


def _fields(cls: type, values: Any, source: str) -> dict[str, Any]:
    """``values`` as keyword arguments of a dataclass of numbers; whole numbers and floats are told apart."""
    known = {f.name: f for f in dataclasses.fields(cls)}
    _check_names(known, values, source)
    missing = [n for n, f in known.items() if n not in values and f.default is dataclasses.MISSING]
    if missing:
        raise UserError(f"{source} lacks {', '.join(missing)}")
    read = dict(values)
    for name, value in values.items():
        kind = known[name].type  # a string: annotations are not evaluated
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "int" and not (number and isinstance(value, int) and value >= 0):
            raise UserError(f"{source}: {name} is {value!r}", "allowed: a whole number, 0 or more")
        if kind == "float":
            if not (number and math.isfinite(value) and value >= 0):
                hint = "allowed: a number, 0 or more (YAML reads 3e-3 as a word; write 3.0e-3 or 0.003)"
                raise UserError(f"{source}: {name} is {value!r}", hint)
            read[name] = float(value)
    return read


def _stage(values: Any, source: str) -> Stage:
    stage = Stage(**_fields(Stage, values, source))
    if stage.length < 1 or stage.tokens_per_step % stage.length or not stage.tokens_per_step:
        raise UserError(
            f"{source}: tokens_per_step {stage.tokens_per_step} is not a multiple of length {stage.length}",
            "a step takes whole sequences",
        )
    if not stage.steps:
        raise UserError(f"{source}: steps is 0", "allowed: a whole number of at least 1")
    if not isinstance(stage.mixture, dict) or not stage.mixture:
        raise UserError(f"{source}: mixture is {stage.mixture!r}", f"it gives shares of {', '.join(KINDS)}")
    for kind, share in stage.mixture.items():
        if kind not in KINDS:
            raise UserError(f"{source}: unknown kind of sequence {kind!r}", did_you_mean(str(kind), KINDS))
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 < share < math.inf:
            raise UserError(f"{source}: the share of {kind} is {share!r}", "allowed: a number above 0")
        if kind != "plain" and stage.length < SHORTEST_WITH_RECORDS:
            raise UserError(
                f"{source}: length {stage.length} is too short for {kind}",
                f"records need at least {SHORTEST_WITH_RECORDS}",
            )
    # One order, since the kind of a sequence is drawn by its place in the list
    return dataclasses.replace(stage, mixture={kind: stage.mixture[kind] for kind in KINDS if kind in stage.mixture})


def _check(recipe: Recipe, source: str) -> None:
    """What fields must be to each other."""
    model, longest = recipe.model, recipe.training_length
    if model.training_length not in (None, longest):
        raise UserError(
            f"{source}: training_length is {model.training_length}, and the longest stage has length {longest}",
            "they must agree, since extrapolation is counted from training_length",
        )
    if not recipe.learning_rate:
        raise UserError(f"{source}: learning_rate is 0", "allowed: above 0; Muon follows its schedule too")
    for name in ("checkpoint_every", "log_every"):
        if getattr(recipe, name) == 0:
            raise UserError(f"{source}: {name} is 0", "allowed: a whole number of at least 1")
    if recipe.optimizer not in OPTIMIZERS:
        raise UserError(f"{source}: optimizer is {recipe.optimizer!r}", did_you_mean(str(recipe.optimizer), OPTIMIZERS))
    if 0 < recipe.microbatch_tokens < longest:
        raise UserError(
            f"{source}: microbatch_tokens is {recipe.microbatch_tokens}, shorter than a sequence of {longest}",
            "allowed: 0 (no limit), or at least the length of the longest stage",
        )
    if (recipe.num_random_keys > 0) != (recipe.distractor_weight > 0):
        raise UserError(
            f"{source}: num_random_keys is {recipe.num_random_keys} and distractor_weight {recipe.distractor_weight}",
            "the distractor loss needs both; leave both out to train without it",
        )
    if recipe.num_random_keys and not (model.attn_type != "none" and model.num_global_blocks):
        raise UserError(f"{source}: the distractor loss needs attention, and attn_type is {model.attn_type}")
    _check_data(recipe, source)


def _check_data(recipe: Recipe, source: str) -> None:
    data = recipe.data
    if isinstance(data, dict):
        for key, value in data.items():
            if key not in STREAM_KEYS:
                raise UserError(f"{source}, data: unknown key {key!r}", did_you_mean(str(key), STREAM_KEYS))
            if not isinstance(value, str):
                raise UserError(f"{source}, data: {key} is {value!r}", "allowed: a word")
        if "dataset" not in data:
            raise UserError(f"{source}, data lacks dataset", "it names a data set, such as HuggingFaceFW/fineweb-edu")
        if recipe.model.tokenizer is None:
            raise UserError(
                f"{source}: a data set needs a tokenizer", "write tokenizer: gpt2 (or byte, or a path) under model"
            )
    elif not isinstance(data, str) or not data:
        raise UserError(
            f"{source}: data is {data!r}",
            "allowed: stdlib, a text file, folder or .jsonl, a glob of .bin token shards, or keys of a data set",
        )
    if not recipe.is_bytes:
        planted = sorted({kind for stage in recipe.stages for kind in stage.mixture} - {"plain"})
        if planted:
            raise UserError(
                f"{source}: {', '.join(planted)} in the mixture, and the data is not text read as bytes",
                "records are planted in text files alone: use tokenizer byte and a file, or the mixture {plain: 1.0}",
            )


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe in the model card of a checkpoint; ``None`` where there is no card, or one without a recipe."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    text = card.partition(CARD_HEADING)[2].partition("```")[0]
    try:
        return recipe_from_dict(yaml.safe_load(text), "card")
    except (yaml.YAMLError, UserError):
        return None


def check_out(folder: Path, recipe: Recipe) -> None:
    """Refuse to write where anything but this recipe's checkpoint stands."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is a file", "give another --out folder")
    if not any(path for path in folder.iterdir() if path.suffix != PARTIAL):
        return
    theirs = recipe_of(folder)
    if theirs is None or recipe.differs_from(theirs):
        what = "another recipe's checkpoint" if (folder / "config.json").is_file() else "other files"
        raise UserError(f"{folder} holds {what}", "give another --out folder, or delete this one")


def check_writable(folder: Path, option: str) -> None:
    """Refuse a folder that could not be made or written to."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"{folder} cannot be a folder: {nearest} is a file", f"give another {option} folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"cannot write to {nearest}", f"give another {option} folder")
