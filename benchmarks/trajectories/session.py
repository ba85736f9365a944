"""Sessions of a coding agent, of any length, as a real gateway would record them.

The first prompt has 8,000 tokens; each turn adds 300 sampled ones (text and a tool call) and 300 of
a tool result with the template's markup. The text is source code of the standard library, and the
tokenizer is a BPE trained on it. Ids are spread over a vocabulary of Qwen3's size, which compresses
worse than ids in the order of their frequency. Logprobs are drawn from an exponential distribution
and have random mantissas, which compress worse than those of a sharp policy.
"""

# ruff: noqa: INP001 - programs, not a package
from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "gateway"))

from script import TAIL, train_tokenizer

from tugline.chat.tokenizer import Tokenizer
from tugline.types import (
    Call,
    Finish,
    Message,
    Role,
    Sampling,
    Timings,
    Tool,
    ToolCall,
    VersionSpan,
)

BASE = 8000
SAMPLED = 300
RESULT = 300
_TRAINED_ON = 1_000_000
_BEGAN = 1_700_000_000.0


@dataclass(frozen=True)
class Turn:
    """An answer and the result of its tool call."""

    ids: list[int]
    answer: Message
    result: str
    tail: list[int]


class TextSource:
    """A long text, from which parts are quoted at random, and its tokenizer."""

    def __init__(self) -> None:
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
        text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in sources)
        self.text = text.encode("ascii", "ignore").decode()
        self.tokenizer: Tokenizer = train_tokenizer(self.text[:_TRAINED_ON])
        self.random = random.Random(0)

    def quote(self, tokens: int) -> str:
        """Return about `tokens` tokens of text from a random position."""
        at = self.random.randrange(len(self.text) - 8 * tokens)
        return self.tokenizer.decode(
            self.tokenizer.encode(self.text[at : at + 8 * tokens])[:tokens]
        )

    def exactly(self, tokens: int, before: str, after: str) -> tuple[list[int], str]:
        """Return `tokens` ids of `before`, a quotation and `after`; and the quotation."""
        head, end = self.tokenizer.encode(before), self.tokenizer.encode(after)
        middle = self.tokenizer.encode(self.quote(tokens))[: tokens - len(head) - len(end)]
        return [*head, *middle, *end], self.tokenizer.decode(middle)


def turn(source: TextSource, number: int) -> Turn:
    """Make an answer of 300 tokens and the 300 tokens that follow it."""
    arguments = {"path": f"src/part_{number}.py", "text": source.quote(SAMPLED // 3)}
    serialized = json.dumps(arguments)
    call = f'<tool_call>\n{{"name": "write", "arguments": {serialized}}}\n</tool_call><|im_end|>'
    ids, text = source.exactly(SAMPLED, "", call)
    tail, result = source.exactly(RESULT, *TAIL.split("%s"))
    tool_call = ToolCall(f"call_{number}", "write", serialized)
    return Turn(ids, Message(Role.ASSISTANT, text, tool_calls=(tool_call,)), result, tail)


def calls(source: TextSource, turns: int) -> Iterator[Call]:
    """Yield the calls of a session, each with its complete prompt."""
    source.random.seed(0)
    schema: dict[str, Any] = {"type": "object", "properties": {"path": {"type": "string"}}}
    tools = tuple(Tool(name, source.quote(40), schema) for name in ("read", "write", "bash"))
    base, system = source.exactly(BASE, "", "")
    prompt, added = np.array(base, np.int32), (Message(Role.SYSTEM, system),)
    noise = np.random.default_rng(0)
    for number in range(turns):
        step = turn(source, number)
        at = _BEGAN + 7.5 * number
        yield Call(
            session="bench-0-0",
            number=number,
            parent=number - 1 if number else None,
            dialect="openai_chat",
            messages=added,
            answer=step.answer,
            tools=tools,
            sampling=Sampling(1.0, 1.0, 0, 4096),
            requested=Sampling(0.7, max_tokens=4096),
            prompt_ids=prompt,
            sampled_ids=np.array(step.ids, np.int32),
            logprobs=-noise.exponential(0.4, SAMPLED).astype(np.float32),
            versions=(VersionSpan(number // 50, 0, SAMPLED),),
            finish=Finish.STOP,
            engine="vllm",
            replicas=("http://127.0.0.1:8000",),
            timings=Timings(at, at + 0.004, at + 0.21, at + 6.03),
        )
        prompt = np.concatenate((prompt, np.array([*step.ids, *step.tail], np.int32)))
        added = (Message(Role.TOOL, step.result, tool_call_id=f"call_{number}"),)
