"""Generate the OpenAPI 3.1 document of the server's API from its routes.

    python tools/docs/openapi.py    # writes the file of the package for `GET /openapi.json`

Bounds come from the types and descriptions from the docstrings of the fields, so the document
matches what the server accepts. A test checks the server against it.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import msgspec
from starlette.responses import Response
from struct_schemas import describe_structs

from tugline.protocol import Problem
from tugline.server.http import app
from tugline.server.http.app import ROUTES
from tugline.server.http.route import (
    GZIP,
    JSON,
    MSGPACK,
    PROBLEM_JSON,
    PROBLEMS,
    SSE,
    TAR,
    TEXT,
    ZSTD,
    ApiRole,
    Nothing,
    Route,
)

Json = dict[str, Any]
FILE = Path(app.__file__).with_name("openapi.json")
_REF = "#/components/schemas/{name}"
_BINARY: Json = {"type": "string", "format": "binary"}
_PATHS = {
    "id": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,160}$"},
    "number": {"type": "integer", "minimum": 1, "maximum": 2**63 - 1},
}


_MEDIA = {
    "GET /v1/sessions/{id}/log": (TEXT,),
    "GET /v1/sessions/{id}/trajectory": (ZSTD, JSON, MSGPACK),
    "GET /v1/sessions/{id}/recording": (GZIP, TAR),
    "GET /v1/events": (JSON, SSE),
    "GET /metrics": (TEXT,),
}
"""Media types of answers that are not JSON, or not only JSON."""
_STATUSES = {"POST /v1/tasks": (201, 200), "GET /v1/sessions/{id}/recording": (200, 204)}
"""Status codes of routes that have several."""
_REFERRING = {"POST /v1/rejudge", "POST /v1/tasks", "POST /v1/verdicts"}
"""Routes whose body or query refers to objects by their ids."""
_CONFLICTS = {
    "GET /v1/sessions/{id}/trajectory",
    "POST /v1/nodes",
    "POST /v1/tasks",
    "PUT /v1/runs/{id}",
}


def make_document(routes: tuple[Route, ...] = ROUTES) -> bytes:
    """Make the document as JSON."""
    bodies, queries = [route.body for route in routes], {route.query for route in routes}
    named = [*bodies, *queries, *map(_answer, routes), Problem]
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
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }
    return msgspec.json.format(msgspec.json.encode(whole)) + b"\n"


def _answer(route: Route) -> Any:
    """Return the type of the answer; `Response` if it is not JSON."""
    answer = get_type_hints(route.handler)["return"]
    return next(
        (
            kind
            for kind in get_args(answer)
            if isinstance(answer, UnionType) and kind is not Response
        ),
        answer,
    )


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
    """Make the parameters of a query struct's component; none of them can be null."""
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
    answer, statuses = _answer(route), _STATUSES.get(route.name, (route.status,))
    if answer is NoneType:
        return {"204": {"description": "Done."}}
    content: dict[str, Json] = {}
    for media in _MEDIA.get(route.name, (JSON,)):
        schema = {"type": "string"} if media.startswith("text/") else _BINARY
        if media == JSON:
            schema = {} if answer is Response else _schema(answer)
        content[media.partition(";")[0]] = {"schema": schema}
    answers: Json = {
        str(status): {"description": summary + ".", "content": content} for status in statuses
    }
    answers.get("204", {}).pop("content", None)  # such an answer is empty
    return answers


def _problems(route: Route) -> Json:
    names = {"malformed", "invalid", "unavailable", "stopping", "fault"}
    if route.roles:
        names |= {"unauthorized", "forbidden"}
    if ApiRole.NODE in route.roles:
        names.add("fenced")
    if route.name in _CONFLICTS:
        names.add("conflict")
    if "{" in route.path or route.name in _REFERRING:
        names.add("missing")
    if route.name in {"POST /v1/tasks", "POST /v1/rejudge"}:
        names.add("quota")
    if len(_MEDIA.get(route.name, ())) > 1:
        names.add("not-acceptable")
    if route.method == "POST":
        names |= {"too-large", "media-type", "slow"}
    content = {PROBLEM_JSON: {"schema": {"$ref": _REF.format(name="Problem")}}}
    by_status: dict[int, list[str]] = {}
    for name, (status, _) in PROBLEMS.items():
        if name in names:
            by_status.setdefault(status, []).append(f"`{name}`")
    return {
        str(status): {"description": " or ".join(listed), "content": content}
        for status, listed in by_status.items()
    }


if __name__ == "__main__":
    FILE.write_bytes(make_document())
