"""A history that ends with the assistant's message is answered in Chat and Responses, and trained.

Continue sends such a history after a compaction, opencode at its last step, and frameworks when
they ask again.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.engine import RENDERING, create_chat_app, reply_in_turn, reply_with
from support.gateway import ASK, OpenSession, open_session
from tugline.chat.engines.chat import VllmChat
from tugline.testing import ScriptedEngine
from tugline.traces.base import PrefixMerging
from tugline.types import Branch
from tugline.web.engine_http import ModelCard
from tugline.web.serve import serve

SYSTEM = {"role": "system", "content": "You help."}
OWN = {"role": "assistant", "content": "Hello."}
FOREIGN = {"role": "assistant", "content": "This was the last step. I sum up."}
HISTORIES = {
    "a summary": [SYSTEM, FOREIGN],
    "an own answer": [SYSTEM, *ASK, OWN],
    "a text of the client behind it": [SYSTEM, *ASK, OWN, FOREIGN],
    "nothing else": [FOREIGN],
}


@contextlib.asynccontextmanager
async def engine(folder: Path, mode: str) -> AsyncIterator[OpenSession]:
    """A session whose prompts the gateway renders, or the engine."""
    play = reply_in_turn("Hello.", "Done.", "Once more.")
    if mode == "exact":
        async with open_session(folder, play) as session:
            yield session
        return
    scripted = ScriptedEngine(play, vocab_size=RENDERING.tokenizer.size)
    async with serve(create_chat_app(scripted, RENDERING.tokenizer)) as url:
        card = ModelCard("scripted", 20_000)
        async with open_session(folder, url, wire=VllmChat(), card=card, rendering=None) as session:
            yield session


@pytest.mark.parametrize("mode", ["exact", "observed"])
@pytest.mark.parametrize("path", ["chat/completions", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("history", HISTORIES.values(), ids=HISTORIES)
async def test_an_assistants_last_message_is_a_closed_turn(
    tmp_path: Path,
    mode: str,
    path: str,
    stream: bool,  # noqa: FBT001 - drawn, not passed
    history: list[dict[str, Any]],
) -> None:
    """The prompt closes the message and opens an answer, which is trained and can be continued."""
    field = "messages" if path == "chat/completions" else "input"
    go_on = [*history, {"role": "assistant", "content": "Done."}, ASK[0]]
    async with engine(tmp_path, mode) as session:
        for messages in ([SYSTEM, *ASK], history, go_on):
            async with session.post_openai(path, stream=stream, **{field: messages}) as response:
                assert response.status == 200, await response.text()
                await response.read()
        _, asked, last = session.calls
    prompt = RENDERING.tokenizer.decode(asked.prompt_ids.tolist())
    assert prompt.endswith(f"{history[-1]['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert not PrefixMerging().build(session.calls).ledger.masked
    if mode == "exact":  # in other modes the engine's template decides
        assert (last.parent, last.branch) == (1, None)
        whole = np.concatenate((asked.prompt_ids, asked.sampled_ids))
        assert np.array_equal(last.prompt_ids[: len(whole)], whole)


async def test_an_own_answer_is_continued_from_its_ids(tmp_path: Path) -> None:
    """Reasoning that the client left out stays in the prompt, so that there is one trace."""
    async with open_session(
        tmp_path, reply_in_turn("<think>\nHm.\n</think>\n\nHello.", "Done.")
    ) as session:
        for messages in (ASK, [*ASK, OWN]):
            async with session.post_openai(messages=messages) as response:
                assert response.status == 200
        first, second = session.calls
    assert (second.parent, second.branch, second.messages) == (0, None, ())
    assert "Hm." in RENDERING.tokenizer.decode(second.prompt_ids.tolist())
    assert len(PrefixMerging().build(session.calls).traces) == 1
    assert first.answer is not None


async def test_a_prefill_is_refused_where_the_api_continues_it(tmp_path: Path) -> None:
    """Anthropic's and Google's APIs refuse a prefill; its tokens can be counted."""
    contents = [{"role": "user", "parts": [{"text": "Hi"}]}]
    contents.append({"role": "model", "parts": [{"text": "Sure:"}]})
    async with open_session(tmp_path, reply_with("Hello.")) as session:
        for path, body in (
            ("v1/messages", session.body([*ASK, OWN])),
            ("v1beta/models/m:generateContent", {"contents": contents}),
        ):
            async with session.http.post(f"{session.url}/{path}", json=body) as response:
                assert response.status == 400
                assert "the last message is from the assistant" in await response.text()
        for path, body in (
            ("v1/messages/count_tokens", {"model": "m", "messages": [*ASK, OWN]}),
            ("v1beta/models/m:countTokens", {"contents": contents}),
        ):
            async with session.http.post(f"{session.url}/{path}", json=body) as response:
                assert response.status == 200, await response.text()
        assert not session.calls
        async with session.post_openai(messages=[*ASK, FOREIGN]) as response:
            assert response.status == 200
        assert session.calls[0].branch is None


async def test_a_text_that_was_not_sampled_forks(tmp_path: Path) -> None:
    """The client's own text at the end of the conversation makes a branch, with the reason."""
    async with open_session(tmp_path, reply_with("Hello.")) as session:
        for messages in (ASK, [*ASK, OWN, FOREIGN]):
            async with session.post_openai(messages=messages) as response:
                assert response.status == 200
        assert [call.branch for call in session.calls] == [None, Branch.HARNESS_ASSISTANT]
