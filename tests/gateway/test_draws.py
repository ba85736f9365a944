"""An answer survives its engine, its client and its weights, and is sampled once (I2, I3)."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rig import ASK, Rig, cut_once, ids, rig, says, text_of
from tugline.errors import EngineError
from tugline.gateway import completion
from tugline.testing.scripted_engine import Reply
from tugline.types import Branch, CallOutcome, Finish, Limits, Policy, Sampling, VersionSpan

LONG = " ".join(f"word{i}" for i in range(24))
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


async def until(holds: Any, within_s: float = 5.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - bounded just above
            await asyncio.sleep(0.01)


# --------------------------------------------------------------------------- lost engines
async def test_an_answer_goes_on_where_its_engine_died(tmp_path: Path) -> None:
    """Both replicas cut the connection in the middle; the client reads one unbroken stream."""
    async with rig(tmp_path, cut_once(LONG, 40), cut_once(LONG, 50)) as it:
        async with it.post(it.body(stream=True)) as response:
            told = text_of(await response.text())
        call = it.calls[0]
    assert told == LONG
    assert call.sampled_ids.tolist() == ids(LONG)
    assert (call.outcome, call.finish, call.branch) == (CallOutcome.COMPLETE, Finish.STOP, None)
    assert len(call.replicas) == 3
    assert call.replicas[0] == call.replicas[2] != call.replicas[1]


async def test_a_version_that_changes_with_the_replica_is_a_span_of_its_own(tmp_path: Path) -> None:
    """Tokens carry the version of whoever sampled them."""
    async with rig(tmp_path, says(LONG, cut_after=40), says(LONG, cut_after=40)) as it:
        it.engines[0].version, it.engines[1].version = 3, 4
        await _read(it)
        call = it.calls[0]
    assert [span.version for span in call.versions[:2]] in ([3, 4], [4, 3])
    assert call.versions[0] == VersionSpan(call.versions[0].version, 0, 40)


async def _read(it: Rig) -> str:
    async with it.post(it.body(stream=True)) as response:
        return await response.text()


async def test_without_a_replica_left_the_answer_ends_as_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was told is a whole answer in the dialect's terms; what was sampled is trained."""
    monkeypatch.setattr(completion, "_CONTINUATIONS", 1)
    told = " ".join(f"w{i}" for i in range(40))

    def cut(prompt: Any, request: str) -> Any:
        reply = says(told, cut_after=60)(prompt, request)
        return reply if request.endswith("-0") else says(told, status=500)(prompt, request)

    async with rig(tmp_path, cut) as it:
        text = await _read(it)
        call = it.calls[0]
    assert '"stop_reason":"max_tokens"' in text
    assert text.rstrip().endswith('{"type":"message_stop"}')
    assert call.outcome is CallOutcome.ENGINE_LOST
    assert call.sampled_ids.tolist() == ids(told)[:60]


async def test_a_fault_before_the_first_token_is_another_replicas_business(tmp_path: Path) -> None:
    """Whichever replica the session sticks to, the refused call is answered."""
    async with rig(tmp_path, says("a", status=500), says("Done.")) as it:
        for _ in range(3):
            reply = await it.ask()
            assert reply["content"] == [{"type": "text", "text": "Done."}]


async def test_a_failing_replica_is_left_out_and_comes_back(tmp_path: Path) -> None:
    """After faults in a row it is not asked again until a probe finds it well."""
    sick = says("a", status=500)
    async with rig(tmp_path, sick, says("Done.")) as it:
        replica = it.gateway._upstream.replicas[0]
        for _ in range(2):
            replica.failed()
        assert replica.ejected
        before = len(it.engines[0].calls)
        for _ in range(4):
            await it.ask()
        assert len(it.engines[0].calls) == before
        await until(lambda: not replica.ejected)


async def test_calls_of_a_session_stick_to_one_replica(tmp_path: Path) -> None:
    """The KV cache of a conversation stays useful."""
    async with rig(tmp_path, says("Hi."), says("Hi."), says("Hi.")) as it:
        for _ in range(6):
            await it.ask()
        assert sorted(len(engine.calls) for engine in it.engines) == [0, 0, 6]


