"""Configuration files: one YAML, TOML or JSON file into one frozen struct.

They are read strictly (`tugline.schema`), because a typing mistake that is silently ignored costs
a night of training. Every field carries a sentence, its docstring, from which `describe` makes the
reference table of the documentation.
"""

import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as shapes

from tugline.errors import ConfigError
from tugline.schema import decode, field_docs, list_structs, read_values


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Base of every configuration: frozen, checked however it is made, a docstring per field."""

    def __post_init__(self) -> None:
        """Check types and bounds, also of a configuration made in Python. Raises `ConfigError`."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                msg = f"{field.name} is {value}, must be a finite number"
                raise ConfigError(msg, field.name)
            decode(value, field.type, name=field.name)


C = TypeVar("C", bound=Config)


def load(path: Path | str, kind: type[C]) -> C:
    """Read the file at `path` as `kind`. Raises `ConfigError`, one line."""
    values = read_values(Path(path))
    return from_mapping({} if values is None else values, kind, source=str(path))


def from_mapping(values: Any, kind: type[C], source: str = "configuration") -> C:
    """Convert `values` to `kind`; errors name `source`. Raises `ConfigError`, one line."""
    if not isinstance(values, Mapping):
        msg = f"{source} holds {reprlib.repr(values)}; keys and values are needed, key: value"
        raise ConfigError(msg)
    return decode(values, kind, source=source)


# --------------------------------------------------------------------------- the reference table
def describe(kind: type[Config], prefix: str = "", given: Config | None = None) -> list[str]:
    """Markdown table rows ``| key | type | default | meaning |`` of every key, nested ones dotted.

    A key whose value is itself a configuration is replaced by that one's keys; `given` is the
    configuration that holds the defaults. Raises `ConfigError` for a field without a docstring.
    """
    rows: list[str] = []
    docs = field_docs(kind)
    types = {field.name: field.type for field in _struct_fields(kind)}
    for field in msgspec.structs.fields(kind):
        default = getattr(given, field.name) if given else _default(field)
        inner = [each for each in list_structs(field.type) if issubclass(each, Config)]
        for nested in inner:
            value = default if isinstance(default, nested) else None
            rows += describe(nested, f"{prefix}{field.name}.", value)
        if inner:
            continue
        if field.name not in docs:
            msg = f"{kind.__name__}.{field.name} has no docstring that says what it is"
            raise ConfigError(msg)
        text = "required" if default is msgspec.NODEFAULT else f"`{default}`"
        cells = (f"`{prefix}{field.name}`", _say_type(types[field.name]), text, docs[field.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _struct_fields(kind: type[Config]) -> tuple[shapes.Field, ...]:
    shape = shapes.type_info(kind)
    return shape.fields if isinstance(shape, shapes.StructType) else ()


def _default(field: msgspec.structs.FieldInfo) -> Any:
    make = field.default_factory
    return field.default if make is msgspec.NODEFAULT else make()


_TYPE_NAMES: dict[type, str] = {
    shapes.IntType: "integer",
    shapes.FloatType: "number",
    shapes.BoolType: "boolean",
    shapes.NoneType: "null",
    shapes.DictType: "object",
    shapes.StructType: "object",
    shapes.ListType: "array",
    shapes.VarTupleType: "array",
    shapes.TupleType: "array",
}


def _say_type(shape: shapes.Type) -> str:
    """A type with its bounds, such as ``integer or null, >= 1``."""
    options = shape.types if isinstance(shape, shapes.UnionType) else (shape,)
    names = [name for option in options for name in _say_names(option)]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {bound:g}"
        for option in options
        if isinstance(option, shapes.IntType | shapes.FloatType)
        for key, sign in signs.items()
        if (bound := getattr(option, key)) is not None
    ]
    return ", ".join([" or ".join(names), *bounds])


def _say_names(shape: shapes.Type) -> list[str]:
    match shape:
        case shapes.EnumType(cls=cls):
            return [f"`{member.value}`" for member in cls]
        case shapes.LiteralType(values=values):
            return [f"`{value}`" for value in values]
    names = (name for kind, name in _TYPE_NAMES.items() if isinstance(shape, kind))
    return [next(names, "string")]
