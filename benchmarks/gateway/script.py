"""One scripted conversation, the same on every run: what the client says and the engine answers.

A coding agent's session of 40 model calls over OpenAI Chat. The prompt grows by the engine's
answer (512 tokens: reasoning, text, one tool call) and a tool result each turn; the system prompt
is cut so that the mean prompt has 16,384 tokens. Text is the standard library's own source, the
tokenizer is trained on it, and ids are spread over a vocabulary as large as Qwen3's, so that ids,
JSON escapes and bodies have realistic sizes. Everything is made before anything is measured.
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
class Said:
    """One answer of the engine, and what it means to a client."""

    ids: Ids
    logprobs: Logprobs
    reasoning: str
    text: str
    name: str
    arguments: dict[str, str]
    result: str
    """What the client's tool then says."""


@dataclass(frozen=True)
class Told:
    """An answer in the words of the gateway, which a client repeats."""

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
    answers: tuple[Said, ...]
    prompts: tuple[Ids, ...]
    """Exact prompt ids of each turn, views of the last."""

    @property
    def turns(self) -> int:
        """Calls of a session."""
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
    """Each turn's request body, in two parts around its ``max_completion_tokens``.

    One more than answers were told so far, at most one for each turn. A body is cut from the last
    one when it is asked for, since those of 300 turns are 100 MB.
    """

    def __init__(self, script: Script, told: Sequence[Told], *, stream: bool) -> None:
        opening = (
            {"role": "system", "content": script.system},
            {"role": "user", "content": script.user},
        )
        parts = [b'{"model":"stub","messages":[' + b",".join(map(compact, opening))]
        for said, echoed in zip(script.answers[:-1], told, strict=False):
            parts.append(b"," + b",".join(map(compact, _echo(said, echoed))))
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
    """JSON as JavaScript writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def write(like: Script | None = None, *, turns: int = TURNS, result_tokens: int = 0) -> Script:
    """Make the conversation, or a longer one that begins `like` another; takes a few seconds.

    `result_tokens` is the length of a tool's result; 0 for `RESULT_CHARS` characters.
    """
    text = _corpus()
    tokenizer = like.tokenizer if like else tokenizer_of(text)
    rendering = Rendering(tokenizer, "qwen3", thinking_retention="all")
    answers = tuple(_answer(tokenizer, text, turn, result_tokens) for turn in range(turns))
    tools = tuple(_tool(text, index) for index in range(8))
    user = "Mend the failing tests of this repository.\n" + _slice(text, 0, 400)
    tails = [np.array(tokenizer.encode(TAIL % said.result), np.int32) for said in answers]

    def prompts(system: str) -> tuple[Ids, ...]:
        start = (Message(Role.SYSTEM, system), Message(Role.USER, user))
        parts = [rendering.render(start, tools)]
        for said, tail in zip(answers[:-1], tails, strict=False):
            parts += (said.ids, tail)
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


def tokenizer_of(text: str) -> Tokenizer:
    """A byte-level BPE whose ids lie as far apart as a large vocabulary's."""
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


def _answer(tokenizer: Tokenizer, text: str, turn: int, result_tokens: int) -> Said:
    """Exactly 512 tokens: reasoning and a tool call of about even size, text for the rest."""
    place = 9_000 * turn + 1_000
    arguments = {"path": f"src/part_{turn}.py", "text": _slice(text, place, 800)}
    written = json.dumps({"name": "write", "arguments": arguments})
    call = tokenizer.encode(f"<tool_call>\n{written}\n</tool_call><|im_end|>")
    thought = tokenizer.encode(_slice(text, place + 1_000, 2_000).strip())[:THOUGHT]
    opening, closing = tokenizer.encode("<think>\n"), tokenizer.encode("\n</think>\n\n")
    room = SAMPLED - len(opening) - THOUGHT - len(closing) - len(call)
    said = tokenizer.encode(_slice(text, place + 3_000, 4_000).strip())[:room]
    ids = [*opening, *thought, *closing, *said, *call]
    if len(ids) != SAMPLED or room < 1:
        msg = f"an answer has {len(ids)} tokens instead of {SAMPLED}"
        raise RuntimeError(msg)
    result = _slice(text, place + 8_000, max(RESULT_CHARS, 8 * result_tokens))
    if result_tokens:
        result = tokenizer.decode(tokenizer.encode(result)[:result_tokens])
    logprobs = -np.random.default_rng(turn).exponential(0.4, SAMPLED).astype(np.float32)
    return Said(
        np.array(ids, np.int32),
        logprobs,
        tokenizer.decode(thought).strip(),
        tokenizer.decode(said).strip(),
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


def _echo(said: Said, told: Told) -> list[dict[str, Any]]:
    """An answer as a client repeats it (arguments written compactly), and its tool's result."""
    function = {"name": said.name, "arguments": compact(said.arguments).decode()}
    return [
        {
            "role": "assistant",
            "content": told.text,
            "reasoning_content": told.reasoning,
            "tool_calls": [{"id": told.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": told.call_id, "content": said.result},
    ]
