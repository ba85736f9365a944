"""Configuration files, read strictly: one YAML or TOML file into one frozen pydantic model.

An unknown key is an error that names the nearest known one, and every error is one line that says
which file, which key, which value and what would be right, because a typing mistake that is
silently ignored costs a night of training. Every field carries a sentence (its docstring), from
which `describe` makes the reference table of the documentation.
"""

from __future__ import annotations

import difflib
import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from tugline.errors import ConfigError

Location = tuple[int | str, ...]


class Config(BaseModel):
    """Base of every configuration model: frozen, closed, a docstring under each field."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )


M = TypeVar("M", bound=BaseModel)


def load(path: Path | str, model: type[M]) -> M:
    """The file at `path` as `model`. Raises `ConfigError`, one line."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        msg = f"cannot read configuration file {path}: {error.strerror}"
        raise ConfigError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"{path} is not UTF-8 text (byte {error.start})"
        raise ConfigError(msg) from error
    return from_mapping(_parse(path, text), model, source=path.name)


def from_mapping(values: Mapping[str, Any], model: type[M], source: str = "configuration") -> M:
    """`values` as `model`; `source` names them in errors. Raises `ConfigError`, one line."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        details = error.errors(include_url=False)
        details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        msg = _explain(details[0], model, source) + more
        raise ConfigError(msg) from error


def describe(model: type[BaseModel], prefix: str = "", given: BaseModel | None = None) -> list[str]:
    """Markdown table rows ``| key | type | default | meaning |`` of every key, nested ones dotted.

    A key whose value is itself a model is replaced by that model's keys; `given` is the model
    that stands there by default. Raises `ConfigError` for a field without a docstring.
    """
    rows: list[str] = []
    for name, field in model.model_fields.items():
        default = getattr(given, name) if given else _default_of(field)
        inner = list(_models(field.annotation))
        for nested in inner:
            value = default if isinstance(default, nested) else None
            rows += describe(nested, f"{prefix}{name}.", value)
        if inner:
            continue
        if not field.description:
            msg = f"{model.__name__}.{name} has no docstring that says what it is"
            raise ConfigError(msg)
        shown = "required" if default is PydanticUndefined else f"`{default}`"
        meaning = " ".join(field.description.split())
        cells = (f"`{prefix}{name}`", _type_of(model, name), shown, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


# --------------------------------------------------------------------------- text to values
class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error, as it is in TOML."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - PyYAML's signature
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _parse(path: Path, text: str) -> Mapping[str, Any]:
    values: Any
    match path.suffix.lower():
        case ".yaml" | ".yml":
            values = _parse_yaml(path, text)
        case ".toml":
            try:
                values = tomllib.loads(text)
            except tomllib.TOMLDecodeError as error:
                msg = f"{path.name} is not valid TOML: {error}"
                raise ConfigError(msg) from error
        case other:
            msg = f"{path.name}: file type {other!r} is unknown; use .yaml, .yml or .toml"
            raise ConfigError(msg)
    if not isinstance(values, Mapping):
        msg = f"{path.name} holds {reprlib.repr(values)}; keys and values are needed, key: value"
        raise ConfigError(msg)
    return values


def _parse_yaml(path: Path, text: str) -> Any:
    try:
        values = yaml.load(text, _StrictLoader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        msg = f"{path.name} is not valid YAML: {error.problem}{where}"
        raise ConfigError(msg) from error
    except yaml.YAMLError as error:
        msg = f"{path.name} is not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError(msg) from error
    return {} if values is None else values


# --------------------------------------------------------------------------- errors to one line
_RELATIONS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


def _explain(detail: ErrorDetails, model: type[BaseModel], source: str) -> str:
    location, kind = detail["loc"], detail["type"]
    key = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"unknown key {key!r} in {source}{_nearest(model, location)}"
    if kind == "missing":
        return f"key {key!r} is missing in {source}"
    value = reprlib.repr(detail["input"])
    if kind in _RELATIONS:
        relation, bound = _RELATIONS[kind]
        right = f"is not {relation} {detail['ctx'][bound]}"
    else:
        right = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{key}: {value} {right} ({source})" if key else f"{source}: {right}"


def _nearest(model: type[BaseModel], location: Location) -> str:
    """The hint for an unknown key: the nearest key of the same table, or all of them."""
    candidates: list[type[BaseModel]] = [model]
    for part in location[:-1]:
        fields = [one.model_fields[part] for one in candidates if part in one.model_fields]
        candidates = [
            inner for field in fields for inner in _models(field.annotation)
        ] or candidates
    names = sorted({name for one in candidates for name in one.model_fields})
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    table = ".".join(str(part) for part in location[:-1])
    if close:
        return f"; did you mean {'.'.join(filter(None, (table, close[0])))!r}?"
    return f" (known: {', '.join(names)})"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every configuration model inside a field's annotation, such as ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


# --------------------------------------------------------------------------- the reference table
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def _type_of(model: type[BaseModel], name: str) -> str:
    root = model.model_json_schema()
    schema = root["properties"][name]
    kind = " or ".join(_kinds(schema, root.get("$defs", {})))
    limits = [f"{sign} {schema[key]:g}" for key, sign in _BOUNDS.items() if key in schema]
    return ", ".join([kind, *limits])


def _kinds(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    if "$ref" in schema:
        return _kinds(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    if "enum" in schema:
        return [f"`{value}`" for value in schema["enum"]]
    if "const" in schema:
        return [f"`{schema['const']}`"]
    if "anyOf" in schema:
        return [kind for option in schema["anyOf"] for kind in _kinds(option, definitions)]
    return [str(schema.get("type", "any"))]


def _default_of(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True, validated_data={})
