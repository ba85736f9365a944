"""What is known of each chat template beside its rendering: how its answers are marked.

Every template of the `renderers` library is listed by the name of its typed configuration. A
`Template` names the special tokens around reasoning and tool calls, so that an answer can be told
while it is sampled, and the words that open a tool call, so that one can be forced.
"""

# ruff: noqa: RUF001  # DeepSeek writes its special tokens with these characters
from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any, get_args

from renderers import configs

from tugline.chat.tokenizer import Tokenizer


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
class Channels:
    """Ids around messages that each say in a header what they are (harmony)."""

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
    """What must be sampled before any tool call; banning it bans them all."""
    call_end: int
    """What closes one tool call."""
    block: int
    """Opens one tool call; the same as `call` where calls stand in no section."""
    section: int
    section_end: int
    """Open and close a section of calls."""
    guarded: int = -1
    """From here on only the whole answer can be read."""
    channels: Channels | None = None

    @property
    def reasons(self) -> bool:
        """Whether single ids open and close reasoning."""
        return min(self.think, self.think_end) >= 0 or self.channels is not None

    @property
    def lead(self) -> tuple[int, ...]:
        """What must stand before a single call for the library to see it as one."""
        return () if self.block == self.call else (self.call,)

    @property
    def ids(self) -> frozenset[int]:
        """All of them."""
        if self.channels is not None:
            return frozenset(astuple(self.channels))
        calls = (self.call, self.call_end, self.block, self.section, self.section_end)
        return frozenset((self.think, self.think_end, *calls, self.guarded))


@dataclass(frozen=True, slots=True)
class Force:
    """What to append to a prompt so that the answer is a tool call."""

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
    held: str = ""
    """An answer that begins so can only be read as a whole, unless it is a special token."""
    guard: str = ""
    guarded: str = ""
    """Text, and the special token behind it, from which on the rest is read as a whole."""
    preface: str = ""
    """What the template itself writes at the beginning of reasoning."""
    channels: bool = False
    names: bool = False
    """A tool's result names the tool."""
    numbered: bool = False
    """Calls are known as ``functions.name:number``."""
    gap: str = ""
    """What stands behind a sampled turn and the library's bridge forgets."""
    joint: str = ""
    """What stands between the results of parallel calls; the library's bridge takes but one."""
    late: bool = True
    """Whether a system message may stand anywhere."""
    plain_json: bool = False
    """A call is one JSON object with ``name`` and ``arguments``."""
    force: Force | None = None

    def markers(self, tokenizer: Tokenizer) -> Markers:
        """The ids of the marks in one vocabulary."""

        def found(text: str) -> int:
            token = tokenizer.convert_tokens_to_ids(text) if text else None
            return -1 if token is None else token

        block, section, guarded = found(self.call), found(self.section), found(self.guarded)
        harmony = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>")
        return Markers(
            think=found(self.think),
            think_end=found(self.think_end),
            call=guarded if self.guarded else section if self.section and self.strict else block,
            call_end=found(self.call_end),
            block=block,
            section=section,
            section_end=found(self.section_end),
            guarded=guarded,
            channels=Channels(*map(found, harmony)) if self.channels else None,
        )


_QWEN3 = Template(
    plain_json=True,
    force=Force('<tool_call>\n{"name": "', '", "arguments": ', skipping="<think>\n\n</think>\n\n"),
)
_QWEN35 = Template(
    late=False, force=Force("<tool_call>\n<function=", ">\n", closing="\n</think>\n\n")
)
_NEMOTRON = replace(_QWEN35, force=Force("<tool_call>\n<function=", ">\n", closing="\n</think>\n"))
_GLM45 = Template(again=True, force=Force("<tool_call>", "\n", closing="\n<think></think>\n"))
_GLM5 = Template(again=True, force=Force("<tool_call>", closing="</think>"))
_LAGUNA = Template(closes=False, gap="\n", force=Force("<tool_call>", "\n"))
_LAGUNA2 = Template(closes=False, force=Force("<tool_call>", closing="</think>"))
_DEEPSEEK = Template(
    call="<｜tool▁call▁begin｜>",
    call_end="<｜tool▁call▁end｜>",
    section="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    closes=False,
    held="<think>",
    late=False,
    force=Force(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "\n```json\n",
        closing="\n</think>\n\n",
    ),
)
_KIMI = Template(
    call="<|tool_call_begin|>",
    call_end="<|tool_call_end|>",
    section="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    held="<think>",
    numbered=True,
    force=Force("<|tool_calls_section_begin|><|tool_call_begin|>functions.", closing="</think>"),
)
_PLAIN = Template(think="", think_end="", call="", call_end="")

_TEMPLATES: dict[str, Template] = {
    "qwen3": _QWEN3,
    "qwen3-vl": Template(late=False, force=Force('<tool_call>\n{"name": "', '", "arguments": ')),
    "prime-qwen3": Template(force=Force("<tool_call>\n<function=", ">\n")),
    "qwen3.5": _QWEN35,
    "qwen3.6": _QWEN35,
    "qwen3.8": _QWEN35,
    "nemotron-3": _NEMOTRON,
    "nemotron-3-ultra": _NEMOTRON,
    "nemotron-3.5": _NEMOTRON,
    "glm-4.5": _GLM45,
    "glm-5": _GLM5,
    "glm-5.1": _GLM5,
    "glm-5.3": _GLM5,
    "minimax-m2": Template(
        call="<minimax:tool_call>",
        call_end="</minimax:tool_call>",
        late=False,
        force=Force('<minimax:tool_call>\n<invoke name="', '">\n', closing="\n</think>\n\n"),
    ),
    "laguna-xs.2": _LAGUNA,
    "laguna-m.1": _LAGUNA,
    "laguna-xs-2.1": _LAGUNA2,
    "laguna-s-2.1": _LAGUNA2,
    "deepseek-v3": _DEEPSEEK,
    "deepseek-r1": _DEEPSEEK,
    "deepseek-v4": Template(
        call="",
        call_end="",
        again=True,
        guard="<",
        guarded="｜DSML｜",
        joint="</tool_result>\n\n<tool_result>",
        force=Force('\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="', '">\n', closing="</think>"),
    ),
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
        late=False,
        force=Force(
            "<tool_calls:opensource>\n<tool_call:opensource>",
            "<tool_sep:opensource>\n",
            closing="</think:opensource>",
        ),
    ),
    "llama-3": replace(_PLAIN, held="{", force=Force('{"name": "', '", "parameters": ')),
    "gemma4": Template(
        think="<|channel>",
        think_end="<channel|>",
        call="<|tool_call>",
        call_end="<tool_call|>",
        preface="thought\n",
        names=True,
        force=Force("<|tool_call>call:", "{"),
    ),
    "gpt-oss": replace(
        _PLAIN,
        call_end="<|call|>",
        channels=True,
        names=True,
        force=Force(
            "<|end|><|start|>assistant<|channel|>commentary to=functions.",
            " <|constrain|>json<|message|>",
        ),
    ),
    "inkling": replace(_PLAIN, call="<|content_invoke_tool_json|>", followed=False, names=True),
}


def template(name: str) -> Template:
    """What is known of the template `name`; one that is not listed is read when it is over."""
    return _TEMPLATES.get(name, replace(_PLAIN, followed=False))
