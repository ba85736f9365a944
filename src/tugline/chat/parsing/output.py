"""An answer while it is parsed: its pieces, and the reading of its tool calls."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from tugline.chat.calls.base import ParsedCall
from tugline.chat.calls.values import Schemas, starts_with_json
from tugline.chat.model_call import Piece, ReasoningDelta, TextDelta
from tugline.chat.templates.answers import AnswerSyntax
from tugline.chat.tokenizer import Detokenizer
from tugline.types import MalformedCalls, Message, Role, Tool, ToolCall

Delta = type[TextDelta | ReasoningDelta]


class AnswerOutput:
    """The answer so far, and its pieces not yet returned."""

    def __init__(
        self, syntax: AnswerSyntax, call_prefix: str, stops: tuple[str, ...], *, guarded: bool
    ) -> None:
        """`guarded` holds back text that may begin a tag of a call."""
        self._tokenizer = syntax.tokenizer
        self._exact = syntax.incremental
        token_bytes: Mapping[int, bytes] = syntax.tokenizer.token_bytes or {}
        guard = syntax.template.guard_text if guarded else ""
        self.text = Detokenizer(token_bytes, stops=stops, guard=guard)
        self.reasoning = Detokenizer(token_bytes, guard=guard)
        self.parts: dict[Delta, Detokenizer] = {
            ReasoningDelta: self.reasoning,
            TextDelta: self.text,
        }
        self.reasoning_tokens = 0
        self.unread = 0
        """Ids after a stop string, in a vocabulary that cannot be decoded id by id."""
        self.calls: list[ParsedCall] = []
        self._sent: list[ToolCall] = []
        self._call_prefix = call_prefix
        self._pieces: list[Piece] = []

    def take_pieces(self) -> list[Piece]:
        """Return the pieces since the last call; adjacent text is one delta."""
        pieces = self._pieces
        self._pieces = []
        return pieces

    def add(self, kind: Delta, ids: list[int]) -> None:
        """Add ids of text or reasoning; ids after a stop string are ignored."""
        if kind is ReasoningDelta:
            self.reasoning_tokens += len(ids)
        if self._exact:
            self._emit(kind, self.parts[kind].feed(ids))
        else:
            self._add_decoded(kind, ids)

    def _add_decoded(self, kind: Delta, ids: list[int]) -> None:
        part = self.parts[kind]
        ended = part.matched_stop is not None
        self._emit(kind, part.feed_text(self._tokenizer.decode(ids)))
        stop = part.matched_stop
        if stop is not None and not ended:

            def has_stop(count: int) -> bool:
                return stop in self._tokenizer.decode(ids[:count])

            self.unread = len(ids) - bisect_left(range(len(ids)), True, key=has_stop)

    def write(self, kind: Delta, text: str) -> None:
        """Add a whole segment of text or reasoning."""
        self._emit(kind, self.parts[kind].write(text))

    def add_calls(self, calls: Sequence[ParsedCall]) -> None:
        """Add tool calls after the current segment."""
        self.finish_text()
        for call in calls:
            call_id = f"call_{self._call_prefix}_{len(self._sent)}"
            sent = ToolCall(call_id, call.name, call.arguments)
            self.calls.append(call)
            self._sent.append(sent)
            self._pieces.append(sent)

    def finish_text(self) -> None:
        """End the current segment of reasoning or text."""
        for kind, part in self.parts.items():
            self._emit(kind, part.finish_text())

    def build_message(self) -> Message:
        """Return the whole answer."""
        text = "".join(self.text.emitted)
        reasoning = "".join(self.reasoning.emitted)
        return Message(Role.ASSISTANT, text, tuple(self._sent), reasoning=reasoning or None)

    def _emit(self, kind: Delta, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if type(last) is kind:
            self._pieces[-1] = kind(last.text + text)
        else:
            self._pieces.append(kind(text))


class CallReader:
    """Reader of blocks of calls, with the tools of one request."""

    def __init__(
        self,
        syntax: AnswerSyntax,
        tools: Sequence[Tool] | None,
        malformed: MalformedCalls,
        *,
        forbidden: bool,
    ) -> None:
        """`tools` are the declared ones; None accepts malformed calls of any tool."""
        self._grammar = syntax.grammar
        self._schemas = Schemas(tools or ())
        self._names = None if tools is None else frozenset(tool.name for tool in tools)
        self._malformed = MalformedCalls.TEXT if forbidden else malformed
        self._forbidden = forbidden
        self.forbidden_calls = 0
        """Number of well-formed calls that became text, because calls are forbidden."""
        self.malformed: MalformedCalls | None = None
        """How malformed calls were delivered; None if there were none."""

    def declares(self, name: str) -> bool:
        """Whether the request declares a tool."""
        return self._names is None or name in self._names

    def is_cut_off(self, block: str) -> bool:
        """Whether a block begins as a call of a declared tool, and then is not even JSON."""
        opening = self._grammar.match_opening(block)
        if opening is None or not opening[1] or not self.declares(opening[0]):
            return False
        return not starts_with_json(block)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode the ids of a block for its grammar."""
        return self._grammar.tags.decode(ids)

    def restore(self, text: str) -> str:
        """Turn decoded text of a block into the text that was sampled."""
        return self._grammar.tags.restore(text)

    def parse(self, block: str) -> list[ParsedCall] | None:
        """Parse a decoded block; None if any of it is malformed, or calls are forbidden."""
        return None if self._forbidden else self._grammar.parse(block, self._schemas)

    def forbids(self, block: str) -> bool:
        """Whether a block is well-formed, and calls are forbidden."""
        return self._forbidden and self._grammar.parse(block, self._schemas) is not None

    def take_rest(self, block: str) -> ParsedCall | None:
        """Return the call that a block without well-formed calls is delivered as; None if text."""
        if self._forbidden:
            calls = self._grammar.parse(block, self._schemas)
            self.forbidden_calls += len(calls or ())
            if calls is not None:
                return None
        self.malformed = self._malformed
        found = None
        if self._malformed is MalformedCalls.RAW:
            found = self._grammar.find_malformed(block, self._names)
        return None if found is None else ParsedCall(*found)
