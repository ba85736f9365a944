"""However an answer is cut into chunks, what is streamed is what the whole answer says."""

from __future__ import annotations

import itertools
import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tiny import rendering
from tugline.gateway.decoder import Decoder
from tugline.gateway.dialects.base import Piece, ReasoningDelta, TextDelta
from tugline.types import Ids, Message, ToolCall

RENDERING = rendering()
PROMPT = np.asarray(RENDERING.tokenizer.encode("<|im_start|>assistant\n"), np.int32)
WORDS = st.text(st.sampled_from('ab \n<>{}"é界🙂'), max_size=12)
CALLS = st.builds(
    lambda name, path: "<tool_call>\n" + json.dumps({"name": name, "arguments": {"path": path}}),
    st.sampled_from(["read", "edit"]),
    st.text(max_size=5),
).map(lambda text: text + "\n</tool_call>")
PARTS = (
    WORDS | CALLS | st.sampled_from(["<tool_call>{oops}</tool_call>", "<tool_call>", "</think>"])
)


def played(ids: list[int], cuts: list[int]) -> tuple[list[Piece], Message]:
    """All pieces and the message, from chunks that end at `cuts`."""
    decoder = Decoder(RENDERING, PROMPT, "0")
    pieces: list[Piece] = []
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    for start, end in itertools.pairwise(edges):
        chunk: Ids = np.asarray(ids[start:end], np.int32)
        pieces += decoder.feed(chunk)
    rest, message = decoder.finish()
    return [*pieces, *rest], message


@given(
    thought=st.none() | WORDS,
    parts=st.lists(PARTS, max_size=5),
    ended=st.booleans(),
    cuts=st.lists(st.integers(0, 10_000), max_size=30),
)
def test_pieces_add_up_to_the_message(
    thought: str | None, parts: list[str], cuts: list[int], *, ended: bool
) -> None:
    """Text, reasoning and calls of the stream equal the message, whatever the chunks were."""
    opening = "" if thought is None else f"<think>{thought}</think>"
    text = opening + "".join(parts) + ("<|im_end|>" if ended else "")
    ids = RENDERING.tokenizer.encode(text)
    pieces, message = played(ids, cuts)
    assert "".join(p.text for p in pieces if isinstance(p, TextDelta)) == message.content
    said = "".join(p.text for p in pieces if isinstance(p, ReasoningDelta))
    assert said == (message.reasoning or "")
    assert tuple(p for p in pieces if isinstance(p, ToolCall)) == message.tool_calls
    assert played(ids, [])[1] == message


@given(text=WORDS, calls=st.lists(CALLS, max_size=3))
def test_a_plain_answer_says_what_the_parser_says(text: str, calls: list[str]) -> None:
    """Where nothing is malformed, the message is exactly the renderer's parse."""
    ids = RENDERING.tokenizer.encode(text + "".join(calls) + "<|im_end|>")
    _, message = played(ids, list(range(0, len(ids), 3)))
    parsed = RENDERING.parse(ids, PROMPT)
    assert message.content == parsed.content
    assert tuple((call.name, call.arguments) for call in message.tool_calls) == parsed.calls
    assert len(parsed.calls) == len(calls)
