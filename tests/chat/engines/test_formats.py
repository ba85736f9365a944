"""Every engine's wire format on payloads that vLLM 0.32 and SGLang 0.5.23 really sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from tugline.chat.engines.base import Delta, EngineFormat, EngineRequest, parse_engine_error
from tugline.chat.engines.chat import ObservedChat, TextChat, VllmChat
from tugline.chat.engines.generate import Embedded, VllmCompletions, VllmGenerate
from tugline.chat.engines.sglang import SglangChat, SglangGenerate
from tugline.chat.model_call import Request
from tugline.chat.tokens import TokenSequence
from tugline.errors import ContextOverflow, EngineError, Unsupported
from tugline.types import Finish, Mode, Sampling, VersionSpan

RECORDED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("recorded.json").read_text(encoding="utf-8")
)
FORMATS: dict[str, EngineFormat] = {
    "vllm_generate": VllmGenerate(),
    "vllm_completions": VllmCompletions(),
    "vllm_chat": VllmChat(),
    "sglang_generate": SglangGenerate(),
    "sglang_chat": SglangChat(),
}
BY_CLASS = {type(wire).__name__: wire for wire in (*FORMATS.values(), Embedded(), TextChat())}
PAYLOADS = yaml.safe_load(Path(__file__).with_name("payloads.yaml").read_text(encoding="utf-8"))
EXACT = [name for name, wire in FORMATS.items() if wire.mode is Mode.EXACT]
OBSERVED = [name for name, wire in FORMATS.items() if wire.mode is Mode.OBSERVED]
SAMPLING = Sampling(temperature=0.5, top_p=0.9, top_k=7, max_tokens=9, seed=3, stop=("END",))


def ask_for(wire: EngineFormat, banned: tuple[int, ...] = (), **more: Any) -> EngineRequest:
    """A request in this format; `more` are fields of the harness."""
    given = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hi."}]}
    request = msgspec.convert(given | more, Request)
    asked = EngineRequest(
        request=request, model="m", sampling=SAMPLING, request_id="r-1", banned=banned
    )
    if wire.mode is not Mode.EXACT:
        return asked
    prompt = TokenSequence(np.array([5, 6, 7], np.int32))
    return msgspec.structs.replace(asked, prompt=prompt, stop_ids=(2,))


def streamed(name: str, *, at_once: int = 1) -> list[Delta]:
    """The recorded stream, `at_once` events per read."""
    reader = FORMATS[name].make_reader()
    payloads = [payload.encode() for payload in RECORDED[name]["stream"]]
    return [
        delta
        for start in range(0, len(payloads), at_once)
        for delta in reader.read_events(payloads[start : start + at_once])
    ]


def whole(name: str) -> list[Delta]:
    """The recorded reply in one piece."""
    wire = FORMATS[name]
    return wire.make_reader().read_body(RECORDED[name]["whole"].encode())


def reported_ids(name: str) -> list[int]:
    """The sampled ids of the recorded stream, read without the code under test."""
    events = [json.loads(payload) for payload in RECORDED[name]["stream"]]
    if name == "sglang_generate":
        return list(events[-1]["output_ids"])
    if name == "sglang_chat":
        return next(list(e["sglext"]["output_ids"][0]) for e in events if "sglext" in e)
    return [i for e in events for choice in e["choices"] for i in choice.get("token_ids") or ()]


def joined(deltas: list[Delta]) -> tuple[list[int], list[float]]:
    """All ids and logprobs."""
    ids = [one for delta in deltas for one in delta.ids]
    return ids, [one for delta in deltas for one in delta.logprobs]


# --------------------------------------------------------------------------- reading
@pytest.mark.parametrize("at_once", [1, 3, 1000])
@pytest.mark.parametrize("name", FORMATS)
def test_a_stream_gives_every_token_once_however_it_is_cut(name: str, at_once: int) -> None:
    """Ids and logprobs are complete and aligned, with one finish reason."""
    deltas = streamed(name, at_once=at_once)
    ids, logprobs = joined(deltas)
    assert ids == reported_ids(name)
    assert len(ids) == len(logprobs) > 0
    assert all(logprob <= 0 for logprob in logprobs)
    assert [delta.finish for delta in deltas if delta.finish] == [
        Finish.LENGTH if name in EXACT else Finish.STOP
    ]
    assert sum(delta.unreported_tokens for delta in deltas) == 0
    if at_once == 1000:
        assert len([delta for delta in deltas if len(delta.ids)]) <= 2


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_reply_gives_every_token(name: str) -> None:
    """A whole reply has as many ids and logprobs as the engine counts, and its finish reason."""
    deltas = whole(name)
    ids, logprobs = joined(deltas)
    reply = json.loads(RECORDED[name]["whole"])
    counted = reply["usage"] if "usage" in reply else reply["meta_info"]
    assert len(ids) == len(logprobs) == counted["completion_tokens"]
    assert deltas[-1].finish is (Finish.LENGTH if name in EXACT else Finish.STOP)


@pytest.mark.parametrize("name", OBSERVED)
def test_an_observed_answer_has_its_parts_and_its_prompt(name: str) -> None:
    """Reasoning, text and calls are those that the engine parsed; the prompt's ids are as sent."""
    for deltas in (streamed(name), streamed(name, at_once=1000), whole(name)):
        reasoning = "".join(delta.reasoning for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        arguments: dict[int, str] = {}
        names: dict[int, str] = {}
        for call in (call for delta in deltas for call in delta.calls):
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
            names[call.index] = names.get(call.index, "") + call.name
        assert reasoning.strip().startswith("The user asks for")
        assert text.strip() == "Let me look."
        assert names == {0: "read", 1: "read"}
        assert all(set(json.loads(text)) == {"path"} for text in arguments.values())
        (prompt,) = [delta.prompt for delta in deltas if delta.prompt is not None]
        assert prompt in RECORDED[name]["stream"][0].encode() + b"".join(
            payload.encode() for payload in RECORDED[name]["stream"]
        )
        assert msgspec.json.decode(prompt, type=list[int])[0] == 1


def test_versions_are_read_where_the_engine_reports_them() -> None:
    """Both native routes have versions; vLLM at a stream's end, counted from the first token."""
    spans = (VersionSpan(0, 0, 8),)
    assert [d.spans for d in streamed("vllm_generate") if d.spans] == [spans]
    assert [d.spans for d in streamed("sglang_generate") if d.spans] == [spans]
    assert {d.version for d in whole("vllm_generate")} == {0}
    assert {d.version for d in whole("vllm_completions")} == {None}


def test_weights_that_change_in_the_middle_are_two_spans() -> None:
    """SGLang and vLLM report two versions for an answer of four tokens."""
    sglang, vllm = (json.dumps(body).encode() for body in PAYLOADS["weights_changed"].values())
    (delta,) = SglangGenerate().make_reader().read_body(sglang)
    assert delta.spans == (VersionSpan(0, 0, 1), VersionSpan(3, 1, 4))
    first, second = VllmGenerate().make_reader().read_body(vllm)
    assert (first.version, first.ids) == (0, [10])
    assert (second.version, second.ids, second.finish) == (3, [11, 12, 13], Finish.STOP)


def test_incremental_and_cumulative_streams_are_the_same() -> None:
    """The option ``--incremental-streaming-output`` changes nothing."""
    cumulative = [json.loads(payload) for payload in RECORDED["sglang_generate"]["stream"]]
    seen = 0
    incremental = []
    for event in cumulative:
        meta = event["meta_info"]
        fresh = meta["output_token_logprobs"][seen:]
        seen += len(fresh)
        incremental.append({**event, "meta_info": {**meta, "output_token_logprobs": fresh}})
    for at_once in (1, 3, 1000):
        reader = SglangGenerate().make_reader()
        deltas: list[Delta] = []
        for start in range(0, len(incremental), at_once):
            part = incremental[start : start + at_once]
            deltas += reader.read_events([json.dumps(event).encode() for event in part])
        assert joined(deltas) == joined(streamed("sglang_generate"))


def test_an_aborted_sglang_chat_has_counts_only() -> None:
    """Tokens without ids cannot be trained on: they are counted as unreported, not lost."""
    reader = SglangChat().make_reader()
    events = [json.loads(payload) for payload in RECORDED["sglang_chat"]["stream"][:9]]
    end = {"choices": [{"delta": {}, "finish_reason": "abort"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 11}}
    deltas = reader.read_events([json.dumps(event).encode() for event in (*events, end, usage)])
    count = sum(len((e["choices"][0]["logprobs"] or {"content": []})["content"]) for e in events)
    assert sum(delta.unreported_tokens for delta in deltas) == count > 0
    assert deltas[-1].finish is Finish.ABORT


@pytest.mark.parametrize("wire", [VllmChat(), ObservedChat(), SglangChat()], ids=lambda w: w.name)
def test_an_observed_answer_without_ids_is_an_error(wire: EngineFormat) -> None:
    """The error names what to ask the engine for (I2)."""
    reply = {
        "choices": [{"message": {"content": "Hi."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    with pytest.raises(EngineError, match=r"return_token_ids|return_output_ids_in_sglext"):
        wire.make_reader().read_body(json.dumps(reply).encode())


@pytest.mark.parametrize("name", FORMATS)
def test_unreadable_events_are_an_engine_error(name: str) -> None:
    """Unreadable events, and an error in the middle of a stream, are engine errors."""
    wire = FORMATS[name]
    for payload in (b"<html>", b"\xff\xfe", b'{"choices": 5, "meta_info": 5}'):
        with pytest.raises(EngineError, match="cannot be decoded"):
            wire.make_reader().read_events([payload])
    for payload in RECORDED[name]["stream"][:2]:
        assert wire.make_reader().read_events([payload.encode()]) is not None
    with pytest.raises(EngineError, match="out of memory"):
        wire.make_reader().read_events([b'{"error": {"message": "out of memory", "code": 500}}'])


def test_tokens_of_text_only_answers_are_counted() -> None:
    """The server's usage counts, else its events; the count is never 0."""
    with_usage = TextChat().make_reader()
    payloads = [payload.encode() for payload in RECORDED["vllm_chat"]["stream"]]
    deltas = with_usage.read_events(payloads)
    sampled = len(reported_ids("vllm_chat"))
    assert sum(delta.unreported_tokens for delta in deltas) == sampled
    assert all(not len(delta.ids) for delta in deltas)
    assert deltas[-1].prompt_count > 0
    without = TextChat().make_reader()
    uncounted = [delta for payload in payloads[:-1] for delta in without.read_events([payload])]
    assert 0 < sum(delta.unreported_tokens for delta in uncounted) <= sampled


@pytest.mark.parametrize("name", FORMATS)
def test_a_prompt_too_long_is_a_context_overflow(name: str) -> None:
    """The error has the numbers, however the engine words it."""
    status, body = RECORDED[name]["overflow"]
    error = parse_engine_error(status, body.encode(), None)
    assert isinstance(error, ContextOverflow)
    assert error.window == 2048
    assert error.prompt > 2048


def test_an_overflow_inside_a_stream_is_one_too() -> None:
    """The refusal is read from the stream, where SGLang puts it after a status of 200."""
    reader = SglangGenerate().make_reader()
    with pytest.raises(ContextOverflow):
        reader.read_events([RECORDED["sglang_generate"]["overflow_stream"].encode()])


def test_other_refusals_keep_status_and_message() -> None:
    """The error has the status, Retry-After and message, by which a retry is decided."""
    error = parse_engine_error(503, b'{"error": {"message": "overloaded"}}', "3")
    assert isinstance(error, EngineError)
    assert (error.status, error.retry_after) == (503, 3.0)
    assert "overloaded" in str(error)
    status, body = RECORDED["vllm_chat"]["missing"]
    assert "Not Found" in str(parse_engine_error(status, body.encode(), None))
    assert "teapot" in str(parse_engine_error(418, b"I am a teapot", None))


# --------------------------------------------------------------------------- requests
def sent(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The JSON that the engine of a row is sent."""
    wire = BY_CLASS[row["wire"]]
    post = wire.build_request(ask_for(wire, tuple(row.get("banned", ())), **fields))
    body: dict[str, Any] = json.loads(b"".join(post.body))
    return body


@pytest.mark.parametrize("row", PAYLOADS["sent"], ids=lambda row: row["wire"])
def test_engine_requests_have_the_documented_body(row: dict[str, Any]) -> None:
    """Ids are unchanged and banned ones biased out; or the whole conversation is sent."""
    assert sent(row, **row.get("fields", {})) == row["body"]


@pytest.mark.parametrize("row", PAYLOADS["constrained"], ids=lambda row: row["wire"])
def test_structured_output_is_requested_in_each_engines_format(row: dict[str, Any]) -> None:
    """The request has a schema, or asks for any JSON object."""
    expected = sent(row)
    for name, fields in row["asks"].items():
        expected[name] = expected.get(name, {}) | fields
    assert sent(row, constraint=row["constraint"]) == expected


def test_sglang_refuses_what_its_chat_route_would_ignore() -> None:
    """A limit of one tool call, which SGLang would not keep to, is refused."""
    wire, tool = SglangChat(), {"name": "read", "description": "", "parameters": {}}
    with pytest.raises(Unsupported, match="one tool call") as caught:
        wire.build_request(ask_for(wire, tools=[tool], parallel=False))
    assert caught.value.param == "parallel_tool_calls"


@pytest.mark.parametrize("name", BY_CLASS)
def test_an_abort_names_the_request_as_its_route_does(name: str) -> None:
    """The abort has the prefix that the route puts before the request's id."""
    post = BY_CLASS[name].build_abort("r-1")
    assert (post and json.loads(b"".join(post.body))) == PAYLOADS["aborts"][name]
