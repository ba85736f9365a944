"""The OpenAPI 3.1 document, from the routes and the structs that they name.

Bounds come from the types, field descriptions from the docstrings under the fields, so the document
promises what the server accepts.
"""

import functools
import re
from importlib import metadata
from types import NoneType
from typing import Any

import msgspec
from starlette.responses import Response

from tugline.protocol import Problem
from tugline.schema import describe_structs
from tugline.server.http.answers import MEDIA, PROBLEMS
from tugline.server.http.route import JSON, ApiRole, Nothing, Route

Json = dict[str, Any]
_REF = "#/components/schemas/{name}"
_BINARY: Json = {"type": "string", "format": "binary"}
_PATHS = {
    "id": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,160}$"},
    "number": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
}


@functools.cache
def document(routes: tuple[Route, ...]) -> bytes:
    """The document as JSON."""
    bodies, queries = [route.body for route in routes], {route.query for route in routes}
    named = [*bodies, *queries, *(route.answer for route in routes), Problem]
    schemas = describe_structs(named, _REF)
    for name in describe_structs(bodies, _REF):
        if schemas[name].get("type") == "object":
            schemas[name]["additionalProperties"] = False
    parameters = {kind: _parameters(schemas.pop(kind.__name__)) for kind in queries}
    paths: dict[str, Json] = {}
    for route in routes:
        operation = _operation(route, parameters[route.query])
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


def _schema(kind: Any) -> Json:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
    return schema


# --------------------------------------------------------------------------- operations
def _operation(route: Route, query: list[Json]) -> Json:
    noun = route.path.removeprefix("/v1").split("/")[1].removesuffix(".json")
    summary = (route.handler.__doc__ or "").splitlines()[0].rstrip(".")
    operation: Json = {
        "operationId": f"{noun}.{route.handler.__name__}",
        "tags": [noun],
        "summary": summary,
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": _PATHS[name]}
                for name in re.findall(r"\{(\w+)\}", route.path)
            ),
            *query,
        ],
        "responses": {**_answers(route, summary), **_problems(route)},
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


def _parameters(component: Json) -> list[Json]:
    """The parameters of a query struct's component; none of them can be null."""
    parameters = []
    for name, each in component["properties"].items():
        schema = dict(each)
        for option in schema.pop("anyOf", []):
            schema |= option if option.get("type") != "null" else {}
        if schema.get("default") is None:
            schema.pop("default", None)
        parameters.append(
            {
                "name": name,
                "in": "query",
                "required": name in component.get("required", ()),
                "description": schema.pop("description", ""),
                "schema": schema,
            }
        )
    return parameters


def _answers(route: Route, summary: str) -> Json:
    if route.answer is NoneType:
        return {str(status): {"description": "Done."} for status in route.statuses}
    content: dict[str, Json] = {}
    for media in route.media:
        schema = {"type": "string"} if media.startswith("text/") else _BINARY
        if media == JSON:
            schema = {} if route.answer is Response else _schema(route.answer)
        content[media.partition(";")[0]] = {"schema": schema}
    answers: Json = {
        str(status): {"description": summary + ".", "content": content} for status in route.statuses
    }
    answers.get("204", {}).pop("content", None)  # such an answer is empty
    return answers


def _problems(route: Route) -> Json:
    names = {"malformed", "invalid", "unavailable", "stopping", "fault", *route.problems}
    if route.roles:
        names |= {"unauthorized", "forbidden"}
    if ApiRole.NODE in route.roles:
        names.add("fenced")
    if "{" in route.path:
        names.add("missing")
    if len(route.media) > 1:
        names.add("not-acceptable")
    if route.method == "POST":
        names |= {"too-large", "media-type", "slow"}
    content = {MEDIA: {"schema": {"$ref": _REF.format(name="Problem")}}}
    by_status: dict[int, list[str]] = {}
    for name, (status, _) in PROBLEMS.items():
        if name in names:
            by_status.setdefault(status, []).append(f"`{name}`")
    return {
        str(status): {"description": " or ".join(listed), "content": content}
        for status, listed in by_status.items()
    }
