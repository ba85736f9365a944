"""Weights: what is served, and the barrier that all nodes pass while it changes."""

from __future__ import annotations

from tugline.protocol import Barrier, Control, Pause, Version
from tugline.server.checks import check_pause, check_version
from tugline.server.http.route import CLIENTS, READERS, Call, Nothing, Route


async def current(call: Call[Nothing, Nothing]) -> Control:
    """Tell the newest version, and whether model calls are held."""
    return await call.control.control()


async def announce(call: Call[Nothing, Version]) -> Barrier:
    """Announce new weights; answers when the nodes know."""
    check_version(call.body)
    return await call.attend(call.control.announce(call.body.version))


async def pause(call: Call[Nothing, Pause]) -> Barrier:
    """Hold model calls on all nodes; answers when they are held."""
    check_pause(call.body)
    return await call.attend(call.control.pause(call.body))


async def resume(call: Call[Nothing, Nothing]) -> Barrier:
    """Let model calls go on."""
    return await call.attend(call.control.resume())


ROUTES = (
    Route("GET", "/v1/weights", READERS, current),
    Route("POST", "/v1/weights", CLIENTS, announce),
    Route("POST", "/v1/weights/pause", CLIENTS, pause),
    Route("POST", "/v1/weights/resume", CLIENTS, resume),
)
