"""How each chat template marks answers and writes tool calls.

Every template of the `renderers` library is listed by the name of its typed configuration. A
`Template` names the special tokens around reasoning and tool calls, so that an answer can be parsed
while it is sampled, and the text that opens a tool call, so that one can be forced. Tool calls are
JSON objects, or DeepSeek V4's DSML.
"""

# ruff: noqa: RUF001  # the marks as the model writes them
import json
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec
from renderers import create_renderer
from renderers.configs import RendererConfig

from tugline.chat.tokenizer import Tokenizer
from tugline.errors import ConfigError
from tugline.schema import decode, read_values

_CLASSES = {cls.model_fields["name"].default: cls for cls in get_args(get_args(RendererConfig)[0])}
_GENERIC = {"auto", "default", "custom"}
CONFIGS: dict[str, Any] = {name: cls for name, cls in _CLASSES.items() if name not in _GENERIC}
"""Typed configuration of every template, by name."""
RETENTIONS = ("all", "tool_cycle", "template")


def create(tokenizer: Tokenizer, renderer: str, retention: str) -> Any:
    """The library's renderer. Raises `ConfigError`."""
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
    """Ids around messages whose headers say what they hold (harmony)."""

    start: int
    message: int
    end: int
    channel: int


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that open and close the parts of an answer; -1 where the vocabulary has none."""

    think: int
    think_end: int
    call: int
    """Sampled before any tool call; banning it bans them all."""
    call_end: int
    """Closes one tool call."""
    block: int
    """Opens one tool call; the same as `call` where calls stand in no section."""
    section: int
    section_end: int
    """Open and close a section of calls."""
    guarded: int = -1
    """From here on only the whole answer can be parsed."""
    channels: Channels | None = None

    @property
    def reasons(self) -> bool:
        """Whether single ids open and close reasoning."""
        return min(self.think, self.think_end) >= 0 or self.channels is not None

    @property
    def lead(self) -> tuple[int, ...]:
        """Ids before a single call without which the library does not recognise it."""
        return (self.call,) if self.section >= 0 and self.block != self.call else ()

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        if self.channels is not None:
            return frozenset(astuple(self.channels))
        calls = (self.call, self.call_end, self.block, self.section, self.section_end)
        return frozenset((self.think, self.think_end, *calls, self.guarded))


@dataclass(frozen=True, slots=True)
class Force:
    """Text to append to a prompt so that the answer is a tool call."""

    opening: str
    """Up to the tool's name."""
    after: str | None = None
    """From the name to its arguments; None where the name's end cannot be written."""
    closing: str = ""
    """Before it all, where the prompt opened reasoning."""
    skipping: str = ""
    """Before it all, where the model would open reasoning."""


@dataclass(frozen=True, slots=True)
class Template:
    """The marks and habits of one template; a mark that it lacks is empty."""

    think: str = "<think>"
    think_end: str = "</think>"
    call: str = "<tool_call>"
    call_end: str = "</tool_call>"
    section: str = ""
    section_end: str = ""
    call_ends_reasoning: bool = True
    """A tool call inside reasoning that is never closed ends it."""
    strict_section: bool = True
    """A call outside a section is text."""
    reopens_reasoning: bool = False
    """Reasoning may open anywhere, not only at the beginning."""
    incremental: bool = True
    """Whether its special tokens separate the parts of an answer."""
    hold_prefix: str = ""
    """Unless it is a special token, an answer that begins with it is parsed as a whole."""
    guard_text: str = ""
    guard_mark: str = ""
    """Text, and the special token behind it, from which on the rest is parsed as a whole."""
    preface: str = ""
    """Text that the template itself writes at the beginning of reasoning."""
    channels: bool = False
    named_results: bool = False
    """A tool's result names the tool."""
    numbered_calls: bool = False
    """Call ids are ``functions.name:number``."""
    gap: str = ""
    """Text behind a sampled turn that the library's bridge leaves out."""
    result_separator: str = ""
    """Text between the results of parallel calls, where the library's bridge takes only one."""
    late_system: bool = True
    """Whether a system message may stand anywhere."""
    json_calls: bool = False
    """A call is one JSON object with ``name`` and ``arguments``."""
    force: Force | None = None

    def markers(self, tokenizer: Tokenizer) -> Markers:
        """Look up the marks in one vocabulary."""

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
    """The marks of the template `name`; an unlisted one is parsed when the answer is over."""
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
    """Encode arguments as JSON text; text stays as it is."""
    if isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.encode(arguments).decode()
    except ValueError:  # surrogates
        return json.dumps(arguments)


# --------------------------------------------------------------------------- DSML
DSML_CALL = re.compile(r'<｜DSML｜invoke name="[^"]*">\n.*?</｜DSML｜invoke>', re.DOTALL)
DSML_SECTION = re.compile(r"</?｜DSML｜(?:tool_calls|toolcalls|tool)>")
"""Opens or closes a section of calls."""


# --------------------------------------------------------------------------- text around messages
_PROBES = ("", "x", " x ", "\n\nx\n\n", "1.", '{"a": 2}', "<|x|>", "é界🙂")
_SHAPES = 256
"""Shapes that are kept; a conversation has few."""


class TailTexts:
    """What a template writes around the messages of a tail, as its own renderer shows it.

    Tails of one shape differ in their contents alone, so the ids of each are those of one text. A
    shape is used only if that holds for contents that begin and end in every way that matters, and
    none is if a content could make one added token out of its end and of what follows it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[Hashable, tuple[list[str], Callable[[str], str]]] = {}
        """The texts, none for a shape without, and what becomes of contents."""
        added = tokenizer.added_tokens
        starts = {token[:size] for token in added for size in range(1, len(token) + 1)}
        self._usable = not any(
            token[at:] in starts for token in added for at in range(1, len(token))
        )

    def encode(self, shape: Hashable, contents: Sequence[str]) -> list[int] | None:
        """The ids of a tail; None if its shape is not known, or cannot be used."""
        texts, change = self._known.get(shape, ([], str))
        return self._join(texts, map(change, contents)) if texts else None

    def learn(
        self, shape: Hashable, count: int, render: Callable[[Sequence[str]], list[int] | None]
    ) -> None:
        """Look at how tails of `count` messages come out of `render`, once for each shape."""
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
            before, found, text = text.partition(content)
            if not found:
                return []
            texts.append(before)
        return [*texts, text]

    def _join(self, texts: Sequence[str], contents: Iterable[str]) -> list[int]:
        pairs = zip(texts, (*contents, ""), strict=True)
        return self._tokenizer.encode("".join([text for pair in pairs for text in pair]))
