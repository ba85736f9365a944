"""Limits of a gateway, and validation and sampling parameters of each call."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from tugline.chat.dialects.base import is_refused_by_engine
from tugline.chat.engines.base import Feature
from tugline.chat.model_call import FORCING, ChoiceMode, Request
from tugline.errors import (
    ContextOverflow,
    EngineError,
    Overloaded,
    RequestError,
    TuglineError,
    Unsupported,
)
from tugline.gateway.terms import SessionTerms
from tugline.types import HANDLING, Cause, Failure, Mode, Policy, Role, Sampling, TraceKind
from tugline.types.task import MIN_TEMPERATURE


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """Durations in seconds, sizes in bytes; the defaults suit production."""

    # Requests of clients
    max_body: int = 32 << 20
    """Largest request body, also after decompression."""
    token_bytes: int = 16
    """Bytes of a request per token of the window, beyond its first megabyte (exact mode)."""
    large_body: int = 128 << 10
    """Request size from which parsing and rendering run in a thread."""
    session_bytes: int = 64 << 20
    """Request bytes that a session may have in flight."""
    gateway_bytes: int = 256 << 20
    """Request bytes that all sessions may have in flight."""
    session_answers: int = 256
    """Answers that a session may have in flight."""
    several_sampled: int = 16
    """Answers to requests with ``n`` > 1 that a session samples at once; the others wait."""
    gateway_answers: int = 4096
    """Answers that all sessions may have in flight."""
    body_timeout_s: float = 60.0
    headers_within_s: float = 45.0
    """Longest wait of a stream's headers for a replica to accept the request, so that refusals get
    a status; some clients give up after a minute without a byte."""
    first_token_within_s: float = 2.0
    """Longest further wait for the first token, so that faults just after that get one, too."""
    keep_alive_s: float = 15.0
    """Silence in a stream after which a keep-alive is sent."""
    recent_calls: int = 8
    """Number of a session's last calls among which repeated requests are recognized."""
    max_recording: int = 256 << 20
    """Size of a session's recording above which its calls are refused."""
    closed_sessions: int = 4096
    """Number of closed sessions whose calls can still be read."""

    # One completion
    grace_s: float = 0.6
    """Time for which an answer without a client is still sampled, in case the client retries."""
    stream_interval: int = 128
    """Tokens of an event of the engine's stream, if the client does not stream."""
    cancel_timeout_s: float = 10.0
    """Longest wait for a cancelled call to be recorded."""
    pause_timeout_s: float = 900.0
    """Longest wait of a call while weights are swapped."""
    failovers: int = 4
    """Maximum number of times that an answer moves to another replica after its first token."""

    # Replicas
    tries: int = 4
    """Attempts to get a first token."""
    backoff_s: float = 0.25
    """First delay between attempts; it doubles."""
    longest_retry_after_s: float = 20.0
    """Time for which refusals are retried; a longer ``Retry-After`` is passed on at once."""
    eject_after: int = 2
    """Consecutive faults after which a replica is ejected."""
    probe_every_s: float = 1.0
    """Pause between probes of ejected replicas."""
    probe_timeout_s: float = 5.0
    silent_s: float = 30.0
    """Time without a token after which a replica is probed; without an answer, it hangs."""
    stalled_s: float = 120.0
    """Time without a token after which a started stream is lost, whatever the probe's result."""


DEFAULTS = CallSettings()


class InFlight:
    """A limited amount in flight for one session, counted in the gateway's total as well."""

    def __init__(self, unit: str, limit: int, gateway: "InFlight | None" = None) -> None:
        """`unit` names the amount in errors. `gateway` is the total; None if this is the total."""
        self.used = 0
        self._unit, self._limit, self._gateway = unit, limit, gateway

    def take(self, amount: int) -> None:
        """Add `amount`. Raises `Overloaded` above a limit, and then adds nothing."""
        if self.used + amount > self._limit:
            who, status = ("session", 429) if self._gateway else ("gateway", 503)
            msg = (
                f"the limit of the {who} is {self._limit} {self._unit} in flight; retry when "
                "some have ended"
            )
            raise Overloaded(msg, status=status, retry_after=1.0)
        if self._gateway:
            self._gateway.take(amount)
        self.used += amount

    def give_back(self, amount: int) -> None:
        """Subtract `amount`."""
        self.used -= amount
        if self._gateway:
            self._gateway.give_back(amount)

    @contextlib.contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yield `take`; the amounts taken with it are given back when the block ends."""
        taken = 0

        def take(amount: int) -> None:
            nonlocal taken
            self.take(amount)
            taken += amount

        try:
            yield take
        finally:
            self.give_back(taken)


# --------------------------------------------------------------------------- sampling
def contract_for(sampling: Sampling, sample: int) -> Sampling:
    """Return the task's sampling contract for one sample, with a seed derived for the sample."""
    if sampling.seed is None:
        return sampling
    return msgspec.structs.replace(sampling, seed=_derive_seed(sampling.seed, sample))


