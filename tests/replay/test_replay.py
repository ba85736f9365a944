"""Replay recorded sessions with the real agent, and fork them with a live model."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from replay.played import (
    AGENT,
    INSTRUCTION,
    LOOP,
    TURNS,
    observed,
    record,
    run,
    saying,
    see_wallaby,
    tampered,
    task,
)
from support.polling import until
from tugline.errors import UsageError
from tugline.plugins import find
from tugline.recording.file import read
from tugline.recording.verify.session import verify_session
from tugline.recording.verify.text import TextVerifier
from tugline.replay import run as replays
from tugline.replay.matching import Normalizer, folder_patterns, sort_tool_results
from tugline.replay.run import Options, RecordedSession, ReplayReport
from tugline.replay.source import Live
from tugline.sandbox.local import LocalRuntime
from tugline.testing import ScriptedTurn, serve_scripted_model
from tugline.types import Call, Limits, Message, PluginSpec, Reason, Reward, Role, ToolCall

PI = PluginSpec("pi")
Calls = Sequence[Call]
Change = Callable[[Calls], Calls]


async def replay(path: Path, folder: Path, *options: Options) -> ReplayReport:
    """Replay a recording."""
    return await replays.replay(RecordedSession.load(path), folder, *options)


async def fork(path: Path, folder: Path, live: Live) -> list[ReplayReport]:
    """Fork a recording."""
    return await replays.fork(RecordedSession.load(path), folder, live)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session of three calls, recorded once for all tests."""
    return asyncio.run(record(tmp_path_factory.mktemp("first")))


