"""What a notebook is run with: its own parameters, the quick ones, the user's, checked before anything runs.

Names and defaults are read from the notebook's cell tagged ``parameters`` by its syntax tree. (papermill's own
inspection misses annotated lines and only warns of an unknown name.) Bounds are those of the study's ``Parameters``.
"""

import ast
import importlib
import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

import nbformat
import yaml

from ..common import BadInput, resolve_device

DEFAULT_LIMITS = {"quick": 120, "full": 900}  # seconds, for a notebook without an entry in parameters.yaml
SETTINGS = "parameters.yaml"


@dataclass
class Plan:
    """One notebook that will run."""

    path: Path
    defaults: dict[str, Any]
    time_limit_seconds: float
    values: dict[str, Any] = field(default_factory=dict)  # defaults, and over them quick, device and the user's

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name.split("_", 1)[0]

    @property
    def injected(self) -> dict[str, Any]:
        """What papermill has to add: the values that differ from the notebook's own."""
        return {name: value for name, value in self.values.items() if repr(value) != repr(self.defaults[name])}


def find_notebooks(folder: Path, only: str | None = None) -> list[Path]:
    """Notebooks ``NN_name.ipynb`` of a folder in order; ``only`` such as ``"01,03"`` picks by number.

    Raises BadInput where there are none, or for a number that no notebook has.
    """
    found = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not found:
        raise BadInput(f"{folder} holds no notebook named NN_question.ipynb.")
    if only is None:
        return found
    numbers = {path.name[:2] for path in found}
    wanted = [part.strip().zfill(2) for part in only.split(",") if part.strip()]
    unknown = [number for number in wanted if number not in numbers]
    if unknown or not wanted:
        raise BadInput(
            f"no notebook has number {', '.join(unknown) or repr(only)}: give some of {','.join(sorted(numbers))}."
        )
    return [path for path in found if path.name[:2] in wanted]


def read_defaults(path: Path) -> dict[str, Any]:
    """Names and literal values of a notebook's parameters cell; empty if it has none.

    Raises BadInput for a file that is no notebook, or a line of the cell that is not ``name = literal``.
    """
    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # nbformat raises its own and json's errors, by version
        raise BadInput(f"{path.name} is not a notebook that can be read ({type(error).__name__}).") from None
    source = next(
        (
            cell.source
            for cell in notebook.cells
            if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", [])
        ),
        "",
    )
    found = {}
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise BadInput(
            f"{path.name}: line {error.lineno} of the parameters cell is not Python ({error.msg})."
        ) from None
    for line in lines:
        targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
        try:
            if (
                not isinstance(line, (ast.Assign, ast.AnnAssign))
                or len(targets) != 1
                or not isinstance(targets[0], ast.Name)
            ):
                raise ValueError
            found[targets[0].id] = ast.literal_eval(line.value)
        except (ValueError, TypeError):
            raise BadInput(
                f"{path.name}: line {line.lineno} of the parameters cell is not `name = literal`: "
                "keep literals only, one a line."
            ) from None
    return found


