"""What was asked for: lengths, presets, suites; read strictly, before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import math
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from atma_eval.bundled import bundled_presets, bundled_suites, given_path
from atma_eval.errors import UserError, did_you_mean
from atma_eval.tasks.base import Task
from atma_eval.tasks.induction import Induction
from atma_eval.tasks.perplexity import Perplexity

DEFAULT_SEED = 1234
FAMILIES: dict[str, type] = {"induction": Induction, "perplexity": Perplexity}
COMMAND_FAMILIES = {"niah": ("induction",), "ppl": ("perplexity",)}
DTYPES = {
    "auto": "auto",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
}
IMPLS = ("auto", "torch", "triton")
MAX_LENGTH = 2**28
MAX_DIGITS = 18
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
LENGTHS_HINT = "lengths are like 2048, 2k or 1m (k = 1024), a list 2k,4k,8k or a doubling range 2k..64k; from 1 to 256m"


def parse_length(text: str) -> int:
    """``2048``, ``2k`` or ``1m`` (k = 1,024) as a number of tokens."""
    match = re.fullmatch(r"([0-9]{1,12})([km]?)", text.strip().lower())
    value = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 1 <= value <= MAX_LENGTH:
        raise UserError(f"bad length {text.strip()!r}", LENGTHS_HINT)
    return value


def parse_lengths(text: str | list[Any]) -> tuple[int, ...]:
    """A comma-separated list of lengths and doubling ranges ``A..B``, as increasing distinct numbers.

    A range doubles from A and ends with B, whether or not B is a doubling of A.
    """
    parts = [str(part) for part in text] if isinstance(text, list) else str(text).split(",")
    lengths: set[int] = set()
    for part in parts:
        first, dots, last = part.partition("..")
        if dots and not (first.strip() and last.strip()):
            raise UserError(f"bad length range {part.strip()!r}: it has one end", LENGTHS_HINT)
        low = parse_length(first)
        if not dots:
            lengths.add(low)
            continue
        high = parse_length(last)
        if high < low:
            raise UserError(
                f"bad length range {part.strip()!r}: it ends below its start", f"write {last.strip()}..{first.strip()}"
            )
        while low < high:
            lengths.add(low)
            low *= 2
        lengths.add(high)
    if not lengths:
        raise UserError("the list of lengths is empty", LENGTHS_HINT)
    return tuple(sorted(lengths))


def parse_window(value: str | int) -> str | int:
    """``train`` (what the checkpoint was trained with), ``full``, or a number of keys."""
    text = str(value).strip().lower()
    if text in ("train", "full"):
        return text
    try:
        return parse_length(text)
    except UserError:
        raise UserError(f"bad window {value!r}", "allowed: train, full, or a number of keys such as 1024") from None


def parse_dtype(value: str) -> str:
    if value.lower() not in DTYPES:
        raise UserError(f"unknown dtype {value!r}", did_you_mean(value, DTYPES))
    return DTYPES[value.lower()]


def check_device(value: str) -> None:
    """Refuse what is no device name; whether the device is there, only torch can say."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise UserError(f"unknown device {value!r}", "allowed: auto, cpu, cuda, cuda:N")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file that holds one mapping."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds no mapping of names to values")
    return values


