"""Render messages to token ids, for one model, with the `renderers` library.

`render` renders a whole conversation. `render_extension` returns only the ids that follow existing
ones, given the end of the prompt and the sampled ids; it returns None if the template cannot
continue them without changing them (I1). Except for `render`, the cost is proportional to the new
part (I7).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Self

import msgspec
import numpy as np
from renderers.base import MODEL_RENDERER_MAP

from tugline.chat.calls.base import ParsedCall
from tugline.chat.model_call import FORCING, JsonObject, ToolChoice, serialize_tool
from tugline.chat.stream_parser import StreamParser
from tugline.chat.templates.answers import AnswerSyntax
from tugline.chat.templates.base import TailTexts, create, template
from tugline.chat.templates.contents import SPECIAL_TOKENS, ContentTokenizer
from tugline.chat.templates.library import (
    LIBRARY_ERRORS,
    Library,
    find_call_index,
    find_opening,
    link_result,
    place_late_system,
    serialize_text,
)
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import END
from tugline.errors import ConfigError
from tugline.types import Ids, MalformedCalls, Mask, Message, Role, Tool

_CACHED = 64
_CONTEXT = 24
"""Number of ids around a mark that a template may inspect."""


def find_template(model: str) -> str | None:
    """Return the chat template to suggest for a model, by its name or that of a folder of it."""
    known: Mapping[str, str] = MODEL_RENDERER_MAP
    if model in known:
        return known[model]
    end = "/" + model.rstrip("/").rpartition("/")[2].lower()
    found = {template for name, template in known.items() if name.lower().endswith(end)}
    return found.pop() if len(found) == 1 else None


class Rendering(AnswerSyntax):
    """A model's template, bound to its tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        renderer: str,
        *,
        thinking_retention: str = "all",
        special_tokens_in_contents: str = "text",
    ) -> None:
        """Raises `ConfigError`."""
        if special_tokens_in_contents not in SPECIAL_TOKENS:
            known = ", ".join(SPECIAL_TOKENS)
            msg = (
                f"special_tokens_in_contents={special_tokens_in_contents!r} must be one of {known}"
            )
            raise ConfigError(msg)
        self.name = renderer
        self.thinking_retention = thinking_retention
        self.special_tokens_in_contents = special_tokens_in_contents
        self.options = {
            "thinking_retention": thinking_retention,
            "special_tokens_in_contents": special_tokens_in_contents,
        }
        """Options by name, to make the same rendering elsewhere."""
        escapes = special_tokens_in_contents == "text" and not template(renderer).encodes_contents
        contents = ContentTokenizer(tokenizer, escapes=escapes)
        self._renderer = create(contents, renderer, thinking_retention)
        super().__init__(tokenizer, renderer, self._renderer.get_stop_token_ids())
        self._library = Library(renderer, self._renderer, self.template, contents)
        self._tools: tuple[Sequence[Tool], list[JsonObject] | None] = ((), None)
        self._tails = TailTexts(tokenizer)
        self._renders: OrderedDict[bytes, Ids] = OrderedDict()

    @classmethod
    def for_model(
        cls,
        tokenizer: Tokenizer,
        model_name: str,
        *,
        thinking_retention: str = "all",
        special_tokens_in_contents: str = "text",
    ) -> Self | None:
        """Create the rendering of a published model by its exact name; None if unknown."""
        renderer = MODEL_RENDERER_MAP.get(model_name)
        if renderer is None:
            return None
        return cls(
            tokenizer,
            renderer,
            thinking_retention=thinking_retention,
            special_tokens_in_contents=special_tokens_in_contents,
        )

    # ----------------------------------------------------------------------- messages to ids
    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """Render a whole conversation to ids, ready for the model's next turn.

        Raises `Unsupported`, naming the field, if the template cannot render its content.
        """
        data = msgspec.json.encode((list(tools), list(messages)))
        key = hashlib.blake2b(data, digest_size=16).digest()
        ids = self._renders.pop(key, None)
        if ids is None:
            ids = np.asarray(self._library.render(messages, tools), np.int32)
            ids.flags.writeable = False  # shared by all callers
        self._renders[key] = ids
        if len(self._renders) > _CACHED:
            self._renders.popitem(last=False)
        return ids

    def render_answers(
        self, messages: Sequence[Message], tools: Sequence[Tool]
    ) -> tuple[Ids, Mask]:
        """Render a finished conversation to ids, and a mask of the model's own, both ``(n,)``.

        Raises `Unsupported` as `render` does.
        """
        rendered = self._library.render_answers(messages, tools)
        return np.array(rendered.token_ids, np.int32), np.array(rendered.loss_mask, np.bool_)

    def render_extension(
        self, end: Ids, sampled: Ids, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> Ids | None:
        """Render `tail` after a prompt ending in `end` and its answer `sampled`.

        Without a tail the model answers again. Returns None if the template would change existing
        ids.
        """
        if not tail:
            closed = self.render((Message(Role.USER, "u"), Message(Role.ASSISTANT, "a")), ())
            return find_opening(closed, "a", sampled, self.tokenizer)
        contents = [message.content for message in tail]
        shape = self._find_shape(end[-END:], sampled, tail)
        if shape and self._library.contents.has_tokens(contents):
            shape = None
        known = self._tails.encode(shape, contents) if shape else None
        if known is not None:
            return np.asarray(known, np.int32)
        ids = self._bridge(end, sampled, tail, tools)
        if shape and ids is not None:

            def render(contents: Sequence[str]) -> list[int] | None:
                other = [Message(m.role, text) for m, text in zip(tail, contents, strict=True)]
                rendered = self._bridge(end, sampled, other, tools)
                return None if rendered is None else rendered.tolist()

            self._tails.learn(shape, len(tail), render)
        return ids

    def _find_shape(self, end: Ids, sampled: Ids, tail: Sequence[Message]) -> Hashable:
        """Return all that the ids of `tail` depend on, except its contents; None if unknown.

        A bridge reads the marks, the id before the last, and only the text of tool results, unless
        it numbers or names them. Unfinished answers have no shape.
        """
        template = self.template
        roles = [message.role for message in tail]
        numbered = template.named_results or template.numbered_calls or template.result_separator
        usable = {Role.TOOL} if self.thinking_retention != "all" else {Role.TOOL, Role.USER}
        if numbered or not self.markers.reasons or not usable.issuperset(roles):
            return None
        if not len(sampled) or sampled[-1] not in self.stop_ids or any(m.images for m in tail):
            return None
        marks = [ids[self.find_marks(ids)].tobytes() for ids in (end, sampled)]
        return (*marks, sampled[-2:].tobytes(), *roles)

    def _bridge(
        self, end: Ids, sampled: Ids, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> Ids | None:
        before: list[int] = end[-END:].tolist()
        messages = self._library.escape(self._serialize_tail(before, sampled, tail))
        answer = self._abridge(sampled)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before, answer, messages, tools=self._serialize_tools(tools)
            )
        except LIBRARY_ERRORS:  # a full render reports the error in the messages
            return None
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        known = before + answer
        if len(ids) <= len(known) or ids[: len(known)] != known:
            return None
        new = ids[len(known) :]
        if self.template.gap and answer and answer[-1] in self.stop_ids:
            new = self.tokenizer.encode(self.template.gap) + new
        return np.asarray(new, np.int32)

    def force_tool_call(self, choice: ToolChoice) -> Ids | None:
        """Return ids to append to the prompt to force a tool call; None if unknown.

        They close reasoning first, and end before the tool's name (`ChoiceMode.REQUIRED`) or before
        the arguments (`ChoiceMode.NAMED`). A choice among several names cannot be forced.
        """
        force = self.template.force
        if force is None or choice.mode not in FORCING:
            return None
        if len(choice.names) > 1 or (choice.names and force.after is None):
            return None
        contents = self._library.contents
        text = force.opening
        if choice.names:
            text += contents.escape(choice.names[0]) + (force.after or "")
        if force.closing or force.skipping:
            generation = self.render((Message(Role.USER, "x"),), ())[-END:]
            if self.starts_in_reasoning(generation):
                text = force.closing + text
            elif self.markers.think_end not in generation:
                text = force.skipping + text
        return np.asarray(contents.encode(text), np.int32)

    # ----------------------------------------------------------------------- the library's input
    def _serialize_tail(
        self, end: list[int], sampled: Ids, tail: Sequence[Message]
    ) -> list[JsonObject]:
        """Serialize the messages after an answer, with tool results linked to its calls."""
        template = self.template
        placed = place_late_system(tail, template, leading=False)
        messages = [serialize_text(message) for message in placed]
        results = [message for message in messages if message["role"] == "tool"]
        if results and (template.named_results or template.numbered_calls):
            calls = self._list_calls(end, sampled, len(results))
            indices = [find_call_index(result) for result in results]
            if sorted(indices) != list(range(len(calls))):
                indices = list(range(len(results)))
            for result, index in zip(results, indices, strict=True):
                if index < len(calls):
                    link_result(result, (calls[index].name, calls[index].written_id), template)
        if template.result_separator and len(results) > 1:
            results.sort(key=find_call_index)
            joined = template.result_separator.join(result["content"] for result in results)
            others = [message for message in messages if message["role"] != "tool"]
            messages = [{**results[0], "content": joined}, *others]
        return messages

    def _list_calls(self, end: list[int], sampled: Ids, results: int) -> list[ParsedCall]:
        """List the calls of an answer, those that are malformed only if they have results."""
        prompt = np.asarray(end, np.int32)
        for malformed in MalformedCalls:
            parser, _ = StreamParser.parse(self, prompt, sampled.tolist(), malformed=malformed)
            if len(parser.output.calls) >= results:
                break
        return parser.output.calls

    def _abridge(self, sampled: Ids) -> list[int]:
        """Return the parts of an answer that a bridge reads: its start, end, and around marks.

        All of it if reasoning is marked by text, or if the answer's calls are parsed again.
        """
        ids: list[int] = sampled.tolist()
        if not self.markers.reasons or self.template.named_results:
            return ids
        result = ids[:_CONTEXT]
        at = _CONTEXT
        for mark in np.flatnonzero(self.find_marks(sampled)).tolist():
            if mark + _CONTEXT > at:
                result += ids[max(at, mark - _CONTEXT) : mark + _CONTEXT]
                at = mark + _CONTEXT
        return result + ids[max(at, len(ids) - _CONTEXT) :]

    def _serialize_tools(self, tools: Sequence[Tool]) -> list[JsonObject] | None:
        """Serialize the tools; cached while they are the same object."""
        known, serialized = self._tools  # large requests are rendered in threads
        if tools is not known:
            serialized = [serialize_tool(tool) for tool in tools] or None
            self._tools = (tools, serialized)
        return serialized
