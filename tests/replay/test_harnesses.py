"""Sessions of every real harness, recorded with the scripted model, can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from conformance import sessions
from conformance.session_run import Scenario, run_session
from replay.played import saying, tampered
from tugline.cli.harness_check import FILES, INSTRUCTION, Case, cases_of
from tugline.recording.file import read
from tugline.replay.run import RecordedSession, fork, replay
from tugline.replay.source import Live
from tugline.testing import ScriptedTurn, serve_scripted_model
from tugline.types import Role

CORE = ("codex", "claude_code")
OTHERS = ("qwen_code", "gemini_cli", "opencode", "mini_swe_agent", "pi")


def with_slow_commands(case: Case) -> Scenario:
    """The plain session with slower commands: Qwen Code loses the output of quick ones."""

    def slow(turn: ScriptedTurn) -> ScriptedTurn:
        calls = [
            (name, {**options, case.argument: f"{options[case.argument]}; sleep 0.3"})
            for name, options in turn.calls
        ]
        return msgspec.structs.replace(turn, calls=tuple(calls))

    *turns, last = case.script()
    return Scenario({INSTRUCTION: (*map(slow, turns), last)}, FILES)


async def recorded(name: str, scenario: Callable[[Case], Scenario], folder: Path) -> Path:
    """Record one session of the real program, if this folder has none yet."""
    path = folder / "recordings" / "check-0.0.rec"
    if not path.exists():
        case = cases_of(name)[0]
        await run_session(case, scenario(case), folder)
    return path


@pytest.fixture(scope="module")
def plain_sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a plain session of each harness, by name."""
    return tmp_path_factory.mktemp("plain")


@pytest.mark.harness
@pytest.mark.parametrize(
    "name", [*CORE, *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)]
)
async def test_every_harness_repeats_its_requests(
    name: str, plain_sessions: Path, tmp_path: Path
) -> None:
    """All requests are as recorded; another tool result is reported with its place."""
    path = await recorded(name, with_slow_commands, plain_sessions / name)
    recording = RecordedSession.load(path)
    report = await replay(recording, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert report.replayed == len(recording.calls) == 4
    changed = tampered(
        path,
        tmp_path / "tampered",
        lambda calls: [*calls[:3], saying(calls[3], "heron", "bittern")],
    )
    report = await replay(RecordedSession.load(changed), tmp_path / "replayed")
    (difference,) = report.differences
    assert (difference.request, difference.call) == (3, 3)
    assert "(tool), the result of" in difference.where
    assert ("bittern" in difference.recorded, "heron" in difference.replayed) == (True, True)


@pytest.mark.harness
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["codex", "claude_code", "pi"])
async def test_a_harness_can_be_forked(name: str, plain_sessions: Path, tmp_path: Path) -> None:
    """Two recorded answers are followed by live ones; the history continues exactly."""
    path = await recorded(name, with_slow_commands, plain_sessions / name)
    recording = RecordedSession.load(path)
    scenario = with_slow_commands(cases_of(name)[0])
    async with serve_scripted_model(scenario.scripts, {}) as model:
        (report,) = await fork(recording, tmp_path / "fork", Live(model.upstream, 2))
    assert report.as_recorded, report.differences
    assert (report.replayed, report.live) == (2, 2)
    calls = read(Path(report.recording)).calls
    assert [call.replayed for call in calls] == [True, True, False, False]
    assert all(call.branch is None for call in calls)
    results = [each.content for call in calls for each in call.messages if each.role is Role.TOOL]
    assert "heron" in results[-1]


@pytest.mark.harness
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "scenario", "answers"),
    [
        ("codex", sessions.team, 5),
        ("opencode", sessions.titled, 5),
        ("pi", sessions.faulty, 4),
        ("claude_code", sessions.budget, 2),
    ],
    ids=["sub-agent", "title", "faults", "budget"],
)
async def test_sub_agents_titles_faults_and_budgets_are_replayed(
    name: str, scenario: Callable[[Case], Scenario], answers: int, tmp_path: Path
) -> None:
    """Sub-agents have new ids; interrupted answers are complete; refusals are repeated."""
    recording = RecordedSession.load(await recorded(name, scenario, tmp_path / "first"))
    report = await replay(recording, tmp_path / "again")
    assert report.as_recorded, report.differences
    assert report.replayed == answers
    assert report.adapted == (name == "codex")