# --------------------------------------------------------------------------- clients that leave
async def test_hanging_up_ends_the_engines_work_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    """Within two seconds no request runs, and the call is on disk as nobody's."""
    async with rig(tmp_path, says(LONG, delay_s=0.02)) as it:
        response = await it.post(it.body(stream=True))
        await response.content.readany()
        await asyncio.sleep(0.3)
        response.close()
        began = time.monotonic()
        await until(lambda: not it.running, 2.0)
        assert time.monotonic() - began < 2.0
        await until(lambda: it.calls)
        call = it.calls[0]
    assert call.outcome is CallOutcome.CLIENT_GONE
    assert 0 < len(call.sampled_ids) < len(ids(LONG))


async def test_an_unstreamed_answer_is_salvaged_when_its_client_leaves(tmp_path: Path) -> None:
    """The engine is asked for what it has before the connection is dropped."""
    async with rig(tmp_path, says(LONG, delay_s=0.02)) as it:
        asking = asyncio.create_task(it.ask())
        await asyncio.sleep(0.4)
        asking.cancel()
        await until(lambda: not it.running, 2.5)
        await until(lambda: it.calls)
    assert it.calls[0].outcome is CallOutcome.CLIENT_GONE


async def test_two_hundred_clients_that_die_leave_nothing_running(tmp_path: Path) -> None:
    """Killing many clients in the middle of their streams frees the engine."""
    async with rig(tmp_path, says(LONG, delay_s=0.05)) as it:
        responses = await asyncio.gather(*(it.post(it.body(stream=True)) for _ in range(200)))
        await until(lambda: it.running == 200, 20)
        for response in responses:
            response.close()
        await until(lambda: not it.running, 2.0)


# --------------------------------------------------------------------------- the same request again
async def test_a_retry_goes_on_from_what_was_sampled(tmp_path: Path) -> None:
    """The same request after a hang-up is answered whole, and no token is sampled twice."""
    async with rig(tmp_path, says(LONG, delay_s=0.01)) as it:
        response = await it.post(it.body(stream=True))
        await response.content.readany()
        await asyncio.sleep(0.2)
        response.close()
        await until(lambda: it.calls)
        told = text_of(await _read(it))
        first, second = it.calls
    assert told == LONG
    assert [*first.sampled_ids.tolist(), *second.sampled_ids.tolist()] == ids(LONG)
    whole = np.concatenate((first.prompt_ids, first.sampled_ids))
    assert np.array_equal(second.prompt_ids, whole)
    assert (second.parent, second.branch) == (0, None)


async def test_a_retry_at_once_joins_the_answer_in_flight(tmp_path: Path) -> None:
    """A client that comes back within a moment follows the same answer from its beginning."""
    async with rig(tmp_path, says(LONG, delay_s=0.01)) as it:
        response = await it.post(it.body(stream=True))
        await response.content.readany()
        response.close()
        await asyncio.sleep(0.1)
        told = text_of(await _read(it))
        assert len(it.engines[0].calls) == 1
    assert told == LONG
    assert [call.outcome for call in it.calls] == [CallOutcome.COMPLETE]


async def test_the_same_turn_without_a_stream_is_not_sampled_again(tmp_path: Path) -> None:
    """Claude Code's fallback asks for a streamed turn once more, unstreamed."""
    async with rig(tmp_path, says("Done.")) as it:
        streamed = text_of(await _read(it))
        whole = await it.ask(stream=False)
        assert whole["content"] == [{"type": "text", "text": streamed}]
        assert len(it.engines[0].calls) == 1


async def test_deliberate_samples_are_kept_apart(tmp_path: Path) -> None:
    """Twins in flight, and the same question after its answer was received, are new samples."""
    async with rig(tmp_path, says(LONG, delay_s=0.002)) as it:
        await asyncio.gather(it.ask(), it.ask())
        await it.ask()
        assert len(it.engines[0].calls) == 3
    assert [call.branch for call in it.calls] == [None, None, None]


async def test_an_sdks_retry_is_replayed(tmp_path: Path) -> None:
    """A client that says it retries gets the answer there is."""
    async with rig(tmp_path, says("Done.")) as it:
        await it.ask()
        async with it.post(it.body(), **{"x-stainless-retry-count": "1"}) as again:
            reply = await again.json()
        assert reply["id"] == "msg_s1-0"
        assert len(it.engines[0].calls) == 1


