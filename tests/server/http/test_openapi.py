"""The server conforms to its OpenAPI document, as schemathesis checks."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from openapi import FILE, make_document
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.parameters import ParameterLocation

from support.server import TOKENS, RunningServer, encode_result, serve
from tugline.protocol import NodeRegistered

DOCUMENT = json.loads(FILE.read_bytes())
OPERATIONS = [each.ok() for each in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()]
# not among the checks: those that want answers kept between requests, or send requests of their own
PASSED_BY = {"use_after_free", "ensure_resource_availability", "ignored_auth"}
# a schema cannot say that `min_usable` is at most `samples`, or that a file's path is relative
TOO_STRICT = {"positive_data_acceptance"}
EXAMPLES = int(os.environ.get("TUGLINE_EXAMPLES", "4"))
"""Of each kind and operation; more of them take longer and find more."""
MODES = [
    (operation, mode)
    for operation in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or operation.body or any(operation.iter_parameters())
]


@asynccontextmanager
async def _serve_with_data(folder: Path) -> AsyncIterator[tuple[str, NodeRegistered]]:
    """The address and the node of a server with a task, a result and a callback."""
    async with serve(
        f"sqlite:{folder / 'db'}", folder, lease_s=1.0, callback_hosts=("*",)
    ) as server:
        node, epoch = await server.start(samples=4, callback={"url": "http://127.0.0.1:9/"})
        assert (await server.commit(node, "t-0", epoch, encode_result("t-0", "t"))).status == 200
        await server.lease(node, 1)
        leasing = asyncio.create_task(_keep_lease(server, node))
        yield server.url, node
        leasing.cancel()


async def _keep_lease(server: RunningServer, node: NodeRegistered) -> None:
    """Keep the node's lease, and apply new orders at once."""
    applied = 0
    while True:
        applied = (await server.lease(node, 0, 0.3, applied)).control.generation


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, NodeRegistered]]:
    """That server on its own thread."""
    lived_in = _serve_with_data(tmp_path_factory.mktemp("server"))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(lived_in) as known:
        yield known


def _request_options(case: Case, url: str, node: NodeRegistered, *, real: bool) -> dict[str, Any]:
    """Options to send `case`: a valid token, often a known id, and no long wait."""
    roles = DOCUMENT["paths"][case.path][case.method.lower()]["x-roles"]
    tokens = {"client": TOKENS.client, "join": TOKENS.join, "read": TOKENS.read, "node": node.token}
    if real and "id" in case.path_parameters:
        ids = {"tasks": "t", "sessions": "t-0", "nodes": node.node, "consumers": "c", "runs": "r"}
        case.path_parameters["id"] = ids[case.path.split("/")[2]]
    if case.path.endswith(("lease", "pause")) and isinstance(case.body, dict):
        case.body.setdefault("within_s" if case.path.endswith("pause") else "wait_s", 0.01)
    waits = ((case.query, "wait_s", 60), (case.body, "wait_s", 60), (case.body, "within_s", 3600))
    for bag, name, most in waits:
        asked = bag.get(name) if isinstance(bag, dict) else None
        if isinstance(asked, int | float) and 0 <= asked <= most:
            bag[name] = min(asked, 0.01)
    headers = {"Authorization": f"Bearer {tokens[roles[0]]}"} if roles else {}
    return {"base_url": url, "headers": headers, "timeout": 20}


@pytest.mark.filterwarnings("ignore:Do not use the `random`")  # schemathesis uses it
@pytest.mark.parametrize(
    ("operation", "mode"), MODES, ids=lambda case: getattr(case, "label", case)
)
def test_the_server_conforms_to_its_document(
    operation: APIOperation, mode: GenerationMode, address: tuple[str, NodeRegistered]
) -> None:
    """Valid and invalid requests get documented statuses and bodies, and never a 500."""
    url, node = address
    (rejects,) = CHECKS.get_by_names(["negative_data_rejection"])
    taken = [check for check in CHECKS.get_all() if check.__name__ not in PASSED_BY | TOO_STRICT]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
    def holds(case: Case, real: bool) -> None:  # noqa: FBT001 - hypothesis fills it in
        right = mode is GenerationMode.POSITIVE
        answer = case.call(**_request_options(case, url, node, real=real and right))
        parts = case.meta.components if case.meta else {}
        wrong = {part for part, how in parts.items() if how.mode is GenerationMode.NEGATIVE}
        mended = wrong <= {ParameterLocation.HEADER, ParameterLocation.COOKIE}
        case.validate_response(answer, checks=[c for c in taken if not (mended and c is rejects)])

    holds()


def test_the_document_is_up_to_date() -> None:
    """The document equals what ``python tools/docs/openapi.py`` writes."""
    assert make_document() == FILE.read_bytes()


@pytest.mark.parametrize("name", ["Task", "Limits", "Sampling", "Group"])
def test_every_number_of_a_task_has_a_range(name: str) -> None:
    """The schema has the minimum and maximum of each number."""
    for field, schema in DOCUMENT["components"]["schemas"][name]["properties"].items():
        for kind in schema.get("anyOf", [schema]):
            if kind.get("type") in {"integer", "number"}:
                assert {"minimum", "exclusiveMinimum"} & kind.keys(), field
                assert "maximum" in kind, field


def test_every_query_parameter_is_described() -> None:
    """Each query parameter has a description."""
    undescribed = [
        f"{method} {path} {parameter['name']}"
        for path, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
        for parameter in operation["parameters"]
        if parameter["in"] == "query" and not parameter["description"]
    ]
    assert not undescribed
