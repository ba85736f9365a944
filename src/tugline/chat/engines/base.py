"""Interface of an engine's wire format, and types shared by the replies of all engines.

A format sends token ids (exact mode) or messages (observed mode: the engine renders them and
reports its ids; text mode: it reports none). In exact mode the gateway decodes ids into text; in
the other modes it passes on the engine's own text, reasoning and tool calls.
"""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from tugline.chat.model_call import Request
from tugline.chat.tokens import TokenSequence
from tugline.errors import ContextOverflow, EngineError, TuglineError
from tugline.types import Call, Experts, Finish, LogprobMeaning, Mode, Sampling, VersionSpan
from tugline.types.task import BIG

NEUTRAL = {"repetition_penalty": 1.0}
"""Sent explicitly, as is ``min_p``, because a model's own defaults replace absent fields."""


class Feature(StrEnum):
    """Capability of an engine besides sampling."""

    STRUCTURED = "structured"
    """Constrained decoding (`Request.constraint`)."""
    IMAGES = "images"
    BAN = "ban"
    """Banned ids (`EngineRequest.banned`)."""
    TOOL_CHOICE = "tool_choice"
    """Forced tool choice, in observed mode."""
    EXPERTS = "experts"
    """Experts that each token was computed with (`EngineRequest.experts`)."""
    KEPT = "kept"
    """Ids that truncated sampling left to choose from (`EngineRequest.kept`)."""


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Engine-independent form of a request for one answer."""

    request: Request
    """The harness's request; its messages and tools are sent if the engine renders them."""
    model: str
    sampling: Sampling
    """Enforced parameters; ``top_k`` 0 or None is off. ``stop`` is not used in exact mode."""
    request_id: str
    """Unique id, which identifies the request in an abort."""
    prompt: TokenSequence | None = None
    """Prompt ids, in exact mode."""
    stop_ids: tuple[int, ...] = ()
    """Ids that end the answer once sampled, in exact mode."""
    banned: tuple[int, ...] = ()
    """Ids that must not be sampled, in exact mode."""
    experts: bool = False
    """Whether to report the experts of the prompt's and the answer's tokens."""
    kept: bool = False
    """Whether to report the ids that sampling left to choose from, with each sampled id."""
    stream_interval: int | None = None
    """Tokens of an event, for engines that can send several; None: the engine's default."""


class Post(msgspec.Struct, frozen=True):
    """An HTTP POST to the engine."""

    path: str
    body: Sequence[bytes | memoryview]
    """Parts of the JSON body."""


class CallDelta(msgspec.Struct):
    """A streamed part of a tool call, in observed mode."""

    index: int
    name: str = ""
    arguments: str = ""


class ReportedExperts:
    """Experts of consecutive tokens of a request, which begins with the prompt's first token.

    They are as the engine reported them, also if they cannot be right: floats, negative numbers,
    zeros. `tugline.recording.experts.check_experts` names what is wrong.
    """

    def __init__(self, start: int, rows: Experts) -> None:
        """`start` is the position of the first of the tokens.

        `rows` are of another type than unsigned integers if the engine's values are not such
        numbers, and of the shape (0, 0, 0) if the report could not be read.
        """
        self.start = start
        self.end = start + len(rows)
        """Position behind the last one."""
        self.parts = [rows]
        """Rows as they were reported, to be joined once."""

    @property
    def rows(self) -> Experts:
        """Experts of all tokens."""
        if len(self.parts) > 1:
            self.parts = [np.concatenate(self.parts)]
        return self.parts[0]

    def is_continued_by(self, other: "ReportedExperts") -> bool:
        """Whether `other` begins behind the last token, and can be appended."""
        same_shape = self.parts[0].shape[1:] == other.parts[0].shape[1:]
        return self.end == other.start and same_shape

    def append(self, other: "ReportedExperts") -> None:
        """Add a report that continues this one; copies are made once, for all."""
        self.parts += other.parts
        self.end = other.end


