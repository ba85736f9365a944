"""Text completions under the official OpenAI SDK: exact ids, no template, one growing trace."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from exports.made import export, record
from support.engine import RENDERING, ids, reply_in_turn, reply_with
from support.gateway import OpenSession, open_session
from support.polling import until
from tugline.exports.base import SkipReason
from tugline.gateway.app import Gateway
from tugline.gateway.policy import CallSettings
from tugline.recording import file as recordings
from tugline.recording.records import RecordedResult
from tugline.recording.verify.session import VerifyVerdict, verify_session
from tugline.recording.verify.text import TextVerifier
from tugline.recording.view.html_page import pack_recording
from tugline.replay.source import RecordedSource
from tugline.testing import Reply
from tugline.traces.base import PrefixMerging
from tugline.traces.lineage import Continuation
from tugline.types import CallOutcome, Finish, Sampling, Status

TEXT = "  <think>4</think> é🙂\n"
"""White space at both ends, template markup, and characters of several tokens."""


class Client:
    """An open session with an SDK client."""

    def __init__(self, session: OpenSession) -> None:
        self.opened = session
        self.sdk = openai.AsyncOpenAI(
            base_url=f"{session.url}/v1", api_key=session.key, max_retries=0
        )

    async def ask(self, prompt: Any = "2+2=", **options: Any) -> Any:
        """One text completion with up to 400 tokens."""
        return await self.sdk.completions.create(
            model="m", prompt=prompt, **{"max_tokens": 400, **options}
        )

    async def hang_up(self, prompt: str, **options: Any) -> None:
        """Ask for a stream, and disconnect at the first text."""
        stream = await self.ask(prompt, stream=True, **options)
        async for chunk in stream:
            if chunk.choices[0].text:
                break
        await stream.close()


@contextlib.asynccontextmanager
async def client(folder: Path, *plays: Any, **options: Any) -> AsyncIterator[Client]:
    """See `support.gateway`."""
    async with open_session(folder, *plays, **options) as session:
        made = Client(session)
        async with made.sdk:
            yield made


encode = RENDERING.tokenizer.encode


async def test_the_answer_is_the_text_as_it_was_sampled(tmp_path: Path) -> None:
    """The prompt is encoded as it is without a template, and the answer is not parsed.

    The reply and the record are those of one call.
    """
    async with client(tmp_path, reply_with(TEXT)) as me:
        reply = await me.ask(seed=7, top_p=0.5)
        (call,) = me.opened.calls
        by_key = me.sdk.with_options(base_url=f"{me.opened.gateway.url}/v1")
        await by_key.completions.create(model="m", prompt=encode("2+3="))
        assert me.opened.calls[1].requested.max_tokens == 16
    assert (reply.object, reply.id) == ("text_completion", "cmpl-s1-0")
    assert reply.choices[0].model_dump() == {
        "index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop",
    }  # fmt: skip
    assert call.prompt_ids.tolist() == encode("2+2=")
    assert call.sampled_ids.tolist() == ids(TEXT)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, len(ids(TEXT)))
    assert (call.dialect, call.raw_prompt, call.messages) == ("openai_completions", True, ())
    assert call.requested == Sampling(top_p=0.5, max_tokens=400, seed=7)
    assert call.answer.content == TEXT


async def test_a_stream_has_the_same_text(tmp_path: Path) -> None:
    """The stream has several choices, the prompt first, and the counts last."""
    async with client(tmp_path, reply_in_turn(TEXT)) as me:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = [chunk async for chunk in await me.ask(n=2, echo=True, **options)]
        whole = await me.ask("Again:", n=2, echo=True)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert {(chunk.id, chunk.object, chunk.usage) for chunk in chunks} == {
        ("cmpl-s1-0", "text_completion", None)
    }
    for index in (0, 1):
        mine = [choice for choice in choices if choice.index == index]
        assert "".join(choice.text for choice in mine) == "2+2=" + TEXT
        assert mine[0].text == "2+2="
        assert [choice.finish_reason for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert [choice.text for choice in whole.choices] == ["Again:" + TEXT] * 2
    assert (last.choices, last.usage.prompt_tokens) == ([], 4)
    assert last.usage.completion_tokens == 2 * len(ids(TEXT)) == last.usage.total_tokens - 4


async def test_logprobs_are_those_of_the_sampled_tokens(tmp_path: Path) -> None:
    """Each token has its text and offset; a stream has the logprobs in its last chunk."""
    values = np.linspace(-2, 0, len(ids(TEXT))).tolist()
    async with client(tmp_path, lambda *_: Reply(ids(TEXT), values)) as me:
        whole = (await me.ask(logprobs=0)).choices[0].logprobs
        stream = await me.ask("2+3=", logprobs=0, stream=True)
        streamed = [chunk.choices[0].logprobs async for chunk in stream]
        (call, other) = me.opened.calls
    assert "".join(whole.tokens) == TEXT + "<|im_end|>"
    assert whole.text_offset == [len("".join(whole.tokens[:n])) for n in range(len(whole.tokens))]
    assert np.allclose(whole.token_logprobs, values)
    assert whole.top_logprobs == [
        {token: value} for token, value in zip(whole.tokens, whole.token_logprobs, strict=True)
    ]
    assert np.allclose(whole.token_logprobs, call.logprobs)
    assert streamed[:-1] == [None] * (len(streamed) - 1)
    assert np.allclose(streamed[-1].token_logprobs, other.logprobs)


async def test_a_stop_string_and_a_limit_end_the_text(tmp_path: Path) -> None:
    """The string is not in the text, but in the ids, up to the token that completed it."""
    async with client(tmp_path, reply_with("one two three four")) as me:
        stopped = (await me.ask(stop=["three"])).choices[0]
        cut = (await me.ask("2+3=", max_tokens=3)).choices[0]
        calls = me.opened.calls
    assert (stopped.text, stopped.finish_reason) == ("one two ", "stop")
    assert calls[0].sampled_ids.tolist() == ids("one two three", end=False)
    assert calls[0].stop == "three"
    assert (cut.text, cut.finish_reason, calls[1].finish) == ("one", "length", Finish.LENGTH)


async def test_a_growing_prompt_is_one_trace(tmp_path: Path) -> None:
    """A recording of text or ids is verified, displayed and exported, and its ledger balances.

    It is one scenario: what happens to one recording, from the calls to the export.
    """
    answers = iter((" I look.\nObs", "\nIt is 4.\nObs", " Done."))
    async with client(tmp_path, lambda _p, _r: Reply(ids(next(answers)))) as me:
        prompt = "Q: 2+2?\nThought:"
        first = (await me.ask(prompt, stop="Obs")).choices[0].text
        prompt += first + "Observation: 4\nThought:"
        second = (await me.ask(prompt, stop="Obs")).choices[0].text
        prompt += second + "Obs: sure?"
        await me.ask(encode(prompt))
        calls, path = me.opened.calls, me.opened.live.transcript.writer.path
    assert (first, second) == (" I look.\n", "\nIt is 4.\n")
    assert [(call.parent, call.branch) for call in calls] == [(None, None), (0, None), (1, None)]
    recording = recordings.read(path)
    report = verify_session(path, recording, TextVerifier())
    assert {check.verdict for check in report.checks.values()} == {VerifyVerdict.PASS}
    assert [turn.continuation for turn in report.turns[1:]] == [Continuation.EXACT] * 2
    built = PrefixMerging().build(recording.calls)
    (trace,) = built.traces
    assert int(trace.mask.sum()) == sum(len(call.sampled_ids) for call in calls)
    assert trace.ids.tolist() == encode(prompt) + ids(" Done.")
    assert pack_recording(path)
    done = RecordedResult(status=Status.COMPLETED, builder="prefix_merging", ledger=built.ledger)
    recordings.write_result(path, done)
    assert export("parquet", tmp_path, tmp_path / "rows.parquet").exported == 1
    record(tmp_path, "s2")
    chats = export("sft", tmp_path, tmp_path / "chats.jsonl")
    assert chats.rows_left_out == {SkipReason.SHORTER: 2, SkipReason.RAW_PROMPT: 1}


async def test_a_repeated_request_gets_the_rest_of_its_answer(tmp_path: Path) -> None:
    """A repeated request continues where it broke off; with logprobs it is sampled anew."""
    text = " ".join(f"word{i}" for i in range(24))
    quick = CallSettings(grace_s=0.01)
    async with client(tmp_path, reply_with(text, delay_s=0.005), tuning=quick) as me:
        for number, options in enumerate(({}, {"logprobs": 0})):
            await me.hang_up("Hi" + str(options), **options)
            await until(lambda n=number: len(me.opened.calls) > 2 * n)
            reply = (await me.ask("Hi" + str(options), **options)).choices[0]
            assert reply.text == text
        calls = me.opened.calls
    assert [call.outcome for call in calls] == [CallOutcome.CLIENT_GONE, CallOutcome.COMPLETE] * 2
    assert [call.resumed > 0 for call in calls] == [False, True, False, False]
    assert len(reply.logprobs.tokens) == len(ids(text))


async def test_a_recording_answers_the_same_prompts(tmp_path: Path) -> None:
    """Prompts are matched by their ids, in any order; another prompt gets an unused answer."""
    async with client(tmp_path, reply_in_turn("One.", "Two.")) as me:
        texts = {prompt: (await me.ask(prompt)).choices[0].text for prompt in ("A", "AB")}
        path = me.opened.live.transcript.writer.path
    recording = recordings.read(path)
    source = RecordedSource(recording.header, recording.calls, tokenizer=RENDERING.tokenizer)
    async with (
        Gateway(source, RENDERING, tmp_path / "again") as gateway,
        gateway.open(recording.header.session, recording.header.task) as opened,
        openai.AsyncOpenAI(base_url=f"{opened.base_url}/v1", api_key=opened.key) as sdk,
    ):
        for prompt, recorded in (("AB", "AB"), ("other", "A")):
            reply = await sdk.completions.create(model="m", prompt=prompt, max_tokens=400)
            assert reply.choices[0].text == texts[recorded]
    assert (source.state("s1").replayed, source.state("s1").exact) == (2, 1)


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"prompt": ""}, "prompt", "must be a list of token ids"),
        ({"prompt": [5, 10**30]}, "prompt", "token ids below"),
        ({"prompt": [-1]}, "prompt", "token ids below"),
        ({"prompt": "long " * 60}, "prompt", "maximum context length is 64"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], field: str, message: str
) -> None:
    """An unsupported field is a 400 in OpenAI's shape, before anything is sampled."""
    async with client(tmp_path, reply_with("x"), window=64) as me:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await me.ask(change.pop("prompt", "Hi"), **change)
        assert caught.value.param == field
        assert not me.opened.engines[0].calls
