"""A tool call that cannot be parsed reaches the harness as a call or as text, by one setting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.test_usage import PATHS, ask
from support.engine import ids, reply_with
from support.gateway import open_session
from tugline.recording.verify.text import TextVerifier
from tugline.types import EchoChange, MalformedCalls, Session, ToolCall

BROKEN = '{"path": "a.py" "b.py"}'
ANSWER = f'<tool_call>\n{{"name": "read", "arguments": {BROKEN}}}\n</tool_call>'
CARRIED = {"chat": (True, True), "responses": (True, True), "anthropic": (False, True)}
"""Whether an API carries such a call in a whole answer, and in a stream."""
DIALECTS = sorted(set(PATHS) - {"completions"})


def find_arguments(reply: Any) -> str | None:
    """The argument text of the only call in a reply or its events; None without a call."""
    text = json.dumps(reply)
    if '"finish_reason": "tool_calls"' in text or '"delta": {"tool_calls"' in text:
        chunks = reply if isinstance(reply, list) else [reply]
        parts = [
            call["function"].get("arguments", "")
            for chunk in chunks
            for choice in chunk["choices"]
            for call in (choice.get("delta") or choice.get("message") or {}).get("tool_calls", ())
        ]
        return "".join(parts)
    items = reply.get("output", ()) if isinstance(reply, dict) else [e.get("item") for e in reply]
    calls = [item for item in items if item and item["type"] == "function_call"]
    if calls:
        return str(calls[-1]["arguments"])
    if isinstance(reply, list):
        inputs = [e["delta"] for e in reply if e.get("type") == "content_block_delta"]
        json_parts = [delta["partial_json"] for delta in inputs if "partial_json" in delta]
        return "".join(json_parts) or None
    return None


@pytest.mark.parametrize("malformed", MalformedCalls)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_malformed_call_is_delivered_as_the_setting_says(
    tmp_path: Path, dialect: str, malformed: MalformedCalls, *, stream: bool
) -> None:
    """An API that can carry such calls gets the sampled arguments; another gets the text."""
    async with open_session(tmp_path, reply_with(ANSWER), malformed=malformed) as opened:
        reply = await ask(opened, dialect, stream=stream)
        [call] = opened.calls
        carried = CARRIED.get(dialect, (False, False))[stream]
        raw = malformed is MalformedCalls.RAW and carried
        assert call.malformed is (MalformedCalls.RAW if raw else MalformedCalls.TEXT)
        if raw:
            assert BROKEN in (find_arguments(reply) or "").replace('\\"', '"')
            assert call.answer.tool_calls == (ToolCall("call_0_0", "read", f"{BROKEN}}}\n"),)
        else:
            assert find_arguments(reply) is None
            assert call.answer.content == ANSWER
        session = Session(id="s1", task="t", sample=0)
        path = opened.gateway.recording_path(session)
        assert not TextVerifier().find_faults(path, opened.recording.header, opened.calls)


@pytest.mark.parametrize("malformed", MalformedCalls)
async def test_a_call_that_is_cut_is_malformed(tmp_path: Path, malformed: MalformedCalls) -> None:
    """A call that the token limit cuts is malformed, and the finish reason stays the length."""
    async with open_session(tmp_path, reply_with(ANSWER), malformed=malformed) as session:
        length = len(ids(ANSWER[: ANSWER.index("b.py")], end=False))
        reply = await ask(session, "chat", stream=False, max_tokens=length)
        [choice] = reply["choices"]
        assert choice["finish_reason"] == "length"
        assert bool(choice["message"].get("tool_calls")) is (malformed is MalformedCalls.RAW)
        assert session.calls[0].malformed is malformed


ECHOES = {
    "as it was": None,
    "empty": "{}",
    "wrapped": json.dumps({"value": BROKEN}),
    "repaired": '{"path": "a.py"}',
}
"""Arguments with which clients echo a call whose arguments are not JSON."""


@pytest.mark.parametrize("how", ECHOES)
async def test_an_echoed_malformed_call_is_its_recorded_ids(tmp_path: Path, how: str) -> None:
    """The next prompt continues the answer exactly, whatever the client made of the arguments."""
    async with open_session(tmp_path, reply_with(ANSWER)) as session:
        first = await ask(session, "chat", stream=False)
        message = first["choices"][0]["message"]
        function = message["tool_calls"][0]["function"]
        function["arguments"] = ECHOES[how] or function["arguments"]
        result = {"role": "tool", "tool_call_id": "call_0_0", "content": "not JSON"}
        asked = [{"role": "user", "content": "Mend it."}]
        await ask(session, "chat", stream=False, messages=[*asked, message, result])
        before, after = session.calls
        known = [*before.prompt_ids.tolist(), *before.sampled_ids.tolist()]
        changes = () if ECHOES[how] is None else (EchoChange.ARGUMENTS,)
        assert (after.parent, after.branch, after.echo_changes) == (0, None, changes)
        assert after.prompt_ids.tolist()[: len(known)] == known
