"""What is known of each chat template beside its rendering: how its answers are marked.

Every template of the `renderers` library is listed by the name of its typed configuration. A
`Template` names the special tokens around reasoning and tool calls, so that an answer can be told
while it is sampled, and the words that open a tool call, so that one can be forced.
"""

# ruff: noqa: RUF001  # DeepSeek writes its special tokens with these characters
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from renderers import configs

from tugline.tokenizer import Tokenizer


def _configs() -> dict[str, Any]:
    classes: list[Any] = [getattr(configs, name) for name in configs.__all__]
    named = {
        get_args(one.model_fields["name"].annotation)[0]: one
        for one in classes
        if "name" in getattr(one, "model_fields", {})
    }
    return {name: one for name, one in named.items() if name not in {"auto", "default", "custom"}}


CONFIGS: dict[str, Any] = _configs()
"""Typed configuration of every template, by name."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids that open and close the parts of an answer; -1 where the vocabulary has none."""

    think: int
    think_end: int
    call: int
    """What must be sampled before any tool call; banning it bans them all."""
    call_end: int
    """What closes one tool call."""
    block: int
    """Opens one tool call; the same as `call` where calls stand in no section."""
    section: int
    section_end: int
    """Open and close a section of calls."""

    @property
    def lead(self) -> tuple[int, ...]:
        """What must stand before a single call for the library to see it as one."""
        return () if self.block == self.call else (self.call,)

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        sections = (self.section, self.section_end)
        return frozenset(
            (self.think, self.think_end, self.call, self.call_end, self.block, *sections)
        )


@dataclass(frozen=True, slots=True)
class Template:
    """The marks of one template; empty strings where it has no such thing."""

    think: str = "<think>"
    think_end: str = "</think>"
    call: str = "<tool_call>"
    call_end: str = "</tool_call>"
    section: str = ""
    section_end: str = ""
    closes: bool = True
    """A tool call inside reasoning that nothing closes ends it."""
    strict: bool = True
    """A call outside a section is text."""
    again: bool = False
    """Reasoning may open anywhere, not only at the beginning."""
    followed: bool = True
    """Whether its special tokens tell the parts of an answer apart."""
    forced: tuple[str, str] | None = None
    """What opens a call up to the name, and what stands between the name and the arguments."""

    def markers(self, tokenizer: Tokenizer) -> Markers:
        """The ids of the marks in one vocabulary."""

        def found(text: str) -> int:
            token = tokenizer.convert_tokens_to_ids(text) if text else None
            return -1 if token is None else token

        block, section = found(self.call), found(self.section)
        return Markers(
            think=found(self.think),
            think_end=found(self.think_end),
            call=section if self.section and self.strict else block,
            call_end=found(self.call_end),
            block=block,
            section=section,
            section_end=found(self.section_end),
        )

    def incremental(self, markers: Markers) -> bool:
        """Whether a vocabulary with these ids allows to follow an answer as it is sampled."""
        return self.followed and min(markers.think, markers.think_end, markers.call_end) >= 0


_HERMES = Template(forced=('<tool_call>\n{"name": "', '", "arguments": '))
_XML = Template(forced=("<tool_call>\n<function=", ">\n"))
_GLM = Template(again=True, forced=("<tool_call>", ""))
_LAGUNA = Template(closes=False)
_DEEPSEEK = Template(
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    closes=False,
)
_KIMI = Template(
    call="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
)
_WHOLE = Template("", "", "", "", followed=False)

_TEMPLATES: dict[str, Template] = {
    "qwen3": _HERMES,
    "qwen3-vl": _HERMES,
    "prime-qwen3": _XML,
    "qwen3.5": _XML,
    "qwen3.6": _XML,
    "qwen3.8": _XML,
    "nemotron-3": _XML,
    "nemotron-3-ultra": _XML,
    "nemotron-3.5": _XML,
    "glm-4.5": _GLM,
    "glm-5": _GLM,
    "glm-5.1": _GLM,
    "glm-5.3": _GLM,
    "minimax-m2": Template(
        call="<minimax:tool_call>",
        call_end="</minimax:tool_call>",
        forced=('<minimax:tool_call>\n<invoke name="', '">\n'),
    ),
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA,
    "laguna-s-2.1": _LAGUNA,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "kimi-k2": _KIMI,
    "kimi-k2.5": _KIMI,
    "hy3": Template(
        think="<think:opensource>",
        think_end="</think:opensource>",
        call="<tool_call:opensource>",
        call_end="</tool_call:opensource>",
        section="<tool_calls:opensource>",
        section_end="</tool_calls:opensource>",
        closes=False,
        strict=False,
    ),
}


def template(name: str) -> Template:
    """What is known of the template `name`; one that is not listed is told only when it is over."""
    return _TEMPLATES.get(name, _WHOLE)
