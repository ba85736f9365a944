"""The real pi against the real gateway, in all four dialects, without internet."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conformance.matrix import check
from conformance.worker import checks_of
from tugline.cli.harness_check import cases_of

pytestmark = pytest.mark.pi
TUGLINE = Path(sys.executable).with_name("tugline")


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic", "google"])
async def test_pi_works_in_every_dialect(dialect: str) -> None:
    """Nothing fails, no turn forks, no foreign host is looked up."""
    case = next(case for case in cases_of("pi") if case.dialect == dialect)
    result = await check(case)
    assert (result.turns, result.exact_turns) == (4, 4)
    checks = {name: result.checks[name] for name in checks_of(case, slow=False)}
    foreign = checks.pop("no_foreign_host")
    assert set(checks.values()) == {"pass"}, checks
    if foreign.startswith("fail: no network namespace"):
        pytest.skip(f"all else passed; no_foreign_host needs Linux namespaces ({foreign})")
    assert foreign == "pass"


async def test_without_namespaces_the_rest_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that allows no namespaces gets one failure, which names the reason."""
    (tmp_path / "unshare").write_text(
        "#!/bin/sh\necho 'unshare failed: not permitted' >&2\nexit 1\n"
    )
    (tmp_path / "unshare").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    checks = (await check(cases_of("pi")[0], only="plain")).checks
    reason = "fail: no network namespace: unshare failed: not permitted"
    assert checks.pop("no_foreign_host") == reason
    assert set(checks.values()) == {"pass"}


def test_the_command_checks_a_harness_in_a_sandbox(tmp_path: Path) -> None:
    """One object on stdout, in the documented shape; files stay in the folder of --keep."""
    command = [TUGLINE, "harness", "check", "pi", "--json", "--keep", tmp_path / "kept"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    results = json.loads(done.stdout)["results"]
    assert done.returncode == 0, done.stdout
    dialects = ["openai_chat", "openai_responses", "anthropic", "google"]
    assert [result["dialect"] for result in results] == dialects
    for result in results:
        assert set(result) == {"harness", "version", "dialect", "turns", "exact_turns", "checks"}
        assert (result["turns"], result["exact_turns"]) == (4, 4)
        names = "completes tool_call_executed history_exact prefix_kept text_shown"
        assert result["checks"] == dict.fromkeys(names.split(), "pass")
    assert (tmp_path / "kept" / "pi-google" / "session" / "agent" / "logs" / "agent.log").exists()
