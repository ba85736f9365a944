"""Sessions of real programs, from their recorded request bodies, become the traces they should.

Each file has the model's answers in its first line, then the bodies in the order of their arrival.
The programs' prompts and the results of their tools are shortened.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from support.engine import reply_in_turn
from support.gateway import open_session
from tugline.schema import read_jsonl
from tugline.traces.base import PrefixMerging
from tugline.types import Branch, Call, EchoChange, TraceKind

RECORDED = Path(__file__).with_name("recorded")


async def replay(folder: Path, program: str) -> Sequence[Call]:
    """The calls of a session with these bodies; none is refused, and nothing is masked."""
    answers, *bodies = [row for _, row in read_jsonl(RECORDED / f"{program}.jsonl")]
    async with open_session(folder, reply_in_turn(*answers)) as session:
        for body in bodies:
            async with session.post_openai(**body) as response:
                assert response.status == 200, await response.text()
                await response.read()
        calls = session.calls
    assert len(calls) == len(bodies)
    assert not PrefixMerging().build(calls).ledger.masked
    return calls


def list_kinds(calls: Sequence[Call]) -> list[TraceKind]:
    """The kind of each trace."""
    return [trace.kind for trace in PrefixMerging().build(calls).traces]


async def test_crewai_leaves_out_the_text_of_answers_with_calls(tmp_path: Path) -> None:
    """Seven calls of CrewAI 1.15 are one trace, and the change is recorded."""
    calls = await replay(tmp_path, "crewai")
    assert [call.branch for call in calls] == [None] * 7
    changes = {call.echo_changes for call in calls[1:]}
    assert changes == {(EchoChange.REASONING, EchoChange.TEXT)}
    assert list_kinds(calls) == ["main"]


async def test_continue_compacts_to_an_assistant_message(tmp_path: Path) -> None:
    """Continue 1.5 sends the system prompt and its summary, which is answered and trained."""
    calls = await replay(tmp_path, "continue")
    kinds = [call.kind for call in calls]
    assert kinds == [*["main"] * 5, "compaction", "main", "main"]
    assert [message.role for message in calls[6].messages] == ["system", "assistant"]
    branches = [call.branch for call in calls]
    assert branches == [*[None] * 6, Branch.COMPACTED, None]
    assert list_kinds(calls) == ["main", "compaction"]


async def test_copilot_compacts_in_the_background_without_tools(tmp_path: Path) -> None:
    """The summary of Copilot CLI 1.0 with ``tool_choice: none`` is a trained compaction.

    The conversation continues meanwhile as one trace, until the summary replaces it.
    """
    calls = await replay(tmp_path, "copilot")
    assert [call.kind for call in calls] == ["main", "compaction", "main", "main"]
    assert [call.branch for call in calls] == [None, None, None, Branch.COMPACTED]
    assert not any(call.constrained for call in calls)
    assert list_kinds(calls) == ["main", "compaction", "compaction"]


async def test_a_changed_text_is_no_omission(tmp_path: Path) -> None:
    """An echo whose text differs from the answer forks, although its calls have their ids."""
    answers, first, second, *_ = [row for _, row in read_jsonl(RECORDED / "crewai.jsonl")]
    second["messages"][2]["content"] = "I look at"
    async with open_session(tmp_path, reply_in_turn(*answers)) as session:
        for body in (first, second):
            async with session.post_openai(**body) as response:
                await response.read()
        assert [call.branch for call in session.calls] == [None, Branch.HISTORY_EDITED]
