"""Every route, in the order in which the documentation shows them."""

from __future__ import annotations

from tugline.server.api import about, events, nodes, results, sessions, tasks, weights
from tugline.server.api.route import Route

ROUTES: tuple[Route, ...] = (
    *tasks.ROUTES,
    *sessions.ROUTES,
    *results.ROUTES,
    *nodes.ROUTES,
    *weights.ROUTES,
    *events.ROUTES,
    *about.ROUTES,
)
