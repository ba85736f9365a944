"""The scripted conversation between client and engine; identical on every run.

It is a coding agent's session of 40 model calls over OpenAI Chat. Each turn adds the engine's
answer (512 tokens: reasoning, text, one tool call) and a tool result to the prompt. The system
prompt is cut so that the mean prompt has 16,384 tokens. The text is source code of the standard
library, and the tokenizer is trained on it. Ids are spread over a vocabulary of Qwen3's size, so
that ids, JSON escapes and bodies have realistic sizes. The conversation is complete before the
measurement begins.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import argparse as _argparse
import asyncio.base_events
import itertools
import json
import mailbox
import random
import tarfile
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from tugline.chat.templates.rendering import Rendering
from tugline.chat.tokenizer import Tokenizer
from tugline.types import Ids, Logprobs, Message, Role, Tool

TURNS = 40
SAMPLED = 512
MEAN_PROMPT = 16_384
THOUGHT = 120
"""Tokens of reasoning in an answer."""
RESULT_CHARS = 240
LONG_RESULT = 2_000
"""Tokens of a tool's result in the second profile."""
TAIL = (
    "\n<|im_start|>user\n<tool_response>\n%s\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
"""What Qwen3's template writes between an answer's end and the next one."""
_VOCABULARY = 8192
_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>",
    "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
_FIRST_SPECIAL = 151_643
_MODULES = (_argparse, tarfile, typing, mailbox, asyncio.base_events)


@dataclass(frozen=True)
class ScriptedAnswer:
    """One answer of the engine: its tokens, their parsed content and the tool's result."""

    ids: Ids
    logprobs: Logprobs
    reasoning: str
    text: str
    name: str
    arguments: dict[str, str]
    result: str
    """Output of the client's tool for this call."""


@dataclass(frozen=True)
class EchoedAnswer:
    """An answer as the gateway returned it; the client sends it back in later requests."""

    text: str
    reasoning: str
    call_id: str


@dataclass(frozen=True)
class Script:
    """The whole conversation."""

    tokenizer: Tokenizer
    system: str
    user: str
    tools: tuple[Tool, ...]
    answers: tuple[ScriptedAnswer, ...]
    prompts: tuple[Ids, ...]
    """Exact prompt ids of each turn, views of the last."""

    @property
    def turns(self) -> int:
        """Number of calls in a session."""
        return len(self.answers)

    def sizes(self, bodies: Sequence[tuple[bytes, bytes]]) -> dict[str, int]:
        """First, mean and last prompt in tokens, and the mean request body in bytes."""
        lengths = [len(prompt) for prompt in self.prompts]
        return {
            "turns": self.turns,
            "sampled_tokens": SAMPLED,
            "first_prompt_tokens": lengths[0],
            "mean_prompt_tokens": round(sum(lengths) / self.turns),
            "last_prompt_tokens": lengths[-1],
            "mean_body_bytes": round(sum(len(a) + len(b) + 6 for a, b in bodies) / self.turns),
        }


class Bodies(Sequence[tuple[bytes, bytes]]):
    """Request bodies by turn, each in two parts around its ``max_completion_tokens``.

    There is one more body than there are `echoes`, but at most one for each turn. A body is sliced
    from the longest one on access, because the bodies of 300 turns would take 100 MB.
    """

    def __init__(self, script: Script, echoes: Sequence[EchoedAnswer], *, stream: bool) -> None:
        opening = (
            {"role": "system", "content": script.system},
            {"role": "user", "content": script.user},
        )
        parts = [b'{"model":"stub","messages":[' + b",".join(map(compact, opening))]
        for answer, echo in zip(script.answers[:-1], echoes, strict=False):
            parts.append(b"," + b",".join(map(compact, _echo(answer, echo))))
        self._front, self._ends = b"".join(parts), list(itertools.accumulate(map(len, parts)))
        options: dict[str, Any] = {"stream": stream}
        if stream:
            options["stream_options"] = {"include_usage": True}
        self._options = b"]," + compact(options)[1:-1] + b',"max_completion_tokens":'
        tools = [{"type": "function", "function": _function(tool)} for tool in script.tools]
        self._tools = b"," + compact({"tools": tools})[1:]

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, turn: Any) -> Any:
        return self._front[: self._ends[turn]] + self._options, self._tools


