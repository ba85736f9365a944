"""Every real harness in every dialect it speaks, without internet: the long suite."""

from pathlib import Path

import msgspec
import pytest

from conformance.matrix import check
from conformance.session_run import run_session
from conformance.sessions import late_error
from tugline.cli.harness_check import CASES, Case, cases_of

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]


def not_passed(checks: dict[str, str]) -> dict[str, str]:
    """Return the checks that are not a plain pass."""
    return {name: result for name, result in checks.items() if result != "pass"}


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if case.harness != "pi"],
    ids=lambda case: f"{case.harness}-{case.dialect}",
)
async def test_nothing_fails(case: Case) -> None:
    """Whatever does not hold lies in the harness; every turn continues exactly."""
    result = await check(case)
    bad = not_passed(result.checks)
    assert all(verdict.startswith("cli: ") for verdict in bad.values()), bad
    assert set(bad) <= ({"streaming"} if case.harness == "mini_swe_agent" else set())
    assert (result.turns, result.exact_turns) == (4, 4)


async def test_claude_code_as_people_use_it() -> None:
    """With moving cache markers, system messages in between and all its tools, nothing forks."""
    case = msgspec.structs.replace(cases_of("claude_code")[0], options={"lean": False})
    result = await check(case)
    assert not_passed(result.checks) == {}


async def test_gemini_cli_asks_again_after_a_late_error(tmp_path: Path) -> None:
    """The engine fails after the headers: it does not end with 0 and half of its work."""
    case = cases_of("gemini_cli")[0]
    run = await run_session(case, late_error(case), tmp_path)
    assert (run.exit.code, len(run.requests), len(run.calls)) == (0, 5, 4)


@pytest.mark.parametrize("name", ["gemini_cli", "qwen_code"])
async def test_a_first_token_after_seventy_seconds(name: str) -> None:
    """Headers go out early enough for those that would give up at 60 s, or ask twice."""
    result = await check(cases_of(name)[0], slow=True)
    assert not_passed(result.checks) == {}
    assert "slow_start_survived" in result.checks
