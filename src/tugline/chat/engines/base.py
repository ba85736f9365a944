"""The contract of an engine's wire format, and what the replies of all engines have in common.

A format takes token ids (exact mode) or messages (observed mode: the engine renders them and
reports its ids; text mode: it reports none). In exact mode the gateway decodes ids into text
itself; in the other two it passes on the engine's own text, reasoning and tool calls.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec

from tugline.chat.model_call import Request
from tugline.chat.tokens import TokenSequence
from tugline.errors import ContextOverflow, EngineError, TuglineError
from tugline.types import Call, Finish, LogprobMeaning, Mode, Sampling, VersionSpan

NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Sent explicitly, because a model's own defaults replace what a request leaves out."""


class Feature(StrEnum):
    """What an engine can do besides sampling."""

    STRUCTURED = "structured"
    """Constrained decoding (`Request.constraint`)."""
    IMAGES = "images"
    BAN = "ban"
    """Never sample given ids (`EngineRequest.banned`)."""
    TOOL_CHOICE = "tool_choice"
    """Observed mode: forced tool choice."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What to sample for one request of a harness."""

    request: Request
    """Its messages and tools are sent where the engine renders them."""
    model: str
    sampling: Sampling
    """Enforced; ``top_k`` 0 or None is off. ``stop`` matters in observed and text mode only."""
    request_id: str
    """Unique; names the request in an abort."""
    prompt: TokenSequence | None = None
    """In exact mode."""
    stop_ids: tuple[int, ...] = ()
    """Sampled and then final, in exact mode."""
    banned: tuple[int, ...] = ()
    """Ids that may not be sampled, in exact mode."""


class Post(msgspec.Struct, frozen=True):
    """One HTTP POST to the engine."""

    path: str
    body: Sequence[bytes | memoryview]
    """JSON, in parts."""


class CallDelta(msgspec.Struct):
    """A part of a tool call as an observed engine streams it."""

    index: int
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, kw_only=True, gc=False):
    """Tokens sampled under one policy version, and what else came with them.

    Reasoning comes before text, and text before calls.
    """

    ids: list[int] = []
    logprobs: list[float] = []
    version: int | None = None
    """None where the engine does not report it; the gateway then uses the announced one."""
    spans: tuple[VersionSpan, ...] = ()
    """Versions of the whole reply so far, counted from its first token, where an engine reports
    them late; they override `version`."""
    finish: Finish | None = None
    """Comes with the last delta."""
    prompt: bytes | None = None
    """Observed mode: the prompt's ids as raw JSON array, as the engine wrote it."""
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    stop: str | None = None
    """Observed and text mode: the stop string that matched."""
    unreported_tokens: int = 0
    """Sampled tokens whose ids are not reported (yet), by the engine's own count; negative where
    an earlier count was too high or the ids came after all."""
    prompt_count: int = 0
    """Text mode: prompt tokens by the engine's own count."""
    replayed: Call | None = None
    """The recorded call that this response repeats, where nothing was sampled."""


class EngineFailure(msgspec.Struct):
    """An error in a reply with status 200: streams begin before prompts are looked at."""

    code: int | str | None = None


class EngineReply(msgspec.Struct, gc=False):
    """Base of every engine's reply, streamed or whole."""

    error: EngineFailure | None = None


class ReportedSpan(msgspec.Struct):
    """Weight version of the tokens from `start` to `end`."""

    version: str
    start: int
    end: int


R = TypeVar("R", bound=EngineReply)


_EMPTY = Delta()
_ERROR = attrgetter("error")


class Reader(ABC, Generic[R]):
    """Reads one reply; keeps what it must between chunks."""

    decoder: msgspec.json.Decoder[R]

    def __init__(self, missing_ids: str = "") -> None:
        """`missing_ids` is the text of the error when required ids are missing."""
        self.missing_ids = missing_ids
        self.count = 0
        """Tokens read so far."""
        self.deltas: list[Delta] = []
        """Collected from the current chunk; `add` extends the last or appends another one."""

    @abstractmethod
    def add(self, reply: R) -> None:
        """Add one event, or a whole reply, to `deltas`."""

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """Read payloads of server-sent events (the part behind ``data:``, without ``[DONE]``).

        All payloads of one network read are given together; consecutive tokens of one version are
        one `Delta`. Raises `EngineError` for what cannot be read, or when required ids are
        missing, naming the engine flag to add.
        """
        try:
            replies = self.decoder.decode_lines(b"\n".join(payloads))
        except (msgspec.DecodeError, UnicodeDecodeError):
            replies = []
        if not replies or any(map(_ERROR, replies)):
            replies = [self.decode(payload) for payload in payloads]  # one of them raises
        return self.add_all(replies)

    def read_body(self, body: bytes) -> list[Delta]:
        """Read a reply that was not streamed. Raises `EngineError` if there is no answer in it."""
        deltas = self.add_all([self.decode(body)])
        if not deltas:
            raise EngineError("the engine answered without a choice")
        return deltas

    def add_all(self, replies: Iterable[R]) -> list[Delta]:
        """Add replies; returns what they amount to."""
        self.deltas = [Delta()]
        for reply in replies:
            self.add(reply)
        return [delta for delta in self.deltas if delta != _EMPTY]

    def decode(self, payload: bytes) -> R:
        """Decode a reply. Raises `EngineError` if it cannot be read or reports a failure."""
        try:
            reply = self.decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"the engine sent a reply that cannot be read: {error}") from error
        if reply.error is not None:
            code = reply.error.code
            raise parse_engine_error(code if isinstance(code, int) else 500, payload, None)
        return reply


