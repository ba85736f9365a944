"""Nodes: they join with the join token, and with their own they ask for work and say they live."""

from __future__ import annotations

from typing import Any

from tugline.protocol import (
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    NodeView,
    Renewal,
)
from tugline.server.checks import check_ask, check_held, check_hello
from tugline.server.http.auth import Role
from tugline.server.http.problems import Refusal
from tugline.server.http.route import CLIENTS, NODES, READERS, Call, Nothing, Route

MAX_HELD = 16 << 20
"""Bytes of a question that names what a node holds."""


async def register(call: Call[Nothing, NodeRegistration]) -> NodeRegistered:
    """Join as a node."""
    check_hello(call.body)
    return await call.control.register(call.body)


async def listed(call: Call[Nothing, Nothing]) -> list[NodeView]:
    """List the nodes."""
    return await call.control.nodes()


async def lease(call: Call[Nothing, LeaseRequest]) -> LeaseResponse:
    """Wait for work, for orders or for `LeaseRequest.wait_s`."""
    _own(call)
    check_ask(call.body)
    return await call.attend(call.control.lease(call.id, call.body))


async def renew(call: Call[Nothing, Renewal]) -> LeaseResponse:
    """Keep a node's lease."""
    _own(call)
    check_held(call.body.held, call.body.applied)
    return await call.control.renew(call.id, call.body)


async def drain(call: Call[Nothing, Nothing]) -> None:
    """Give a node nothing more: it finishes what it has and goes."""
    if call.caller.role is Role.NODE:
        _own(call)
    await call.control.drain(call.id)


def _own(call: Call[Any, Any]) -> None:
    if call.caller.node != call.id:
        msg = "a node may speak for itself alone"
        raise Refusal(msg, "forbidden")


_FENCED = ("fenced",)
ROUTES = (
    Route("POST", "/v1/nodes", frozenset({Role.JOIN}), register, statuses=(201,)),
    Route("GET", "/v1/nodes", READERS, listed),
    Route("POST", "/v1/nodes/{id}/lease", NODES, lease, problems=_FENCED, max_body=MAX_HELD),
    Route("POST", "/v1/nodes/{id}/renew", NODES, renew, problems=_FENCED, max_body=MAX_HELD),
    Route(
        "POST", "/v1/nodes/{id}/drain", NODES | CLIENTS, drain, statuses=(204,), problems=_FENCED
    ),
)
