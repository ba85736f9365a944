"""What recognising works with: a recorded turn, and the plan for a new one."""

from __future__ import annotations

from dataclasses import dataclass

from tugline.chat.tokens import TokenSequence
from tugline.gateway.canonical import MessageDigest
from tugline.types import Branch, EchoChange, Message


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """A recorded call as a place to continue from."""

    number: int
    tokens: TokenSequence
    """Prompt and answer; empty where the engine told no ids."""
    prompt: int
    """How many of them are prompt."""
    answer: Message
    marks: tuple[MessageDigest, ...]
    """Of the messages it added to the conversation of `before`, without its answer."""
    before: Turn | None
    """The turn whose conversation it went on with."""
    tools: bytes
    """Digest of the tools it was asked with."""
    thread: str | None = None
    complete: bool = True
    """False for an answer that broke off: it may be echoed, and continued, as far as it got."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """What a request will be answered from."""

    prompt: TokenSequence
    """Empty in observed mode until the engine tells."""
    turn: Turn | None
    """Whose conversation it continues, in meaning; None on a branch."""
    parent: int | None
    branch: Branch | None
    echo_changes: tuple[EchoChange, ...]
    added: tuple[Message, ...]
    """The messages that are new with respect to the parent; all of them on a branch."""
    marks: tuple[MessageDigest, ...]
    """Theirs."""
    reused: int
    """Leading prompt ids that are the parent's own."""
    digest: bytes
    """Of the whole conversation."""
    tools: bytes
    thread: str | None = None