def resolve_sampling(
    requested: Sampling,
    contract: Sampling,
    policy: Policy,
    limits: Sequence[int | None],
    number: int,
) -> Sampling:
    """Combine contract and request of call `number` by `policy`, bounded by `limits`.

    Each call gets its own seed, derived from the session's, so that its tokens do not depend on
    concurrent calls. Raises `RequestError` if the policy refuses the request.
    """
    if policy is Policy.REFUSE:
        _refuse_deviation(requested, contract)
    first, second = (requested, contract) if policy is Policy.ALLOW else (contract, requested)
    caps = [n for n in (requested.max_tokens, contract.max_tokens, *limits) if n is not None]
    seed = requested.seed if contract.seed is None else _derive_seed(contract.seed, number)
    temperature = _first(first.temperature, second.temperature, 1.0)
    return Sampling(
        temperature=max(temperature, MIN_TEMPERATURE) if temperature else 0.0,
        top_p=_first(first.top_p, second.top_p, 1.0),
        top_k=int(_first(first.top_k, second.top_k, 0)),
        min_p=_first(first.min_p, second.min_p, 0.0),
        max_tokens=min(caps) if caps else None,
        seed=seed,
        stop=first.stop or second.stop,
    )


def check_request(request: Request, mode: Mode, features: frozenset[Feature]) -> None:
    """Raise `RequestError`, or `Unsupported` for a field that this engine does not support."""
    if not request.messages and request.prompt is None:
        raise RequestError("the request has no messages", param="messages")
    text_only = mode is Mode.EXACT or Feature.IMAGES not in features
    if text_only and any(map(attrgetter("images"), request.messages)):
        _refuse("messages", "images", "only text prompts are supported for this model")
    if request.constraint is not None and Feature.STRUCTURED not in features:
        _refuse(
            "response format",
            "structured output",
            "this engine does not support constrained decoding",
        )
    forced = request.tool_choice.mode in FORCING
    if forced and not request.tools:
        msg = "tool_choice requires a tool call, but the request has no tools"
        raise RequestError(msg, param="tool_choice")
    names = {tool.name for tool in request.tools}
    for name in request.tool_choice.names:
        if name not in names:
            msg = f"tool_choice names {name!r}, which is not among the tools"
            raise RequestError(msg, param="tool_choice")
    auto = request.tool_choice.mode is ChoiceMode.AUTO
    if auto and request.tool_choice.names and names - set(request.tool_choice.names):
        _refuse("tool_choice", "a subset of the tools", "declare only the allowed tools")
    if forced and mode is not Mode.EXACT and Feature.TOOL_CHOICE not in features:
        _refuse("tool_choice", "a forced tool call", "this engine's chat route does not support it")


def find_kind(request: Request, terms: SessionTerms) -> TraceKind | None:
    """Return the kind that the harness declares, or that phrases in its own prompts imply."""
    first = request.messages[0]
    last = request.messages[-1]
    if request.thread.kind is None and last.role is Role.USER:
        answered = any(message.role is Role.ASSISTANT for message in request.messages)
        if answered and any(phrase in last.content for phrase in terms.compaction_phrases):
            return TraceKind.COMPACTION
        if not answered and any(phrase in first.content for phrase in terms.side_phrases):
            return TraceKind.SIDE
    return request.thread.kind


def classify_call(request: Request, *, declares_tools: bool) -> TraceKind:
    """Return the kind found by `find_kind`; else a first request without tools is a side call.

    `declares_tools` is whether the session's calls usually declare tools.
    """
    if request.thread.kind is not None:
        return request.thread.kind
    if not declares_tools or request.tools:
        return TraceKind.MAIN
    answered = any(message.role is Role.ASSISTANT for message in request.messages)
    return TraceKind.MAIN if answered else TraceKind.SIDE


def _refuse(field: str, feature: str, reason: str) -> None:
    msg = f"{field}: {feature} is not supported here: {reason}"
    raise Unsupported(msg, param=field.replace(" ", "_"))


def _refuse_deviation(requested: Sampling, contract: Sampling) -> None:
    for field in ("temperature", "top_p", "top_k", "min_p"):
        value = getattr(requested, field)
        agreed = getattr(contract, field)
        if value is not None and agreed is not None and value != agreed:
            msg = f"{field}={value} violates the task's sampling contract; it must be {agreed}"
            raise RequestError(msg, param=field)


def _derive_seed(seed: int, number: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest())


def _first(first: float | None, second: float | None, default: float) -> float:
    if first is not None:
        return first
    return default if second is None else second


def find_engine_failure(error: TuglineError | None) -> Failure | None:
    """Return the session's failure if its last call ended with `error`; None if it is none."""
    if not isinstance(error, ContextOverflow | EngineError):
        return None
    refused = isinstance(error, ContextOverflow) or is_refused_by_engine(error)
    cause = Cause.ENGINE if refused else Cause.ENGINE_LOST
    return Failure(HANDLING[cause].boundary, str(error), cause)
