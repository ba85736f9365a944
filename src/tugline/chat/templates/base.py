"""Special tokens and tool call syntax of each chat template.

Templates of the `renderers` library are listed by the name of their typed configuration. A
`Template` names the special tokens around reasoning and tool calls, so that an answer can be parsed
while it is sampled, the grammar of the calls, and the text that opens a call, so that a call can be
forced.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
from renderers import create_renderer
from renderers.configs import RendererConfig

from tugline.chat.calls.gemma import GemmaCalls
from tugline.chat.calls.json_calls import JsonCalls
from tugline.chat.calls.tagged import TaggedCalls
from tugline.chat.templates.contents import ContentTokenizer
from tugline.chat.tokenizer import Tokenizer
from tugline.errors import ConfigError
from tugline.schema import decode, read_values

_CLASSES = {cls.model_fields["name"].default: cls for cls in get_args(get_args(RendererConfig)[0])}
_GENERIC = {"auto", "default", "custom"}
CONFIGS: dict[str, Any] = {name: cls for name, cls in _CLASSES.items() if name not in _GENERIC}
"""Typed configuration of every template, by name."""
RETENTIONS = ("all", "tool_cycle", "template")


def create(tokenizer: ContentTokenizer, renderer: str, retention: str) -> Any:
    """Create the library's renderer. Raises `ConfigError`."""
    if retention not in RETENTIONS:
        known = ", ".join(RETENTIONS)
        raise ConfigError(f"thinking_retention={retention!r} must be one of {known}")
    keep = None if retention == "template" else retention
    try:
        return create_renderer(tokenizer, CONFIGS[renderer](thinking_retention=keep))
    except (AssertionError, ValueError, RuntimeError) as error:
        msg = f"renderer={renderer!r} cannot be created for {tokenizer.name_or_path}: {error}"
        raise ConfigError(msg) from error


@dataclass(frozen=True, slots=True)
class Channels:
    """Messages of an answer in channels: each has a header, a mark, and a body.

    The patterns match a whole header with its mark. A header that none matches is text.
    """

    start: str
    """Mark that begins a header, and ends a body that has no `end`."""
    end: str
    """Mark that ends a body."""
    bodies: tuple[str, ...]
    """Marks between a header and its body."""
    reasoning: str
    text: str
    call: str
    """Pattern with the tool's name as group ``name`` or ``early``."""
    restart: str = ""
    """Another mark that begins a header, if `start` is left out."""


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
    """Id within each tag of a call, where tags have no ids of their own (DSML)."""
    headers: frozenset[int] = frozenset()
    """Ids that begin a header of a message in channels."""
    bodies: frozenset[int] = frozenset()
    """Ids between such a header and its body."""
    body_end: int = -1
    """Id that ends such a body."""

    @property
    def reasons(self) -> bool:
        """Whether single ids open and close reasoning."""
        return min(self.think, self.think_end) >= 0 or bool(self.bodies)

    @property
    def ids(self) -> frozenset[int]:
        """All marks."""
        if self.bodies:
            return self.headers | self.bodies | {self.body_end}
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

    grammar: JsonCalls | TaggedCalls | GemmaCalls
    """How the calls of one block are written."""
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
    hold_prefix: str = ""
    """Prefix of answers that are parsed as a whole, unless it is a special token."""
    guard_text: str = ""
    """Text before `guard_mark` in a tag."""
    guard_mark: str = ""
    """Special token within each tag of a call."""
    section_tags: str = ""
    """Pattern of the tags around calls, where they are text."""
    preface: str = ""
    """Text that the template writes at the start of reasoning."""
    channels: Channels | None = None
    """Headers of messages, if an answer has several messages."""
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
    encodes_contents: bool = False
    """Whether the library has an encoder of its own that encodes contents as text (harmony)."""
    lone_calls: bool = False
    """Whether a message is either text or one call."""
    json_tools: str = ""
    """Role of a message with JSON that declares tools whose schemas the template cannot write."""
    force: Force | None = None

    def markers(self, tokenizer: Tokenizer) -> Markers:
        """Look up the marks in a vocabulary."""

        def find_id(text: str) -> int:
            token = tokenizer.convert_tokens_to_ids(text) if text else None
            return -1 if token is None else token

        block, section, guarded = map(find_id, (self.call, self.section, self.guard_mark))
        call = section if self.section and self.strict_section else block
        headers = (self.channels.start, self.channels.restart) if self.channels else ()
        return Markers(
            think=find_id(self.think),
            think_end=find_id(self.think_end),
            call=guarded if self.guard_mark else call,
            call_end=find_id(self.call_end),
            block=block,
            section=section,
            section_end=find_id(self.section_end),
            guarded=guarded,
            headers=frozenset(map(find_id, headers)),
            bodies=frozenset(map(find_id, self.channels.bodies if self.channels else ())),
            body_end=find_id(self.channels.end) if self.channels else -1,
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


def template(name: str) -> Template:
    """Return the template `name`. Raises `ConfigError`."""
    if name not in _TEMPLATES:
        known = ", ".join(sorted(_TEMPLATES))
        raise ConfigError(f"renderer={name!r} must be one of {known}")
    return _TEMPLATES[name]


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
