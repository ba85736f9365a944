"""Routes of nodes, and of the weights state that they apply.

A node joins with the join token, and leases and renews with its own.
"""

from __future__ import annotations

from typing import Any

from tugline.protocol import (
    Barrier,
    Control,
    LeaseRequest,
    LeaseResponse,
    NodeRegistered,
    NodeRegistration,
    NodeView,
    Pause,
    Renewal,
    Version,
)
from tugline.server.http.auth import ApiRole
from tugline.server.http.problems import Refusal
from tugline.server.http.route import CLIENTS, NODES, READERS, ApiCall, Nothing, Routes
from tugline.server.store import nodes

MAX_HELD = 16 << 20
"""Bytes of a request that lists what a node holds."""
ROUTES = Routes()
_FENCED = ("fenced",)


@ROUTES.add("POST", "/v1/nodes", frozenset({ApiRole.JOIN}), statuses=(201,))
async def register(call: ApiCall[Nothing, NodeRegistration]) -> NodeRegistered:
    """Join as a node."""
    return await call.control.dispatcher.register(call.body)


@ROUTES.add("GET", "/v1/nodes", READERS)
async def list_nodes(call: ApiCall[Nothing, Nothing]) -> list[NodeView]:
    """List the nodes."""
    return await call.db.read(nodes.list_views)


@ROUTES.add("POST", "/v1/nodes/{id}/lease", NODES, problems=_FENCED, max_body=MAX_HELD)
async def lease(call: ApiCall[Nothing, LeaseRequest]) -> LeaseResponse:
    """Wait for work, for orders or for `LeaseRequest.wait_s`."""
    _check_own(call)
    return await call.attend(call.control.dispatcher.lease(call.id, call.body))


@ROUTES.add("POST", "/v1/nodes/{id}/renew", NODES, problems=_FENCED, max_body=MAX_HELD)
async def renew(call: ApiCall[Nothing, Renewal]) -> LeaseResponse:
    """Keep a node's lease."""
    _check_own(call)
    return await call.control.dispatcher.renew(call.id, call.body)


@ROUTES.add("POST", "/v1/nodes/{id}/drain", NODES | CLIENTS, statuses=(204,), problems=_FENCED)
async def drain(call: ApiCall[Nothing, Nothing]) -> None:
    """Give a node no more work; it finishes what it holds and leaves."""
    if call.caller.role is ApiRole.NODE:
        _check_own(call)
    await call.control.dispatcher.drain(call.id)


def _check_own(call: ApiCall[Any, Any]) -> None:
    if call.caller.node != call.id:
        msg = "a node may act for itself only"
        raise Refusal(msg, "forbidden")


# --------------------------------------------------------------------------- weights
@ROUTES.add("GET", "/v1/weights", READERS)
async def get_weights(call: ApiCall[Nothing, Nothing]) -> Control:
    """Get the version of the weights, and whether model calls are held."""
    return await call.db.read(nodes.control)


@ROUTES.add("POST", "/v1/weights", CLIENTS)
async def announce(call: ApiCall[Nothing, Version]) -> Barrier:
    """Announce new weights; answers when the nodes know."""
    return await call.attend(call.control.weights.announce(call.body.version))


@ROUTES.add("POST", "/v1/weights/pause", CLIENTS)
async def pause(call: ApiCall[Nothing, Pause]) -> Barrier:
    """Hold model calls on all nodes; answers when they are held."""
    return await call.attend(call.control.weights.pause(call.body))


@ROUTES.add("POST", "/v1/weights/resume", CLIENTS)
async def resume(call: ApiCall[Nothing, Nothing]) -> Barrier:
    """Let model calls continue."""
    return await call.attend(call.control.weights.resume())
