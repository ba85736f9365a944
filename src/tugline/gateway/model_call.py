"""A model call that is ready to be sampled: its request, and its prompt among recorded calls."""

from dataclasses import dataclass

import msgspec

from tugline.chat.dialects.base import Dialect
from tugline.chat.model_call import UNNAMED, Request, ThreadInfo
from tugline.chat.tokens import TokenSequence
from tugline.gateway.turns import MessageDigest, Turn
from tugline.types import Branch, EchoChange, MalformedCalls, Message


class Prompt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Prompt ids of a request, and its position in the session's tree."""

    tokens: TokenSequence
    """Prompt ids; empty in observed mode until the engine reports them."""
    turn: Turn | None = None
    """The turn whose conversation the request extends; None on a branch."""
    parent: int | None
    branch: Branch | None
    echo_changes: tuple[EchoChange, ...] = ()
    added: tuple[Message, ...]
    """Messages that the parent does not have; all messages on a branch."""
    digests: tuple[MessageDigest, ...]
    """Digests of the messages in `added`."""
    reused: int
    """Number of leading ids shared with a recorded turn."""
    digest: bytes
    """Digest of the whole conversation."""
    tools: bytes
    thread: ThreadInfo = UNNAMED
    """Thread named by the harness, or inferred for a known sub-agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """A parsed request, its prompt, and the dialect in which it is answered."""

    dialect: Dialect
    request: Request
    prompt: Prompt
    malformed: MalformedCalls
    """How a malformed tool call of the response is delivered."""
    retry: bool
    """Whether the client declares the request a retry of an earlier one."""
    repaired: bool
    """Whether lone surrogates were repaired in the body."""
