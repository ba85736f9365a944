"""Find the turn that a request extends, and its exact prompt ids (I1).

A session is a tree of turns. A turn is found by a chain of digests over the meaning of its
messages (`canonical`): what a harness may rewrite without changing meaning does not enter. The
deepest turn whose digest matches is the parent, and the new prompt is the parent's exact ids plus
the rendered tail. Anything else is a branch, with its reason (`branching`).

Recognising costs what is new (I7): messages that are the same objects as in an earlier request of
the session are not looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokens import TokenSequence
from tugline.errors import Unsupported
from tugline.gateway import branching
from tugline.gateway.canonical import (
    MessageDigest,
    call_positions,
    chain_digest,
    digest_message,
    echo_changes,
    tools_digest,
)
from tugline.gateway.turns import PromptPlan, Turn
from tugline.types import Branch, Ids, Message, Role, Tool

_EMPTY = TokenSequence(np.empty(0, np.int32))
_REMEMBERED = 4
_END = 64
"""Ids at a prompt's end that a template looks at to go on from it."""


@dataclass(slots=True)
class _Chain:
    """Digests of one request: ``chain[k]`` covers its first `k` messages."""

    tools: bytes
    messages: Sequence[Message] = ()
    marks: list[MessageDigest] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)


class Conversation:
    """The turns of one session."""

    def __init__(self, rendering: Rendering | None) -> None:
        """Without a `rendering` prompts are the engine's business (observed mode)."""
        self._rendering = rendering
        self._turns: dict[bytes, list[Turn]] = {}
        self._all: list[Turn] = []
        self._children: dict[int, list[Turn]] = {}
        """Turns by the number of the call whose conversation they went on with."""
        self._chains: list[_Chain] = []
        self._tools: list[tuple[Sequence[Tool], bytes]] = []

    def plan(
        self, messages: Sequence[Message], tools: Sequence[Tool], thread: str | None = None
    ) -> PromptPlan:
        """Find the parent turn and, where we render, the exact prompt. Raises `RequestError`."""
        links = self._link(messages, self._digest(tools))
        found = self._deepest(links, messages)
        if found is None:
            return self._branch(links, messages, tools, thread)
        depth, turn = found
        tail = tuple(messages[depth:])
        if any(message.role is Role.ASSISTANT for message in tail) or (not tail and turn.complete):
            return self._branch(links, messages, tools, thread)
        prompt = self._extended(turn, tail, tools)
        if prompt is None:
            return self._branch(links, messages, tools, thread, Branch.RENDERER_REFUSED)
        branch = branching.beside(self._children.get(turn.number, ()), turn, links.marks[depth:])
        start = depth if branch is None else 0
        return PromptPlan(
            prompt=prompt,
            turn=turn,
            parent=turn.number,
            branch=branch,
            echo_changes=echo_changes(turn.answer, messages[depth - 1]),
            added=tuple(messages[start:]),
            marks=tuple(links.marks[start:]),
            reused=len(turn.tokens),
            digest=links.chain[-1],
            tools=links.tools,
            thread=thread,
        )

    def observed(self, plan: PromptPlan, raw: bytes) -> PromptPlan:
        """The same plan with the prompt that the engine says it rendered.

        `raw` is its JSON array; digits that extend the parent's are compared as bytes, and only
        the rest becomes numbers.
        """
        inner = raw.strip()[1:-1]
        if plan.turn is not None and plan.branch is None:
            known = plan.turn.tokens.to_json()
            if inner.startswith(known + b","):
                rest = inner[len(known) + 1 :]
                prompt = plan.turn.tokens.extend(_numbers(rest), rest)
                return replace(plan, prompt=prompt, reused=len(plan.turn.tokens))
        ids = _numbers(inner)
        if plan.turn is not None and plan.branch is None:
            shared = plan.turn.tokens.shared_prefix(ids)
            prompt = plan.turn.tokens.truncate(shared).extend(ids[shared:])
            whole = shared == len(plan.turn.tokens)
            branch = None if whole else Branch.ENGINE_RERENDERED
            return replace(plan, prompt=prompt, reused=shared, branch=branch)
        shared, near = branching.nearest(self._all, ids)
        prompt = (
            TokenSequence(ids)
            if near is None
            else near.tokens.truncate(shared).extend(ids[shared:])
        )
        return replace(plan, prompt=prompt, reused=shared)

    def record(
        self, plan: PromptPlan, number: int, sampled: Ids, answer: Message, *, complete: bool = True
    ) -> None:
        """Make an answered call a turn that later requests may extend."""
        turn = Turn(
            number=number,
            tokens=plan.prompt.extend(sampled),
            prompt=len(plan.prompt),
            answer=answer,
            marks=plan.marks,
            before=plan.turn if plan.branch is None else None,
            tools=plan.tools,
            thread=plan.thread,
            complete=complete,
        )
        digest = chain_digest(plan.digest, digest_message(answer, {}))
        self._turns.setdefault(digest, []).append(turn)
        self._all.append(turn)
        if turn.before is not None:
            self._children.setdefault(turn.before.number, []).append(turn)

    def continued(self, number: int) -> bool:
        """Whether a later turn went on from the call `number`."""
        return number in self._children

    # ----------------------------------------------------------------------- recognising
    def _digest(self, tools: Sequence[Tool]) -> bytes:
        for known, digest in self._tools:
            if known is tools:
                return digest
        digest = tools_digest(tools)
        self._tools = [(tools, digest), *self._tools][:_REMEMBERED]
        return digest

    def _link(self, messages: Sequence[Message], tools: bytes) -> _Chain:
        """Digests of the request, taken over from the known one with the longest same front."""
        best, shared = _Chain(tools), 0
        for known in self._chains:
            if known.tools == tools:
                same = _same_front(known.messages, messages)
                if same > shared:
                    best, shared = known, same
        marks = best.marks[:shared]
        chain = best.chain[: shared + 1] or [tools]
        places = next((call_positions(m) for m in reversed(messages[:shared]) if m.tool_calls), {})
        for message in messages[shared:]:
            marks.append(digest_message(message, places))
            chain.append(chain_digest(chain[-1], marks[-1]))
            if message.tool_calls:
                places = call_positions(message)
        links = _Chain(tools, messages, marks, chain)
        grown = best if shared == len(best.messages) else None
        others = [known for known in self._chains if known is not grown]
        self._chains = [links, *others][:_REMEMBERED]
        return links

    def _deepest(self, links: _Chain, messages: Sequence[Message]) -> tuple[int, Turn] | None:
        for depth in range(len(messages), 0, -1):
            if messages[depth - 1].role is Role.ASSISTANT:
                turns = self._turns.get(links.chain[depth])
                if turns:
                    return depth, _best(turns, messages[depth - 1])
        return None

    def _extended(
        self, turn: Turn, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenSequence | None:
        """The turn's exact ids and the rendered tail; None if the template cannot go on so."""
        if self._rendering is None:
            return _EMPTY
        if not tail:
            return turn.tokens  # an answer that broke off is taken up where it ended
        sampled = turn.tokens.tail(len(turn.tokens) - turn.prompt)
        end = turn.tokens.truncate(turn.prompt).tail(_END)
        more = self._rendering.render_extension(end, sampled, tail, tools)
        return None if more is None else turn.tokens.extend(more)

    def _branch(
        self,
        links: _Chain,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        thread: str | None,
        reason: Branch | None = None,
    ) -> PromptPlan:
        """Render everything anew; the nearest turn by shared ids is named as the parent."""
        if messages[-1].role is Role.ASSISTANT:
            msg = (
                f"messages[{len(messages) - 1}] is the assistant's: continuing an answer that the "
                "model did not give cannot be honoured; end with a user or tool message"
            )
            raise Unsupported(msg, param="messages")
        prompt = _EMPTY
        ids: Ids | None = None
        if self._rendering is not None:
            ids = self._rendering.render(messages, tools)
            prompt = TokenSequence(ids)
        shared, near = 0, None
        if self._all:
            view = branching.Asked(messages, links.marks, links.tools, thread)
            suspect, why = branching.reason(self._all, view)
            reason = reason or why
            if ids is not None:
                shared, near = branching.nearest(self._all, ids)
                if near is not None and shared:
                    prompt = near.tokens.truncate(shared).extend(ids[shared:])
            near = near or suspect
        return PromptPlan(
            prompt=prompt,
            turn=None,
            parent=near.number if near is not None and reason is not None else None,
            branch=reason,
            echo_changes=(),
            added=tuple(messages),
            marks=tuple(links.marks),
            reused=shared,
            digest=links.chain[-1],
            tools=links.tools,
            thread=thread,
        )


def _same_front(known: Sequence[Message], messages: Sequence[Message]) -> int:
    for index, (old, new) in enumerate(zip(known, messages, strict=False)):
        if old is not new:
            return index
    return min(len(known), len(messages))


def _best(turns: Sequence[Turn], echoed: Message) -> Turn:
    """Of answers that mean the same, the one whose call ids are echoed; else the latest."""
    ids = [call.id for call in echoed.tool_calls]
    for turn in reversed(turns):
        if ids and [call.id for call in turn.answer.tool_calls] == ids:
            return turn
    return turns[-1]


def _numbers(inner: bytes) -> Ids:
    return np.asarray(msgspec.json.decode(b"[" + inner + b"]", type=list[int]), np.int32)
