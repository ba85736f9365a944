"""The wire formats that the gateway speaks."""

from tugline.chat.dialects.anthropic import Anthropic
from tugline.chat.dialects.base import Dialect, HttpRequest
from tugline.chat.dialects.google import Google
from tugline.chat.dialects.openai_chat import OpenAIChat, OpenAICompletions
from tugline.chat.dialects.openai_responses import OpenAIResponses

DIALECTS = (Anthropic(), Google(), OpenAIResponses(), OpenAICompletions(), OpenAIChat())
"""In the order in which they are matched: OpenAI Chat claims any ``/models`` that is left."""


def fallback_dialect(request: HttpRequest) -> Dialect:
    """Dialect whose error shape answers an unknown route, by the headers and the version."""
    anthropic = "anthropic-version" in request.headers
    google = request.version.startswith("v1beta") or "x-goog-api-key" in request.headers
    wanted = "anthropic" if anthropic else "google" if google else "openai_chat"
    return next(dialect for dialect in DIALECTS if dialect.name == wanted)