async def test_a_partial_answer_that_is_echoed_is_continued(tmp_path: Path) -> None:
    """After a cut, a harness keeps the half it got and adds a message: an exact continuation."""
    async with rig(tmp_path, says(LONG, delay_s=0.01)) as it:
        response = await it.post(it.body(stream=True))
        text = ""
        while len(text_of(text)) < 60:
            text += (await response.content.readany()).decode()
        response.close()
        await until(lambda: it.calls)
        gone = it.calls[0]
        told = it.gateway._recent["s1"][0].draws[0]
        half = "".join(piece.text for _, piece in told._told)
        length, _ = told._told[-1]
        cut = {"role": "user", "content": "Your response above was cut off."}
        await it.ask([*ASK, {"role": "assistant", "content": half}, cut])
        call = it.calls[1]
    assert (call.parent, call.branch) == (0, None)
    assert length >= len(gone.sampled_ids) - 1, "a blank at the end is not told yet"
    whole = np.concatenate((gone.prompt_ids, gone.sampled_ids[:length]))
    assert np.array_equal(call.prompt_ids[: len(whole)], whole)


# --------------------------------------------------------------------------- weights
async def test_paused_calls_wait_and_running_ones_finish(tmp_path: Path) -> None:
    """`pause` returns when nothing is in flight; a new call is answered after `resume`."""
    async with rig(tmp_path, says(LONG, delay_s=0.005)) as it:
        running = asyncio.create_task(it.ask())
        await until(lambda: it.running)
        await it.gateway.pause("wait", within_s=5)
        assert not it.running
        held = asyncio.create_task(it.ask([*ASK, *ASK]))
        await asyncio.sleep(0.3)
        assert len(it.engines[0].calls) == 1
        it.gateway.resume()
        assert (await running)["stop_reason"] == (await held)["stop_reason"] == "end_turn"


async def test_pause_can_end_running_answers_with_what_they_have(tmp_path: Path) -> None:
    """An aborted answer is told as truncated and recorded as aborted."""
    async with rig(tmp_path, says(LONG, delay_s=0.02)) as it:
        reading = asyncio.create_task(_read(it))
        await asyncio.sleep(0.4)
        await it.gateway.pause("abort", within_s=5)
        it.gateway.resume()
        assert '"stop_reason":"max_tokens"' in await reading
        call = it.calls[0]
    assert (call.outcome, call.finish) == (CallOutcome.COMPLETE, Finish.ABORT)
    assert 0 < len(call.sampled_ids) < len(ids(LONG))


async def test_a_pause_that_takes_too_long_says_so(tmp_path: Path) -> None:
    """No wait is unbounded."""
    async with rig(tmp_path, says(LONG, delay_s=0.05)) as it:
        reading = asyncio.create_task(_read(it))
        await until(lambda: it.running)
        with pytest.raises(EngineError, match="still in flight"):
            await it.gateway.pause("wait", within_s=0.2)
        it.gateway.resume()
        await reading


# --------------------------------------------------------------------------- settings and budgets
async def test_a_buffered_stream_tells_everything_at_the_end(tmp_path: Path) -> None:
    """Headers and opening come early, deltas only when the answer is complete."""
    async with rig(tmp_path, says(LONG, delay_s=0.005), stream="buffered") as it:
        assert text_of(await _read(it)) == LONG


async def test_a_stop_sequence_ends_the_answer_before_it(tmp_path: Path) -> None:
    """The engine is let go, the sampled ids end with the one that completed the match."""
    async with rig(tmp_path, says("one two three four", delay_s=0.001)) as it:
        reply = await it.ask(stop_sequences=["three"])
        call = it.calls[0]
    assert reply["content"] == [{"type": "text", "text": "one two"}]
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "three")
    assert call.sampled_ids.tolist() == ids("one two three", end=False)
    assert call.stop == "three"


async def test_a_named_tool_choice_begins_the_call_for_the_model(tmp_path: Path) -> None:
    """The forced beginning is context; the model samples the arguments."""
    async with rig(tmp_path, lambda _p, _r: _tail('{"path": "a.py"}}\n</tool_call>')) as it:
        reply = await it.ask(tool_choice={"type": "tool", "name": "read"})
        call = it.calls[0]
    (block,) = reply["content"]
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "read", {"path": "a.py"})
    assert call.sampled_ids.tolist() == ids('{"path": "a.py"}}\n</tool_call>')


