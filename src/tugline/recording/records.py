"""Records of a recording: one header, then calls and events, and at the end the result.

They hold everything that a trainer, the viewer or a replay needs: the task and its harness, how
prompts were made, every call, and the outcome. The server that wrote them is not needed.
"""

import hashlib
from enum import StrEnum
from typing import Any

import msgspec

from tugline.types import Failure, Ledger, Mode, Reward, Session, SpentLimit, Status, Task


class Header(msgspec.Struct, frozen=True, kw_only=True, tag="header"):
    """The session, and how its prompts were made: the first record of a recording."""

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
    """SHA-256, in hex, of the ``tokenizer.json`` beside the recordings (see
    `tugline.recording.folder`); empty if the engine makes the ids."""
    workdir: str = ""
    """The agent's working folder as its programs saw it; a replay uses the same path."""
    home: str = ""
    forked_from: str = ""
    """``session@call`` if this session is a replay that was sampled from that call on; else
    empty."""


class RecordedEventKind(StrEnum):
    """Kinds of events beside the model calls."""

    REFUSED = "refused"
    """A request was answered with an error before anything was sampled; `detail` has its status,
    the class of the error and the field that it names."""
    REPEATED = "repeated"
    """A request was repeated and got the answer to `call`, live or from its end."""
    REPAIRED = "repaired"
    """The request of `call` held the text in `detail`, which is no Unicode, and was mended."""
    ENGINE_FAULT = "engine_fault"
    """A replica failed in the middle of `call`, which failed over to another one or ended;
    `detail` has its address and the number of tokens so far."""
    PAUSED = "paused"
    """New calls are held; `detail` has the policy for those in flight."""
    RESUMED = "resumed"
    WEIGHTS = "weights"
    """The engine serves the policy version in `detail`."""


class RecordedEvent(msgspec.Struct, frozen=True, tag="event"):
    """An event at `at` (Unix seconds), about `call` if it is not None."""

    kind: RecordedEventKind
    at: float
    call: int | None = None
    detail: str = ""


def truncate(data: bytes, limit: int) -> bytes:
    """Return `data`, or its first `limit` bytes and a line with the digest of the rest."""
    if len(data) <= limit:
        return data
    rest = memoryview(data)[limit:]
    digest = hashlib.sha256(rest).hexdigest()
    return data[:limit] + f"\n[tugline left out {len(rest)} bytes, sha256 {digest}]".encode()


class RecordedResult(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """The outcome of a session: a trajectory without its traces, which a builder can rebuild."""

    status: Status
    builder: str
    """Name of the builder that made the ledger."""
    ledger: Ledger
    reward: Reward | None = None
    report: dict[str, Any] = {}
    failure: Failure | None = None
    spent: SpentLimit | None = None
    seconds: dict[str, float] = {}
    """Wall-clock time by stage."""
