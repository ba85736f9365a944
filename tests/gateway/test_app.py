"""The gateway over real sockets, in front of a scripted engine: prefills, stops and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.engine import RENDERING, ids, reply_with
from support.gateway import open_session
from tugline.chat.engines.generate import Embedded
from tugline.errors import EngineError
from tugline.gateway.app import Gateway
from tugline.gateway.replicas import Upstream
from tugline.recording.records import RecordedEventKind
from tugline.testing import Reply
from tugline.traces.base import count_calls
from tugline.types import Reason

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


READ, WRITE = ({"type": "function", "function": {"name": name}} for name in ("read", "write"))
ONLY_READ = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [READ]}}
"""The model sees both tools in its prompt, so this choice cannot be enforced."""


async def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    """Halves of a surrogate pair, also escaped twice, are replaced; an event records the repair."""
    texts = ["a\\ud83d", "\\uDE00b", "\\ud83d\\ude00", "\\\\ud83d", "\\ud83d\\ud83d\\ude00"]
    body = b'{"model": "m", "messages": [%b]}' % b", ".join(
        b'{"role": "user", "content": "%b"}' % text.encode() for text in texts
    )
    async with open_session(tmp_path, reply_with("Hello.")) as session:
        async with session.http.post(f"{session.url}/v1/chat/completions", data=body) as response:
            assert response.status == 200
        (call,), (event,) = session.calls, session.recording.events
    repaired = ["a\ufffd", "\ufffdb", "\U0001f600", "\\ud83d", "\ufffd\U0001f600"]
    assert [message.content for message in call.messages] == repaired
    assert (event.kind, event.call) == (RecordedEventKind.REPAIRED, 0)
    assert event.detail == "lone surrogates"


async def test_a_stop_sequence_ends_the_answer(tmp_path: Path) -> None:
    """Generation is aborted; the sampled ids end with the one that completed the match."""
    async with open_session(tmp_path, reply_with("one two three four")) as session:
        reply = await session.ask(stop_sequences=["three"])
        call, sampled = session.calls[0], session.sampled
    assert reply["content"] == [{"type": "text", "text": "one two"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "three")
    assert call.sampled_ids.tolist() == ids("one two three", end=False)
    assert call.stop == "three"
    (ledger,) = count_calls([call], []).values()
    # the engine may sample some more until it is stopped, which it does not report
    assert sampled >= call.unreported_tokens + len(call.sampled_ids) > len(call.sampled_ids)
    assert ledger.dropped[Reason.BEHIND_STOP] == call.unreported_tokens


async def test_a_named_tool_choice_prefills_the_call(tmp_path: Path) -> None:
    """The forced beginning is context; the model samples the arguments."""
    rest = '{"path": "a.py"}}\n</tool_call>'
    async with open_session(tmp_path, lambda _p, _r: Reply(ids(rest))) as session:
        reply = await session.ask(tool_choice={"type": "tool", "name": "read"})
        call = session.calls[0]
    (block,) = reply["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "read", {"path": "a.py"})
    assert call.sampled_ids.tolist() == ids(rest)


async def test_generation_stops_after_one_call_without_parallel_calls(tmp_path: Path) -> None:
    """The sampled ids end where the first call closes."""
    async with open_session(tmp_path, reply_with(CALL + "\n" + CALL)) as session:
        reply = await session.ask(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        call = session.calls[0]
    assert [block["type"] for block in reply["content"]] == ["tool_use"]
    assert reply["stop_reason"] == "tool_use"
    assert call.sampled_ids.tolist() == ids(CALL, end=False)


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("chat/completions", {"tools": [READ, WRITE], "tool_choice": ONLY_READ}, "tool_choice"),
        ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("responses", {"input": [{"type": "additional_tools", "tools": []}]}, "input"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(
    tmp_path: Path, path: str, change: dict[str, Any], param: str
) -> None:
    """A field that the session or the engine's format refuses is the param of a 400."""
    async with open_session(tmp_path, reply_with("Hi.")) as session:
        async with session.post_openai(path, **change) as response:
            error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param), error
        assert not session.engines[0].calls


async def test_a_gateway_without_an_engine_does_not_start(tmp_path: Path) -> None:
    """One clear error names the reason."""
    with pytest.raises(EngineError, match="cannot reach the engine"):
        async with Gateway(Upstream("http://127.0.0.1:9", Embedded()), RENDERING, tmp_path):
            pass
