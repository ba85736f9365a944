"""Find the recorded turn that a request extends, and the exact ids of its prompt (I1).

A session is a tree of turns. A turn is found by a chain of digests over its messages (`turns`),
so rewritings that keep the meaning do not matter. The deepest turn whose digest matches is the
parent, and the prompt is the parent's exact ids plus the rendered new messages. Any other request
is a branch with a reason (`turns`).

The cost is proportional to the new part (I7): messages that are the same objects as in an earlier
request of the session are not digested again.
"""

import hashlib
import operator
from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from tugline.chat.model_call import UNNAMED, Piece, ThreadInfo
from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokens import END, TokenSequence, count_shared, decode_ids
from tugline.errors import RequestError, Unsupported
from tugline.gateway import turns
from tugline.gateway.model_call import Prompt
from tugline.traces.lineage import adds_to_parent
from tugline.types import Branch, Call, CallOutcome, Ids, Message, Role, Tool, ToolCall, TraceKind

_EMPTY = TokenSequence(np.empty(0, np.int32))
_Messages = tuple[Message, ...]
_REMEMBERED = 4
"""Number of requests whose digests are kept: one per thread, of threads that alternate."""


class CallTree:
    """The turns of one session."""

    def __init__(self, rendering: Rendering | None) -> None:
        """`rendering` is None in observed mode, where the engine renders the prompts."""
        self._rendering = rendering
        self._by_digest: dict[bytes, tuple[turns.Turn, ...]] = {}
        self._turns: list[turns.Turn] = []
        self._answers: dict[bytes, turns.Turn] = {}
        """The last turn by the digest of the conversation that it answered."""
        self._by_calls: dict[tuple[str, ...], turns.Turn] = {}
        """The last turn by the ids of its answer's tool calls."""
        self._children: dict[int, tuple[turns.Turn, ...]] = {}
        """Turns by the number of the call that they extend."""
        self._requests: list[turns.Conversation] = []
        self._tools: list[tuple[Sequence[Tool], bytes]] = []
        self.unfinished: dict[int, tuple[ThreadInfo, Sequence[Piece]]] = {}
        """Thread and pieces of each unfinished answer, by call number."""

    def extend(
        self, messages: Sequence[Message], tools: Sequence[Tool], thread: ThreadInfo = UNNAMED
    ) -> Prompt | turns.Conversation:
        """Return the prompt of a request that extends a recorded call, in exact mode with its ids.

        Any other request is returned as a conversation, for `branch`.
        """
        if thread == UNNAMED:
            thread = self._find_delegation(messages)
        request = self._digest_request(messages, self._digest_tools(tools), thread)
        depth, turn = self._find_deepest(request)
        tail = tuple(messages[depth:])
        if turn is None or any(m.role is Role.ASSISTANT for m in tail):
            return request
        tokens = self._extend(turn, tail, tools)
        if tokens is None:
            request.refused = True
            return request
        siblings = self._children.get(turn.number, ())
        deleted = turns.repeats_sibling(siblings, request.digests[depth:])
        start = 0 if deleted else depth
        return Prompt(
            tokens=tokens,
            turn=turn,
            parent=turn.number,
            branch=Branch.TURN_DELETED if deleted else None,
            echo_changes=turns.compare_echo(turn, messages[depth - 1]),
            added=tuple(messages[start:]),
            digests=tuple(request.digests[start:]),
            reused=len(turn.tokens),
            digest=request.chain[-1],
            tools=request.tools,
            thread=_inherit_thread(thread, turn),
        )

    def match_text(self, prompt: str | Sequence[int], thread: ThreadInfo) -> Prompt:
        """Find the turn whose ids are a prefix of a prompt without messages.

        Text is encoded with the special tokens that the tokenizer adds. Raises `RequestError`.
        """
        tokenizer = None if self._rendering is None else self._rendering.tokenizer
        if tokenizer is None or tokenizer.token_bytes is None:
            msg = (
                "prompt requires exact mode and a tokenizer that decodes single ids; send messages"
            )
            raise Unsupported(msg, param="prompt")
        if isinstance(prompt, str):
            prompt = tokenizer.encode(prompt, add_special_tokens=True)
        if not prompt or min(prompt) < 0 or max(prompt) >= tokenizer.size:
            msg = f"prompt={list(prompt)!r:.60} must be a list of token ids below {tokenizer.size}"
            raise RequestError(msg, param="prompt")
        ids = np.asarray(prompt, np.int32)
        tokens, shared, near = self._find_nearest(ids)
        root = turn = near
        while turn is not None and len(turn.tokens) > shared:
            root = turn
            turn = turn.parent
        branch = None
        if turn is None and root is not None and not len(ids) == shared == root.prompt_length:
            branch = Branch.NEW_THREAD if shared < root.prompt_length else Branch.HISTORY_EDITED
        parent = near if branch else turn
        digest = _digest_ids(ids)
        return Prompt(
            tokens=tokens, turn=turn, parent=parent.number if parent else None, branch=branch,
            added=(), digests=(digest,), reused=shared, digest=digest, tools=b"", thread=thread,
        )  # fmt: skip

    def set_observed(self, prompt: Prompt, raw: bytes) -> Prompt:
        """Return `prompt` with the ids that the engine reports, a JSON array.

        The parent's leading ids are compared as bytes; only the rest is decoded.
        """
        inner = raw.strip()[1:-1]
        if prompt.turn is None or prompt.branch is not None:
            tokens, shared, _ = self._find_nearest(decode_ids(inner))
            return replace(prompt, tokens=tokens, reused=shared)
        parent = prompt.turn.tokens
        known = b"".join(parent.to_json(after=b","))
        if inner.startswith(known):
            tokens = parent.extend(decode_ids(inner[len(known) :]))
            return replace(prompt, tokens=tokens, reused=len(parent))
        ids = decode_ids(inner)
        shared = parent.shared_prefix(TokenSequence(ids))
        tokens = parent.truncate(shared).extend(ids[shared:])
        branch = None if shared == len(parent) else Branch.ENGINE_RERENDERED
        return replace(prompt, tokens=tokens, reused=shared, branch=branch)

    def add(self, prompt: Prompt, number: int, tokens: TokenSequence, answer: Message) -> None:
        """Add an answered call as a turn that later requests can extend.

        `tokens` are the ids of prompt and answer.
        """
        turn = turns.Turn(
            number=number,
            tokens=tokens,
            prompt_length=len(prompt.tokens),
            answer=answer,
            wording=turns.hash_wording(answer),
            digest=turns.digest_message(answer, {}),
            digests=prompt.digests,
            parent=prompt.turn if prompt.branch is None else None,
            tools=prompt.tools,
            thread=prompt.thread,
        )
        digest = turns.chain_digest(prompt.digest, turn.digest)
        self._by_digest[digest] = (*self._by_digest.get(digest, ()), turn)
        self._answers[prompt.digest] = turn
        self._turns.append(turn)
        if answer.tool_calls:
            self._by_calls[turns.list_call_ids(answer)] = turn
        if turn.parent is not None:
            parent = turn.parent.number
            self._children[parent] = (*self._children.get(parent, ()), turn)

    def restore(self, calls: Sequence[Call]) -> None:
        """Rebuild turns from recorded calls."""
        origins: dict[int, tuple[turns.Turn | None, _Messages, _Messages]] = {}
        """The turn that a call extends, its conversation, and the messages that the call added."""
        restored: dict[int | None, tuple[turns.Turn, _Messages]] = {}
        for call in calls:
            extends = call.branch is None if call.raw_prompt else adds_to_parent(call)
            origin = restored.get(call.parent) if extends else None
            turn, before = origin or (None, ())
            added = call.messages
            if call.resumed and call.parent in origins:  # continues an interrupted answer
                turn, before, added = origins[call.parent]
            origins[call.number] = turn, before, added
            if call.answer is None or not can_be_extended(call):
                continue
            messages = (*before, *added)
            kind = None if call.kind is TraceKind.MAIN else call.kind
            thread = ThreadInfo(call.thread, call.parent_thread, kind)
            given = len(call.prompt_ids) - call.resumed - call.forced
            ids = call.prompt_ids[:given]
            if call.raw_prompt:
                before = ()
                digests = [_digest_ids(ids)]
                request = turns.Conversation(b"", digests=digests, chain=digests)
            else:
                request = self._digest_request(messages, self._digest_tools(call.tools), thread)
            prompt = Prompt(
                tokens=self._find_nearest(ids)[0],
                turn=turn,
                parent=call.parent,
                branch=call.branch,
                added=added,
                digests=tuple(request.digests[len(before) :]),
                reused=0,
                digest=request.chain[-1],
                tools=request.tools,
                thread=thread,
            )
            rest = np.concatenate((call.prompt_ids[given:], call.sampled_ids))
            self.add(prompt, call.number, prompt.tokens.extend(rest), call.answer)
            restored[call.number] = self._turns[-1], (*messages, call.answer)

    def is_extended(self, number: int) -> bool:
        """Whether a later turn extends the call `number`."""
        return number in self._children

    # ----------------------------------------------------------------------- digests
    def _digest_tools(self, tools: Sequence[Tool]) -> bytes:
        for known, digest in self._tools:
            if known is tools:
                return digest
        digest = turns.digest_tools(tools)
        self._tools = [(tools, digest), *self._tools][:_REMEMBERED]
        return digest

    def _digest_request(
        self, messages: Sequence[Message], tools: bytes, thread: ThreadInfo
    ) -> turns.Conversation:
        """Digest a request, starting from the known request with the longest shared prefix."""
        best = turns.Conversation(tools, chain=[tools])
        shared = 0
        for known in self._requests:
            if known.tools == tools:
                length = count_shared(known.messages, messages, operator.is_)
                if length > shared:
                    best = known
                    shared = length
        request = best.cut(shared)
        digests = request.digests
        chain = request.chain
        answers = (m for m in reversed(messages[:shared]) if m.tool_calls)
        positions = next(map(turns.call_positions, answers), {})
        for message in messages[shared:]:
            turn = self._answers.get(chain[-1])
            if turn is not None and turn.answer == message:  # an unchanged echo
                digests.append(turn.digest)
            else:
                digests.append(turns.digest_message(self._restore_answer(message), positions))
            chain.append(turns.chain_digest(chain[-1], digests[-1]))
            if message.tool_calls:
                positions = turns.call_positions(message)
        request.refused = False
        request.thread = thread
        request.messages = messages
        others = [known for known in self._requests if known is not request]
        self._requests = [request, *others][:_REMEMBERED]
        return request

    def _restore_answer(self, message: Message) -> Message:
        """Return an echoed answer as it was sampled, if only this was changed.

        Clients leave out the text beside calls. Of arguments that are not JSON they keep a part,
        repair it, or write an empty object.
        """
        turn = self._by_calls.get(turns.list_call_ids(message)) if message.tool_calls else None
        if turn is None:
            return message
        dropped = not turns.strip_text(message.content)
        restored = replace(
            message,
            content=turn.answer.content if dropped else message.content,
            tool_calls=turns.restore_malformed(message.tool_calls, turn.answer.tool_calls),
        )
        same = turns.digest_message(restored, {}) == turn.digest
        return restored if same else message

    def _find_deepest(self, request: turns.Conversation) -> tuple[int, turns.Turn | None]:
        """Return the length of the longest conversation that the request repeats, and its turn."""
        for depth in range(len(request.messages), 0, -1):
            message = request.messages[depth - 1]
            if message.role is Role.ASSISTANT:
                found = self._by_digest.get(request.chain[depth])
                if found:
                    return depth, _select_by_call_ids(found, message)
        return 0, None

    def _find_delegation(self, messages: Sequence[Message]) -> ThreadInfo:
        """Recognize a sub-agent's thread: its first message is the argument of a tool call.

        A client may start the sub-agent before the answer with that call is complete.
        """
        last = messages[-1] if messages else None
        answered = any(message.role is Role.ASSISTANT for message in messages)
        if last is None or answered or last.role is not Role.USER:
            return UNNAMED
        task = f"\n{last.content.strip()}"
        answers = [(turn.thread, turn.answer.tool_calls) for turn in self._turns]
        for thread, calls in (*answers, *list(self.unfinished.values())):
            for call in calls:
                if isinstance(call, ToolCall) and turns.gives_task(call, task):
                    return ThreadInfo(call.id, thread.id, TraceKind.SUBAGENT)
        return UNNAMED

    # ----------------------------------------------------------------------- prompts
    def _extend(
        self, turn: turns.Turn, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> TokenSequence | None:
        """Append the rendered tail to the turn's exact ids; None if the template cannot."""
        if self._rendering is None:
            return _EMPTY
        answer = len(turn.tokens) - turn.prompt_length
        known = turn.tokens.to_array(answer + END)
        end = known[: len(known) - answer]
        sampled = known[len(known) - answer :]
        more = self._rendering.render_extension(end, sampled, tail, tools)
        return None if more is None else turn.tokens.extend(more)

    def _find_nearest(self, ids: Ids) -> tuple[TokenSequence, int, turns.Turn | None]:
        """Find the turn with the longest shared prefix; return the tokens, its length, the turn."""
        tokens = TokenSequence(ids)
        shared, near = turns.nearest_by_tokens(self._turns, tokens)
        if near is None or not shared:
            return tokens, shared, near
        return near.tokens.truncate(shared).extend(ids[shared:]), shared, near

    def branch(self, request: turns.Conversation, tools: Sequence[Tool]) -> Prompt:
        """Render a whole conversation; the parent is the turn with the most shared ids.

        Raises `RequestError`.
        """
        messages = request.messages
        tokens = _EMPTY
        shared = 0
        near = None
        if self._rendering is not None:
            ids = self._rendering.render(messages, tools)
            tokens, shared, near = self._find_nearest(ids)
        alike, why = turns.nearest_by_meaning(self._turns, request)
        thread = (
            request.thread if why is Branch.NEW_THREAD else _inherit_thread(request.thread, alike)
        )
        kinds = (t.thread.kind for t in reversed(self._turns) if t.thread.id == thread.id)
        summarised = next(kinds, None) is TraceKind.COMPACTION is not thread.kind
        if summarised and why not in {None, Branch.NEW_THREAD}:
            why = Branch.COMPACTED
        reason = Branch.RENDERER_REFUSED if request.refused else why
        near = near or alike
        return Prompt(
            tokens=tokens,
            parent=near.number if near is not None and reason is not None else None,
            branch=reason,
            added=tuple(messages),
            digests=tuple(request.digests),
            reused=shared,
            digest=request.chain[-1],
            tools=request.tools,
            thread=thread,
        )


def _inherit_thread(thread: ThreadInfo, turn: turns.Turn | None) -> ThreadInfo:
    """Return `turn`'s thread for an unnamed thread that continues a sub-agent, else `thread`."""
    goes_on = turn is not None and turn.thread.kind is TraceKind.SUBAGENT and thread.id is None
    return turn.thread if turn is not None and goes_on else thread


def _select_by_call_ids(candidates: Sequence[turns.Turn], echoed: Message) -> turns.Turn:
    """Select the turn whose call ids are echoed, among turns of equal meaning; else the latest."""
    ids = turns.list_call_ids(echoed)
    for turn in reversed(candidates):
        if ids and turns.list_call_ids(turn.answer) == ids:
            return turn
    return candidates[-1]


def _digest_ids(ids: Ids) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def can_be_extended(call: Call) -> bool:
    """Whether later calls can extend a recorded one: not a partial answer, nor a side call."""
    return call.outcome is not CallOutcome.CLIENT_GONE and call.kind is not TraceKind.SIDE