def read_settings(folder: Path) -> dict[str, dict]:
    """parameters.yaml of a notebooks folder: per notebook ``time_limit_seconds`` and ``quick``. Absent: empty.

    Raises BadInput where it has another form.
    """
    path = folder / SETTINGS
    if not path.exists():
        return {}
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise BadInput(f"{SETTINGS} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise BadInput(f"{SETTINGS} must map notebook names to settings.")
    for name, entry in settings.items():
        entry = entry if isinstance(entry, dict) else {"": entry}
        wrong = set(entry) - {"time_limit_seconds", "quick"}
        limits = entry.get("time_limit_seconds", {})
        if (
            wrong
            or not isinstance(entry.get("quick") or {}, dict)
            or not isinstance(limits, dict)
            or set(limits) - {"quick", "full"}
        ):
            raise BadInput(
                f"{SETTINGS}: {name} must hold time_limit_seconds: {{quick: s, full: s}} and quick: {{name: value}}."
            )
        for limit in limits.values():
            if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0:
                raise BadInput(f"{SETTINGS}: {name} has time limit {limit!r}: give seconds above 0.")
    return settings


def parse_override(text: str) -> tuple[str, Any]:
    """``name=value`` or ``01.name=value`` to key and value: a Python literal, or else the bare string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    number, dot, name = key.rpartition(".")
    if not equals or not name.isidentifier() or (dot and not number.isdigit()):
        raise BadInput(f"parameter {text!r} is not of the form NAME=VALUE or 01.NAME=VALUE.")
    try:
        parsed = ast.literal_eval(value.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        parsed = value
    return (f"{number.zfill(2)}.{name}" if dot else name), parsed


def read_parameters_file(path: Path | str) -> tuple[str, dict[str, Any]]:
    """A parameters file, as each page hands one out: ``{notebook: {name: value}}``, notebooks by name or number.

    Returns the notebooks' numbers, as ``only`` takes them, and the values as overrides ``NN.name``.
    Raises BadInput for a file that is missing or of another form.
    """
    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"the parameters file {path} cannot be read ({error.strerror}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"the parameters file {path} is not YAML: {' '.join(str(error).split())}") from None
    whole = isinstance(found, dict) and found and all(isinstance(values, dict) for values in found.values())
    if not whole or not all(re.fullmatch(r"\d{1,2}(_\w+)?", str(name)) for name in found):
        raise BadInput(
            f"the parameters file {path} must map notebooks to values, as in 01_row_threshold: {{threshold: 32}}."
        )
    numbers = {name: str(name).split("_")[0].zfill(2) for name in found}
    values = {f"{numbers[name]}.{key}": value for name, some in found.items() for key, value in some.items()}
    return ",".join(numbers.values()), values


def stronger(kept: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a parameters file, and over them the command line's, also where those name no notebook."""
    return {key: value for key, value in kept.items() if key.partition(".")[2] not in given} | dict(given)


def make_plans(folder: Path, only: str | None, quick: bool, device: str, overrides: Mapping[str, Any]) -> list[Plan]:
    """Decide and check everything that will run: which notebooks, with which values and limits.

    ``overrides`` maps ``name`` (every chosen notebook that has it) or ``NN.name`` (that one, and stronger) to values.
    Raises BadInput for an unknown notebook, name, device, or a value that the study refuses.
    """
    resolve_device(device)
    settings = read_settings(folder)
    mode = "quick" if quick else "full"
    plans = []
    for path in find_notebooks(folder, only):
        entry = settings.get(path.stem) or {}
        limit = (entry.get("time_limit_seconds") or {}).get(mode, DEFAULT_LIMITS[mode])
        plans.append(Plan(path, read_defaults(path), limit))
    _reject_unknown(plans, overrides)
    for plan in plans:
        chosen = dict((settings.get(plan.name) or {}).get("quick") or {}) if quick else {}
        unknown = sorted(set(chosen) - set(plan.defaults))
        if unknown:
            raise BadInput(f"{SETTINGS}: notebook {plan.name} has no parameter {', '.join(unknown)}.")
        if "device" in plan.defaults:
            chosen["device"] = device
        chosen |= {name: value for name, value in overrides.items() if name in plan.defaults}
        own = f"{plan.number}."
        chosen |= {key.removeprefix(own): value for key, value in overrides.items() if key.startswith(own)}
        plan.values = plan.defaults | {name: _jsonable(name, value) for name, value in chosen.items()}
        _check_values(plan)
    return plans


def _reject_unknown(plans: list[Plan], overrides: Mapping[str, Any]) -> None:
    everywhere = sorted({name for plan in plans for name in plan.defaults})
    for key in overrides:
        number, dot, name = key.rpartition(".")
        asked = [plan for plan in plans if not dot or plan.number == number]
        if not asked:
            running = ", ".join(plan.number for plan in plans)
            raise BadInput(f"parameter {key}: notebook {number} is not among those that run ({running}).")
        if not any(name in plan.defaults for plan in asked):
            have = ", ".join(sorted(asked[0].defaults) if dot else everywhere) or "no parameters at all"
            whose = f"notebook {asked[0].name} has" if dot or len(plans) == 1 else "the chosen notebooks have"
            raise BadInput(f"parameter {name!r} is unknown: {whose} {have}.")


def _check_values(plan: Plan) -> None:
    try:
        if "device" in plan.values:
            resolve_device(plan.values["device"])
        study = _study(plan.name)
        if study is not None:
            study.checked(plan.values)
    except BadInput as error:
        raise BadInput(f"notebook {plan.name}: {error}") from None


def _study(name: str) -> Any:
    """The class ``Parameters`` of the study that goes with a notebook, or None where there is no such study."""
    module = f"batch_variance.studies.{name.split('_', 1)[-1]}"
    if not module.rpartition(".")[2].isidentifier() or importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), "Parameters", None)


def _jsonable(name: str, value: Any) -> Any:
    """The value with tuples as lists, as a notebook's injected cell and its metadata can hold it."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise BadInput(
            f"parameter {name} = {value!r} cannot be passed on: give a number, string, bool, None, list or dict."
        ) from None
