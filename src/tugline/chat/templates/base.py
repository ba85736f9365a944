"""Special tokens and tool call syntax of each chat template.

Templates of the `renderers` library are listed by the name of their typed configuration. A
`Template` names the special tokens around reasoning and tool calls, so that an answer can be parsed
while it is sampled, and the text that opens a tool call, so that a call can be forced. Tool calls
are JSON objects, or DeepSeek V4's DSML.
"""

# ruff: noqa: RUF001  # the marks as the model writes them
import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
from renderers import create_renderer
from renderers.configs import RendererConfig

from tugline.chat.model_call import JsonObject, decode_arguments, serialize_message
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import ConfigError, Unsupported
from tugline.schema import decode, read_values
from tugline.types import Ids, Message

_CLASSES = {cls.model_fields["name"].default: cls for cls in get_args(get_args(RendererConfig)[0])}
_GENERIC = {"auto", "default", "custom"}
CONFIGS: dict[str, Any] = {name: cls for name, cls in _CLASSES.items() if name not in _GENERIC}
"""Typed configuration of every template, by name."""
RETENTIONS = ("all", "tool_cycle", "template")


def create(tokenizer: Tokenizer, renderer: str, retention: str) -> Any:
    """Create the library's renderer. Raises `ConfigError`."""
    for field, name, known in (
        ("renderer", renderer, sorted(CONFIGS)),
        ("thinking_retention", retention, RETENTIONS),
    ):
        if name not in known:
            raise ConfigError(f"{field}={name!r} is unknown; it must be one of {', '.join(known)}")
    keep = None if retention == "template" else retention
    try:
        return create_renderer(tokenizer, CONFIGS[renderer](thinking_retention=keep))
    except (AssertionError, ValueError, RuntimeError) as error:
        msg = f"renderer={renderer!r} cannot be made for {tokenizer.name_or_path}: {error}"
        raise ConfigError(msg) from error


@dataclass(frozen=True, slots=True)
class Channels:
    """Ids around the headers and bodies of messages in channels (harmony)."""

    start: int
    message: int
    end: int
    channel: int


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that open and close the parts of an answer; -1 if the vocabulary has none."""

    think: int
    think_end: int
    call: int
    """Id sampled before any tool call; banning it bans all calls."""
    call_end: int
    """Id that closes one tool call."""
    block: int
    """Id that opens one tool call; equal to `call` if calls are not in a section."""
    section: int
    """Id that opens a section of calls."""
    section_end: int
    """Id that closes a section of calls."""
    guarded: int = -1
    """Id after which the rest can only be parsed as a whole."""
    channels: Channels | None = None

    @property
    def reasons(self) -> bool:
        """Whether single ids open and close reasoning."""
        return min(self.think, self.think_end) >= 0 or self.channels is not None

    @property
    def lead(self) -> tuple[int, ...]:
        """Ids that the library needs before a single call to recognize it."""
        return (self.call,) if self.section >= 0 and self.block != self.call else ()

    @property
    def ids(self) -> frozenset[int]:
        """All marks."""
        if self.channels is not None:
            return frozenset(astuple(self.channels))
        calls = (self.call, self.call_end, self.block, self.section, self.section_end)
        return frozenset((self.think, self.think_end, *calls, self.guarded))


@dataclass(frozen=True, slots=True)
class Force:
    """Text appended to a prompt to force a tool call."""

    opening: str
    """Text up to the tool's name."""
    after: str | None = None
    """Text from the name to the arguments; None if the name's end cannot be written."""
    closing: str = ""
    """Text before `opening` if the prompt opened reasoning."""
    skipping: str = ""
    """Text before `opening` if the model would open reasoning."""


@dataclass(frozen=True, slots=True)
class Template:
    """Marks and conventions of one template; a missing mark is empty."""

    think: str = "<think>"
    think_end: str = "</think>"
    call: str = "<tool_call>"
    call_end: str = "</tool_call>"
    section: str = ""
    section_end: str = ""
    call_ends_reasoning: bool = True
    """Whether a tool call inside unclosed reasoning ends the reasoning."""
    strict_section: bool = True
    """Whether a call outside a section is text."""
    reopens_reasoning: bool = False
    """Whether reasoning may open anywhere, not only at the start."""
    incremental: bool = True
    """Whether special tokens separate the parts of an answer."""
    hold_prefix: str = ""
    """Prefix of answers that are parsed as a whole, unless it is a special token."""
    guard_text: str = ""
    """Text before `guard_mark`, which belongs to it."""
    guard_mark: str = ""
    """Special token after which the rest is parsed as a whole."""
    preface: str = ""
    """Text that the template writes at the start of reasoning."""
    channels: bool = False
    """Whether messages have harmony headers."""
    named_results: bool = False
    """Whether a tool's result names the tool."""
    numbered_calls: bool = False
    """Whether call ids are ``functions.name:number``."""
    gap: str = ""
    """Text after a sampled turn that the library's bridge omits."""
    reopening: str = ""
    """Text after a last message of the assistant, up to the model's answer, that the library
    omits."""
    result_separator: str = ""
    """Text between results of parallel calls, for a bridge that accepts only one result."""
    late_system: bool = True
    """Whether a system message may occur anywhere."""
    json_calls: bool = False
    """Whether a call is a JSON object with ``name`` and ``arguments``."""
    force: Force | None = None

    def markers(self, tokenizer: Tokenizer) -> Markers:
        """Look up the marks in a vocabulary."""

        def find_id(text: str) -> int:
            token = tokenizer.convert_tokens_to_ids(text) if text else None
            return -1 if token is None else token

        block, section, guarded = map(find_id, (self.call, self.section, self.guard_mark))
        call = section if self.section and self.strict_section else block
        harmony = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>")
        return Markers(
            think=find_id(self.think),
            think_end=find_id(self.think_end),
            call=guarded if self.guard_mark else call,
            call_end=find_id(self.call_end),
            block=block,
            section=section,
            section_end=find_id(self.section_end),
            guarded=guarded,
            channels=Channels(*map(find_id, harmony)) if self.channels else None,
        )


