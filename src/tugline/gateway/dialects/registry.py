"""Every dialect the gateway speaks, in the order in which they are asked whose a request is."""

from __future__ import annotations

from tugline.gateway.dialects.base import Dialect, Incoming
from tugline.gateway.dialects.openai_chat import OpenAIChat

DIALECTS: tuple[Dialect, ...] = (OpenAIChat(),)
"""OpenAI Chat comes last: it takes ``/models`` from whoever shows no other sign."""


def fallback(incoming: Incoming) -> Dialect:
    """Whose error shape an unknown route is answered in."""
    for dialect in DIALECTS:
        if incoming.path.startswith(f"/{dialect.name}"):
            return dialect
    return DIALECTS[-1]