def _tail(text: str) -> Reply:
    """What a model goes on with after a given beginning."""
    return Reply(ids(text))


async def test_one_call_at_a_time_stops_after_the_first(tmp_path: Path) -> None:
    """Without parallel calls the engine ends where the first call closes."""
    async with rig(tmp_path, says(CALL + "\n" + CALL)) as it:
        reply = await it.ask(tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        call = it.calls[0]
    assert [block["type"] for block in reply["content"]] == ["tool_use"]
    assert reply["stop_reason"] == "tool_use"
    assert call.sampled_ids.tolist() == ids(CALL, end=False)


@pytest.mark.parametrize(
    ("policy", "used"), [(Policy.ENFORCE, 1.0), (Policy.ALLOW, 0.5)], ids=["enforce", "allow"]
)
async def test_the_contract_decides_about_sampling(
    tmp_path: Path, policy: Policy, used: float
) -> None:
    """What the harness wished is recorded either way."""
    contract = Sampling(temperature=1.0, top_p=1.0)
    async with rig(tmp_path, says("Hi."), sampling=contract, policy=policy) as it:
        await it.ask(temperature=0.5)
        call = it.calls[0]
    assert (call.sampling.temperature, call.requested.temperature) == (used, 0.5)


async def test_the_contract_can_refuse(tmp_path: Path) -> None:
    """Other sampling than agreed is an error that names the field and what is right."""
    contract = Sampling(temperature=1.0)
    async with rig(tmp_path, says("Hi."), sampling=contract, policy=Policy.REFUSE) as it:
        reply = await it.ask(temperature=0.5)
    assert reply["status"] == 400
    assert "temperature=0.5 is refused" in reply["error"]["message"]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(max_turns=1), "1 model calls"),
        (Limits(max_sampled_tokens=3), "3 sampled tokens"),
        (Limits(calls_s=0.2), "0.2 seconds"),
    ],
    ids=["turns", "tokens", "time"],
)
async def test_a_spent_budget_is_told_in_the_status_its_harness_stops_on(
    tmp_path: Path, limits: Limits, words: str
) -> None:
    """Nothing is sampled any more, and the message says which budget it was."""
    async with rig(tmp_path, says("Hello."), limits=limits, spent_status=404) as it:
        await it.ask()
        await asyncio.sleep(0.25)
        reply = await it.ask([*ASK, *ASK])
    assert reply["status"] == 404
    assert words in reply["error"]["message"]
    assert len(it.calls) == 1


async def test_a_call_without_tools_beside_the_task_is_a_side_call(tmp_path: Path) -> None:
    """A title request is recorded as such, and as another thread."""
    async with rig(tmp_path, says("Hello.")) as it:
        await it.ask()
        title = [{"role": "user", "content": "Write a title."}]
        body = {"model": "m", "max_tokens": 50, "system": "You title.", "messages": title}
        async with it.post(body) as response:
            assert response.status == 200
    assert [call.kind for call in it.calls] == ["main", "side"]
    assert it.calls[1].branch is Branch.NEW_THREAD


async def test_counting_costs_nothing_and_is_true(tmp_path: Path) -> None:
    """The count is that of the prompt that is then sampled from."""
    async with rig(tmp_path, says("Hello.")) as it:
        counting = {"model": "m", "messages": ASK, "tools": it.body()["tools"]}
        url = f"{it.url}/v1/messages/count_tokens"
        async with it.http.post(url, json=counting) as response:
            count = (await response.json())["input_tokens"]
        reply = await it.ask()
    assert count == reply["usage"]["input_tokens"] == len(it.calls[0].prompt_ids)


async def test_a_stream_opens_at_its_first_token(tmp_path: Path) -> None:
    """Headers, opening and first delta come while the engine is still sampling."""
    async with rig(tmp_path, says(LONG, delay_s=0.02)) as it:
        began = time.monotonic()
        async with it.post(it.body(stream=True)) as response:
            first = await response.content.readany()
            assert time.monotonic() - began < 0.02 * len(ids(LONG)) / 2
            assert json.loads(first.split(b"data: ")[1].split(b"\n")[0])["type"] == "message_start"
