"""Every real harness in every dialect it speaks, without internet: the long suite."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from conformance.session_run import run_session
from conformance.sessions import late_error
from conformance.worker import check
from tugline.cli.harness_check import CASES, Case, cases_of

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]
AS_USED = msgspec.structs.replace(cases_of("claude_code")[0], options={"lean": False})
"""Claude Code with default options: moving cache markers, late system messages, all tools."""
NATIVE = [cases_of(name)[0] for name in dict.fromkeys(case.harness for case in CASES)]
"""Every harness in its own dialect."""
IN_THE_HARNESS = {"mini_swe_agent": {"streaming": "fail: the answer came whole"}}
"""Known failures, as in docs/harnesses.md: it requests whole answers only."""


def not_passed(checks: dict[str, str]) -> dict[str, str]:
    """Return the checks that are not a plain pass."""
    return {name: result for name, result in checks.items() if result != "pass"}


@pytest.mark.nightly
async def test_a_first_token_after_seventy_seconds() -> None:
    """Headers are sent early enough for harnesses with a timeout of 60 s."""
    cases = [cases_of(name)[0] for name in ("gemini_cli", "qwen_code")]
    passed = {"slow_start_survived": "pass", "no_foreign_host": "pass"}
    assert await asyncio.gather(*(check(case, slow=True) for case in cases)) == [passed] * 2


def name_case(case: Case) -> str:
    """The id of a case's test."""
    return f"{case.harness}-{case.dialect}{' as used' if case is AS_USED else ''}"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in NATIVE else pytest.mark.nightly, id=name_case(case))
        for case in (*CASES, AS_USED)
        if case.harness != "pi"
    ],
)
async def test_every_check_passes(case: Case) -> None:
    """Each check passes, but for known failures of the harness."""
    assert not_passed(await check(case)) == IN_THE_HARNESS.get(case.harness, {})


async def test_gemini_cli_asks_again_after_a_late_error(tmp_path: Path) -> None:
    """An engine that fails after the headers is asked again, and the work is completed."""
    case = cases_of("gemini_cli")[0]
    run = await run_session(case, late_error(case), tmp_path)
    assert (run.exit.code, len(run.requests), len(run.calls)) == (0, 5, 4)
