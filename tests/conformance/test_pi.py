"""The real pi against the real gateway, in all four dialects, without internet."""

import json
from pathlib import Path

import pytest

from conformance.worker import check
from support.commands import run_command
from tugline.cli.harness_check import cases_of

pytestmark = pytest.mark.pi
DIALECTS = ["openai_chat", "openai_responses", "anthropic", "google"]
COMMAND_CHECKS = ("completes", "tool_call_executed", "history_exact", "prefix_kept", "text_shown")


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_pi_works_in_every_dialect(dialect: str) -> None:
    """No check fails, no turn forks, and no foreign host is looked up."""
    case = next(case for case in cases_of("pi") if case.dialect == dialect)
    checks = await check(case)
    foreign = checks.pop("no_foreign_host")
    names = "streaming usage_seen retry_safe budget_stop_survived"
    assert checks == dict.fromkeys([*names.split(), *COMMAND_CHECKS], "pass")
    if foreign.startswith("fail: no network namespace"):
        pytest.skip(f"all else passed; no_foreign_host needs Linux namespaces ({foreign})")
    assert foreign == "pass"


def test_the_command_checks_a_harness_in_a_sandbox(tmp_path: Path) -> None:
    """The output is one object in the documented shape; --keep keeps the files in its folder."""
    options = ("pi", "--json", "--keep", tmp_path / "kept")
    done = run_command("harness", "check", *options, timeout=110)
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 0, done.stdout
    assert [result["dialect"] for result in results] == DIALECTS
    for result in results:
        assert set(result) == {"harness", "version", "dialect", "turns", "exact_turns", "checks"}
        assert (result["turns"], result["exact_turns"]) == (4, 4)
        assert result["checks"] == dict.fromkeys(COMMAND_CHECKS, "pass")
    assert (tmp_path / "kept" / "pi-google" / "session" / "agent" / "logs" / "agent.log").exists()
