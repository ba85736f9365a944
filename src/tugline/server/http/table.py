"""Every route, in the order in which the documentation shows them."""

from __future__ import annotations

from tugline.server.http import about, events, nodes, results, sessions, tasks, weights
from tugline.server.http.route import Route

ROUTES: tuple[Route, ...] = (
    *tasks.ROUTES,
    *sessions.ROUTES,
    *results.ROUTES,
    *nodes.ROUTES,
    *weights.ROUTES,
    *events.ROUTES,
    *about.ROUTES,
)
