"""Make reference tables from the configuration classes."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect as shapes

from tugline.config import Config
from tugline.schema import field_docs, list_structs


def describe(kind: type[Config], prefix: str = "", given: Config | None = None) -> list[str]:
    """Make rows ``| key | type | default | meaning |`` of a Markdown table; nested keys are dotted.

    A key whose value is a configuration is replaced by the keys of that configuration; a key with
    several configurations by name is followed by their keys. `given` is the configuration with the
    defaults. Raises `ValueError` for a field without a docstring.
    """
    rows: list[str] = []
    docs = field_docs(kind)
    types = {field.name: field.type for field in _struct_fields(kind)}
    for field in msgspec.structs.fields(kind):
        default = getattr(given, field.name) if given else _default(field)
        inner = [each for each in list_structs(field.type) if issubclass(each, Config)]
        named = isinstance(types[field.name], shapes.DictType)
        if not inner or named:
            if field.name not in docs:
                msg = f"{kind.__name__}.{field.name} has no docstring"
                raise ValueError(msg)
            text = "required" if default is msgspec.NODEFAULT else f"`{default}`"
            key, meaning = f"`{prefix}{field.name}`", docs[field.name]
            cells = (key, _format_type(types[field.name]), text, meaning)
            rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        for nested in inner:
            value = default if isinstance(default, nested) else None
            name = f"{field.name}.NAME" if named else field.name
            rows += describe(nested, f"{prefix}{name}.", value)
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


def _format_type(shape: shapes.Type) -> str:
    """Format a type with its bounds, such as ``integer or null, >= 1``."""
    options = shape.types if isinstance(shape, shapes.UnionType) else (shape,)
    names = [name for option in options for name in _list_type_names(option)]
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    bounds = [
        f"{sign} {bound:g}"
        for option in options
        if isinstance(option, shapes.IntType | shapes.FloatType)
        for key, sign in signs.items()
        if (bound := getattr(option, key)) is not None
    ]
    return ", ".join([" or ".join(names), *bounds])


def _list_type_names(shape: shapes.Type) -> list[str]:
    match shape:
        case shapes.EnumType(cls=cls):
            return [f"`{member.value}`" for member in cls]
        case shapes.LiteralType(values=values):
            return [f"`{value}`" for value in values]
    names = (name for kind, name in _TYPE_NAMES.items() if isinstance(shape, kind))
    return [next(names, "string")]
