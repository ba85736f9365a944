"""What happens beside the model calls stands in the session's recording, too."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from rig import cut_once, rig, says
from tugline.recording.file import Recording, read
from tugline.recording.records import Event, EventKind


def recording(folder: Path) -> Recording:
    """The only one."""
    (path,) = folder.glob("*.rec")
    return read(path)


def events(folder: Path, kind: EventKind) -> list[Event]:
    """Those of one kind."""
    return [event for event in recording(folder).events if event.kind is kind]


async def test_a_refused_request_is_noted_without_its_words(tmp_path: Path) -> None:
    """Status, error and field are there; nothing of the prompt is, nor a call."""
    async with rig(tmp_path, says("ok")) as it:
        assert (await it.ask(top_k=-5))["status"] == 400
        assert (await it.ask(messages="Mend"))["status"] == 400
        found = recording(tmp_path)
    assert [event.kind for event in found.events] == [EventKind.REFUSED] * 2
    assert found.calls == ()
    for event in found.events:
        assert event.detail.startswith("400 ")
        assert "Mend" not in event.detail
        assert event.data == b""
    assert found.events[1].detail == "400 RequestError messages[0]"


async def test_a_retry_that_is_given_the_first_answer_is_noted(tmp_path: Path) -> None:
    """One call, and a word that its answer was told twice."""
    async with rig(tmp_path, says("ok")) as it:
        await it.ask()
        async with it.post(it.body(), **{"x-stainless-retry-count": "1"}) as response:
            assert response.status == 200
        assert len(recording(tmp_path).calls) == 1
        assert [event.call for event in events(tmp_path, EventKind.REPEATED)] == [0]


async def test_a_replica_that_dies_in_the_middle_is_noted(tmp_path: Path) -> None:
    """Which one, how far it got, and in which call."""
    play = cut_once("a long enough answer to be cut in two", 5)
    async with rig(tmp_path, play, play) as it:
        async with it.post(it.body(stream=True)) as response:
            await response.read()
        (fault,) = events(tmp_path, EventKind.ENGINE_FAULT)
        (call,) = recording(tmp_path).calls
    assert fault.call == call.number
    assert fault.detail == f"{call.replicas[0]} after 5 tokens"


async def test_pauses_and_weights_are_noted_in_live_sessions(tmp_path: Path) -> None:
    """In their order, with the mode and the version."""
    async with rig(tmp_path, says("ok")) as it:
        await it.gateway.pause("abort")
        it.gateway.set_weights_version(7)
        it.gateway.resume()
        found = recording(tmp_path).events
    assert [(event.kind, event.detail) for event in found] == [
        (EventKind.PAUSED, "abort"),
        (EventKind.WEIGHTS, "7"),
        (EventKind.RESUMED, ""),
    ]
    assert found[0].at <= found[1].at <= found[2].at


async def test_where_every_record_is_flushed_events_go_with_the_next_call(tmp_path: Path) -> None:
    """No event waits for the disk by itself, and none is lost."""
    async with rig(tmp_path, says("ok"), flush_s=0) as it:
        it.gateway.set_weights_version(1)
        assert recording(tmp_path).events == ()
        await it.ask()
        assert len(recording(tmp_path).events) == 1
        it.gateway.set_weights_version(2)
    assert [event.detail for event in recording(tmp_path).events] == ["1", "2"]


@pytest.mark.parametrize("stream", [False, True])
async def test_raw_bodies_are_kept_as_they_were_told(tmp_path: Path, stream: bool) -> None:  # noqa: FBT001
    """With ``raw="all"`` request and response are there byte for byte."""
    async with rig(tmp_path, says("ok"), raw="all") as it:
        async with it.post(it.body(stream=stream)) as response:
            told = await response.read()
        found = recording(tmp_path)
    (event,) = found.events
    assert (event.kind, event.call, event.data) == (EventKind.RESPONSE, 0, told)
    assert b"Mend it." in found.calls[0].request


@pytest.mark.parametrize("raw", ["none", "requests"])
async def test_raw_bodies_are_left_out_as_asked(tmp_path: Path, raw: str) -> None:
    """Requests alone by default; nothing if so asked."""
    async with rig(tmp_path, says("ok"), raw=raw) as it:
        await it.ask()
        found = recording(tmp_path)
    assert found.events == ()
    assert bool(found.calls[0].request) is (raw == "requests")


async def test_a_body_over_the_limit_says_what_is_left_out(tmp_path: Path) -> None:
    """Nothing is cut in silence: the marker has the number of bytes and their digest."""
    limit = 100
    async with rig(tmp_path, says("many words " * 30), raw="all", raw_limit=limit) as it:
        body: dict[str, Any] = it.body()
        async with it.post(body) as response:
            told = await response.read()
        found = recording(tmp_path)
    rest = told[limit:]
    marker = f"\n[tugline left out {len(rest)} bytes, sha256 {hashlib.sha256(rest).hexdigest()}]"
    assert found.events[0].data == told[:limit] + marker.encode()
    assert b"[tugline left out " in found.calls[0].request[limit:]
    assert len(found.calls[0].request) < limit + 120
