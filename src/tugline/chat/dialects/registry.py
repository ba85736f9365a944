"""Every dialect the gateway speaks, in the order in which they are asked whose a request is."""

from __future__ import annotations

from tugline.chat.dialects.anthropic import Anthropic
from tugline.chat.dialects.base import Dialect, Incoming
from tugline.chat.dialects.google import Google
from tugline.chat.dialects.openai_chat import OpenAIChat
from tugline.chat.dialects.openai_responses import OpenAIResponses

DIALECTS: tuple[Dialect, ...] = (Anthropic(), Google(), OpenAIResponses(), OpenAIChat())
"""OpenAI Chat comes last: it takes ``/models`` from whoever shows no other sign."""


def fallback(incoming: Incoming) -> Dialect:
    """Whose error shape an unknown route is answered in, by the headers and the version."""
    anthropic = "anthropic-version" in incoming.headers
    google = incoming.version.startswith("v1beta") or "x-goog-api-key" in incoming.headers
    wanted = "anthropic" if anthropic else "google" if google else ""
    return next((dialect for dialect in DIALECTS if dialect.name == wanted), DIALECTS[-1])
