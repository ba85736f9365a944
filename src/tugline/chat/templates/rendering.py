"""Messages to token ids and back, for one model: a thin, typed face on the `renderers` library.

`render` renders a whole conversation. `render_extension` gives only the ids that follow those that
are already there, from the end of the prompt and the sampled ids; it returns None when the template
cannot continue them without changing them (I1). Only `render` costs more than what is new (I7).
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import msgspec
import numpy as np
from msgspec import structs
from renderers import create_renderer
from renderers.base import MODEL_RENDERER_MAP, ToolCallParseStatus

from tugline.chat.request import ChoiceMode, ToolChoice
from tugline.chat.templates.base import CONFIGS, Markers, Template, template
from tugline.chat.templates.plain import Plain, json_call, plain_message, plain_tool, written
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import ConfigError, Unsupported
from tugline.types import Ids, Message, Role, Tool

END = 64
"""How many ids of a prompt's end say all that matters for going on from it."""

_SYSTEM = frozenset({Role.SYSTEM, Role.DEVELOPER})
_PLACE = re.compile(r"call_.*_(\d+)")
RETENTIONS = ("all", "tool_cycle", "template")
_RENDERS = 64
_NEAR = 24
"""Ids around a mark that a template may look at."""
_FAULTS = (ValueError, TypeError, RecursionError)
"""What the library raises for messages it has no place for, and JSON for a monstrous number."""
_ACCEPTED = frozenset({ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON})


@dataclass(frozen=True, slots=True)
class Parsed:
    """An answer taken apart; a malformed tool call stays in `content` as it was written."""

    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]
    """Name and JSON arguments of each well-formed call."""