class EngineFormat(ABC):
    """Everything the gateway knows about one way of talking to one kind of engine."""

    name: str
    """Such as ``vllm``."""
    mode: Mode
    reader: type[Reader[Any]]
    """Reads its replies."""
    advice: str
    """What opens the route where it is closed."""
    missing_ids: str = ""
    """Text of the error when a reply has no token ids."""
    features: frozenset[Feature] = frozenset()
    abort_path: str = ""
    """Route that ends a request; empty if there is none."""
    abort_id: str = "{}"
    """The id by which that route knows a request: each sampling route adds something of its own."""

    default_meaning = LogprobMeaning.PROCESSED
    """Of log probabilities, where a server was started without options."""

    def __init__(self, logprob_meaning: LogprobMeaning | None = None) -> None:
        self.logprob_meaning = logprob_meaning or self.default_meaning

    @abstractmethod
    def build_request(self, ask: EngineRequest) -> Post:
        """Build the HTTP request. Raises `Unsupported` for what the engine would ignore."""

    def make_reader(self) -> Reader[Any]:
        """Make a reader for one reply."""
        return self.reader(self.missing_ids)

    def build_abort(self, request_id: str) -> Post | None:
        """Ask the engine to end a request and reply with what it has; None if it cannot."""
        if not self.abort_path:
            return None
        body = {"request_ids": [self.abort_id.format(request_id)]}
        return Post(self.abort_path, [msgspec.json.encode(body)])


# --------------------------------------------------------------------------- parts of a reply
_TOO_LONG = re.compile(r"(?:context|model) (?:length|size|window)(?:\D{0,8}(\d+))?")
"""Matches every engine's refusal of a long prompt; the group is the window's size."""
_SECONDS = re.compile(r"\d+(?:\.\d+)?")


def parse_engine_error(status: int, body: bytes, retry_after: str | None) -> TuglineError:
    """Parse an engine's error body; a prompt beyond the window is a `ContextOverflow`."""
    # An engine may repeat the key that it refuses.
    text = "see engine.api_key_env for its API key" if status == 401 else _find_message(body)
    too_long = _TOO_LONG.search(text)
    if status in {400, 413, 422} and too_long:
        counts = [int(count) for count in re.findall(r"\d+", text)]
        window = int(too_long[1]) if too_long[1] else None
        return ContextOverflow(text, prompt=max(counts, default=None), window=window)
    wait = float(retry_after) if retry_after and _SECONDS.fullmatch(retry_after) else None
    return EngineError(f"the engine answered {status}: {text}", status=status, retry_after=wait)


def _find_message(body: bytes) -> str:
    """The message in ``{"error": {...}}``, in a flat body or a `detail`; else the body's start."""
    try:
        fields = msgspec.json.decode(body)
        fields = fields.get("error") or fields
        return str(fields.get("message") or fields.get("detail") or fields)
    except (msgspec.DecodeError, AttributeError):
        return body[:200].decode("utf-8", "replace")


def parse_finish(reason: str | None) -> Finish | None:
    """Parse a finish reason: all but ``length`` and ``abort`` are the model's own stop."""
    known = {"length": Finish.LENGTH, "abort": Finish.ABORT}
    return known.get(reason, Finish.STOP) if reason else None


@lru_cache(maxsize=64)
def parse_version(version: str) -> int:
    """Parse a weight version: ``7`` and ``v7`` are 7; an engine's first, unnamed one is 0."""
    digits = "".join(char for char in version if char.isdigit())
    return int(digits) if digits else 0


def parse_spans(spans: list[ReportedSpan] | None) -> tuple[VersionSpan, ...]:
    """Parse the weight versions of a reply."""
    if not spans:
        return ()
    return tuple(VersionSpan(parse_version(one.version), one.start, one.end) for one in spans)