@pytest.mark.parametrize("runtime", ["local", "bubblewrap"])
@pytest.mark.parametrize(
    "harness", [pytest.param(PI, marks=pytest.mark.pi), LOOP, AGENT], ids=["pi", "loop", "agent"]
)
async def test_an_agent_repeats_its_requests(
    harness: PluginSpec, runtime: str, tmp_path: Path
) -> None:
    """Every request is as recorded, also if the working folder has another name.

    A replay is checked as a whole, since it needs a recorded session.
    """
    if reason := find("runtime", runtime)().check_available():
        pytest.skip(reason)
    given = task(harness, runtime=PluginSpec(runtime))
    first = await record(tmp_path / "first", given)
    recording = RecordedSession.load(first)
    report = await replay(first, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert (report.recorded, report.replayed, report.live, report.adapted) == (3, 3, 0, 0)
    assert report.failure is None
    assert report.reward == report.recorded_reward
    assert report.reward == Reward(1.0)
    again, header = read(Path(report.recording)), recording.header
    assert all(call.replayed for call in again.calls)
    for old, new in zip(recording.calls, again.calls, strict=True):
        assert np.array_equal(old.sampled_ids, new.sampled_ids)
        assert np.array_equal(old.logprobs, new.logprobs)
        assert (old.versions, old.finish, old.sampling) == (new.versions, new.finish, new.sampling)
    if runtime == "local":
        assert (Path(header.workdir) / "second.txt").read_text() == "walrus\n", (
            "the recorded session's files are unchanged"
        )
        assert report.masked["workdir"] == {header.workdir: again.header.workdir}
    else:
        assert report.exact, "prompts differ only if the time does"
        assert "workdir" not in report.masked


async def test_paths_in_recorded_answers_are_adapted(tmp_path: Path) -> None:
    """A recorded tool call with an absolute path works in the folder of the replay."""
    where = tmp_path / "first" / "sessions" / "s1.0" / "agent" / "work"
    turns = (*TURNS[:1], ScriptedTurn("", calls=(run(f"cp one.txt {where}/second.txt"),)), TURNS[2])
    recording = await record(tmp_path / "first", turns=turns)
    (where / "second.txt").unlink()
    report = await replay(recording, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert (report.replayed, report.adapted) == (3, 1)
    assert report.reward == Reward(1.0)
    assert not (where / "second.txt").exists()


def add_request(calls: Calls) -> list[Call]:
    """Repeat the last request."""
    return [*calls, replace(calls[-1], number=3, parent=2)]


def change_temperature(calls: Calls) -> list[Call]:
    """Change the temperature of each request."""
    return [replace(call, requested=replace(call.requested, temperature=0.25)) for call in calls]


@pytest.mark.parametrize(
    ("change", "at", "replayed", "where"),
    [
        (change_temperature, (0, 0), 3, "sampling.temperature"),
        (
            lambda calls: calls[:2],
            (2, 1),
            2,
            "a request beyond the recorded ones: message 5 (assistant) is new",
        ),
        (add_request, (3, 3), 3, "end of the session: 1 recorded requests were not made"),
    ],
    ids=["sampling", "more", "fewer"],
)
async def test_differing_requests_are_reported(
    change: Change, at: tuple[int, int], replayed: int, where: str, recording: Path, tmp_path: Path
) -> None:
    """Each difference is reported once, with its place; other sampling is still answered."""
    changed = tampered(recording, tmp_path / "tampered", change)
    report = await replay(changed, tmp_path / "again")
    (difference,) = report.differences
    assert (difference.request, difference.call, report.replayed) == (*at, replayed)
    assert difference.where == where
    if where == "sampling.temperature":
        assert (difference.recorded, difference.replayed) == ("0.25", "None")


async def test_a_replay_can_continue_after_differences(recording: Path, tmp_path: Path) -> None:
    """The option `go_on` answers after a difference, and reports each difference once."""

    def change(calls: Calls) -> list[Call]:
        nothing = saying(calls[2], "(no output)", "(nothing)")
        return [calls[0], saying(calls[1], "walrus", "wallaby"), nothing]

    changed = tampered(recording, tmp_path / "tampered", change)
    report = await replay(changed, tmp_path / "again", Options(go_on=True))
    assert [difference.request for difference in report.differences] == [1, 2]
    assert report.replayed == 3
    masks = Options(masks=("walrus|wallaby", r"\(no.*\)"))
    masked = await replay(changed, tmp_path / "masked", masks)
    assert masked.as_recorded, "masked text is not compared"
    assert masked.masked["mask1"] == {"wallaby": "walrus"}


def split_answer(calls: Calls) -> list[Call]:
    """Split the first answer into one that was interrupted and one that resumes it."""
    first, *rest = calls
    at = len(first.sampled_ids) // 2
    spans = [
        (replace(first.versions[0], start=0, end=n),) for n in (at, len(first.sampled_ids) - at)
    ]
    gone = replace(
        first, sampled_ids=first.sampled_ids[:at], logprobs=first.logprobs[:at],
        versions=spans[0], outcome="client_gone",
    )  # fmt: skip
    again = replace(
        first, number=1, parent=0, messages=(), resumed=at, versions=spans[1],
        prompt_ids=np.concatenate((first.prompt_ids, first.sampled_ids[:at])),
        sampled_ids=first.sampled_ids[at:], logprobs=first.logprobs[at:],
    )  # fmt: skip
    return [
        gone,
        again,
        *(replace(call, number=call.number + 1, parent=call.number) for call in rest),
    ]


async def test_a_resumed_answer_is_replayed_as_one(recording: Path, tmp_path: Path) -> None:
    """The replayed agent gets the whole answer with one request."""
    split = tampered(recording, tmp_path / "split", split_answer)
    report = await replay(split, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert (report.recorded, report.replayed) == (3, 3)


async def test_spent_budgets_are_replayed(tmp_path: Path) -> None:
    """The refusal of a request is part of the replay."""
    limits = Limits(max_turns=2)
    recording = await record(tmp_path / "first", task(limits=limits))
    report = await replay(recording, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert report.replayed == 2


async def test_observed_sessions_are_replayed_by_their_text(tmp_path: Path) -> None:
    """Requests to an engine that renders prompts itself are matched by their messages."""
    async with observed(TURNS) as model:
        recording = await record(tmp_path / "first", model=model)
    report = await replay(recording, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert (report.replayed, report.exact) == (3, None)
    again = read(Path(report.recording)).calls
    for old, new in zip(read(recording).calls, again, strict=True):
        assert np.array_equal(old.sampled_ids, new.sampled_ids)
        assert old.answer == new.answer


# --------------------------------------------------------------------------- forks
async def test_a_fork_continues_live(recording: Path, tmp_path: Path) -> None:
    """Samples share the recorded prefix, are evaluated and verified, and train new tokens only.

    A fork is checked as a whole, since it needs a recorded session and two agents.
    """
    other = (
        *TURNS[:1],
        ScriptedTurn("Another way.", calls=(run("cp one.txt second.txt; echo copied"),)),
        ScriptedTurn("Done otherwise."),
    )
    async with serve_scripted_model({INSTRUCTION: other}, {}) as model:
        live = Live(model.upstream, 1, samples=2, slots=2, first=3)
        reports = await fork(recording, tmp_path / "forks", live)
        assert len(model.engine.calls) == 4, "the recorded call was not sampled again"
    assert [report.session for report in reports] == ["s1-at1-3", "s1-at1-4"]
    for report in reports:
        assert report.as_recorded, report.differences
        assert (report.replayed, report.live, report.failure) == (1, 2, None)
        assert report.reward == Reward(1.0)
        path = Path(report.recording)
        forked = read(path)
        assert forked.header.forked_from == "s1@1"
        assert [call.replayed for call in forked.calls] == [True, False, False]
        ledger = forked.result.ledger
        recorded = len(read(recording).calls[0].sampled_ids)
        assert ledger.masked == {Reason.REPLAYED: recorded}
        assert ledger.trained == sum(len(call.sampled_ids) for call in forked.calls[1:])
        verified = verify_session(path, forked, TextVerifier())
        assert not verified.failed, verified
    with pytest.raises(UsageError, match="must be from 0 to 3"):
        await fork(recording, tmp_path / "beyond", Live(model.upstream, 4))


async def test_a_difference_before_a_fork_ends_it(recording: Path, tmp_path: Path) -> None:
    """The difference is reported, and nothing is sampled."""
    changed = tampered(recording, tmp_path / "tampered", see_wallaby)
    async with serve_scripted_model({INSTRUCTION: TURNS}, {}) as model:
        (report,) = await fork(changed, tmp_path / "fork", Live(model.upstream, 2))
        assert not model.engine.calls
    assert [difference.request for difference in report.differences] == [1]
    assert report.live == 0


_KILLED = """
import asyncio, sys
from pathlib import Path
from replay.played import record
from tugline.testing import Reply
asyncio.run(record(Path(sys.argv[1]), faults={2: Reply(first_s=60.0)}))
"""


async def test_a_killed_session_is_continued(tmp_path: Path) -> None:
    """After ``kill -9`` of everything, recorded answers are not sampled again."""
    folder = tmp_path / "killed"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _KILLED, str(folder)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    recording = folder / "recordings" / "s1.0.rec"
    await until(lambda: recording.exists() and len(read(recording).calls) >= 2, 40)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    LocalRuntime().reap(folder)
    killed = read(recording)
    assert killed.result is None
    async with serve_scripted_model({INSTRUCTION: TURNS}, {}) as model:
        live = Live(model.upstream, len(killed.calls))
        (report,) = await fork(recording, tmp_path / "recovered", live)
        assert len(model.engine.calls) == 1
    assert report.as_recorded, report.differences
    assert report.failure is None
    assert report.reward == Reward(1.0)


# --------------------------------------------------------------------------- errors and matching
def test_recordings_that_cannot_be_replayed_are_refused(recording: Path, tmp_path: Path) -> None:
    """The error names what is missing: the calls or the tokenizer."""
    empty = tampered(recording, tmp_path / "empty", lambda _calls: [])
    with pytest.raises(UsageError, match="has no calls"):
        RecordedSession.load(empty)
    with pytest.raises(UsageError, match="give one with --tokenizer"):
        RecordedSession.load(Path(shutil.copy(recording, tmp_path)))


def test_results_of_parallel_calls_are_sorted() -> None:
    """Results are in the order of their calls."""
    calls = tuple(ToolCall(name, "bash", "{}") for name in ("a", "b"))
    front = (Message(Role.USER, "x"), Message(Role.ASSISTANT, "", tool_calls=calls))
    first, second = (Message(Role.TOOL, "one", tool_call_id=name) for name in ("a", "b"))
    after = (Message(Role.USER, "y"),)
    assert sort_tool_results((*front, second, first, *after)) == (*front, first, second, *after)
    assert sort_tool_results((*front, first, second, *after)) == (*front, first, second, *after)


LINES = Path(__file__).with_name("masked.jsonl").read_text().splitlines()
MASKED = [json.loads(line) for line in LINES]
"""Pairs of texts of two runs of one session."""


@pytest.mark.parametrize(("first", "second"), MASKED)
def test_run_dependent_text_is_masked(first: str, second: str) -> None:
    """Dates, durations, ids, folders, processes and addresses are masked, and nothing else."""
    old = Normalizer(folder_patterns("/w/one", "/w/home"))
    new = Normalizer(folder_patterns("/v/two", "/v/home"))
    assert first != second
    assert old.mask_text(first) == new.mask_text(second) != first
    assert old.mask_text(f"walrus {first}") != new.mask_text(f"heron {second}")
    for plain in ("5 files, 12 lines", "version 2.1.3", "a - b", "/x/one", "sleep 5s"):
        assert old.mask_text(plain) == plain


def test_an_invalid_mask_is_refused() -> None:
    """The error names the flag, the text and the mistake."""
    with pytest.raises(
        UsageError, match=r"--mask '\(' is not a valid regular expression: missing \)"
    ):
        Normalizer({}, ("(",))
