"""Turns restored from a recording equal those of the live session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.test_text_completions import client
from support.engine import RENDERING, reply_in_turn, reply_with
from support.gateway import ASK, OpenSession, open_session
from support.polling import until
from tugline.gateway.policy import CallSettings
from tugline.gateway.prefix import CallTree
from tugline.traces.lineage import Continuation, trace_lineage
from tugline.types import Branch, Call, CallOutcome

CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "a.py"}}\n</tool_call>'


def describe(tree: CallTree) -> list[tuple[Any, ...]]:
    """All fields that later requests are matched with."""
    return [
        (
            turn.number,
            turn.tokens.to_array().tolist(),
            turn.prompt_length,
            turn.wording,
            turn.digests,
            turn.parent.number if turn.parent else None,
            turn.tools,
            turn.thread,
            [key for key, turns in tree._by_digest.items() if turn in turns],
        )
        for turn in tree._turns
    ]


def assert_restored(session: OpenSession) -> tuple[Call, ...]:
    """Return the recorded calls; the turns restored from them equal the live ones."""
    calls = session.recording.calls
    again = CallTree(RENDERING)
    again.restore(calls)
    assert describe(again) == describe(session.live.transcript.turns)
    return calls


async def talk(session: OpenSession) -> None:
    """Tools, an edited history, a repeated question, a side call and an interrupted answer."""
    messages: list[Any] = list(ASK)
    for number in range(3):
        reply = await session.ask(messages)
        calls = [part for part in reply["content"] if part["type"] == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": f"result {number}"}
            for call in calls
        ]
        messages += [
            {"role": "assistant", "content": reply["content"]},
            {"role": "user", "content": results or "Go on."},
        ]
    await session.ask([*messages[:2], {"role": "user", "content": "Something else."}])
    await session.ask([{"role": "user", "content": "Mend it, please."}, *messages[1:3]])
    await session.ask(ASK, temperature=0.5)
    await session.ask([{"role": "user", "content": "A title, please."}], tools=[])
    await session.hang_up()
    await until(lambda: session.calls[-1].outcome is CallOutcome.CLIENT_GONE)
    await session.read()


@pytest.mark.parametrize("answers", [("Done and over.",), (CALL, CALL, "That is all of it.")])
async def test_restored_turns_equal_the_live_ones(tmp_path: Path, answers: tuple[str, ...]) -> None:
    """Restored turns have the same tokens, digests and places in the tree."""
    play = reply_in_turn(*answers, delay_s=0.02)
    async with open_session(tmp_path, play, tuning=CallSettings(grace_s=0.01)) as session:
        await talk(session)
        calls = assert_restored(session)
        asked = [call.prompt_ids.tolist() for call in session.engines[0].calls]
        assert [call.prompt_ids.tolist() for call in calls] == asked
        assert Branch.HISTORY_EDITED in {call.branch for call in calls}
        assert calls[-1].resumed
        assert len(describe(session.live.transcript.turns)) >= 6


async def test_restored_raw_prompts_equal_the_live_ones(tmp_path: Path) -> None:
    """Prompts without messages may be extended, repeated, or have two choices.

    The rest of an interrupted answer, and a prompt that extends it, are restored as well.
    """
    quick = CallSettings(grace_s=0.01)
    play = reply_with("It is 4, I think.", delay_s=0.01)
    async with client(tmp_path, play, tuning=quick) as me:
        session, ask = me.opened, me.ask

        def grown(*more: int) -> list[int]:
            last = session.calls[-1]
            return [*last.prompt_ids.tolist(), *last.sampled_ids.tolist(), *more]

        await session.ask(ASK, tools=[])
        await ask(grown(5))
        longer = grown(6)
        await ask("2+2=")
        await ask(grown(7), n=2)
        await ask(longer)
        await ask("2+2=")
        await ask([*grown()[:-4], 9])
        await ask("2+2=It is 5")
        await me.hang_up("Hello")
        await until(lambda: session.calls[-1].outcome is CallOutcome.CLIENT_GONE)
        await ask("Hello")
        await ask(grown(8))
        calls = assert_restored(session)
    new, edited = Branch.NEW_THREAD, Branch.HISTORY_EDITED
    branches = [None, None, new, None, None, None, None, edited, edited, new, None, None]
    assert [call.branch for call in calls] == branches
    assert [call.parent for call in calls] == [None, 0, 1, 2, 2, 1, None, 3, 3, 3, 9, 10]
    assert [call.number for call in calls if call.resumed] == [10]
    known = {call.number: call for call in calls}
    lineage = [trace_lineage(call, known.get(call.parent)) for call in calls]
    assert Continuation.BROKEN not in {each.continuation for each in lineage}
