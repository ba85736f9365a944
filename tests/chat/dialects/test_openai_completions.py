"""Particulars of OpenAI text completions: prompts, echoes, log probabilities, streams."""

from __future__ import annotations

import json
from typing import Any

from chat.dialects.wires import COMPLETIONS, finished, sse
from tugline.chat.model_call import TextDelta, Usage
from tugline.types import Finish, Message, Role

DIALECT = COMPLETIONS.dialect
TOKENS = (("Hé", -0.5), ("", -0.25), ("llo", -1.0), ("<|im_end|>", 0.0))
LOGPROBS = {
    "tokens": ["Hé", "", "llo", "<|im_end|>"],
    "token_logprobs": [-0.5, -0.25, -1.0, 0.0],
    "text_offset": [0, 2, 2, 5],
    "top_logprobs": [{"Hé": -0.5}, {"": -0.25}, {"llo": -1.0}, {"<|im_end|>": 0.0}],
}


def test_a_prompt_is_text_or_the_ids_of_one() -> None:
    """There are no messages; the session is named as in the other OpenAI APIs."""
    text = COMPLETIONS.parse({"prompt": "Hi"}, headers={"session-id": "s"})
    assert (text.prompt, text.messages, text.thread.id) == ("Hi", (), "s")
    assert COMPLETIONS.parse({"prompt": [5, 6]}).prompt == (5, 6)
    assert (text.n, text.stream, text.usage_in_stream, text.logprobs) == (1, False, False, False)


def test_a_whole_answer() -> None:
    """Each choice begins with the prompt, if that is echoed, and has its own tokens."""
    request = COMPLETIONS.parse({"prompt": "Say ", "n": 2, "echo": True})
    one = finished(Message(Role.ASSISTANT, "Hello"), tokens=TOKENS)
    two = finished(Message(Role.ASSISTANT, " hi\n"), finish=Finish.LENGTH)
    reply = json.loads(DIALECT.encode(request, [one, two]))
    assert reply.pop("usage")["total_tokens"] == 31 + 14
    assert reply == {
        "id": "cmpl-s1-4",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {"index": 0, "text": "Say Hello", "logprobs": LOGPROBS, "finish_reason": "stop"},
            {"index": 1, "text": "Say  hi\n", "logprobs": None, "finish_reason": "length"},
        ],
    }


def test_a_stream_of_several_answers() -> None:
    """The echo first, the text as it comes, tokens and reason at the end, then the counts."""
    body: dict[str, Any] = {"prompt": "Say ", "n": 2, "echo": True, "stream": True}
    request = COMPLETIONS.parse({**body, "stream_options": {"include_usage": True}})
    stream = DIALECT.stream(request, "s1-4", 17)
    sent = stream.start(Usage(31, 0)) + stream.add(TextDelta(" b"), 1) + stream.add(TextDelta("a"))
    one = finished(Message(Role.ASSISTANT, "a"), tokens=TOKENS)
    sent += stream.finish([one, finished(Message(Role.ASSISTANT, " b"), finish=Finish.LENGTH)])
    assert sent.endswith(b"data: [DONE]\n\n")
    *events, usage = sse(sent)
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 45)
    assert {(e["id"], e["object"], e["usage"]) for e in events} == {
        ("cmpl-s1-4", "text_completion", None)
    }
    choices = [choice for event in events for choice in event["choices"]]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in choices] == [
        (0, "Say ", None),
        (1, "Say ", None),
        (1, " b", None),
        (0, "a", None),
        (0, "", "stop"),
        (1, "", "length"),
    ]
    assert [c["logprobs"] for c in choices] == [None] * 4 + [LOGPROBS, None]