class Rendering:
    """One model's template, bound to its tokenizer."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: str, *, thinking_retention: str = "all"
    ) -> None:
        if renderer not in CONFIGS:
            msg = (
                f"renderer={renderer!r} is unknown; it must be one of {', '.join(sorted(CONFIGS))}"
            )
            raise ConfigError(msg)
        if thinking_retention not in RETENTIONS:
            msg = (
                f"thinking_retention={thinking_retention!r} is unknown; "
                f"it must be one of {', '.join(RETENTIONS)}"
            )
            raise ConfigError(msg)
        self.name = renderer
        self.tokenizer = tokenizer
        self.thinking_retention = thinking_retention
        self._renderer = _create(tokenizer, renderer, thinking_retention)
        self.template: Template = template(renderer)
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self.markers: Markers = self.template.markers(tokenizer)
        self._tools: tuple[Sequence[Tool], list[Plain] | None] = ((), None)
        self._renders: OrderedDict[bytes, Ids] = OrderedDict()
        self._openings: dict[tuple[int, ...], bool] = {}

    @classmethod
    def for_model(
        cls, tokenizer: Tokenizer, model_name: str, *, thinking_retention: str = "all"
    ) -> Self | None:
        """The rendering of a published model, by its exact name; None if it is not known."""
        renderer = MODEL_RENDERER_MAP.get(model_name)
        if renderer is None:
            return None
        return cls(tokenizer, renderer, thinking_retention=thinking_retention)

    @property
    def incremental(self) -> bool:
        """Whether an answer can be told while it is sampled; else it is held until its end."""
        return self.tokenizer.token_bytes is not None and self.template.followed

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        """Ids of the whole conversation, ready for the model's next turn.

        Raises `Unsupported` naming the field where the template has no place for what it holds.
        """
        key = hashlib.blake2b(
            msgspec.json.encode((list(tools), list(messages))), digest_size=16
        ).digest()
        ids = self._renders.get(key)
        if ids is None:
            ids = self._render_ids(messages, tools)
            self._renders[key] = ids
            if len(self._renders) > _RENDERS:
                self._renders.popitem(last=False)
        else:
            self._renders.move_to_end(key)
        return ids

    def render_extension(
        self, end: Ids, sampled: Ids, tail: Sequence[Message], tools: Sequence[Tool]
    ) -> Ids | None:
        """The ids that follow a prompt that ends in `end`, its answer `sampled`, for a new `tail`.

        None if the template would change the ids that are there.
        """
        before: list[int] = end[-END:].tolist()
        answer: list[int] = sampled.tolist()
        plain = self._tail(before, answer, tail)
        answer = self._outline(answer)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before, answer, plain, tools=self._plain_tools(tools)
            )
        except _FAULTS:  # a full render says what is wrong with the messages
            return None
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        kept = before + answer
        if len(ids) <= len(kept) or ids[: len(kept)] != kept:
            return None
        more = ids[len(kept) :]
        if self.template.gap and answer and answer[-1] in self.stop_ids:
            more = self.tokenizer.encode(self.template.gap) + more
        return np.asarray(more, np.int32)

    def force_tool_call(self, choice: ToolChoice) -> Ids | None:
        """Ids that, appended to the prompt, make the model call a tool; None if that is unknown.

        They close the reasoning first, and go as far as the name (`ChoiceMode.REQUIRED`) or as the
        arguments (`ChoiceMode.NAMED`). Of several names that may be called none can be forced.
        """
        force = self.template.force
        if force is None or choice.mode not in (ChoiceMode.REQUIRED, ChoiceMode.NAMED):
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

    def parse(
        self, sampled: Sequence[int], end: Ids | None = None, tools: Sequence[Tool] = ()
    ) -> Parsed:
        """What the library's parser makes of a whole answer, and what it makes nothing of."""
        ids = list(sampled)
        parsed = self._parsed(ids, None if end is None else end[-END:].tolist(), tools)
        if parsed is None:
            return Parsed(self.tokenizer.decode(ids).strip(), None, ())
        texts = [str(parsed.content)]
        calls: list[tuple[str, str]] = []
        for call in parsed.tool_calls:
            if _accepted(call):
                calls.append((call.name, written(call.arguments)))
            else:
                texts.append(self.tokenizer.decode(ids[slice(*call.token_span)]))
        content = "\n".join(text.strip() for text in texts if text.strip())
        return Parsed(content, (parsed.reasoning_content or "").strip() or None, tuple(calls))

    def parse_calls(
        self, block: list[int], tools: Sequence[Tool] = ()
    ) -> tuple[tuple[str, str], ...]:
        """Name and JSON arguments of the calls in one closed block; none if it is malformed."""
        if self.template.plain_json:
            call = json_call(self.tokenizer.decode_bytes(block[1:-1]))
            if call is not None:
                return (call,)
        parsed = self._parsed([*self.markers.lead, *block], None, tools)
        if parsed is None or not all(_accepted(call) for call in parsed.tool_calls):
            return ()
        return tuple((call.name, written(call.arguments)) for call in parsed.tool_calls)

    def starts_in_reasoning(self, end: Ids) -> bool:
        """Whether an answer to a prompt that ends in `end` begins inside reasoning."""
        ids: list[int] = end[-END:].tolist()
        place = len(ids)
        for token in reversed(ids):
            if token == self.markers.think_end:
                return False
            if token in (self.markers.think, *self.stop_ids):
                break
            place -= 1
        opening = tuple(ids[max(place - 1, 0) :])
        if opening not in self._openings:
            parsed = self._renderer.parse_response(self.tokenizer.encode("x"), prompt_ids=ids)
            if len(self._openings) >= _RENDERS:
                self._openings.clear()
            self._openings[opening] = parsed.reasoning_content is not None
        return self._openings[opening]

    def _parsed(
        self, ids: list[int], prompt: list[int] | None = None, tools: Sequence[Tool] = ()
    ) -> Any:
        """The library's reading; None where it fails, which nothing that is sampled may cause."""
        try:
            return self._renderer.parse_response(
                ids, tools=self._plain_tools(tools), prompt_ids=prompt
            )
        except _FAULTS:
            return None

    def _render_ids(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Ids:
        try:
            ids = self._renderer.render_ids(
                self._plain(messages), tools=self._plain_tools(tools), add_generation_prompt=True
            )
        except _FAULTS as error:
            msg = f"the template of {self.name} cannot render these messages: {error}"
            raise Unsupported(msg, param="messages") from error
        rendered = np.asarray(ids, np.int32)
        rendered.flags.writeable = False  # it is handed to many
        return rendered

    def _plain(self, messages: Sequence[Message]) -> list[Plain]:
        """A whole conversation as the library takes it, with results tied to their calls."""
        made: dict[str, tuple[str, str]] = {}
        number = count()
        plain: list[Plain] = []
        for message in self._placed(messages):
            one = plain_message(message)
            for call, plain_call in zip(
                message.tool_calls, one.get("tool_calls", ()), strict=False
            ):
                own = f"functions.{call.name}:{next(number)}"
                known = own if self.template.numbered else call.id
                made[call.id] = (call.name, known)
                plain_call["id"] = known
            if message.tool_call_id in made:
                self._tie(one, made[message.tool_call_id])
            plain.append(one)
        return plain

    def _tail(self, end: list[int], sampled: list[int], tail: Sequence[Message]) -> list[Plain]:
        """What follows an answer as the library takes it; results are tied to what it called."""
        plain = [plain_message(message) for message in self._placed(tail, leading=False)]
        results = [one for one in plain if one["role"] == "tool"]
        if results and (self.template.names or self.template.numbered):
            parsed = self._parsed(sampled, end)
            calls = [one for one in parsed.tool_calls if _accepted(one)] if parsed else []
            places = [_place(str(one.get("tool_call_id"))) for one in results]
            if sorted(places) != list(range(len(calls))):
                places = list(range(len(results)))
            for one, place in zip(results, places, strict=True):
                if place < len(calls):
                    self._tie(one, (calls[place].name, calls[place].id))
        if self.template.joint and len(results) > 1:
            results.sort(key=lambda one: _place(str(one.get("tool_call_id"))))
            joined = self.template.joint.join(one["content"] for one in results)
            others = [one for one in plain if one["role"] != "tool"]
            plain = [{**results[0], "content": joined}, *others]
        return plain

    def _outline(self, sampled: list[int]) -> list[int]:
        """An answer as far as a bridge looks at it: its beginning, its end, and around its marks.

        Not where reasoning is marked by text, nor where the answer's calls are read again.
        """
        if not self.markers.reasons or self.template.names:
            return sampled
        kept, at = sampled[:_NEAR], _NEAR
        marks = self.markers.ids.union(self.stop_ids)
        for place, token in enumerate(sampled):
            if token in marks and place + _NEAR > at:
                kept += sampled[max(at, place - _NEAR) : place + _NEAR]
                at = place + _NEAR
        return kept + sampled[max(at, len(sampled) - _NEAR) :]

    def _tie(self, result: Plain, call: tuple[str, str | None]) -> None:
        name, known = call
        if self.template.names:
            result["name"] = name
        if self.template.numbered and known:
            result["tool_call_id"] = known

    def _placed(self, messages: Sequence[Message], *, leading: bool = True) -> Sequence[Message]:
        """System messages where the template has a place for them.

        Where it has one only, at the beginning, those that lead are joined there and later ones
        are a user's: they keep their place, and nothing is left out.
        """
        if self.template.late:
            return messages
        front = 0
        while leading and front < len(messages) and messages[front].role in _SYSTEM:
            front += 1
        joined = "\n\n".join(message.content for message in messages[:front])
        placed = [Message(Role.SYSTEM, joined)] if front else []
        for message in messages[front:]:
            late = message.role in _SYSTEM
            placed.append(structs.replace(message, role=Role.USER) if late else message)
        return placed

    def _plain_tools(self, tools: Sequence[Tool]) -> list[Plain] | None:
        """The tools as the OpenAI API writes them; made once while they stay the same object."""
        if tools is not self._tools[0]:
            self._tools = (tools, [plain_tool(tool) for tool in tools] or None)
        return self._tools[1]


def _create(tokenizer: Tokenizer, renderer: str, retention: str) -> Any:
    keep = None if retention == "template" else retention
    try:
        return create_renderer(tokenizer, CONFIGS[renderer](thinking_retention=keep))
    except (AssertionError, ValueError, RuntimeError) as error:
        made_for = f"the tokenizer {tokenizer.name_or_path}"
        msg = f"renderer={renderer!r} cannot be made for {made_for}: {error}"
        raise ConfigError(msg) from error


def _place(call_id: str) -> int:
    """Which call of an answer the gateway's own id names; -1 for another's id."""
    found = _PLACE.fullmatch(call_id)
    return int(found[1]) if found else -1


def _accepted(call: Any) -> bool:
    """Well-formed, or with an argument that its schema did not expect (the harness says so)."""
    named = isinstance(call.name, str) and call.name != "" and call.name.isprintable()
    if call.status not in _ACCEPTED or not named:
        return False
    return call.status is ToolCallParseStatus.OK or isinstance(call.arguments, dict)
