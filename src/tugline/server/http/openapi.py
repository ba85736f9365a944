"""The OpenAPI 3.1 document, written from the table of routes and the structs that it names.

What a struct's types cannot say stands in `checks`: the ranges of a task's numbers and the letters
of its ids are told from there, so the document promises what the server accepts.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from types import NoneType
from typing import Any

import msgspec
from starlette.responses import Response

from tugline.protocol import Problem
from tugline.server.checks import BOUNDS, ID, TENANT
from tugline.server.http.problems import MEDIA, PROBLEMS
from tugline.server.http.route import JSON, Nothing, Route

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"
_NO_STRUCTS = {bytes, NoneType, Nothing, Response}
_BINARY: Json = {"type": "string", "format": "binary"}
_PATTERNS = {("Task", "id"): ID, ("Task", "tenant"): TENANT}
_PARENTS = {"": "Task", "limits": "Limits", "sampling": "Sampling", "group": "Group"}
_PATHS = {
    "id": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,160}$"},
    "number": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
}


def document(routes: Sequence[Route]) -> bytes:
    """The document as JSON."""
    bodies = _structs(route.body for route in routes)
    answers = _structs(route.answer for route in routes)
    queries = _structs(route.query for route in routes)
    _, schemas = msgspec.json.schema_components(
        [*bodies, *answers, *queries, Problem], ref_template=_REF
    )
    _described(schemas, (*bodies, *answers, *queries, Problem))
    _, taken = msgspec.json.schema_components(bodies, ref_template=_REF)
    for name in taken:
        if schemas[name].get("type") == "object":
            schemas[name]["additionalProperties"] = False
    _bound(schemas)
    parameters = {kind: _parameters(schemas.pop(kind.__name__)) for kind in queries}
    paths: dict[str, Json] = {}
    for route in routes:
        operation = _operation(route, parameters.get(route.query, []))
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    whole = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tugline",
            "version": metadata.version("tugline"),
            "description": "Rollouts for reinforcement learning on real agent harnesses.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.encode(whole)


def _structs(kinds: Iterable[Any]) -> list[Any]:
    """The structs among `kinds`, each once; those in a list are taken out of it."""
    bare = [getattr(kind, "__args__", (kind,))[0] for kind in kinds]
    return list(dict.fromkeys(kind for kind in bare if kind not in _NO_STRUCTS))


def _schema(kind: Any) -> Json:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


# --------------------------------------------------------------------------- operations
def _operation(route: Route, query: list[Json]) -> Json:
    module = route.handler.__module__.rpartition(".")[2]
    operation: Json = {
        "operationId": f"{module}.{route.handler.__name__}",
        "tags": [module],
        "summary": route.summary,
        "parameters": [*_path_parameters(route.path), *query],
        "responses": {**_answers(route), **_problems(route)},
        "security": [{"bearer": []}] if route.roles else [],
        "x-roles": sorted(route.roles),
    }
    if route.body is bytes:
        content = {"application/octet-stream": {"schema": _BINARY}}
        operation["requestBody"] = {"required": True, "content": content}
    elif route.body is not Nothing:
        schema = _schema(route.body)
        if schema.get("type") == "array":
            schema = {"anyOf": [schema["items"], {**schema, "minItems": 1, "maxItems": 1000}]}
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return operation


def _path_parameters(path: str) -> list[Json]:
    return [
        {"name": name, "in": "path", "required": True, "schema": _PATHS[name]}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


def _parameters(component: Json) -> list[Json]:
    """The parameters that a query's component stands for; none of them can be null."""
    found = []
    for name, schema in component["properties"].items():
        one = dict(schema)
        some = [option for option in one.pop("anyOf", []) if option.get("type") != "null"]
        if some:
            one = {**one, **some[0]}
        if one.get("default") is None:
            one.pop("default", None)
        required = name in component.get("required", ())
        sentence = one.pop("description", "")
        found.append(
            {
                "name": name,
                "in": "query",
                "required": required,
                "schema": one,
                "description": sentence,
            }
        )
    return found


def _answers(route: Route) -> Json:
    if route.answer is NoneType:
        return {str(status): {"description": "Done."} for status in route.statuses}
    content: dict[str, Json] = {}
    for media in route.media:
        binary = {"type": "string"} if media.startswith("text/") else _BINARY
        if media == JSON:
            binary = {} if route.answer is Response else _schema(route.answer)
        content[media.partition(";")[0]] = {"schema": binary}
    return {
        str(status): {"description": route.summary + ".", "content": content}
        for status in route.statuses
    }


def _problems(route: Route) -> Json:
    names = {"malformed", "invalid", "unavailable", "stopping", "fault", *route.problems}
    if route.roles:
        names |= {"unauthorized", "forbidden"}
    if "{" in route.path:
        names.add("missing")
    if len(route.media) > 1:
        names.add("not-acceptable")
    if route.method == "POST":
        names |= {"too-large", "media-type", "slow"}
    content = {MEDIA: {"schema": {"$ref": _REF.format(name="Problem")}}}
    by_status: dict[int, list[str]] = {}
    for name in PROBLEMS:
        if name in names:
            by_status.setdefault(PROBLEMS[name][0], []).append(f"`{name}`")
    return {
        str(status): {"description": " or ".join(found), "content": content}
        for status, found in by_status.items()
    }


# --------------------------------------------------------------------------- schemas
def _bound(schemas: dict[str, Json]) -> None:
    """Tell the ranges and letters that `checks` holds a task to."""
    for bound in BOUNDS:
        parent, _, name = bound.field.rpartition(".")
        schema = _number(schemas[_PARENTS[parent]]["properties"][name])
        schema["exclusiveMinimum" if bound.above else "minimum"] = bound.low
        schema["maximum"] = bound.high
    for (parent, name), pattern in _PATTERNS.items():
        schemas[parent]["properties"][name]["pattern"] = f"^{pattern}$"


def _number(schema: Json) -> Json:
    options: list[Json] = schema.get("anyOf", [schema])
    return next(one for one in options if one.get("type") in {"number", "integer"})


def _described(schemas: dict[str, Json], kinds: Iterable[Any]) -> None:
    """Give each field of these structs, and of those in them, the sentence that stands under it."""
    waiting, seen = list(kinds), set()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        sentences = _sentences(kind.__module__).get(kind.__name__, {})
        for name, sentence in sentences.items():
            schemas[kind.__name__]["properties"][name].setdefault("description", sentence)
        waiting += [one for field in msgspec.structs.fields(kind) for one in _inner(field.type)]


def _inner(kind: Any) -> list[Any]:
    """The structs that a field's type names."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for one in getattr(kind, "__args__", ()) for struct in _inner(one)]


@functools.cache
def _sentences(module: str) -> dict[str, dict[str, str]]:
    """Of each class of a module, the strings that stand under its fields."""
    found: dict[str, dict[str, str]] = {}
    for kind in ast.parse(inspect.getsource(sys.modules[module])).body:
        lines = kind.body if isinstance(kind, ast.ClassDef) else []
        found[getattr(kind, "name", "")] = {
            field.target.id: " ".join(str(below.value.value).split())
            for field, below in itertools.pairwise(lines)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
    return found