class _Listed(msgspec.Struct):
    names: list[str]
    template: Template


_TEMPLATES = {
    name: listed.template
    for listed in decode(
        read_values(Path(__file__).with_name("templates.yaml")), list[_Listed], name="templates"
    )
    for name in listed.names
}
_UNLISTED = Template(think="", think_end="", call="", call_end="", incremental=False)


def template(name: str) -> Template:
    """Return the template `name`; answers of an unlisted one are parsed at their end."""
    return _TEMPLATES.get(name, _UNLISTED)


# --------------------------------------------------------------------------- tool calls
# --------------------------------------------------------------------------- JSON
class _JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: dict[str, Any]


_JSON_CALL = msgspec.json.Decoder(_JsonCall)


def parse_json_call(text: str) -> tuple[str, str] | None:
    """Parse a block of plain JSON; None leaves it to the library's parser."""
    try:
        call = _JSON_CALL.decode(text)
    except (ValueError, RecursionError):
        return None
    named = call.name != "" and call.name.isprintable()
    return (call.name, encode_arguments(call.arguments)) if named else None


def encode_arguments(arguments: Any) -> str:
    """Encode arguments as JSON text; return a string unchanged."""
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except ValueError:  # raised for lone surrogates
        return json.dumps(arguments)


# --------------------------------------------------------------------------- DSML
DSML_CALL = re.compile(r'<｜DSML｜invoke name="[^"]*">\n.*?</｜DSML｜invoke>', re.DOTALL)
DSML_SECTION = re.compile(r"</?｜DSML｜(?:tool_calls|toolcalls|tool)>")
"""Pattern of a tag that opens or closes a section of calls."""


# --------------------------------------------------------------------------- messages
_OWN_CALL_ID = re.compile(r"call_.*_(\d+)")


def serialize_text(message: Message) -> JsonObject:
    """Serialize a message for the library. Raises `Unsupported` for images."""
    if message.images:
        raise Unsupported("this model's template has no place for images", param="messages")
    return serialize_message(message, arguments=decode_arguments)


def find_call_index(result: JsonObject) -> int:
    """Return the index of the call that a result answers, from a gateway's id; else -1."""
    match = _OWN_CALL_ID.fullmatch(str(result.get("tool_call_id")))
    return int(match[1]) if match else -1


def find_opening(closed: Ids, text: str, sampled: Ids, tokenizer: Tokenizer) -> Ids | None:
    """Return the ids that open an answer right after the answer `sampled`.

    `closed` is a prompt whose last message is the answer `text`. None unless `sampled` ends with
    the id that closes an answer.
    """
    ends = np.flatnonzero(closed == sampled[-1]).tolist() if len(sampled) else []
    if not ends or not tokenizer.decode(closed[: ends[-1]].tolist()).rstrip().endswith(text):
        return None
    opening = closed[ends[-1] + 1 :]
    return opening if len(opening) else None


# --------------------------------------------------------------------------- text around messages
_PROBES = ("", "x", " x ", "\n\nx\n\n", "1.", '{"a": 2}', "<|x|>", "é界🙂")
_SHAPES = 256
"""Maximum number of cached shapes; a conversation has few."""


class TailTexts:
    """Cache of the texts that a template writes around the messages of a tail.

    Tails of one shape differ only in contents, so their ids are the encoding of joined texts. A
    shape is used only if that holds for contents with all kinds of first and last characters. No
    shape is used if the end of a content and the following text could form an added token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[Hashable, tuple[list[str], Callable[[str], str]]] = {}
        """Texts by shape, empty if it cannot be used, and the function applied to contents."""
        added = tokenizer.added_tokens
        starts = {token[:size] for token in added for size in range(1, len(token) + 1)}
        self._usable = not any(
            token[at:] in starts for token in added for at in range(1, len(token))
        )

    def encode(self, shape: Hashable, contents: Sequence[str]) -> list[int] | None:
        """Return the ids of a tail; None if its shape is unknown or cannot be used."""
        texts, change = self._known.get(shape, ([], str))
        return self._join(texts, map(change, contents)) if texts else None

    def learn(
        self, shape: Hashable, count: int, render: Callable[[Sequence[str]], list[int] | None]
    ) -> None:
        """Learn the texts around tails of `count` messages from `render`, once per shape."""
        if shape in self._known or not self._usable:
            return
        if len(self._known) >= _SHAPES:
            self._known.clear()
        contents = [f" \n{index}~\n " for index in range(count)]
        for change in (str, str.strip):
            texts = self._split(render(contents), map(change, contents))
            self._known[shape] = texts, change
            probes = ([probe] * count for probe in _PROBES)
            if texts and all(render(probe) == self.encode(shape, probe) for probe in probes):
                return
        self._known[shape] = [], str

    def _split(self, ids: list[int] | None, contents: Iterable[str]) -> list[str]:
        text = self._tokenizer.decode(ids or [])
        texts = []
        for content in contents:
            before, separator, text = text.partition(content)
            if not separator:
                return []
            texts.append(before)
        return [*texts, text]

    def _join(self, texts: Sequence[str], contents: Iterable[str]) -> list[int]:
        pairs = zip(texts, (*contents, ""), strict=True)
        return self._tokenizer.encode("".join([text for pair in pairs for text in pair]))
