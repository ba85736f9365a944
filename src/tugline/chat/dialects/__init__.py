"""The wire formats that the gateway speaks."""

from tugline.chat.dialects.anthropic import Anthropic
from tugline.chat.dialects.base import Dialect, HttpRequest
from tugline.chat.dialects.google import Google
from tugline.chat.dialects.openai_chat import OpenAIChat, OpenAICompletions
from tugline.chat.dialects.openai_responses import OpenAIResponses

DIALECTS = (Anthropic(), Google(), OpenAIResponses(), OpenAICompletions(), OpenAIChat())
"""Dialects in the order of matching; OpenAI Chat matches the remaining ``/models`` requests."""


def fallback_dialect(request: HttpRequest) -> Dialect:
    """Choose the dialect of the error for an unknown route, by headers and version."""
    wanted = "openai_chat"
    if "anthropic-version" in request.headers:
        wanted = "anthropic"
    elif request.version.startswith("v1beta") or "x-goog-api-key" in request.headers:
        wanted = "google"
    return next(dialect for dialect in DIALECTS if dialect.name == wanted)
