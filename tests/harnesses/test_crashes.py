"""Crashes of the real programs are distinguished from other ways to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.session_run import Scenario, SessionRun, run_session
from tugline.cli.harness_check import CASES, cases_of
from tugline.errors import HarnessError
from tugline.harnesses.base import Launch, LaunchContext
from tugline.harnesses.preset import start_once
from tugline.plugins import find
from tugline.sandbox.base import Exit
from tugline.sandbox.local import LocalRuntime
from tugline.testing import ScriptedTurn

pytestmark = [pytest.mark.harness, pytest.mark.timeout(300)]
NAMES = sorted({case.harness for case in CASES})
INSTRUCTION = "Do as you are told."
TAIL = 400
SETTINGS = {
    "claude_code": "mcp.json",
    "codex": ".codex/config.toml",
    "gemini_cli": ".gemini/settings.json",
    "opencode": ".config/opencode/opencode.json",
    "pi": ".pi/agent/models.json",
}
"""The file that names the model; other programs get it by their environment."""


def harness(name: str) -> Any:
    """A preset."""
    return find("harness", name)(**cases_of(name)[0].options)


async def run_command(name: str, command: str, folder: Path) -> SessionRun:
    """A session in which the model runs one command."""
    case = cases_of(name)[0]
    call = case.call(command)
    script = (ScriptedTurn("", calls=(call,)), ScriptedTurn("Done."))
    return await run_session(case, Scenario({INSTRUCTION: script}), folder)


@pytest.mark.parametrize("name", NAMES)
async def test_a_program_killed_by_a_fault_has_crashed(name: str, tmp_path: Path) -> None:
    """SIGSEGV is a crash; a program that catches the first one (Rust) dies of a second."""
    ran = await run_command(
        name, "kill -SEGV $PPID; sleep 0.2; kill -SEGV $PPID; sleep 20", tmp_path
    )
    assert len(ran.calls) == 1
    assert "ended by SIG" in (harness(name).find_crash(ran.exit, ran.log.strip()[-TAIL:]) or "")


@pytest.mark.parametrize("name", sorted(SETTINGS))
async def test_broken_settings_are_a_harness_error(name: str) -> None:
    """A program that cannot read its settings calls no model, and is not evaluated."""

    class Broken(find("harness", name)):  # type: ignore[misc]
        """The preset with an invalid file of settings."""

        def configure(self, context: LaunchContext) -> Launch:
            made = super().configure(context)
            return msgspec.structs.replace(made, files={**made.files, SETTINGS[name]: "{["})

    broken = Broken(**cases_of(name)[0].options)
    preset = harness(name)
    await preset.install()
    broken.package = preset.package
    with pytest.raises(HarnessError, match=r"exit code [1-9].* and made no model call"):
        await start_once(broken)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-e", "throw new Error('of its own')"), "an uncaught exception"),
        (("-e", "Promise.reject(new Error('of its own'))"), "an uncaught exception"),
        (("--max-old-space-size=16", "-e", "a = []; for (;;) a.push(Array(1e4))"), "SIGABRT"),
    ],
    ids=["thrown", "rejected", "heap"],
)
async def test_crashes_of_node_are_recognized(
    options: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    """The output of the Node that runs the presets shows the crash."""
    pi = harness("pi")
    await pi.install()
    async with LocalRuntime().open(tmp_path) as sandbox:
        end = await sandbox.run((pi.package.command[0], *options), env={}, timeout_s=60)
        output = (sandbox.logs / "agent.log").read_text().strip()[-TAIL:]
    assert reason in (pi.find_crash(end, output) or ""), output
    assert pi.find_crash(Exit(0, timed_out=False, seconds=1.0), output) is None
