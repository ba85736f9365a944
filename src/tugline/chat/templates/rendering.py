"""Render messages to token ids and parse them back, for one model, with the `renderers` library.

`render` renders a whole conversation. `render_extension` returns only the ids that follow existing
ones, given the end of the prompt and the sampled ids; it returns None if the template cannot
continue them without changing them (I1). Except for `render`, the cost is proportional to the new
part (I7).
"""

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import msgspec
import numpy as np
from renderers.base import MODEL_RENDERER_MAP, ToolCallParseStatus, build_training_sample

from tugline.chat.model_call import (
    FORCING,
    JsonObject,
    ToolChoice,
    place_system,
    serialize_tool,
    start_with_user,
)
from tugline.chat.templates.base import (
    Markers,
    TailTexts,
    Template,
    create,
    encode_arguments,
    find_call_index,
    find_opening,
    parse_json_call,
    serialize_text,
    template,
)
from tugline.chat.tokenizer import Tokenizer
from tugline.chat.tokens import END
from tugline.errors import Unsupported
from tugline.types import Ids, Mask, Message, Role, Tool

_CACHED = 64
_CONTEXT = 24
"""Number of ids around a mark that a template may inspect."""
_LIBRARY_ERRORS = (ValueError, TypeError, RecursionError)
"""Raised by the library for messages it cannot render, and by JSON for a huge number."""
_WELL_FORMED = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON})


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed answer; a malformed tool call stays in `content` as written."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    """Name and JSON arguments of each well-formed call."""


class Rendering:
    """A model's template, bound to its tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: str, *, thinking_retention: str = "all"
    ) -> None:
        self.name = renderer
        self.tokenizer = tokenizer
        self.thinking_retention = thinking_retention
        self._renderer = create(tokenizer, renderer, thinking_retention)
        self.template: Template = template(renderer)
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.markers: Markers = self.template.markers(tokenizer)
        self.marks = self.markers.ids.union(self.stop_ids) - {-1}
        """Ids of marks, which are not text."""
        self._is_mark = np.zeros(max(self.marks, default=0) + 2, np.bool_)
        self._is_mark[list(self.marks)] = True
        self._tools: tuple[Sequence[Tool], list[JsonObject] | None] = ((), None)
        self._tails = TailTexts(tokenizer)
        self._renders: OrderedDict[bytes, Ids] = OrderedDict()
        self._openings: dict[tuple[int, ...], bool] = {}

    @classmethod
    def for_model(
        cls, tokenizer: Tokenizer, model_name: str, *, thinking_retention: str = "all"
    ) -> Self | None:
        """Create the rendering of a published model by its exact name; None if unknown."""
        renderer = MODEL_RENDERER_MAP.get(model_name)
        if renderer is None:
            return None
        return cls(tokenizer, renderer, thinking_retention=thinking_retention)

    @property
    def incremental(self) -> bool:
        """Whether answers can be parsed while they are sampled, not only at their end."""
        return self.tokenizer.token_bytes is not None and self.template.incremental

    # ----------------------------------------------------------------------- messages to ids
    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """Render a whole conversation to ids, ready for the model's next turn.

        Raises `Unsupported`, naming the field, if the template cannot render its content.
        """
        data = msgspec.json.encode((list(tools), list(messages)))
        key = hashlib.blake2b(data, digest_size=16).digest()
        ids = self._renders.pop(key, None)
        if ids is None:
            ids = self._render_ids(messages, tools)
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
        try:
            rendered = build_training_sample(
                self._renderer,
                self._serialize(messages),
                role_to_mask=lambda message: message["role"] == Role.ASSISTANT,
                tools=self._serialize_tools(tools),
                ensure_final_stop=True,
            )
        except _LIBRARY_ERRORS as error:
            msg = f"the template of {self.name} cannot render these messages: {error}"
            raise Unsupported(msg, param="messages") from error
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
        shape = self._find_shape(end[-END:], sampled, tail)
        known = self._tails.encode(shape, [m.content for m in tail]) if shape else None
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
        template, roles = self.template, [message.role for message in tail]
        numbered = template.named_results or template.numbered_calls or template.result_separator
        usable = {Role.TOOL} if self.thinking_retention != "all" else {Role.TOOL, Role.USER}
        if numbered or not self.markers.reasons or not usable.issuperset(roles):
            return None
        if not len(sampled) or sampled[-1] not in self.stop_ids or any(m.images for m in tail):
            return None
        marks = [ids[self._find_marks(ids)].tobytes() for ids in (end, sampled)]
        return (*marks, sampled[-2:].tobytes(), *roles)

    def _bridge(
        self, end: Ids, sampled: Ids, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> Ids | None:
        before: list[int] = end[-END:].tolist()
        messages = self._serialize_tail(before, sampled, tail)
        answer = self._abridge(sampled)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before, answer, messages, tools=self._serialize_tools(tools)
            )
        except _LIBRARY_ERRORS:  # a full render reports the error in the messages
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
        text = force.opening
        if choice.names:
            text += choice.names[0] + (force.after or "")
        if force.closing or force.skipping:
            generation = self.render((Message(Role.USER, "x"),), ())[-END:]
            if self.starts_in_reasoning(generation):
                text = force.closing + text
            elif self.markers.think_end not in generation:
                text = force.skipping + text
        return np.asarray(self.tokenizer.encode(text), np.int32)

    # ----------------------------------------------------------------------- ids to messages
    def _find_marks(self, ids: Ids) -> Mask:
        """Return a mask of the `ids` that are `marks`."""
        mask: Mask = self._is_mark.take(ids, mode="clip")
        return mask

    def parse(
        self, sampled: Sequence[int], end: Ids | None = None, tools: Sequence[Tool] = ()
    ) -> Parsed:
        """Parse a whole answer with the library; unparsable parts stay text."""
        ids = list(sampled)
        parsed = self._parse(ids, None if end is None else end[-END:].tolist(), tools)
        if parsed is None:
            return Parsed(self.tokenizer.decode(ids).strip(), None, ())
        texts = [str(parsed.content)]
        calls: list[tuple[str, str]] = []
        for call in parsed.tool_calls:
            if _is_well_formed(call):
                calls.append((call.name, encode_arguments(call.arguments)))
            else:
                texts.append(self.tokenizer.decode(ids[slice(*call.token_span)]))
        content = "\n".join(text.strip() for text in texts if text.strip())
        return Parsed(content, (parsed.reasoning_content or "").strip() or None, tuple(calls))

    def parse_calls(
        self, block: list[int], tools: Sequence[Tool] = ()
    ) -> tuple[tuple[str, str], ...]:
        """Parse a closed block to names and JSON arguments of calls; empty if malformed."""
        if self.template.json_calls:
            call = parse_json_call(self.tokenizer.decode_bytes(block[1:-1]))
            if call is not None:
                return (call,)
        parsed = self._parse([*self.markers.lead, *block], None, tools)
        if parsed is None or not all(_is_well_formed(call) for call in parsed.tool_calls):
            return ()
        return tuple((call.name, encode_arguments(call.arguments)) for call in parsed.tool_calls)

    def starts_in_reasoning(self, end: Ids) -> bool:
        """Whether an answer to a prompt that ends in `end` begins inside reasoning."""
        ids: list[int] = end[-END:].tolist()
        at = len(ids)
        for token in reversed(ids):
            if token == self.markers.think_end:
                return False
            if token in (self.markers.think, *self.stop_ids):
                break
            at -= 1
        opening = tuple(ids[max(at - 1, 0) :])
        known = self._openings.get(opening)
        if known is None:
            parsed = self._renderer.parse_response(self.tokenizer.encode("x"), prompt_ids=ids)
            if len(self._openings) >= _CACHED:
                self._openings.clear()
            known = self._openings[opening] = parsed.reasoning_content is not None
        return known

    def _parse(
        self, ids: list[int], prompt: list[int] | None = None, tools: Sequence[Tool] = ()
    ) -> Any:
        """Parse with the library; None if that fails."""
        try:
            return self._renderer.parse_response(
                ids, tools=self._serialize_tools(tools), prompt_ids=prompt
            )
        except _LIBRARY_ERRORS:
            return None

    # ----------------------------------------------------------------------- the library's input
    def _render_ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """Render a conversation; where a template needs a user's message, an empty one is added."""
        try:
            ids = self._renderer.render_ids(
                self._serialize(messages),
                tools=self._serialize_tools(tools),
                add_generation_prompt=True,
            )
        except _LIBRARY_ERRORS as error:
            if (started := start_with_user(messages)) is not None:
                return self._render_ids(started, tools)
            msg = f"the template of {self.name} cannot render these messages: {error}"
            raise Unsupported(msg, param="messages") from error
        if messages[-1].role is Role.ASSISTANT and self.template.reopening:
            ids = [*ids, *self.tokenizer.encode(self.template.reopening)]
        rendered = np.asarray(ids, np.int32)
        rendered.flags.writeable = False  # shared by all callers
        return rendered

    def _serialize(self, messages: Sequence[Message]) -> list[JsonObject]:
        """Serialize a whole conversation, with tool results linked to their calls."""
        calls: dict[str, tuple[str, str]] = {}
        number = count()
        serialized: list[JsonObject] = []
        for message in self._place_system(messages):
            fields = serialize_text(message)
            for call, fields_of_call in zip(
                message.tool_calls, fields.get("tool_calls", ()), strict=False
            ):
                numbered = f"functions.{call.name}:{next(number)}"
                call_id = numbered if self.template.numbered_calls else call.id
                calls[call.id] = (call.name, call_id)
                fields_of_call["id"] = call_id
            if message.tool_call_id in calls:
                self._link_result(fields, calls[message.tool_call_id])
            serialized.append(fields)
        return serialized

    def _serialize_tail(
        self, end: list[int], sampled: Ids, tail: Sequence[Message]
    ) -> list[JsonObject]:
        """Serialize the messages after an answer, with tool results linked to its calls."""
        template = self.template
        messages = [serialize_text(m) for m in self._place_system(tail, leading=False)]
        results = [message for message in messages if message["role"] == "tool"]
        if results and (template.named_results or template.numbered_calls):
            parsed = self._parse(sampled.tolist(), end)
            calls = [call for call in parsed.tool_calls if _is_well_formed(call)] if parsed else []
            indices = [find_call_index(result) for result in results]
            if sorted(indices) != list(range(len(calls))):
                indices = list(range(len(results)))
            for result, index in zip(results, indices, strict=True):
                if index < len(calls):
                    self._link_result(result, (calls[index].name, calls[index].id))
        if template.result_separator and len(results) > 1:
            results.sort(key=find_call_index)
            joined = template.result_separator.join(result["content"] for result in results)
            others = [message for message in messages if message["role"] != "tool"]
            messages = [{**results[0], "content": joined}, *others]
        return messages

    def _abridge(self, sampled: Ids) -> list[int]:
        """Return the parts of an answer that a bridge reads: its start, end, and around marks.

        All of it if reasoning is marked by text, or if the answer's calls are parsed again.
        """
        ids: list[int] = sampled.tolist()
        if not self.markers.reasons or self.template.named_results:
            return ids
        result, at = ids[:_CONTEXT], _CONTEXT
        for mark in np.flatnonzero(self._find_marks(sampled)).tolist():
            if mark + _CONTEXT > at:
                result += ids[max(at, mark - _CONTEXT) : mark + _CONTEXT]
                at = mark + _CONTEXT
        return result + ids[max(at, len(ids) - _CONTEXT) :]

    def _link_result(self, result: JsonObject, call: tuple[str, str | None]) -> None:
        name, call_id = call
        if self.template.named_results:
            result["name"] = name
        if self.template.numbered_calls and call_id:
            result["tool_call_id"] = call_id

    def _place_system(
        self, messages: Sequence[Message], *, leading: bool = True
    ) -> Sequence[Message]:
        late = self.template.late_system
        return messages if late else place_system(messages, leading=leading)

    def _serialize_tools(self, tools: Sequence[Tool]) -> list[JsonObject] | None:
        """Serialize the tools; cached while they are the same object."""
        known, serialized = self._tools  # large requests are rendered in threads
        if tools is not known:
            serialized = [serialize_tool(tool) for tool in tools] or None
            self._tools = (tools, serialized)
        return serialized


def _is_well_formed(call: Any) -> bool:
    """Whether a call is well-formed; arguments that violate its schema are left to the harness."""
    named = isinstance(call.name, str) and call.name != "" and call.name.isprintable()
    if call.status not in _WELL_FORMED or not named:
        return False
    return call.status is ToolCallParseStatus.OK or isinstance(call.arguments, dict)