class Delta(msgspec.Struct, kw_only=True, gc=False):
    """Tokens sampled under one policy version, and other data received with them.

    Reasoning precedes text, and text precedes calls.
    """

    ids: list[int] = []
    logprobs: list[float] = []
    version: int | None = None
    """Policy version; None if the engine does not report it, and the announced one applies."""
    spans: tuple[VersionSpan, ...] = ()
    """Versions of the whole reply so far, relative to its first token, if an engine reports them
    late; they override `version`."""
    experts: ReportedExperts | None = None
    """Experts of the tokens since the last report, or since the prompt's first token."""
    kept: list[list[int]] = []
    """Ids that were left to choose from, for each of `ids`, or empty if they are not reported.

    A set is empty if it is not reported, or not limited."""
    finish: Finish | None = None
    """Finish reason, in the last delta."""
    prompt: bytes | None = None
    """Observed mode: the prompt's ids as the JSON array that the engine sent."""
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    stop: str | None = None
    """Observed and text mode: the stop string that matched."""
    unreported_tokens: int = 0
    """Number of sampled tokens whose ids are not reported (yet), by the engine's count; negative
    to correct an earlier count that was too high or whose ids came later."""
    prompt_count: int = 0
    """Text mode: number of prompt tokens by the engine's count."""
    replayed: Call | None = None
    """The recorded call that this response replays; None if the response is sampled."""

    @property
    def answers(self) -> bool:
        """Whether it has a part of the answer, or its end; else it is about the prompt only."""
        spoke = self.ids or self.unreported_tokens or self.text or self.reasoning or self.calls
        return bool(spoke or self.finish)


class EngineFailure(msgspec.Struct):
    """An error in a reply with status 200, as streams begin before prompts are validated."""

    code: int | str | None = None


class EngineReply(msgspec.Struct, gc=False):
    """Base of the replies of all engines, streamed or whole."""

    error: EngineFailure | None = None


class ReportedSpan(msgspec.Struct):
    """Weight version of the tokens from `start` to `end`, as reported by an engine."""

    version: str
    start: int
    end: int


R = TypeVar("R", bound=EngineReply)


_EMPTY = Delta()
_ERROR = attrgetter("error")


class Reader(ABC, Generic[R]):
    """Stateful reader of one reply."""

    decoder: msgspec.json.Decoder[R]

    def __init__(self, missing_ids: str = "") -> None:
        """`missing_ids` is the error text if required ids are missing."""
        self.missing_ids = missing_ids
        self.count = 0
        """Number of tokens read so far."""
        self.deltas: list[Delta] = []
        """Deltas of the current chunk; `add` extends the last one or appends another."""

    @abstractmethod
    def add(self, reply: R) -> None:
        """Add an event or a whole reply to `deltas`."""

    def read_events(self, payloads: list[bytes]) -> list[Delta]:
        """Read payloads of server-sent events (the part after ``data:``, without ``[DONE]``).

        All payloads of a network read are passed together; consecutive tokens of one version are
        one `Delta`. Raises `EngineError` for an invalid payload, or if required ids are missing,
        naming the engine flag to add.
        """
        return self.add_all(self.decode_all(payloads))

    def decode_all(self, payloads: list[bytes]) -> list[R]:
        """Decode payloads at once, or one by one if one of them is an error, which then raises."""
        try:
            replies = self.decoder.decode_lines(b"\n".join(payloads))
        except (msgspec.DecodeError, UnicodeDecodeError):
            replies = []
        if not replies or any(map(_ERROR, replies)):
            replies = [self.decode(payload) for payload in payloads]
        return replies

    def read_body(self, body: bytes) -> list[Delta]:
        """Read a reply that is not streamed. Raises `EngineError` if it contains no answer."""
        deltas = self.add_all([self.decode(body)])
        if not deltas:
            raise EngineError("the engine's response has no choices")
        return deltas

    def add_all(self, replies: Iterable[R]) -> list[Delta]:
        """Add replies; return the resulting deltas, without empty ones."""
        self.deltas = [Delta()]
        for reply in replies:
            self.add(reply)
        return [delta for delta in self.deltas if delta != _EMPTY]

    def decode(self, payload: bytes) -> R:
        """Decode a reply. Raises `EngineError` if it is invalid or reports a failure."""
        try:
            reply = self.decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"the engine's response cannot be decoded: {error}") from error
        if reply.error is not None:
            code = reply.error.code
            raise parse_engine_error(code if isinstance(code, int) else 500, payload, None)
        return reply


