"""Any server that speaks OpenAI's chat: observed where it tells ids, else text alone.

Text alone can be run but not trained on: the ledger counts its tokens as `no_token_ids`.
"""

from __future__ import annotations

import msgspec

from tugline.chat.engines.base import EngineRequest, Feature, Post, Reader
from tugline.chat.engines.chat import Chat, chat_body, response_format
from tugline.chat.engines.chat_reading import TextReader
from tugline.chat.engines.generate import parse_engine_error
from tugline.errors import TuglineError
from tugline.types import LogprobMeaning, Mode

_FEATURES = frozenset({Feature.STRUCTURED, Feature.IMAGES, Feature.TOOL_CHOICE})


class ObservedChat(Chat):
    """A server that knows `return_token_ids` but is none of those we know by name."""

    advice = "run it with format `text`, or find its option for `return_token_ids`"

    def __init__(self, logprob_meaning: LogprobMeaning = LogprobMeaning.RAW) -> None:
        super().__init__("openai", logprob_meaning=logprob_meaning, features=_FEATURES)

    def build_abort(self, request_id: str) -> Post | None:
        """No such route is common to all servers."""
        return None


class TextChat:
    """Text only: nothing beyond OpenAI's own fields is sent."""

    name = "openai"
    mode = Mode.TEXT
    logprob_meaning = LogprobMeaning.RAW
    features = _FEATURES

    def build_request(self, request: EngineRequest) -> Post:
        """The conversation."""
        body = chat_body(request, reasoning=None)
        if request.constraint is not None:
            body["response_format"] = response_format(request.constraint)
        return Post("/v1/chat/completions", msgspec.json.encode(body))

    def make_reader(self, request: EngineRequest) -> Reader:
        """A fresh reader."""
        return TextReader()

    def build_abort(self, request_id: str) -> Post | None:
        """No such route is common to all servers."""
        return None

    def parse_error(self, status: int, body: bytes, retry_after: str | None) -> TuglineError:
        """The message inside ``{"error": {...}}``, or the start of whatever came."""
        return parse_engine_error(status, body, retry_after)