def check_keys(values: dict[str, Any], allowed: set[str], where: str) -> None:
    """`UserError` naming the first key that is not allowed."""
    for key in values:
        if key not in allowed:
            raise UserError(f"{where}: unknown key {key!r}", did_you_mean(str(key), allowed))


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A task with defaults, and the window its protocol wants (``train`` unless it says otherwise)."""

    name: str
    family: str
    description: str
    values: dict[str, Any]
    window: str | int

    @property
    def fields(self) -> set[str]:
        """What a preset of this family may set."""
        return {f.name for f in dataclasses.fields(FAMILIES[self.family])} - {"name", "docs_at_most"}


def load_preset(name: str, allowed_families: tuple[str, ...] | None = None) -> Preset:
    """A bundled preset by name, or a preset file by path."""
    presets = bundled_presets()
    path = presets.get(name)
    if path is None and name.endswith((".yaml", ".yml")):
        path = given_path(name)
        path = path if path.is_file() else None
    if path is None:
        fitting = [n for n in presets if not allowed_families or load_preset(n).family in allowed_families]
        raise UserError(f"unknown preset {name!r}", did_you_mean(name, fitting) + "; or a path to a .yaml file")
    values = read_yaml(path)
    family = str(values.pop("family", None))
    if family not in FAMILIES:
        raise UserError(f"{path}: family is {family!r}", did_you_mean(family, FAMILIES))
    if allowed_families and family not in allowed_families:
        fitting = [n for n in presets if load_preset(n).family in allowed_families]
        raise UserError(f"preset {name!r} belongs to the family {family}", f"this command takes {', '.join(fitting)}")
    description = str(values.pop("description", ""))
    window = parse_window(values.pop("window", "train"))
    preset = Preset(name=path.stem, family=family, description=description, values=values, window=window)
    check_keys(values, preset.fields | {"family", "description", "window"}, str(path))
    return preset


def build_task(preset: Preset, **overrides: Any) -> Task:
    """The task of a preset with the given fields replaced; ``None`` keeps the preset's value.

    A preset's ``docs`` is what to take where there are so many; one that is given here must be met, unless
    ``docs_at_most`` says otherwise.
    """
    values = {**preset.values, **{k: v for k, v in overrides.items() if v is not None}}
    values.setdefault("docs_at_most", overrides.get("docs") is None)
    if "lengths" in values and not isinstance(values["lengths"], tuple):
        values["lengths"] = parse_lengths(values["lengths"])
    values.setdefault("seed", DEFAULT_SEED)
    family = FAMILIES[preset.family]
    types = {"cue": str, "end": str, "digit_prefix": str, "draws": str, "inner_start": bool, "repeat": bool}
    types["docs_at_most"] = bool
    for name, value in values.items():
        kind = types.get(name, int)
        if name == "lengths" or (name == "docs" and value is None):
            continue
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UserError(f"{preset.name}: {name} is {value!r}", f"allowed: {kind.__name__}")
    for name in ("trials", "docs", "key_digits", "num_digits"):
        if values.get(name) is not None and values[name] < 1:
            raise UserError(f"{preset.name}: {name} is {values[name]}", "allowed: at least 1")
    for name in ("key_digits", "num_digits"):
        if values.get(name, 1) > MAX_DIGITS:
            raise UserError(f"{preset.name}: {name} is {values[name]}", f"allowed: 1 to {MAX_DIGITS}")
    if values.get("draws", "trial") not in ("trial", "sequence"):
        raise UserError(f"{preset.name}: draws is {values['draws']!r}", "allowed: trial, sequence")
    if "cue" in values and not _is_template(values["cue"]):
        raise UserError(f"{preset.name}: cue is {values['cue']!r}", "allowed: text; {key} in it stands for the key")
    try:
        return family(name=preset.name, **values)
    except TypeError as error:
        missing = str(error).rpartition(":")[2].strip()
        raise UserError(f"preset {preset.name} lacks {missing}", "add what is missing to its .yaml file") from None


def _is_template(text: str) -> bool:
    """Whether ``text`` is not empty and ``{key}`` is the only field in it."""
    try:
        fields = {(name, spec, conversion) for _, name, spec, conversion in string.Formatter().parse(text)}
    except ValueError:
        return False
    return bool(text) and fields <= {(None, None, None), ("key", "", None)}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One ``--model`` and how to run it.

    ``q2_floor`` is a legacy floor of polar attention, ``None`` exact; ``impl`` is ``auto``, ``torch`` or ``triton``.
    """

    name: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    q2_floor: float | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        if self.q2_floor is not None and not 0 < self.q2_floor < math.inf:
            raise UserError(
                f"the floor of the participation ratio is {self.q2_floor}", "allowed: above 0, such as 1e-6"
            )
        if self.impl not in IMPLS:
            raise UserError(f"unknown implementation {self.impl!r}", did_you_mean(self.impl, IMPLS))


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task with its text and the window to apply to every model."""

    task: Task
    text: str = "stdlib"
    window: str | int = "train"


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """All models times all tasks, into one folder."""

    models: tuple[ModelSpec, ...]
    tasks: tuple[TaskSpec, ...]
    out: Path


_SUITE_TASK_KEYS = {"preset", "lengths", "trials", "docs", "seed", "text", "window", "repeat"}


def load_suite(name: str, out: Path | None = None) -> RunSpec:
    """A suite: ``models``, ``tasks`` (presets and what to change in them), and maybe how and where to run them."""
    path = bundled_suites().get(name) or given_path(name)
    if not path.is_file():
        raise UserError(f"no suite {name!r}", did_you_mean(name, bundled_suites()) + "; or a path to a .yaml file")
    values = read_yaml(path)
    check_keys(values, {"models", "tasks", "dtype", "device", "impl", "tokenizer", "out", "description"}, str(path))
    models, tasks = values.get("models"), values.get("tasks")
    if not isinstance(models, list) or not models or not isinstance(tasks, list) or not tasks:
        raise UserError(f"{path} needs a list of models and a list of tasks")
    specs = []
    for entry in tasks:
        entry = {"preset": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict):
            raise UserError(
                f"{path}, tasks: {entry!r} is no task", "a task is the name of a preset, or a mapping with preset"
            )
        preset = load_preset(str(entry.get("preset", "")))
        check_keys(
            entry, _SUITE_TASK_KEYS & {"preset", "text", "window", *preset.fields}, f"{path}, task {preset.name}"
        )
        text, window = str(entry.get("text", "stdlib")), parse_window(entry.get("window", preset.window))
        changes = {key: value for key, value in entry.items() if key in preset.fields}
        specs.append(TaskSpec(task=build_task(preset, **changes), text=text, window=window))
    tokenizer = None if values.get("tokenizer") is None else str(values["tokenizer"])
    dtype, device = parse_dtype(str(values.get("dtype", "auto"))), str(values.get("device", "auto"))
    impl = str(values.get("impl", "auto"))
    return RunSpec(
        models=tuple(
            ModelSpec(name=str(m), tokenizer=tokenizer, dtype=dtype, device=device, impl=impl) for m in models
        ),
        tasks=tuple(specs),
        out=out or Path(str(values.get("out", f"results/{path.stem}"))),
    )
