"""States of answers that consist of messages in channels, each with a header (harmony, Inkling)."""

from tugline.chat.model_call import TextDelta
from tugline.chat.parsing.states import Collecting, Parser, Reasoning, State, Text
from tugline.chat.templates.answers import Body


class ChannelHeader(Collecting):
    """Header of a message, which declares its body as reasoning, text or a call.

    A header that declares nothing known is text.
    """

    def mark(self, token: int) -> State:
        if token in (self.parser.syntax.start_id, self.marks.body_end) and self._ids:
            self.finish()
            self._ids = []
        if token == self.marks.body_end:
            return self
        self.add([token])
        if token not in self.marks.bodies:
            return self
        found = self.parser.syntax.read_header(self.decode(self._ids))
        if found is None or (found[0] is Body.CALL and not self.parser.takes_calls):
            self.finish()
            return Text(self.parser)
        body, name = found
        if body is Body.CALL:
            return ChannelCall(self.parser, self._ids, name)
        return Reasoning(self.parser) if body is Body.REASONING else Text(self.parser)

    def finish(self) -> None:
        self.output.add(TextDelta, self._ids)


class ChannelCall(Collecting):
    """Body of a message that is a call."""

    def __init__(self, parser: Parser, header: list[int], name: str) -> None:
        super().__init__(parser, [])
        self._header, self._name = header, name

    def end(self, token: int) -> None:
        if token == self.marks.call_end:
            self.close(token)
        else:
            self.finish()

    def close(self, token: int) -> None:
        """End the body; a header ends it without closing it."""
        closed = token not in self.marks.headers
        calls = self.parser.reader.parse(self._decode_block()) if closed else None
        if calls is not None:
            self.parser.add_calls(calls)
        else:
            self._add_malformed([token] if closed else [])

    def finish(self) -> None:
        self._add_malformed([])

    def _add_malformed(self, closing: list[int]) -> None:
        self.parser.add_rest(self._decode_block(), [*self._header, *self._ids, *closing])

    def _decode_block(self) -> str:
        return f"{self._name}\n{self.parser.reader.decode(self._ids)}"