def compact(value: Any) -> bytes:
    """Encode as JSON the way JavaScript does: without spaces, not escaped to ASCII."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def write(like: Script | None = None, *, turns: int = TURNS, result_tokens: int = 0) -> Script:
    """Make the conversation; takes a few seconds.

    With `like`, reuse that script's tokenizer and system prompt. `result_tokens` is the length of
    each tool result; 0 means `RESULT_CHARS` characters.
    """
    text = _corpus()
    tokenizer = like.tokenizer if like else train_tokenizer(text)
    rendering = Rendering(tokenizer, "qwen3", thinking_retention="all")
    answers = tuple(_answer(tokenizer, text, turn, result_tokens) for turn in range(turns))
    tools = tuple(_tool(text, index) for index in range(8))
    user = "Mend the failing tests of this repository.\n" + _slice(text, 0, 400)
    tails = [np.array(tokenizer.encode(TAIL % answer.result), np.int32) for answer in answers]

    def prompts(system: str) -> tuple[Ids, ...]:
        start = (Message(Role.SYSTEM, system), Message(Role.USER, user))
        parts = [rendering.render(start, tools)]
        for answer, tail in zip(answers[:-1], tails, strict=False):
            parts += (answer.ids, tail)
        whole, ends = np.concatenate(parts), np.cumsum([len(part) for part in parts])
        return tuple(whole[:end] for end in ends[::2])

    if like is not None:
        return Script(tokenizer, like.system, user, tools, answers, prompts(like.system))
    bare = sum(map(len, prompts(""))) / turns
    filler = tokenizer.encode(_slice(text, 300_000, 60_000))[: round(MEAN_PROMPT - bare)]
    system = tokenizer.decode(filler)
    return Script(tokenizer, system, user, tools, answers, prompts(system))


def _corpus() -> str:
    sources = [Path(module.__file__ or "").read_text(encoding="utf-8") for module in _MODULES]
    return "".join(sources).encode("ascii", "ignore").decode()


def _slice(text: str, start: int, size: int) -> str:
    at = start % (len(text) - size)
    return text[at : at + size]


def train_tokenizer(text: str) -> Tokenizer:
    """Train a byte-level BPE and spread its ids over the range of a large vocabulary."""
    trained = Backend(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(text.splitlines(keepends=True), trainer)
    model = json.loads(trained.to_str())["model"]
    spread = random.Random(0).sample(range(_FIRST_SPECIAL), len(model["vocab"]))
    vocabulary = dict(zip(model["vocab"], spread, strict=True))
    vocabulary |= {token: _FIRST_SPECIAL + i for i, token in enumerate(_SPECIAL)}
    merges = [tuple(merge) for merge in model["merges"]]
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    return Tokenizer(backend, "stub")


def _answer(tokenizer: Tokenizer, text: str, turn: int, result_tokens: int) -> ScriptedAnswer:
    """Exactly 512 tokens: reasoning, a tool call, and as much text as is left."""
    offset = 9_000 * turn + 1_000
    arguments = {"path": f"src/part_{turn}.py", "text": _slice(text, offset, 800)}
    written = json.dumps({"name": "write", "arguments": arguments})
    call = tokenizer.encode(f"<tool_call>\n{written}\n</tool_call><|im_end|>")
    thought = tokenizer.encode(_slice(text, offset + 1_000, 2_000).strip())[:THOUGHT]
    opening, closing = tokenizer.encode("<think>\n"), tokenizer.encode("\n</think>\n\n")
    content_tokens = SAMPLED - len(opening) - THOUGHT - len(closing) - len(call)
    content = tokenizer.encode(_slice(text, offset + 3_000, 4_000).strip())[:content_tokens]
    ids = [*opening, *thought, *closing, *content, *call]
    if len(ids) != SAMPLED or content_tokens < 1:
        msg = f"an answer has {len(ids)} tokens instead of {SAMPLED}"
        raise RuntimeError(msg)
    result = _slice(text, offset + 8_000, max(RESULT_CHARS, 8 * result_tokens))
    if result_tokens:
        result = tokenizer.decode(tokenizer.encode(result)[:result_tokens])
    logprobs = -np.random.default_rng(turn).exponential(0.4, SAMPLED).astype(np.float32)
    return ScriptedAnswer(
        np.array(ids, np.int32),
        logprobs,
        tokenizer.decode(thought).strip(),
        tokenizer.decode(content).strip(),
        "write",
        arguments,
        result,
    )


def _tool(text: str, index: int) -> Tool:
    names = ("read", "write", "edit", "bash", "search", "list", "fetch", "plan")
    fields = {
        name: {"type": "string", "description": _slice(text, 50_000 + 700 * index + 90 * i, 80)}
        for i, name in enumerate(("path", "text", "options"))
    }
    schema = {"type": "object", "properties": fields, "required": ["path"]}
    return Tool(names[index], _slice(text, 100_000 + 900 * index, 300), schema)


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _echo(answer: ScriptedAnswer, echo: EchoedAnswer) -> list[dict[str, Any]]:
    """Messages that a client adds for an answer: itself (compact arguments) and the tool result."""
    function = {"name": answer.name, "arguments": compact(answer.arguments).decode()}
    return [
        {
            "role": "assistant",
            "content": echo.text,
            "reasoning_content": echo.reasoning,
            "tool_calls": [{"id": echo.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": echo.call_id, "content": answer.result},
    ]