class EngineFormat(ABC):
    """Base of wire formats, each for one route of one kind of engine."""

    name: str
    """Engine name, such as ``vllm``."""
    mode: Mode
    reader: type[Reader[Any]]
    """Reader of the replies."""
    advice: str
    """Advice on how to enable the route if it does not work."""
    missing_ids: str = ""
    """Error text for a reply without token ids."""
    features: frozenset[Feature] = frozenset()
    abort_path: str = ""
    """Route that aborts a request; empty if there is none."""
    abort_id: str = "{}"
    """Format of a request's id on the abort route; each sampling route adds its own affixes."""

    default_meaning = LogprobMeaning.PROCESSED
    """Meaning of log probabilities on a server started without options."""

    def __init__(
        self,
        logprob_meaning: LogprobMeaning | None = None,
        *,
        experts: tuple[int, int] | None = None,
        kept: bool = False,
    ) -> None:
        self.logprob_meaning = logprob_meaning or self.default_meaning
        self.experts = experts
        """Layers with experts, and experts of a token in each; None if the server reports none."""
        self.kept = kept
        """Whether the server reports the ids that truncated sampling left to choose from."""

    @abstractmethod
    def build_request(self, ask: EngineRequest) -> Post:
        """Build the HTTP request. Raises `Unsupported` for fields that the engine would ignore."""

    def adapt_sampling(self, sampling: Sampling) -> Sampling:
        """Return the parameters as the server accepts them, for the same distribution."""
        return sampling

    def make_reader(self) -> Reader[Any]:
        """Create the reader of one reply."""
        return self.reader(self.missing_ids)

    def build_abort(self, request_id: str) -> Post | None:
        """Build the POST that ends a request early, with a partial reply; None if unsupported."""
        if not self.abort_path:
            return None
        body = {"request_ids": [self.abort_id.format(request_id)]}
        return Post(self.abort_path, [msgspec.json.encode(body)])


# --------------------------------------------------------------------------- parts of a reply
_TOO_LONG = re.compile(r"(?:context|model) (?:length|size|window)(?:\D{0,8}(\d+))?")
"""Pattern of all engines' refusals of a long prompt; the group is the window's size."""
_NO_MESSAGE = (
    "it gives no reason; vLLM with --return-sampling-mask does so for requests without top_k or at"
    " temperature 0"
)
_SECONDS = re.compile(r"\d+(?:\.\d+)?")


def parse_engine_error(status: int, body: bytes, retry_after: str | None) -> TuglineError:
    """Parse an engine's error body; a prompt beyond the window is a `ContextOverflow`."""
    # An engine may repeat a refused key in its message.
    text = (
        "it rejects the API key; see engine.api_key_env" if status == 401 else _find_message(body)
    )
    too_long = _TOO_LONG.search(text)
    if status in {400, 413, 422} and too_long:
        counts = [int(count) for count in re.findall(r"\d+", text)]
        window = int(too_long[1]) if too_long[1] else None
        return ContextOverflow(text, prompt=max(counts, default=None), window=window)
    wait = _parse_retry_after(retry_after or "")
    return EngineError(f"the engine answered {status}: {text}", status=status, retry_after=wait)


def _parse_retry_after(value: str) -> float | None:
    """Parse seconds, or the date until which to wait; None for anything else."""
    if _SECONDS.fullmatch(value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _find_message(body: bytes) -> str:
    """Find the message in ``{"error": {...}}``, a flat body or `detail`; else the body's start."""
    try:
        fields = msgspec.json.decode(body)
        fields = fields.get("error") or fields
        if fields.get("message") == "":
            return _NO_MESSAGE
        return str(fields.get("message") or fields.get("detail") or fields)
    except (msgspec.DecodeError, AttributeError):
        return body[:200].decode("utf-8", "replace")


def parse_finish(reason: str | None) -> Finish | None:
    """Parse a finish reason; all except ``length`` and ``abort`` mean that the model stopped."""
    known = {"length": Finish.LENGTH, "abort": Finish.ABORT}
    return known.get(reason, Finish.STOP) if reason else None


@lru_cache(maxsize=64)
def parse_version(version: str) -> int:
    """Parse a weight version: ``7`` and ``v7`` are 7; one without digits is 0.

    Raises `EngineError` for a number above `BIG`.
    """
    digits = "".join(char for char in version if char in "0123456789")
    if len(digits) > len(str(BIG)) or int(digits or 0) > BIG:
        raise EngineError(f"the engine's weight version is {version!r:.60}, must be at most {BIG}")
    return int(digits or 0)


def parse_spans(spans: list[ReportedSpan] | None) -> tuple[VersionSpan, ...]:
    """Parse the weight versions of a reply."""
    if not spans:
        return ()
    return tuple(VersionSpan(parse_version(s.version), s.start, s.end) for s in spans)
