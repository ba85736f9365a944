"""Records of a recording: one header, then calls and events, and at the end the result.

Everything that a trainer, an inspector or a replay wants to know is in these records, so that a
recording is enough to do the work again: the task and its harness, how the prompts were made, every
call, and the verdict. Nothing here needs the server that wrote it.
"""

from __future__ import annotations

import hashlib
from enum import StrEnum
from typing import Any

import msgspec

from tugline.types import Failure, Ledger, Mode, Reward, Session, Status, Task


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """Whose calls follow, and how their prompts were made. The first record of a recording."""

    session: Session
    task: Task
    created: float
    """Unix seconds."""
    tugline: str
    """Version of the package that wrote it."""
    model: str = ""
    """The name that the engine gave it."""
    window: int = 0
    """The model's context window in tokens; 0 where the engine does not say."""
    engine: str = ""
    """Engine format, such as ``vllm``."""
    mode: Mode = Mode.EXACT
    template: str = ""
    """The chat template of exact mode, by its name in `docs/templates.md`; else empty."""
    thinking_retention: str = ""
    tokenizer: str = ""
    """SHA-256, in hex, of the ``tokenizer.json`` that is kept once beside the recordings (see
    `tugline.recording.folder`); empty where the engine makes the ids."""
    workdir: str = ""
    """Where the agent worked, as its programs saw it; a replay runs in the same place."""
    home: str = ""
    forked_from: str = ""
    """``session@call`` where this session is a replay that went on by itself from that call of
    the other; else empty."""


class EventKind(StrEnum):
    """What happened beside the model calls."""

    REFUSED = "refused"
    """A request was answered by an error, before anything was sampled; `detail` has its status,
    the class of the error and the field it is about."""
    REPEATED = "repeated"
    """A request came again and was given the answer to `call`, which it joined or replayed."""
    ENGINE_FAULT = "engine_fault"
    """A replica failed in the middle of `call`, and the answer went on elsewhere or ended;
    `detail` has its address and how many tokens there were by then."""
    PAUSED = "paused"
    """New calls are held; `detail` says what becomes of those in flight."""
    RESUMED = "resumed"
    WEIGHTS = "weights"
    """The engine serves another policy version, told in `detail`."""
    RESPONSE = "response"
    """The raw body that was told for `call`, in `data`; kept only if asked for."""


class Event(msgspec.Struct, frozen=True, tag="event"):
    """Something that happened at `at` (Unix seconds), to `call` if it has a number."""

    kind: EventKind
    at: float
    call: int | None = None
    detail: str = ""
    data: bytes = b""


def capped(data: bytes, limit: int) -> bytes:
    """`data`, or its first `limit` bytes and a line that tells what was left out."""
    if len(data) <= limit:
        return data
    rest = memoryview(data)[limit:]
    digest = hashlib.sha256(rest).hexdigest()
    return data[:limit] + f"\n[tugline left out {len(rest)} bytes, sha256 {digest}]".encode()


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """What became of the session: a trajectory without its traces, which a builder makes again."""

    status: Status
    builder: str
    """The builder whose ledger this is."""
    ledger: Ledger
    reward: Reward | None = None
    report: dict[str, Any] = {}
    failure: Failure | None = None
    seconds: dict[str, float] = {}
    """Wall clock per stage."""
