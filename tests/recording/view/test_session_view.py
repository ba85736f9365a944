"""The view of a session: turns classified by their ids, ledgers that add up, and its JSON."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from recording.view.synthetic import START, Script, encode, small, view, whole
from tugline.recording.file import read
from tugline.recording.records import RecordedEvent
from tugline.recording.view.session_view import (
    SessionView,
    TraceView,
    TurnDetail,
    TurnView,
    encode_json,
    view_session,
)
from tugline.traces.base import sum_ledgers
from tugline.types import Branch, CallOutcome, EchoChange, Mode, Reason, TraceKind


def list_continuations(turns: Iterable[TurnView]) -> list[str]:
    """Continuation and reasons of each turn."""
    return [" ".join((turn.continuation, *turn.reasons)) for turn in turns]


def test_each_turn_has_its_continuation(tmp_path: Path) -> None:
    """First, exact and forked follow from the ids; the reasons are those recorded."""
    turns = view(small(tmp_path)).view.turns
    expected = ["first", "exact", "exact", "forked history_edited", "first new_thread", "exact"]
    assert list_continuations(turns) == expected
    first, second = turns[:2]
    assert second.shared == first.prompt + first.sampled
    assert turns[3].shared == first.prompt, "a fork has what the ids share"
    assert [turn.kind for turn in turns[4:]] == [TraceKind.SUBAGENT] * 2
    assert first.tools == ("read",)
    assert (first.at, first.first_token_s, first.total_s) == pytest.approx((0.0, 0.3, 1.5))


def test_a_record_that_ids_contradict_is_not_believed(tmp_path: Path) -> None:
    """Only a turn that extends its parent's ids has echo changes; any other is a fork."""
    script = Script(tmp_path)
    first = script.call(encode("one two"), "three")
    script.call([*whole(first), *encode("four")], "five", echo_changes=(EchoChange.ARGUMENTS,))
    script.call(encode("one other"), "six", parent=0)
    gone = script.call(encode("one two"), "a b c", parent=None, outcome=CallOutcome.CLIENT_GONE)
    script.call(whole(gone)[:-1], "d", parent=3)
    script.call([], "seven", mode=Mode.TEXT, parent=None)
    last = script.call(encode("one"), "two", parent=None)
    script.call([*whole(last), *encode("three")], "four", branch=Branch.NEW_THREAD)
    script.writer.close()
    turns = view(script.path).view.turns
    assert list_continuations(turns) == [
        *("first", "echo_changed arguments", "broken ids_differ", "first", "forked client_gone"),
        *("no_token_ids", "first", "forked new_thread"),
    ]
    assert turns[-1].shared == len(whole(last)), "all ids are shared, in another thread"


@pytest.mark.parametrize("builder", ["prefix_merging", "per_request"])
def test_the_ledgers_of_the_turns_add_up(tmp_path: Path, builder: str) -> None:
    """With either builder each turn balances, and the sum of the turns is the session's."""
    session = view(small(tmp_path), builder).view
    assert all(turn.ledger.balanced for turn in session.turns)
    assert sum_ledgers(turn.ledger for turn in session.turns) == session.ledger
    assert session.turns[2].ledger.masked == {Reason.CLIENT_GONE: session.turns[2].sampled}
    assert sum(trace.trained for trace in session.traces) == session.ledger.trained
    assert session.builder == builder


def test_the_json_has_every_field(tmp_path: Path) -> None:
    """The JSON has the messages of the requested turn only, as they are in the recording."""
    session = view(small(tmp_path))
    brief = msgspec.json.decode(encode_json(session, None))
    assert set(brief) == set(session.view.__struct_fields__)
    assert "detail" not in brief["turns"][0]
    assert [event["kind"] for event in brief["events"]] == ["weights", "engine_fault"]
    assert (brief["result"]["status"], brief["started"]) == ("completed", START)
    assert brief["header"]["task"]["files"] == {}, "a workspace may be large"
    (turn,) = msgspec.json.decode(encode_json(session, 3))["turns"]
    assert (turn["call"], turn["detail"]["answer"]["content"]) == (3, "A fork.")
    contents = [message["content"] for message in turn["detail"]["messages"]]
    assert contents == [message.content for message in session.calls[3].messages]


def test_a_session_that_cannot_be_built_can_be_viewed(tmp_path: Path) -> None:
    """A call without logprobs is an error of every builder; the view has the reason."""
    script = Script(tmp_path)
    script.call(encode("one"), "two", logprobs=np.empty(0, np.float32))
    script.writer.close()
    session = view(script.path).view
    assert "logprobs" in session.build_error
    assert session.traces == ()
    assert session.turns[0].mean_logprob is None
    assert not session.ledger.balanced


def test_a_recording_without_its_header_can_be_viewed(tmp_path: Path) -> None:
    """The calls of a file that has lost its first record are shown."""
    recording = read(small(tmp_path))
    recording.header = None
    recording.results = ()
    session = view_session(tmp_path, recording).view
    assert (session.header, session.result, session.builder) == (None, None, "prefix_merging")
    assert len(session.turns) == 6


def test_every_field_of_the_json_is_documented() -> None:
    """Each field is in docs/format.md."""
    page = (Path(__file__).parents[3] / "docs" / "format.md").read_text(encoding="utf-8")
    shapes = (SessionView, TurnView, TurnDetail, RecordedEvent, TraceView)
    names = [name for shape in shapes for name in shape.__struct_fields__]
    assert [name for name in names if f"`{name}`" not in page] == []
