"""Every real harness in every dialect it speaks, without internet: the long suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tugline.conformance.cells import CELLS, Case, cells_of
from tugline.conformance.matrix import check

pytestmark = [pytest.mark.harness, pytest.mark.timeout(900)]
TUGLINE = Path(sys.executable).with_name("tugline")


def told(verdicts: dict[str, str]) -> dict[str, str]:
    """What is not a plain pass."""
    return {name: verdict for name, verdict in verdicts.items() if verdict != "pass"}


@pytest.mark.parametrize(
    "cell",
    [cell for cell in CELLS if cell.harness != "pi"],
    ids=lambda cell: f"{cell.harness}-{cell.dialect}",
)
async def test_nothing_fails(cell: Case) -> None:
    """Whatever does not hold lies in the harness; every turn continues exactly."""
    result = await check(cell)
    bad = told(result.checks)
    assert all(verdict.startswith("cli: ") for verdict in bad.values()), bad
    assert set(bad) <= ({"streaming"} if cell.harness == "mini_swe_agent" else set())
    assert (result.turns, result.exact_turns) == (4, 4)


async def test_claude_code_as_people_use_it() -> None:
    """With moving cache markers, system messages in between and all its tools, nothing forks."""
    cell = msgspec.structs.replace(cells_of("claude_code")[0], options={"lean": False})
    result = await check(cell)
    assert told(result.checks) == {}


@pytest.mark.parametrize("name", ["gemini_cli", "qwen_code"])
async def test_a_first_token_after_seventy_seconds(name: str) -> None:
    """Headers go out early enough for those that would give up at 60 s, or ask twice."""
    result = await check(cells_of(name)[0], slow=True)
    assert told(result.checks) == {}
    assert "slow_start_survived" in result.checks


def test_the_command_says_it_in_json() -> None:
    """One object on stdout, in the documented shape, and exit code 0 when nothing failed."""
    command = [TUGLINE, "harness", "check", "pi", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 0, done.stdout
    assert [result["dialect"] for result in results] == [
        *("openai_chat", "openai_responses", "anthropic", "google"),
    ]
    assert set(results[0]) == {
        *("harness", "version", "dialect", "turns", "exact_turns", "checks"),
    }
