"""JSON and query strings into structs, strictly: a wrong field is named, with what would be right.

The nouns are open structs, so that a newer server's answer can be read by an older client. What
comes in is held to more: a key that nothing reads is a typing mistake, and it is refused here with
the nearest known one.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import reprlib
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec import inspect

from tugline.server.http.problems import Refusal

T = TypeVar("T")
Key = str | int

_PLACE = re.compile(r" - at (?:`key` in )?`(\$[^`]*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def from_json(data: bytes, kind: type[T]) -> T:
    """`data` as `kind`; one object is enough where a list is wanted, nothing where all is optional.

    Raises `Refusal`: ``malformed`` with the byte, or ``invalid`` with the field.
    """
    try:
        raw = msgspec.json.decode(data or b"{}")
    except RecursionError as error:
        msg = "the body is nested too deeply"
        raise Refusal(msg, "malformed") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error).removeprefix("JSON is malformed: ")
        at = "" if "(byte" in why else f" (byte {len(data)})"
        msg = f"the body is not valid JSON: {why}{at}"
        raise Refusal(msg, "malformed") from error
    if isinstance(inspect.type_info(kind), inspect.ListType) and isinstance(raw, dict):
        raw = [raw]
    _refuse_unknown(raw, _shape(kind), ())  # type: ignore[arg-type]  # hashable
    return _converted(raw, kind, strict=True)


def from_query(query: str, kind: type[T]) -> T:
    """A query string as `kind`; a field that is a tuple may come several times."""
    fields = {field.encode_name: field.type for field in _fields(kind)}
    many = {name for name, shape in fields.items() if isinstance(shape, inspect.VarTupleType)}
    raw: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=2000)
    except ValueError as error:
        msg = f"the query cannot be read: {error}"
        raise Refusal(msg, "malformed") from error
    for name, value in pairs:
        if "\0" in value:
            msg = f"{name} holds a zero byte"
            raise Refusal(msg, "invalid", field=name)
        if name in many:
            raw.setdefault(name, []).append(value)
        elif name in raw:
            msg = f"{name} is given twice, must be given once"
            raise Refusal(msg, "invalid", field=name)
        else:
            raw[name] = value
    _refuse_unknown(raw, dict.fromkeys(fields), ())
    found = _converted(raw, kind, strict=False)
    for name, value in raw.items():
        if getattr(found, name) is None:  # "null" was read as one
            msg = f"{name} is {value!r}; leave it out instead"
            raise Refusal(msg, "invalid", field=name)
    return found


def _converted(raw: Any, kind: type[T], *, strict: bool) -> T:
    try:
        return msgspec.convert(raw, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _explained(error, raw, kind) from error


def _explained(error: msgspec.ValidationError, raw: Any, kind: type) -> Refusal:
    """`error` with the field's dotted name, its value and, of a closed list, what is known."""
    text, place = str(error), _PLACE.search(str(error))
    path = [
        name or (int(number) if number.isdigit() else number)
        for name, number in _STEP.findall(place[1] if place else "")
    ]
    why = _PLACE.sub("", text).replace("`", "")
    lacking = _MISSING.search(text)
    if lacking:
        field = _dotted((*path, lacking[1]))
        return Refusal(f"{field} is missing", "invalid", field=field)
    known, value = _choices(kind, path), raw
    told = list(itertools.takewhile(lambda step: step != "...", path))  # "...": some key of a dict
    for step in told:
        value = value[step]
    field = _dotted(told)
    must = f"must be one of {', '.join(known)}" if known else why[:1].lower() + why[1:]
    detail = f"{field or 'the body'} is {reprlib.repr(value)}: {must}"
    return Refusal(detail, "invalid", field=field, known=known)


def _choices(kind: type, path: Iterable[Key]) -> tuple[str, ...]:
    """The values of the enum at `path`, if there is one."""
    shape: Any = inspect.type_info(kind)
    for step in path:
        shape = _bare(shape)
        if isinstance(shape, inspect.StructType):
            shape = next(field.type for field in shape.fields if field.encode_name == step)
        else:
            shape = getattr(shape, "item_type", getattr(shape, "value_type", shape))
    shape = _bare(shape)
    if isinstance(shape, inspect.EnumType):
        return tuple(str(one.value) for one in shape.cls)
    return ()


def _bare(shape: Any) -> Any:
    """`shape` without "or null"."""
    if isinstance(shape, inspect.UnionType):
        some = [one for one in shape.types if not isinstance(one, inspect.NoneType)]
        return some[0] if len(some) == 1 else shape
    return shape


# --------------------------------------------------------------------------- unknown keys
def _refuse_unknown(value: Any, shape: Any, at: tuple[Key, ...]) -> None:
    """Look through `value`; a shape is that of each field, ``(shape of each item,)``, or None."""
    if isinstance(shape, dict) and isinstance(value, dict):
        for name, inner in value.items():
            if name not in shape:
                raise _unknown(name, tuple(shape), at)
            if shape[name] is not None:
                _refuse_unknown(inner, shape[name], (*at, name))
    elif isinstance(shape, tuple) and isinstance(value, list):
        for number, inner in enumerate(value):
            _refuse_unknown(inner, shape[0], (*at, number))


def _unknown(name: str, known: tuple[str, ...], at: tuple[Key, ...]) -> Refusal:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
    field = _dotted((*at, name))
    return Refusal(f"{field} is unknown; {hint}", "invalid", field=field, known=known)


@functools.cache
def _shape(kind: Hashable) -> Any:
    return _shape_of(inspect.type_info(kind))


def _shape_of(info: inspect.Type) -> Any:
    info = _bare(info)
    if isinstance(info, inspect.StructType):
        return {field.encode_name: _shape_of(field.type) for field in info.fields}
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        inner = _shape_of(info.item_type)
        return None if inner is None else (inner,)
    return None


def _fields(kind: type) -> tuple[inspect.Field, ...]:
    info = inspect.type_info(kind)
    return info.fields if isinstance(info, inspect.StructType) else ()


def _dotted(path: Iterable[Key]) -> str:
    return ".".join(str(step)[:128] for step in path)
