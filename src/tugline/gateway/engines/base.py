"""The contract of an engine's wire format: build a token-in request, read token-out chunks."""

from __future__ import annotations

from typing import Protocol

import msgspec

from tugline.errors import EngineError
from tugline.types import Finish, Ids, Logprobs, Sampling


class Draw(msgspec.Struct, frozen=True):
    """What to sample: exact prompt ids under enforced sampling settings."""

    model: str
    prompt: Ids
    sampling: Sampling
    stop_ids: tuple[int, ...]
    request_id: str


class Delta(msgspec.Struct, frozen=True):
    """Tokens sampled under one policy version; `finish` comes with the last."""

    ids: Ids
    logprobs: Logprobs
    version: int
    finish: Finish | None = None


class EngineFormat(Protocol):
    """Everything the gateway knows about one kind of engine."""

    name: str
    generate_path: str

    def body(self, draw: Draw) -> bytes:
        """The JSON body of a streaming token-in request."""
        ...

    def deltas(self, data: bytes) -> list[Delta]:
        """The tokens in one streamed ``data:`` payload. Raises `EngineError` on nonsense."""
        ...

    def error(self, status: int, body: bytes, retry_after: str | None) -> EngineError:
        """The engine's own words about why it refused."""
        ...
